"""One run on 1, 2 and 4 processes, by DDP and FSDP, eager and compiled, and each one's checkpoint continued by each.

    python tests/matrix.py              # about a quarter of an hour on two cores, most of it compiling
    python tests/matrix.py eager        # without the compiled half

A row is a run of 50 updates with dropout, accumulation and several epochs' ends. Its column `whole run` is the largest
difference of a loss, or of an evaluation's, from one eager process; the other columns that of updates 25 to 50 made by
somebody else from the row's checkpoint of update 25. Eager runs write whole files, compiled ones shards. All must be
below 1e-5; the exit code says so. Not part of the suite, which keeps a small part of this in test_fsdp.py.
"""

import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from test_fsdp import together  # noqa: E402
from tiny import flags, make_dataset, metrics  # noqa: E402

import train  # noqa: E402

KINDS = {
    "alone": (1, "ddp"), "ddp 2": (2, "ddp"), "ddp 4": (4, "ddp"), "fsdp 1": (1, "fsdp"), "fsdp 2": (2, "fsdp"),
    "fsdp 4": (4, "fsdp"),
}  # fmt: skip
MODES = {"eager": ("--compile=False", "--checkpoint_format=whole"),
         "compiled": ("--compile=True", "--checkpoint_format=sharded")}  # fmt: skip
RECIPE = ("--gradient_accumulation_steps=4", "--max_iters=50", "--eval_interval=25", "--keep_checkpoints=9")


def run(kind, *argv):
    ranks, strategy = KINDS[kind]
    done = together(0 if kind == "alone" else ranks, train.main, *argv, f"--strategy={strategy}")
    if done.returncode:
        print(f"{kind}: exit code {done.returncode}\n{done.stdout}", flush=True)


def difference(out, reference):
    """The largest between two runs' losses, of updates and of evaluations; infinite where one is missing."""
    largest = 0.0
    for key in (("iter", "loss"), ("step", "val_loss"), ("step", "train_loss")):
        found, expected = (
            {} if not (path / "metrics.jsonl").exists() else metrics(path, *key) for path in (out, reference)
        )
        if found.keys() != expected.keys():
            return float("inf")
        largest = max([largest, *(abs(found[at] - expected[at]) for at in expected)])
    return largest


def main(modes):
    folder = Path(tempfile.mkdtemp())
    data, reference, worst = make_dataset(folder / "data"), folder / "eager alone", 0.0
    print("from \\ continued by".ljust(20), "whole run".rjust(10), *(kind.rjust(10) for kind in KINDS), flush=True)
    for mode in modes:
        for writer in KINDS:
            out = folder / f"{mode} {writer}"
            run(writer, *flags(data, out, *RECIPE, *MODES[mode]))
            cells = [difference(out, reference)]
            for reader in KINDS:
                copy = shutil.copytree(out, folder / "copy")
                shutil.copy(copy / "ckpt-00000025.pt", copy / "ckpt.pt")
                run(reader, "--init_from=resume", f"--out_dir={copy}", "--compile=False")
                cells.append(difference(copy, reference))
                shutil.rmtree(copy)
            print(f"{mode} {writer}".ljust(20), *(f"{cell:10.1e}" for cell in cells), flush=True)
            worst = max(worst, *cells)
    print(f"the largest of all is {worst:.1e}")
    shutil.rmtree(folder)
    return worst >= 1e-5


if __name__ == "__main__":
    sys.exit(main(["eager"] if sys.argv[1:] == ["eager"] else list(MODES)))
