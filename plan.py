"""What a run needs, before it is started: parameters, tokens, FLOPs, memory by part, disk, hours.

    python train.py config/train_gpt2.py --plan=True                  # on this machine, with a few steps timed
    python train.py config/train_gpt2.py --plan="8 x A100 40GB"       # on hardware that isn't here

The memory of activations is counted, not derived: forward and backward of the real model run on tensors that have a
shape but no storage (FakeTensorMode), and each allocation is noted. That takes a second for any size, and stays true
when the model changes. It counts eager kernels; a compiled model needs less. 1 GB is 10⁹ bytes.

Dimensions: B batch_size, T block_size, L layers.
"""

import bisect
import os
import re
import statistics
import time
import weakref
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import cpu
from configurator import UserError
from guard import Guard
from model import GPT
from optimizer import make_optimizer
from runtime import peak_flops_of

# On a CPU the gaps of malloc's heap make what comes and goes larger by about so much (measured, in eager training).
HEAP = 1.35
CUDA_RUNTIME = 1.0e9  # bytes of a CUDA context with cuBLAS' and NCCL's buffers, roughly
MFU = 0.4  # of a card that isn't here: an assumption; what well-kept runs reach is 0.3 to 0.5
TIMED_SECONDS = 20  # about what timing may take
CHINCHILLA = 20  # tokens a parameter at the least compute for a loss (Hoffmann et al. 2022, arXiv:2203.15556)
GPT2_VOCABULARY = 50257
PARTS = (
    "weights", "averaged weights", "gradients", "optimizer moments", "gathered by fsdp", "activations",
    "loss and backward",
)  # fmt: skip


class NoData:
    """Stands in for a Dataset that isn't on this machine: vocab_size ids, or GPT-2's."""

    tokenizer = None

    def __init__(self, folder, vocab_size):
        self.folder, self.vocab_size = folder, vocab_size or GPT2_VOCABULARY

    def __str__(self):
        return f"{os.path.basename(self.folder)} isn't here; planned for {self.vocab_size:,} token ids"


class RandomTokens:
    """As much of a Dataset as train_step needs: a batch of random ids is a function of its index."""

    def __init__(self, cfg):
        self.shape, self.vocab_size = (cfg.batch_size, cfg.block_size + 1), cfg.vocab_size

    def batch(self, split, index):
        ids = torch.randint(self.vocab_size, self.shape, generator=torch.Generator().manual_seed(index))
        return ids[:, :-1], ids[:, 1:]


@dataclass
class Hardware:
    """What the run is planned for; `memory` is what one rank may use, in bytes, None where nobody knows."""

    ranks: int
    name: str
    memory: float | None
    device_type: str  # cuda or cpu, which here stands for mps too
    dtype: torch.dtype
    here: bool


def hardware(cfg, rt):
    """--plan=True is this machine with the ranks that torchrun started, else "8 x A100 40GB". Raises UserError."""
    if cfg.plan is True:
        return Hardware(rt.world_size, str(rt), rt.memory(), rt.device.type, rt.dtype, here=True)
    found = re.fullmatch(r"([1-9]\d*) ?x ?(.+?) (\d+(?:\.\d+)?) ?GB", cfg.plan)
    if not found:
        raise UserError(f'--plan={cfg.plan}: hardware is written as "8 x A100 40GB", this machine as True')
    ranks, name, size = found.groups()
    device_type = "cpu" if name.lower() == "cpu" else "cuda"
    auto = {"cpu": "float32", "V100": "float16", "T4": "float16"}.get(name, "bfloat16")
    dtype = getattr(torch, auto if cfg.dtype == "auto" else cfg.dtype)
    return Hardware(int(ranks), name, float(size) * 1e9, device_type, dtype, here=False)


# ---- memory ------------------------------------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors that come to be in it and are alive; `peak`, their most since it was set."""

    def __init__(self, known, device_type):
        super().__init__()
        self.live = self.peak = 0
        self.device_type = device_type
        self.storages = {}
        for tensor in known:  # these were there before
            self._note(tensor.untyped_storage(), 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage(), tensor.untyped_storage().nbytes())
        return out

    def _note(self, storage, nbytes):
        key = storage._cdata  # views share it
        if key not in self.storages:
            nbytes = heap(nbytes, self.device_type)
            self.storages[key] = weakref.ref(storage, partial(self._gone, key, nbytes))
            self.live += nbytes
            self.peak = max(self.peak, self.live)

    def _gone(self, key, nbytes, _):
        del self.storages[key]
        self.live -= nbytes


def heap(nbytes, device_type):
    """What a tensor that comes and goes adds to the process."""
    return nbytes * HEAP if device_type == "cpu" else nbytes


def count(cfg, n_layer, device_type, dtype):
    """What a micro-batch and an update of a model with n_layer blocks hold besides weights, gradients and moments.

    → bytes: kept for backward when the last block is through; most at any time until backward has left the first
    block; most after that; most in the optimizer's step.
    """
    with FakeTensorMode():
        model = GPT(replace(cfg.model_config(), n_layer=n_layer))
        blocks = model.transformer.h
        for block in blocks:
            if device_type == "cuda":  # whose flash kernel has dropout of its own
                block.attn.dropout = 0.0
            if cfg.activation_checkpointing:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if device_type == "cpu":
            cpu.speed_up(model)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)  # as from the second micro-batch on
        optimizer = make_optimizer(model, cfg, dtype)
        live, marks = Live([t for p in model.parameters() for t in (p, p.grad)], device_type), []

        def mark(*_):
            marks.append((live.live, live.peak))
            live.peak = live.live

        def mark_gradient(module, args):
            args[0].register_hook(mark)

        blocks[0].register_forward_pre_hook(mark_gradient)
        model.transformer.ln_f.register_forward_pre_hook(mark)
        with live:
            ids = torch.zeros(cfg.batch_size, cfg.block_size, dtype=torch.int64)
            with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
                loss = model(ids, ids)
            loss.backward()
            mark()
            del loss, ids
            for _ in range(2):  # the first one makes the moments
                optimizer.step()
                mark()
    (kept, most_forward), (_, most_backward), (_, most_after), _, (live_after, most_step) = marks
    return kept, max(most_forward, most_backward), most_after, most_step - live_after


def memory(cfg, device_type="cpu", dtype=torch.float32, ranks=1, strategy="ddp", counts=None):
    """Bytes that one rank needs for a run of `cfg`, by PARTS as they are at the peak; their sum is the peak.

    Two sizes are counted, and lines drawn through them: every block is like every other. `counts`: both, if known.
    """
    two, three = counts or (count(cfg, n_layer, device_type, dtype) for n_layer in (2, 3))
    kept, top, bottom, step = (a + (b - a) * (cfg.n_layer - 2) for a, b in zip(two, three, strict=True))
    with torch.device("meta"):
        model = GPT(cfg.model_config())
    parameters = list(model.parameters())
    total, table = model.num_params(), model.transformer.wte.weight.numel()
    block, matrices = (sum(p.numel() for p in model.transformer.h[0].parameters() if p.dim() > d) for d in (0, 1))
    muon = matrices * cfg.n_layer if cfg.optimizer == "muon" else 0  # one moment instead of two
    weights, moments = 4 * total, 4 * (2 * total - muon)
    averaged = weights if cfg.ema_decay else 0
    gradients = sum(heap(4 * p.numel(), device_type) for p in parameters)
    gathered = 0
    if strategy == "fsdp" and ranks > 1:
        weights, averaged, moments = weights / ranks, averaged / ranks, moments / ranks
        if cfg.gradient_accumulation_steps == ranks:  # else they add up whole until the last micro-batch
            gradients /= ranks
        narrow = dtype != torch.float32
        # Whole are the tables and two blocks, one that works and one that is fetched, and the blocks' new gradients.
        gathered = 4 * (total - cfg.n_layer * block) + 2 * block * (4 + (2 if narrow else 4))
        if narrow:  # blocks are gathered in dtype: no copy is made and kept for backward
            kept, top = kept - 2 * cfg.n_layer * block, top - 2 * cfg.n_layer * block
    at_loss, after, in_step = (gradients, kept, top - kept), (gradients, 0, bottom), (gradients, 0, step)
    if cfg.gradient_accumulation_steps == ranks == 1:  # then gradients only come when activations go
        at_loss, after = (0, kept, top - kept), (gradients, 0, bottom - 4 * table)
    gradients, activations, rest = max(at_loss, after, in_step, key=sum)
    return dict(zip(PARTS, (weights, averaged, gradients, moments, gathered, activations, rest), strict=True))


# ---- what would fit ----------------------------------------------------------------------------------------------


def remedy(cfg, hw, strategy, runtime):
    """Flags with which `cfg` fits, the least change first: the micro-batch, then what costs time, then the model."""

    counts = {}

    def fits(**changed):
        wanted = replace(cfg, **changed)
        key = wanted.batch_size, wanted.activation_checkpointing
        if key not in counts:
            counts[key] = [count(wanted, n_layer, hw.device_type, hw.dtype) for n_layer in (2, 3)]
        parts = memory(wanted, hw.device_type, hw.dtype, hw.ranks, changed.get("strategy", strategy), counts[key])
        return runtime + sum(parts.values()) <= hw.memory

    blocks = cfg.batch_size * cfg.gradient_accumulation_steps  # an iteration; this number stays
    sizes = [n for n in range(1, cfg.batch_size + 1) if blocks % n == 0 and blocks // n % hw.ranks == 0]
    slower = {"activation_checkpointing": True}
    sharded = {"strategy": "fsdp"} if hw.ranks > 1 else {}
    for changed in ({}, slower, sharded, {**sharded, **slower}):
        batch_size = largest(sizes, lambda n, changed=changed: fits(**changed, batch_size=n))
        if batch_size:
            if batch_size < cfg.batch_size:
                changed = {"batch_size": batch_size, "gradient_accumulation_steps": blocks // batch_size, **changed}
            return changed
    changed = {"batch_size": sizes[0], "gradient_accumulation_steps": blocks // sizes[0], **sharded, **slower}
    n_layer = largest(range(1, cfg.n_layer), lambda n: fits(**changed, n_layer=n))
    return {**changed, "n_layer": n_layer} if n_layer else None


def largest(values, fits):
    """The largest of ascending values that fits, None if none does; what is larger than one that doesn't, doesn't."""
    at = bisect.bisect_left(values, True, key=lambda value: not fits(value))
    return values[at - 1] if at else None


# ---- the report --------------------------------------------------------------------------------------------------


def report(cfg, data, rt, train_step):
    """Print the plan of `cfg`; `data` is a Dataset or NoData. Raises UserError, with what would fit, if it doesn't."""
    hw, strategy = hardware(cfg, rt), cfg.strategy
    if cfg.gradient_accumulation_steps % hw.ranks:
        raise UserError(f"--gradient_accumulation_steps={cfg.gradient_accumulation_steps} isn't a multiple of the "
                        f"{hw.ranks} ranks")  # fmt: skip
    with torch.device("meta"):
        model = GPT(cfg.model_config())
    parameters = model.num_params()
    tokens = cfg.gradient_accumulation_steps * cfg.batch_size * cfg.block_size
    flops = model.flops_per_token() * tokens
    iterations = (
        cfg.max_iters - 5 * min(cfg.batch_warmup_iters, cfg.max_iters) // 8
    )  # whole ones: the first are shorter
    in_all = tokens * iterations
    parts = memory(cfg, hw.device_type, hw.dtype, hw.ranks, strategy)
    runtime = CUDA_RUNTIME if hw.device_type == "cuda" else rt.used_memory()
    needed = runtime + sum(parts.values())
    limit = f" of {hw.memory / 1e9:,.2f}" if hw.memory else ""
    saved = (
        (parts["weights"] + parts["averaged weights"] + parts["optimizer moments"])
        / parts["weights"]
        * 4
        * parameters
        / 1e9
    )
    rt.print(f"data      {data}")
    rt.print(
        f"model     {parameters:,} parameters, {model.num_params(non_embedding=True):,} of them outside the tables"
    )
    rt.print(f"tokens    {tokens:,} an iteration, {in_all:,} in all: {in_all / parameters:,.1f} a parameter "
             f"(Chinchilla's optimum: {CHINCHILLA})")  # fmt: skip
    rt.print(f"compute   {flops:.3g} FLOPs an iteration, {flops * iterations:.3g} in all")
    rt.print(f"memory    of each of {hw.ranks} rank(s), {strategy}, {hw.name}, {str(hw.dtype).removeprefix('torch.')}:")
    for part, nbytes in {"runtime": runtime, **parts}.items():
        rt.print(f"          {nbytes / 1e9:8.2f} GB {part}")
    rt.print(f"          {needed / 1e9:8.2f} GB together{limit}")
    rt.print(f"disk      {saved:.2f} GB a checkpoint, twice that with best.pt; {_data_size(data)}")
    if hw.memory and needed > hw.memory:
        flags = remedy(cfg, hw, strategy, runtime)
        would = (
            " ".join(f"--{name}={value}" for name, value in flags.items()) + " would" if flags else "nothing here would"
        )
        raise UserError(f"it doesn't fit: {needed / 1e9:,.2f} GB a rank, {hw.memory / 1e9:,.2f} are there; {would}")
    rt.print(f"time      {_hours_here(cfg, rt, train_step) if hw.here else _hours_there(hw, flops * iterations)}")


def _data_size(data):
    if isinstance(data, NoData):
        return "data not here"
    return f"{sum(path.stat().st_size for path in Path(data.folder).glob('*.bin')) / 1e9:.2f} GB of data"


def _hours_there(hw, flops):
    peak = peak_flops_of(hw.name)
    if not peak:
        return f"unknown: {hw.name} isn't in runtime.py's table of peaks"
    hours = flops / (hw.ranks * peak * MFU) / 3600
    return f"{hours:,.1f} hours, if the cards reach {MFU:.0%} of their {peak / 1e12:,.0f} TFLOP/s, without evaluations"


def _hours_here(cfg, rt, train_step):
    """Time a few steps, on random tokens, with fewer micro-batches where an iteration has many."""
    model = GPT(cfg.model_config())
    wrapped = rt.wrap(model)
    optimizer = make_optimizer(model, cfg, rt.dtype)
    guard, per_rank = Guard(cfg.spike_zscore, rt.device), cfg.gradient_accumulation_steps // rt.world_size

    def seconds(**changed):
        timed = replace(cfg, **changed)
        micro_batches = range(timed.gradient_accumulation_steps)
        began = time.perf_counter()
        loss, _ = train_step(wrapped, optimizer, guard, RandomTokens(timed), micro_batches, timed, rt)
        loss.item()  # waits for the device
        return rt.mean(torch.tensor(time.perf_counter() - began)).item()  # so that all ranks decide alike

    short = {"batch_size": 1, "gradient_accumulation_steps": rt.world_size}
    seconds(**short)  # compiles, and fills caches
    one, how = seconds(**short), "timed on one block, so at most"
    one *= cfg.batch_size  # a micro-batch
    if one * 4 < TIMED_SECONDS:
        few, times = min(per_rank, 4), []
        while len(times) < 2 or len(times) < 6 and sum(times) < TIMED_SECONDS:
            times.append(seconds(gradient_accumulation_steps=few * rt.world_size))
        one, how = statistics.median(times[1:]) / few, f"timed on {len(times) - 1} steps of {few} micro-batch(es)"
    iteration = one * per_rank
    evaluations = 2 * cfg.eval_iters / rt.world_size * one / 3  # forward is a third of a step
    whole = cfg.max_iters * iteration + evaluations * (cfg.max_iters // cfg.eval_interval + 1)
    return (f"{iteration * 1000:,.1f} ms an iteration ({how}), about {evaluations:,.1f} s an evaluation: "
            f"{whole / 3600:,.2f} hours in all ({timedelta(seconds=round(min(whole, 1e10)))}); "
            f"{rt.used_memory(most=True) / 1e9:.2f} GB were in use")  # fmt: skip
