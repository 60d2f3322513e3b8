"""Before a long run: are all ranks alike, and can they talk to one another?

    torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py --preflight=True

Every rank says where it is; what must be the same everywhere is compared before any collective, which would hang; then
a known tensor is summed, and the bandwidth measured. Exit code 0 if all is well, else 2 with the reason.
"""

import hashlib
import os
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from configurator import UserError
from dataset import SPLITS, Dataset
from runtime import Runtime

MEGABYTES = 64  # in the measured all-reduce: large enough that latency doesn't matter
ROUNDS = 5


def check(cfg, folder):
    """Raise UserError, naming the ranks, where they differ, miss the data or compute a wrong sum."""
    rt = None
    try:
        data = _data(cfg, folder)
        rt = Runtime(cfg, facts=lambda rt: _facts(cfg, data, rt))
        if data.startswith("unusable"):
            raise UserError(f"data {data}")
        _check_sum(rt)
        seconds = _all_reduce_seconds(rt)
        speed = MEGABYTES * 1e6 / seconds / 1e9
        bus = speed * 2 * (rt.world_size - 1) / rt.world_size  # what each link carries, however many ranks
        rt.print(f"{rt.world_size} rank(s) agree in torch, device, dtype, options, program and data; sums are right")
        rt.print(
            f"all-reduce of {MEGABYTES} MB in {seconds * 1000:.1f} ms: {speed:.2f} GB/s algorithm bandwidth, "
            f"{bus:.2f} GB/s bus bandwidth"
        )
        rt.print("preflight passed")
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":  # the others of a machine are silent otherwise
            print(f"rank {os.environ.get('RANK')}: {error}", file=sys.stderr, flush=True)
        raise
    except RuntimeError as error:
        lost = rt and rt.lost_rank(error)
        if not lost:
            raise
        print(lost, file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    finally:
        if rt:
            rt.close()


def _facts(cfg, data, rt):
    """{what: value} that must be the same on all ranks; says where this one is."""
    versions = {"torch": str(torch.__version__)}
    device = rt.device.type
    if device == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
        versions |= {"CUDA": torch.version.cuda, "NCCL": nccl}
        device = torch.cuda.get_device_name(rt.device)
    words = ", ".join(f"{name} {version}" for name, version in versions.items())
    print(
        f"rank {rt.rank} of {rt.world_size}: {platform.node()}, {rt.device} ({device}), {rt.dtype}, {words}", flush=True
    )
    program = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))))
    options = {f"--{name}": value for name, value in asdict(cfg).items()}
    return {**versions, "device": device, "dtype": str(rt.dtype), "program files": program.hexdigest()[:12],
            "data": data, **options}  # fmt: skip


def _data(cfg, folder):
    """What tells one copy of a data set from another: the files' sizes and a hash of what describes them."""
    try:
        Dataset(folder, cfg.block_size, cfg.batch_size, cfg.seed)
    except UserError as error:
        return f"unusable: {error}"
    sizes = (f"{split}.bin {os.path.getsize(os.path.join(folder, f'{split}.bin')):,} bytes" for split in SPLITS)
    meta = [path.read_bytes() for name in ("meta.json", "meta.pkl") if (path := Path(folder, name)).exists()]
    return f"{', '.join(sizes)}, meta {hashlib.sha256(b''.join(meta)).hexdigest()[:12]}"


def _check_sum(rt):
    """Sum a tensor whose sum is known, in whole numbers that float32 holds exactly."""
    numbers = torch.arange(1000.0, device=rt.device)
    expected = rt.world_size * numbers + rt.world_size * (rt.world_size - 1) / 2
    if not torch.equal(rt.sum(numbers + rt.rank), expected):
        raise UserError(f"rank {rt.rank}: the sum over ranks is wrong")


def _all_reduce_seconds(rt):
    """Seconds that an all-reduce takes, the mean over rounds and ranks."""
    tensor = torch.zeros(MEGABYTES * 10**6 // 4, device=rt.device)
    rt.sum(tensor)[:1].item()  # connects
    began = time.perf_counter()
    for _ in range(ROUNDS):
        rt.sum(tensor)
    tensor[:1].item()  # waits for the device
    return rt.mean(torch.tensor((time.perf_counter() - began) / ROUNDS)).item()
