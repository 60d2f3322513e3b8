"""The run does not depend on how many ranks carry it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import ROOT, flags, here, make_dataset, metrics, run

import train


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data") / "tiny")


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    assert here(train.main, *flags(data, out, "--max_iters=20", "--gradient_accumulation_steps=4")).returncode == 0
    return out


def losses(out):
    return [
        *metrics(out).values(),
        *metrics(out, "step", "val_loss").values(),
        *metrics(out, "step", "train_loss").values(),
    ]


def test_two_ranks_give_the_losses_of_one_with_dropout_accumulation_and_an_epochs_end(alone, data, tmp_path):
    ranks = flags(data, tmp_path, "--max_iters=20", "--gradient_accumulation_steps=4")
    done = run("train.py", *ranks, ranks=2)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path) == pytest.approx(losses(alone), abs=1e-5)
    assert done.stdout.count("step 20: train loss") == 1, "only one rank speaks"


def test_a_run_begun_on_two_ranks_goes_on_alone(alone, data, tmp_path):
    ranks = flags(data, tmp_path, "--max_iters=7", "--lr_decay_iters=20", "--gradient_accumulation_steps=4")
    assert run("train.py", *ranks, ranks=2).returncode == 0
    done = here(train.main, "--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=20")
    assert done.returncode == 0, done.stderr
    found, expected = metrics(tmp_path), metrics(alone)
    assert list(found) == list(expected)
    assert list(found.values()) == pytest.approx(list(expected.values()), abs=1e-5)


def test_accumulation_that_two_ranks_cannot_share_is_refused(data, tmp_path):
    done = run("train.py", *flags(data, tmp_path / "out", "--gradient_accumulation_steps=3"), ranks=2)
    assert done.returncode != 0
    assert "--gradient_accumulation_steps=3" in done.stderr and "the nearest that works is 4" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_killed_rank_under_max_restarts_goes_on_by_itself_with_the_losses_of_an_undisturbed_run(
    alone, data, tmp_path
):
    """--init_from=auto resumes where there is a checkpoint; the first attempt starts from scratch."""
    argv = flags(
        data, tmp_path, "--max_iters=20", "--gradient_accumulation_steps=4", "--init_from=auto", "--eval_interval=5"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=3"]
    with subprocess.Popen([*launcher, str(ROOT / "train.py"), *argv], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("iter 7:"):
                workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                os.kill(int(workers[-1]), signal.SIGKILL)
                break
        rest = process.stdout.read()
        assert process.wait(timeout=100) == 0
    assert "iter 5: loss" in rest and "iter 0: loss" not in rest, rest
    found, expected = metrics(tmp_path), metrics(alone)
    assert list(found) == list(expected) and list(found.values()) == pytest.approx(list(expected.values()), abs=1e-5)


def test_metrics_are_json_lines(alone):
    assert all(json.loads(line) for line in (alone / "metrics.jsonl").read_text().splitlines())
