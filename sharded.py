"""A checkpoint in parts: every rank writes its own, while training goes on, and any number of ranks reads them.

`ckpt.pt` is then a small file: everything but the numbers in its tensors, and under "shards" the name of a folder
beside it, with a file of numbers from each rank, written by torch.distributed.checkpoint (DCP) from a copy in memory.

Nothing in such a folder can be executed. DCP's usual storage describes a folder in `.metadata`, which is a pickle, and
unpickles it and whatever isn't a tensor. So the tensors go through DCP's Hugging Face storage: safetensors files, whose
headers are JSON and say which part of which tensor they hold. All else stays in ckpt.pt, read with weights_only=True.
"""

import math
import os
import shutil
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException

TEMPORARY = ".shards.tmp"  # what is being written; a killed run's is overwritten by the next


class Writer(HuggingFaceStorageWriter):
    """DCP's writer of one file a rank; on the main rank `commit` follows, once the files of all are on the disk."""

    def __init__(self, folder, commit):
        super().__init__(folder, save_distributed=True)
        self.commit = commit

    def finish(self, metadata, results):
        names = {result.storage_data.relative_path for part in results for result in part}
        if missing := sorted(name for name in names if not os.path.isfile(os.path.join(self.path, name))):
            raise OSError(f"{missing[0]} isn't there; --checkpoint_format=sharded needs an out_dir that ranks share")
        self.commit()


def save(state, best, out_dir, out, rt):
    """Begin to write `state`, sharded or not → a function that waits for the end and raises OSError if it failed.

    All ranks call both; only one save may be under way. `out` is the main rank's checkpoint.OutDir.
    """
    folder = os.path.join(out_dir, TEMPORARY)
    rest, tensors = split(state)
    # The averaged weights are among the numbers of `state`: their name is enough.
    best = rest if best is state else best and {**rest, "weights": "average"}
    if out:
        shutil.rmtree(folder, ignore_errors=True)  # before any rank writes: that takes the main rank's plan
    writer = Writer(folder, lambda: rt.print(f"saved {out.save(rest, best, folder)}"))
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process alone is no mistake
    future = dcp.async_save(tensors, storage_writer=writer, process_group=rt.background_group())

    def wait():
        try:
            future.result()
        except CheckpointException as error:
            if out:
                shutil.rmtree(folder, ignore_errors=True)
            rank, (reason, _) = min(error.failures.items())
            raise OSError(f"rank {rank}: {reason}") from None

    return wait


def split(state, prefix=""):
    """Nested dicts → (the same with shapes only, on the device meta, {dotted name: tensor})."""
    rest, tensors = {}, {}
    for key, value in state.items():
        if isinstance(value, dict):
            rest[key], inner = split(value, f"{prefix}{key}.")
            tensors |= inner
        elif isinstance(value, torch.Tensor):
            rest[key] = torch.empty(value.shape, dtype=value.dtype, device="meta")
            tensors[f"{prefix}{key}"] = value
        else:
            rest[key] = value
    return rest, tensors


def fill(rest, folder):
    """Shapes as `split` left them → the same nested dicts with the numbers from `folder`, whole.

    Raises ValueError where the folder doesn't hold each tensor exactly once, before memory is taken; also OSError and
    what safetensors raises.
    """
    reader = HuggingFaceStorageReader(folder)
    found = reader.read_metadata().state_dict_metadata
    _, shapes = split(rest)
    for name, shape in shapes.items():
        chunks = found[name].chunks if name in found else []
        held = sum(math.prod(chunk.sizes) for chunk in chunks)
        if not chunks or found[name].size != shape.shape or held != shape.numel():
            raise ValueError(f"{name} of shape {tuple(shape.shape)} isn't there whole")
    tensors = {name: torch.zeros(shape.shape, dtype=shape.dtype) for name, shape in shapes.items()}
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return _put(rest, tensors)


def _put(rest, tensors, prefix=""):
    whole = {}
    for key, value in rest.items():
        name = f"{prefix}{key}"
        whole[key] = _put(value, tensors, f"{name}.") if isinstance(value, dict) else tensors.get(name, value)
    return whole
