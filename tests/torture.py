"""Kill, signal and starve one run N times at random; then hold it to one that nobody touched.

    python tests/torture.py 50 [seed]

Each round resumes the run, which saves after every update, and then at a random moment sends SIGKILL, SIGTERM, SIGINT
or SIGUSR1, or fills its disk (a small tmpfs, where we may mount one). After each round both checkpoints must load and
the run must not have gone backwards; at the end weights and metrics must be those of an undisturbed run, bit for bit.
Prints `N survived, 0 lost`. Not part of the suite: a round takes some seconds.
"""

import collections
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tiny import flags, make_dataset, metrics, run, same, weights  # noqa: E402

import checkpoint  # noqa: E402

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
# Big enough for a save to take a while, so that kills hit it, and small enough for hundreds of updates a round.
MODEL = ["--n_layer=2", "--n_head=2", "--n_embd=128", "--eval_interval=1", "--eval_iters=1", "--lr_decay_iters=1000"]


def start(argv):
    command = [sys.executable, str(ROOT / "train.py"), *argv]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def until_saved(process):
    for line in process.stdout:
        if line.startswith("saved "):
            return
    raise AssertionError("the run ended before it saved")


def act(kind, process, out, rng):
    """Do one thing to a running process and see it end as it should."""
    time.sleep(rng.uniform(0, 0.5))
    if kind == "kill":
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    elif kind == "disk":
        with open(out / "filler", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
        for line in process.stdout:
            if "was not saved, the former one stays" in line:
                break
        process.send_signal(signal.SIGTERM)
        said = process.communicate()[0]
        assert process.returncode == 1 and "MB are free" in said, said
        (out / "filler").unlink()
    else:
        process.send_signal(kind)
        process.communicate()
        assert process.returncode == 128 + kind, process.returncode


def main(rounds, seed):
    for number in SIGNALS:  # in the background a shell has them ignored, and our children would inherit that
        signal.signal(number, signal.SIG_DFL)
    rng = random.Random(seed)
    folder = Path(tempfile.mkdtemp())
    data, out = make_dataset(folder / "data"), folder / "out"
    out.mkdir()
    mounted = not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", out], capture_output=True
    ).returncode
    kinds = ["kill", "kill", "kill", *SIGNALS, *(["disk"] if mounted else [])]
    recipe = [*flags(data, out), *MODEL, "--max_iters=100000"]
    argv, done, counts, lost = recipe, 0, collections.Counter(), 0
    try:
        for number in range(rounds):
            kind = rng.choice(kinds)
            process = start(argv)
            try:
                until_saved(process)
                act(kind, process, out, rng)
                states = [checkpoint.load(str(out / name)) for name in ("ckpt.pt", "best.pt")]
                assert states[0]["iter_num"] >= done, f"from {done} back to {states[0]['iter_num']}"
                assert states[1]["best_val_loss"] <= states[0]["best_val_loss"], "best.pt isn't the best"
                done = states[0]["iter_num"]
            except Exception as error:
                lost += 1
                print(f"round {number}, {kind}: {error!r}", flush=True)
                os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
            counts[str(kind)] += 1
            argv = ["--init_from=resume", f"--out_dir={out}"]
        end = f"--max_iters={done + 1}"
        assert run("train.py", *argv, end).returncode == 0
        assert run("train.py", *recipe, end, f"--out_dir={folder / 'whole'}").returncode == 0
        equal = same(weights(out), weights(folder / "whole")) and metrics(out) == metrics(folder / "whole")
        verdict = "equals" if equal else "DIFFERS FROM"
        print(f"{dict(counts)}; after {done + 1} updates the run {verdict} an undisturbed one")
        lost += not equal
    finally:
        if mounted:
            subprocess.run(["umount", out])
    print(f"{rounds - lost} survived, {lost} lost")
    return lost > 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 50, int(sys.argv[2]) if len(sys.argv) > 2 else 0))
