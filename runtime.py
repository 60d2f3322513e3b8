"""Where a script runs: device, dtype, compile, ranks. Decided once, so that no loop asks for any of them.

    rt = Runtime(cfg)
    trainable = rt.wrap(model)          # on the device, compiled, under DDP where torchrun started several of us

With torchrun every process holds one Runtime; with plain python there is one rank, and every call below still holds.
"""

import json
import math
import os
import re
import signal
import time
import traceback
import warnings
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import cpu
from configurator import UserError

# Dense bf16 (fp16 before Ampere) tensor-core peaks in FLOP/s, without sparsity, from NVIDIA's data sheets. The first
# entry whose words occur in the device's name counts.
PEAK_FLOPS = {
    "B200": 2250e12, "GH200": 989e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12,
    "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A10G": 70e12, "A10": 125e12, "A40": 150e12, "RTX 4090": 165e12,
    "RTX 3090": 71e12, "V100": 125e12, "T4": 65e12,
}  # fmt: skip


def peak_flops_of(name):
    """FLOP/s of the CUDA device of that name at its best, or None for one that isn't in the table."""
    return next((peak for words, peak in PEAK_FLOPS.items() if re.search(rf"\b{words}\b", name)), None)


USUAL_PROCESS = 0.35e9  # bytes that Python and torch take on a CPU, where the system doesn't tell
TIME_IS_UP = 1000  # beyond every signal's number


@dataclass
class RuntimeConfig:
    device: str = "auto"  # auto (cuda, else mps, else cpu), or a name such as cpu, cuda, cuda:1, mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of the matrix products; weights are float32
    compile: bool | Literal["auto"] = "auto"  # torch.compile; auto: on CUDA, if a compiler works there
    backend: Literal["auto", "nccl", "gloo"] = "auto"  # between ranks; auto: nccl on CUDA, gloo elsewhere
    strategy: Literal["ddp", "fsdp"] = "ddp"  # ddp: each rank holds all weights; fsdp: a share of them, and less memory
    activation_checkpointing: bool = False  # keep only each block's input and compute the rest again for the gradient
    timeout: float = 10.0  # minutes that ranks wait for one another before the run ends; a save must take less
    seed: int = 1337  # of initialisation, data order and dropout

    def check(self):
        if not 0 < self.timeout < 1e6:
            raise ValueError(f"timeout must be a number of minutes above 0, not {self.timeout}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be from 0 to 2**63 - 1, not {self.seed}")


class Stopping:
    """Notes SIGTERM, SIGINT, SIGHUP and SIGUSR1 (a scheduler's warning), and a time limit in minutes; 0 is none.

    The loop ends its step first. A second Ctrl-C ends the process at once.
    """

    def __init__(self, time_limit=0):
        self.signal = 0
        self.deadline = time.monotonic() + time_limit * 60 if time_limit else math.inf
        names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")  # Windows lacks two of them
        signals = [getattr(signal, name) for name in names if hasattr(signal, name)]
        signals = [number for number in signals if signal.getsignal(number) != signal.SIG_IGN]  # as nohup wants it
        self.former = {number: signal.signal(number, self._note) for number in signals}

    def _note(self, number, frame):
        self.signal = number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def close(self):
        for number, handler in self.former.items():
            signal.signal(number, handler)


class Runtime:
    """The device, dtype and ranks that a RuntimeConfig comes to on this machine. Raises UserError if it can't be."""

    def __init__(self, cfg, facts=None):
        """`facts`: a function of this object, before the ranks meet → more that must be the same on all of them."""
        self.distributed = is_distributed()
        self.rank, self.world_size, local_rank = (
            [int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] if self.distributed else (0, 1, 0)
        )
        self.device = _device(cfg.device, local_rank)
        if cfg.backend == "nccl" and self.device.type != "cuda":
            raise UserError(f"--backend=nccl needs --device=cuda, not {self.device.type}")
        if self.distributed and cfg.strategy == "fsdp" and self.device.type not in ("cuda", "cpu"):
            raise UserError(f"--strategy=fsdp needs --device=cuda or cpu, not {self.device.type}; --strategy=ddp works")
        self.is_main = self.rank == 0
        self.dtype = _dtype(cfg.dtype, self.device.type)
        if self.dtype not in (torch.float32, _dtype("auto", self.device.type)):
            self.print(f"--dtype={cfg.dtype} isn't what this {self.device.type} is fastest in; --dtype=auto would be")
        self.seed, self.timeout = cfg.seed, cfg.timeout
        if self.device.type == "cpu":
            cpu.keep_memory()
        self.stopping = self.group_beside = None
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.set_float32_matmul_precision("high")  # TF32 for whatever stays float32
        if self.distributed:
            backend = {"cuda": "nccl"}.get(self.device.type, "gloo") if cfg.backend == "auto" else cfg.backend
            more = facts(self) if facts else {}
            store = meet({"world size": self.world_size, "backend": backend, **more}, cfg.timeout)
            limit, device_id = timedelta(minutes=cfg.timeout), self.device if backend == "nccl" else None
            place = {"store": store, "rank": self.rank, "world_size": self.world_size, "device_id": device_id}
            dist.init_process_group(backend, timeout=limit, **place)
            self.cpu_group = dist.new_group(backend="gloo", timeout=limit) if backend == "nccl" else None
        self.compile, self.compiles = cfg.compile, False  # what is wanted; what came of it when a model was wrapped
        self.activation_checkpointing = cfg.activation_checkpointing
        self.sharded = self.distributed and cfg.strategy == "fsdp"  # one process alone has nothing to share
        # float16's gradients underflow without a scale; for the other dtypes the scaler passes everything through.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        torch.manual_seed(cfg.seed)

    def __str__(self):
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        ranks = f", {self.world_size} ranks" if self.world_size > 1 else ""
        ranks += ", fsdp" if self.sharded else ""
        return f"{name}, {str(self.dtype).removeprefix('torch.')}, {'compiled' if self.compiles else 'eager'}{ranks}"

    def print(self, *args):
        """On the first rank only, at once also into a pipe."""
        if self.is_main:
            with suppress(OSError):  # a log file on a full disk, or a reader that is gone, is no reason to end a run
                print(*args, flush=True)

    # -- the model -----------------------------------------------------------------------------------------------------

    def wrap(self, model):
        """Move `model` to the device and compile it, both in place → what to train: itself, or DDP around it.

        With fsdp it is the model itself, its parameters DTensors of which each rank holds a slice of the rows.
        """
        blocks = model.transformer.h
        if self.activation_checkpointing:
            for block in blocks:  # dropout's generator is set back for the second time, so it drops the same
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if self.device.type == "cpu":
            cpu.speed_up(model)
        self.compiles = self._compiles(self.compile)
        if self.compiles:
            # Inductor would number its random draws by graph; so that a whole model, its blocks alone and eager
            # code all drop the same, dropout stays the eager one.
            torch._inductor.config.fallback_random = True
            for module in blocks if self.sharded else [model]:  # what fsdp gathers and frees is no part of a graph
                module.compile()
        if self.sharded:
            return self._shard(model)
        model.to(self.device)
        if not self.distributed:
            return model
        device_ids = [self.device] if self.device.type == "cuda" else None
        return torch.nn.parallel.DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)

    def _shard(self, model):
        """FSDP2 (arXiv:2304.11277) on each block and on the rest: gathered for its own forward and backward only.

        Where dtype is narrow, blocks are gathered in it and gradients summed in float32, as DDP sums them. The rest
        (tables, last norm) and the stream between blocks stay float32, so that autocast computes what it does in DDP.
        On a CPU it computes no norm of a wide stream with narrow gains, so there blocks are gathered in float32.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # two seconds that only this path pays

        mesh = dist.init_device_mesh(self.device.type, (self.world_size,))
        narrow = self.dtype if self.device.type == "cuda" and self.dtype != torch.float32 else None
        policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for block in model.transformer.h:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh)  # lm_head.weight is wte.weight still, in one group

    def autocast(self):
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    def to_device(self, *tensors):
        """CPU tensors on the device; on CUDA the copy overlaps with the work already queued."""
        if self.device.type == "cuda":
            return [t.pin_memory().to(self.device, non_blocking=True) for t in tensors]
        return [t.to(self.device) for t in tensors]

    # -- the ranks -----------------------------------------------------------------------------------------------------

    def my_share(self, micro_batches):
        """Which of an iteration's micro-batches, a range of indices, this rank takes: every world_size-th."""
        return micro_batches[self.rank :: self.world_size]

    def check_accumulation(self, accumulation, parts=1):
        """Raise UserError unless every rank gets the same number of micro-batches of each of so many `parts`."""
        if accumulation % (self.world_size * parts):
            near = max(1, round(accumulation / (self.world_size * parts))) * self.world_size * parts
            quarters = " in quarters, which --batch_warmup_iters begins with" if parts > 1 else ""
            raise UserError(
                f"--gradient_accumulation_steps={accumulation} counts the micro-batches of all ranks and can't be "
                f"divided by the {self.world_size} of them{quarters}; the nearest that works is {near}"
            )

    @contextmanager
    def micro_step(self, model, index, last):
        """Around forward and backward of micro-batch `index`.

        Dropout becomes a function of (seed, index), whatever ran before and on whichever rank; only the last
        micro-batch of a step sums gradients over the ranks.
        """
        torch.manual_seed((self.seed * 1_000_003 + index) % 2**63)
        if self.sharded:  # unsharded gradients add up meanwhile: communication saved, at 4 bytes a parameter
            model.set_requires_gradient_sync(last)
        with nullcontext() if last or self.sharded or not self.distributed else model.no_sync():
            yield

    def clip_grad_norm_(self, model, max_norm):
        """Scale gradients down to a norm of max_norm, over all parameters and shards → the norm before, 0-dim."""
        parameters = list(model.parameters())
        norm = whole(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def gather(self, state):
        """`state`, nested, with its shards put together: whole and on the CPU for the main rank, None on the others.

        All ranks must call it. None but the main one holds more than one whole tensor at a time.
        """
        if isinstance(state, dict):
            return {key: self.gather(value) for key, value in state.items()}
        if not is_shard(state):
            return state
        tensor = whole(state)
        return tensor.cpu() if self.is_main else None

    def background_group(self):
        """A group, the same at each call, for what runs beside the training; None alone. All ranks must call it."""
        if self.distributed and not self.group_beside:
            self.group_beside = dist.new_group(backend="gloo", timeout=timedelta(minutes=self.timeout))
        return self.group_beside

    def all_finite(self, tensors):
        """Whether all numbers are finite, in the shards of all ranks: the same answer on each."""
        locals_ = [tensor.to_local() if is_shard(tensor) else tensor for tensor in tensors]
        return not self.sum(torch.stack([~tensor.isfinite().all() for tensor in locals_]).sum()).item()

    def mean(self, tensor):
        """The mean over ranks."""
        return self.sum(tensor) / self.world_size

    def sum(self, tensor):
        """The sum over ranks, on the device; a single rank's tensor stays where it is."""
        if self.distributed:
            tensor = tensor.to(self.device)
            dist.all_reduce(tensor)
        return tensor

    def watch_signals(self, time_limit=0):
        """From now on signals and the time limit (minutes, 0: none) only set `stop_reason`."""
        self.stopping = Stopping(time_limit)

    def stop_reason(self):
        """A signal's number once a rank has caught one, TIME_IS_UP after the time limit, else 0: the same on all ranks.

        Where ranks train on GPUs they agree through a group of their CPUs, so that no rank waits for its GPU.
        """
        if not self.stopping:
            return 0
        reason = self.stopping.signal
        if not reason and time.monotonic() > self.stopping.deadline:
            reason = TIME_IS_UP
        if self.distributed:
            reasons = torch.tensor(reason)
            dist.all_reduce(reasons, op=dist.ReduceOp.MAX, group=self.cpu_group)
            reason = reasons.item()
        return reason

    def lost_rank(self, error):
        """If a RuntimeError means that another rank died or didn't answer in time, a line that says so, else None."""
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            return None
        where = next(
            f for f in reversed(traceback.extract_tb(error.__traceback__)) if "site-packages" not in f.filename
        )
        return (
            f"rank {self.rank} of {self.world_size} lost another one: it is gone, or didn't answer within "
            f"--timeout={self.timeout:g} minutes, in {where.name} ({os.path.basename(where.filename)}:{where.lineno}): "
            f"{first_line(error)}"
        )

    def close(self):
        if self.stopping:
            self.stopping.close()
        if self.distributed:
            dist.destroy_process_group()

    # -- what the machine can do ---------------------------------------------------------------------------------------

    def peak_flops(self):
        """FLOP/s of one device at its best, or None where that isn't known."""
        return peak_flops_of(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None

    def memory(self):
        """Bytes that this rank may use: its GPU's, or its share of a machine's; None where nobody knows."""
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[1]
        if self.device.type == "mps":
            return torch.mps.recommended_max_memory()
        free = _free_memory()
        return free and free / int(os.environ.get("LOCAL_WORLD_SIZE", 1)) + self.used_memory()

    def used_memory(self, most=False):
        """Bytes that this process holds on its device, or has held at most."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_reserved() if most else torch.cuda.memory_reserved()
        if self.device.type == "mps":
            return torch.mps.driver_allocated_memory()
        return _process_bytes("VmHWM" if most else "VmRSS") or USUAL_PROCESS

    def peak_memory(self):
        """Bytes at the peak since `reset_peak_memory`: of tensors on CUDA, else of the process; None if unknown."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return _process_bytes("VmHWM")

    def reset_peak_memory(self):
        """Begin a new peak, from what is in use now."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            cpu.give_back_memory()
            with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # proc(5): resets VmHWM

    def _compiles(self, wanted):
        """Whether to compile; a machine whose compiler fails is told so once and trains eagerly."""
        if wanted is False or (wanted == "auto" and self.device.type != "cuda"):
            return False
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=self.device))
        except Exception as error:  # a missing compiler, Triton or driver each raises an exception of its own
            self.print(f"torch.compile doesn't work here, training eagerly: {first_line(error)}")
            return False
        return True


def is_shard(tensor):
    """Whether it is a DTensor, this rank's slice of a larger one; told without two seconds of importing that class."""
    return hasattr(tensor, "full_tensor")


def whole(tensor):
    """A DTensor's whole, gathered from all ranks; any other tensor as it is."""
    return tensor.full_tensor() if is_shard(tensor) else tensor


def shard_like(tensor, p):
    """This rank's slice of a whole tensor, if p is such a slice; else the tensor itself. No rank waits for another."""
    if not is_shard(p):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(p.device), p.device_mesh, p.placements, src_data_rank=None)


def _process_bytes(field):
    """VmRSS, what this process has in memory, or VmHWM, the most it had; None where there is no Linux to tell."""
    try:
        return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    except (OSError, TypeError):
        return None


def _free_memory():
    """Bytes that processes may still take on this machine, or None where the system doesn't tell."""
    try:
        free = int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) * 1024
    except (OSError, IndexError):  # not Linux
        return None
    limit = Path("/sys/fs/cgroup/memory.max")  # a container's, which may be less than the machine has
    limit = limit.read_text().strip() if limit.exists() else "max"
    return min(free, int(limit)) if limit != "max" else free


def is_distributed():
    """Whether torchrun started this process: it tells each its place in these variables.

    Some schedulers set a few of them for their own use.
    """
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} <= os.environ.keys()


def meet(facts, minutes):
    """Wait until all ranks are there → a store for this attempt alone. `facts`, {name: value}, must be the same on all.

    torchrun keeps one store over its restarts, so a second attempt may find there the addresses of the first one's
    processes. Nothing that it tells its workers sets attempts apart: each agent has a TORCHELASTIC_RESTART_COUNT of its
    own, of the failures that it was the first to see, and doesn't count a node that comes or goes. So rank 0 takes a
    number that the store has never given, and tells it to whoever arrives.

    Raises UserError, with the ranks, where facts differ or somebody doesn't come.
    """
    try:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timedelta(minutes=minutes)))
        if rank:
            arrival = store.add("arrivals", 1)
            own = dist.PrefixStore(store.get(f"arrival {arrival}").decode(), store)
            own.set(f"facts {rank}", json.dumps(facts))
            complaint = own.get("complaint").decode()
            own.add("heard", 1)
        else:
            attempt = f"attempt {store.add('attempts', 1)}"
            own = dist.PrefixStore(attempt, store)
            complaint = _greet(store, own, attempt, facts, world_size, minutes)
    except dist.DistError as error:
        raise UserError(f"the ranks didn't meet within --timeout={minutes} minutes: {first_line(error)}") from None
    if complaint:
        raise UserError(complaint)
    return own


def _greet(store, own, attempt, facts, world_size, minutes):
    """Rank 0's part of `meet` → what is wrong with the others' facts, or ""."""
    everyone, told, deadline = {0: facts}, 0, time.monotonic() + minutes * 60
    absent = set(range(1, world_size))
    # Ranks that count differently would wait for some that never come.
    while absent and len({facts.get("world size") for facts in everyone.values()}) == 1 and time.monotonic() < deadline:
        arrivals = store.add("arrivals", 0)  # those of earlier attempts are long gone and don't mind
        for arrival in range(told + 1, arrivals + 1):
            store.set(f"arrival {arrival}", attempt)
        told = arrivals
        came = {rank for rank in absent if own.check([f"facts {rank}"])}
        everyone |= {rank: json.loads(own.get(f"facts {rank}")) for rank in came}
        absent -= came
        time.sleep(0.02)
    complaint = "\n".join(differences(everyone))
    if absent and not complaint:
        complaint = f"{_ranks(absent)} didn't come within --timeout={minutes} minutes"
    own.set("complaint", complaint)
    while complaint and own.add("heard", 0) < len(everyone) - 1 and time.monotonic() < deadline + 10:
        time.sleep(0.02)  # the store may end with this process
    return complaint


def differences(everyone):
    """{rank: {name: value}} → a line for each name whose value isn't the same everywhere."""
    lines = []
    for name in everyone[0]:
        ranks_of = {}  # value → the ranks that have it
        for rank, facts in sorted(everyone.items()):
            ranks_of.setdefault(str(facts.get(name)), []).append(rank)
        if len(ranks_of) > 1:
            values = (f"{value} on {_ranks(ranks)}" for value, ranks in ranks_of.items())
            lines.append(f"the ranks differ in {name}: {', '.join(values)}")
    return lines


def _ranks(ranks):
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def first_line(error):
    """What an exception says, or at least its type, without the lines below the first."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _device(wanted, local_rank):
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(wanted)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", local_rank)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"--device={wanted} can't be used here: {str(error).splitlines()[0][:200]}") from None
    if device.type == "meta":
        raise UserError("--device=meta computes nothing")
    return device


def _dtype(wanted, device_type):
    if wanted != "auto":
        return getattr(torch, wanted)
    if device_type == "cuda":
        # Cards before Ampere only emulate bfloat16.
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return torch.bfloat16 if device_type == "cpu" and _cpu_has_bfloat16() else torch.float32


def _cpu_has_bfloat16():
    """Whether the CPU multiplies bfloat16 natively: without these instructions torch emulates it, far slower."""
    has = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}  # absent before torch 2.12
    return bool(has.get("avx512_bf16") or has.get("amx_bf16"))


def is_out_of_memory(error):
    """Whether a RuntimeError means that the device's memory, or on a CPU the machine's, didn't suffice."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
