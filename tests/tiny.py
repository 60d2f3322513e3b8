"""A tiny model on a tiny text: what the tests of the commands train, in seconds."""

import contextlib
import io
import json
import random
import subprocess
import sys
from pathlib import Path

import torch

from dataset import write_dataset
from tokenizer import CharTokenizer

ROOT = Path(__file__).resolve().parents[1]
WORDS = "to be or not that is the question whether tis nobler in mind suffer slings and arrows of fortune".split()
MODEL = ["--n_layer=2", "--n_head=2", "--n_embd=16", "--block_size=16", "--batch_size=4"]
RECIPE = [  # in float32, as equalities between ranks are
    "--device=cpu", "--dtype=float32", "--compile=False", "--gradient_accumulation_steps=2", "--max_iters=12",
    "--eval_interval=4", "--eval_iters=2", "--log_interval=1", "--warmup_iters=2", "--learning_rate=1e-2",
    "--min_lr=1e-3", "--dropout=0.1",
]  # fmt: skip


def make_dataset(folder, n_words=600):
    """Words in random order; character ids; 90 % train. With the defaults an epoch is 12 to 13 iterations of 2 × 4."""
    rng = random.Random(1)
    text = " ".join(rng.choice(WORDS) for _ in range(n_words)) + "\n"
    tokenizer = CharTokenizer("".join(sorted(set(text))))
    ids = tokenizer.encode(text)
    split = len(ids) * 9 // 10
    write_dataset(folder, {"train": [ids[:split]], "val": [ids[split:]]}, tokenizer, source="made up", sha256="")
    return folder


def flags(data, out, *more):
    """Flags of train.py for a tiny run; later ones win."""
    return [*MODEL, *RECIPE, f"--dataset={data}", f"--out_dir={out}", *more]


def here(main, *argv):
    """A command's main(argv) in this process → CompletedProcess, as `run` gives it but without seconds of start-up."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(list(argv))
        except SystemExit as end:
            code = end.code or 0
    return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())


def run(script, *argv, cwd=ROOT, env=None, ranks=1):
    """A script as a user runs it, under torchrun for several ranks → CompletedProcess with text output."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*launcher, str(ROOT / script), *argv]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=200)


def metrics(out, kind="iter", value="loss"):
    """{iter: loss} (or {step: val_loss}) from metrics.jsonl, at full precision."""
    lines = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "incident" not in line]
    assert len(lines) == len({(line.get("iter"), line.get("step")) for line in lines}), "a line stands twice"
    return {line[kind]: line[value] for line in lines if kind in line}


def weights(out, name="ckpt.pt"):
    return torch.load(Path(out) / name, weights_only=True)["model"]


def same(a, b):
    """Whether two state dicts agree to the last bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
