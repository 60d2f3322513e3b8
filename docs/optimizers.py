"""The runs behind docs/optimizers.md: makes those that are missing, then prints the tables and draws the curves.

    pip install matplotlib==3.11.2
    python docs/optimizers.py              # all of them: a few hours on a laptop
    python docs/optimizers.py chars        # one experiment: chars or tokens
    python docs/optimizers.py chars --jobs=2
    python docs/optimizers.py time         # on a quiet machine: the seconds to a loss, nanoGPT's recipe against ours

Each run is train.py with a seed and the flags below, in out-optimizers/NAME-SEED, and can be interrupted. The first
seed tries every rate; the other seeds repeat the rows that are marked.
"""

import json
import math
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "out-optimizers"
SEEDS = (1337, 1338, 1339)

# nanoGPT's laptop recipe: 4 layers, 128 wide, 64 characters of context, 2,000 updates of 12 blocks, cosine.
CHARS = (
    "--dataset=shakespeare_char --n_layer=4 --n_head=4 --n_embd=128 --block_size=64 --batch_size=12 "
    "--gradient_accumulation_steps=1 --max_iters=2000 --warmup_iters=100 --beta2=0.99 --eval_interval=250"
)
# A GPT-2 of 12 M parameters on Shakespeare in GPT-2's tokens, of which 300 updates see half.
TOKENS = (
    "--dataset=shakespeare --n_layer=6 --n_head=6 --n_embd=192 --block_size=128 --batch_size=4 "
    "--gradient_accumulation_steps=1 --max_iters=300 --warmup_iters=30 --eval_interval=50"
)


def rate(lr, floor=0.1):
    return f"--learning_rate={lr:g} --min_lr={lr * floor:g}"


MUON, LINEAR = "--optimizer=muon", "--lr_schedule=linear"
# experiment → {row: (flags, with every seed?)}
EXPERIMENTS = {
    "chars": {
        "AdamW 1e-3, nanoGPT's": (f"{CHARS} {rate(1e-3)}", True),
        "AdamW 3e-3": (f"{CHARS} {rate(3e-3)}", False),
        "AdamW 6e-3": (f"{CHARS} {rate(6e-3)}", False),
        "AdamW 1e-2": (f"{CHARS} {rate(1e-2)}", False),
        "AdamW 6e-3, linear to 0": (f"{CHARS} {rate(6e-3, 0)} {LINEAR}", True),
        "Muon 3e-3": (f"{CHARS} {MUON} {rate(3e-3)}", False),
        "Muon 6e-3": (f"{CHARS} {MUON} {rate(6e-3)}", False),
        "Muon 1e-2": (f"{CHARS} {MUON} {rate(1e-2)}", False),
        "Muon 2e-2": (f"{CHARS} {MUON} {rate(2e-2)}", False),
        "Muon 1e-2, linear to 0": (f"{CHARS} {MUON} {rate(1e-2, 0)} {LINEAR}", True),
        "Muon 1e-2, wsd to 0": (f"{CHARS} {MUON} {rate(1e-2, 0)} --lr_schedule=wsd", False),
        "Muon 1e-2, constant, EMA": (f"{CHARS} {MUON} {rate(1e-2)} --lr_decay_iters=9999999 --ema_decay=.99", False),
    },
    "tokens": {
        "AdamW 1e-3": (f"{TOKENS} {rate(1e-3)}", False),
        "AdamW 3e-3": (f"{TOKENS} {rate(3e-3)}", True),
        "AdamW 6e-3": (f"{TOKENS} {rate(6e-3)}", False),
        "Muon 1e-3": (f"{TOKENS} {MUON} {rate(1e-3)}", False),
        "Muon 3e-3": (f"{TOKENS} {MUON} {rate(3e-3)}", True),
        "Muon 6e-3": (f"{TOKENS} {MUON} {rate(6e-3)}", False),
    },
}  # fmt: skip


def folder(experiment, row, seed):
    return OUT / f"{experiment}-{''.join(c if c.isalnum() or c in '.-' else '_' for c in row)}-{seed}"


def losses(out):
    """{step: val loss on the whole validation set}, the better of the weights and their average; ms an iteration."""
    try:
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    except FileNotFoundError:
        return {}, math.nan
    found = {line["step"]: min(line["val_loss"], line.get("average_loss", 99)) for line in lines if "step" in line}
    times = [line["ms"] for line in lines if "iter" in line][1:]
    return found, statistics.median(times) if times else math.nan


def make(experiment, row, flags, seed):
    out = folder(experiment, row, seed)
    last = int(flags.split("--max_iters=")[1].split()[0])
    if last in losses(out)[0]:
        return
    common = f"--init_from=auto --eval_iters=0 --log_interval=50 --device=cpu --compile=False --seed={seed}"
    command = [sys.executable, str(ROOT / "train.py"), *flags.split(), *common.split(), f"--out_dir={out}"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    print(f"{experiment}: {row}, seed {seed}: {(done.stdout + done.stderr).splitlines()[-2:]}", flush=True)


def table(experiment):
    print(
        f"\n{experiment}\n\n| recipe | updates | val loss | seeds | spread | reaches the first row's loss at update |"
    )
    print("|---|---|---|---|---|---|")
    goal = None
    for row in EXPERIMENTS[experiment]:
        curves = [losses(folder(experiment, row, seed))[0] for seed in SEEDS]
        curves = [curve for curve in curves if curve]
        if not curves:
            continue
        last = max(curves[0])
        ends = [curve[last] for curve in curves if last in curve]
        mean = statistics.mean(ends)
        goal = goal or mean
        reached = [min((step for step, loss in curve.items() if loss <= goal), default=math.inf) for curve in curves]
        spread = f"{min(ends):.4f} to {max(ends):.4f}" if len(ends) > 1 else ""
        print(f"| {row} | {last:,} | {mean:.4f} | {len(ends)} | {spread} | {statistics.median(reached):,.0f} |")


def draw(experiment):
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for row in EXPERIMENTS[experiment]:
        curves = [losses(folder(experiment, row, seed))[0] for seed in SEEDS]
        curves = [curve for curve in curves if curve]
        if curves:
            steps = sorted(set.intersection(*map(set, curves)) - {0})
            at = [[curve[step] for curve in curves] for step in steps]
            low, mean, high = ([reduce(values) for values in at] for reduce in (min, statistics.mean, max))
            (line,) = axes.plot(steps, mean, "--" if "Muon" in row else "-", label=row)
            axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.3)
    axes.set(xlabel="update", ylabel="loss on the whole validation set", title=f"{experiment}: dashed Muon, band seeds")
    axes.legend(fontsize=7)
    figure.savefig(ROOT / "docs" / f"optimizers-{experiment}.svg", metadata={"Date": None})


def seconds_to(out, goal):
    """Seconds of training, without evaluations, until the loss on the validation set was at most `goal`."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    step = min(line["step"] for line in lines if line.get("val_loss", 99) <= goal)
    ms = {line["iter"]: line["ms"] for line in lines if "iter" in line}  # the mean since the line before
    return sum(ms[at] * (at - before) for before, at in zip([-1, *ms], ms, strict=False) if at < step) / 1000, step


def compare_times(rounds=3):
    """nanoGPT's laptop recipe, float32 and eager, against the CPU recipe's network in as few updates; in turns."""
    common = f"{sys.executable} {ROOT}/train.py {{}} --eval_iters=0 --log_interval=10 --device=cpu --compile=False"
    nanogpt = f"{CHARS} {rate(1e-3)} --eval_interval=100 --out_dir={OUT}/time-nanogpt"
    ours = f"{ROOT}/config/train_shakespeare_char_cpu.py --max_iters=350 --eval_interval=50 --out_dir={OUT}/time-ours"
    for _ in range(rounds):
        for flags in (nanogpt, ours):
            subprocess.run(common.format(flags).split(), check=True, capture_output=True)
        goal = max(1.88, min(losses(OUT / "time-nanogpt")[0].values()))
        (slow, slow_step), (fast, fast_step) = (seconds_to(OUT / f"time-{name}", goal) for name in ("nanogpt", "ours"))
        print(
            f"to a loss of {goal:.4f}: nanoGPT's recipe {slow:.1f} s ({slow_step} updates), "
            f"ours {fast:.1f} s ({fast_step} updates), ratio {fast / slow:.3f}",
            flush=True,
        )


def main(argv):
    if argv == ["time"]:
        return compare_times()
    jobs = next((int(arg.removeprefix("--jobs=")) for arg in argv if arg.startswith("--jobs=")), 1)
    wanted = [arg for arg in argv if not arg.startswith("--")] or list(EXPERIMENTS)
    with ThreadPoolExecutor(jobs) as pool:
        for number, seed in enumerate(SEEDS):
            for experiment in wanted:
                for row, (flags, every_seed) in EXPERIMENTS[experiment].items():
                    if number == 0 or every_seed:
                        pool.submit(make, experiment, row, flags, seed)
    for experiment in wanted:
        table(experiment)
        draw(experiment)


if __name__ == "__main__":
    main(sys.argv[1:])
