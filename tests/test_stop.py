"""Kills, signals, time limits and full disks: what was saved stays, and the run can go on."""

import errno
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny import ROOT, flags, here, make_dataset, metrics, run, same, weights

import checkpoint
import train


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data") / "tiny")


LONG = ("--max_iters=100000", "--eval_interval=1", "--eval_iters=1", "--lr_decay_iters=30", "--log_interval=1")


def start(argv, ranks=1):
    """A run of its own, in the background, its output in a pipe."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, str(ROOT / "train.py"), *argv]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def wait_for(process, text):
    """Read its output until a line contains `text`."""
    for line in process.stdout:
        if text in line:
            return
    pytest.fail(f"it ended without saying {text!r}")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_ends_the_step_saves_and_says_how_to_go_on(data, tmp_path, name):
    process = start(flags(data, tmp_path, *LONG, "--eval_interval=100000"))
    wait_for(process, "iter 5: ")
    process.send_signal(getattr(signal, name))
    rest = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + getattr(signal, name)
    state = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    assert f"stopped after {state['iter_num']} updates" in rest and f"--init_from=resume --out_dir={tmp_path}" in rest
    assert state["iter_num"] == len(metrics(tmp_path)) > 5


def test_a_run_that_signals_stopped_between_evaluations_goes_on_to_the_last_bit(data, tmp_path):
    recipe = ("--max_iters=30", "--lr_decay_iters=30", "--eval_interval=10")
    assert here(train.main, *flags(data, tmp_path / "whole", *recipe)).returncode == 0
    stop_at = {3, 10, 17, 20}
    wanted = checkpoint.OutDir.log

    def log(self, metric):
        wanted(self, metric)
        if metric.get("iter", -1) + 1 in stop_at:
            stop_at.remove(metric["iter"] + 1)
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.OutDir, "log", log)
        assert here(train.main, *flags(data, tmp_path / "out", *recipe)).returncode == 128 + signal.SIGTERM
        for _ in range(3):
            done = here(train.main, "--init_from=resume", f"--out_dir={tmp_path / 'out'}")
            assert done.returncode == 128 + signal.SIGTERM, done.stderr
        assert here(train.main, "--init_from=resume", f"--out_dir={tmp_path / 'out'}").returncode == 0
    assert same(weights(tmp_path / "out"), weights(tmp_path / "whole"))
    for kind, value in (("iter", "loss"), ("step", "val_loss"), ("step", "train_loss")):
        assert metrics(tmp_path / "out", kind, value) == metrics(tmp_path / "whole", kind, value)


def test_a_signal_during_an_evaluation_ends_it_too_and_the_resumed_run_makes_it_again(data, tmp_path, monkeypatch):
    recipe = ("--dropout=0.1", "--eval_interval=4", "--eval_iters=0")
    assert here(train.main, *flags(data, tmp_path / "whole", *recipe)).returncode == 0
    wanted, number = train.Dataset.eval_batches, [0]

    def eval_batches(self, *args):
        for batch in wanted(self, *args):
            number[0] += 1
            if number[0] == 25:  # an evaluation has ten, five a split
                os.kill(os.getpid(), signal.SIGTERM)
            assert number[0] <= 25, "the evaluation went on"
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(train.Dataset, "eval_batches", eval_batches)
        done = here(train.main, *flags(data, tmp_path / "out", *recipe))
    assert done.returncode == 128 + signal.SIGTERM and "stopped after 8 updates" in done.stdout
    assert here(train.main, "--init_from=resume", f"--out_dir={tmp_path / 'out'}").returncode == 0
    assert same(weights(tmp_path / "out"), weights(tmp_path / "whole"))
    for kind, value in (("iter", "loss"), ("step", "val_loss"), ("step", "train_loss")):
        assert metrics(tmp_path / "out", kind, value) == metrics(tmp_path / "whole", kind, value)


def test_the_handlers_are_gone_when_the_run_is(data, tmp_path):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    assert here(train.main, *flags(data, tmp_path, "--max_iters=1")).returncode == 0
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_second_ctrl_c_ends_at_once(data, tmp_path):
    """The first one comes in an update that never ends."""
    code = f"""
import sys, time, train
sys.argv[0] = "train.py"
train.train_step = lambda *a: (print("in a step", flush=True), time.sleep(600))
train.main({flags(data, tmp_path, *LONG)!r})
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    wait_for(process, "in a step")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.wait(timeout=10)
    assert process.returncode == -signal.SIGINT  # a shell calls this 130


def test_the_time_limit_saves_and_ends_well(data, tmp_path):
    done = here(train.main, *flags(data, tmp_path, *LONG, "--time_limit=0.02"))
    assert done.returncode == 0 and "stopped after" in done.stdout
    assert torch.load(tmp_path / "ckpt.pt", weights_only=True)["iter_num"] > 0


def test_a_signal_to_one_of_two_ranks_stops_both_at_the_same_step(data, tmp_path):
    process = start(flags(data, tmp_path, *LONG, "--eval_interval=100000"), ranks=2)
    wait_for(process, "iter 5: ")
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(workers[-1]), signal.SIGTERM)
    rest = process.communicate(timeout=100)[0]
    assert process.returncode != 0 and rest.count("stopped after") == 1, rest
    state = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert state["iter_num"] == last["iter"] + 1


def test_a_kill_at_any_instant_leaves_a_checkpoint_that_resumes_as_if_nothing_had_been(data, tmp_path):
    """A handful of them, with a save after every update; tests/torture.py does it by the hundred."""
    rng = random.Random(3)
    out = tmp_path / "out"
    argv = flags(data, out, *LONG)
    for _ in range(4):
        process = start(argv)
        wait_for(process, "saved ")
        time.sleep(rng.uniform(0, 0.2))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        argv = ["--init_from=resume", f"--out_dir={out}"]
        assert checkpoint.load(str(out / "ckpt.pt"))["iter_num"] > 0 and checkpoint.load(str(out / "best.pt"))
    updates = checkpoint.load(str(out / "ckpt.pt"))["iter_num"] + 1
    assert here(train.main, *argv, f"--max_iters={updates}").returncode == 0
    whole = flags(data, tmp_path / "whole", *LONG, f"--max_iters={updates}")
    assert here(train.main, *whole).returncode == 0
    assert same(weights(out), weights(tmp_path / "whole")) and metrics(out) == metrics(tmp_path / "whole")


# ---- full disks


def limit_files():
    """No file of this process grows beyond 60 kB, as on a disk with so much room."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))


def test_a_full_disk_leaves_the_former_checkpoint_and_says_how_much_room_was_needed(data, tmp_path):
    assert here(train.main, *flags(data, tmp_path, "--max_iters=4")).returncode == 0
    before = (tmp_path / "ckpt.pt").read_bytes()
    assert len(before) > 60_000
    command = [sys.executable, str(ROOT / "train.py"), "--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=9"]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit_files)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stdout.count("was not saved, the former one stays") == 2  # at 8, whereupon it goes on, and at 9
    assert "iter 8: loss" in done.stdout and "It needs 0.1 MB" in done.stdout
    assert (tmp_path / "ckpt.pt").read_bytes() == before
    assert not [p.name for p in tmp_path.iterdir() if "tmp" in p.name or "part" in p.name]


def test_a_best_found_where_a_signal_had_saved_already_is_saved_as_the_best(data, tmp_path, monkeypatch):
    losses, wanted = iter([4.0, 2.0, 3.0, 3.0]), checkpoint.OutDir.log  # at 0, 4, 8 and 12
    monkeypatch.setattr(train, "evaluate", lambda *args: dict.fromkeys(("train", "val"), next(losses)))
    with monkeypatch.context() as patch:
        stop = lambda metric: metric.get("iter") == 3 and os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
        patch.setattr(checkpoint.OutDir, "log", lambda self, metric: wanted(self, metric) or stop(metric))
        done = here(train.main, *flags(data, tmp_path))
    assert done.returncode == 128 + signal.SIGTERM and "stopped after 4 updates" in done.stdout
    assert here(train.main, "--init_from=resume", f"--out_dir={tmp_path}").returncode == 0
    best, latest = (checkpoint.load(str(tmp_path / name)) for name in ("best.pt", "ckpt.pt"))
    assert (best["iter_num"], best["best_val_loss"], latest["best_val_loss"]) == (4, 2.0, 2.0)


def test_a_best_that_could_not_be_saved_does_not_keep_later_ones_from_being_the_best(data, tmp_path, monkeypatch):
    save, losses = torch.save, iter([4.0, 3.0, 2.0, 2.5, 2.6])  # at 0, 4, 8, 12 and 16

    def failing(state, file):
        if state["iter_num"] == 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(state, file)

    monkeypatch.setattr(torch, "save", failing)
    monkeypatch.setattr(train, "evaluate", lambda *args: dict.fromkeys(("train", "val"), next(losses)))
    assert here(train.main, *flags(data, tmp_path, "--max_iters=16")).returncode == 0
    best, latest = (checkpoint.load(str(tmp_path / name)) for name in ("best.pt", "ckpt.pt"))
    assert (best["iter_num"], best["best_val_loss"], latest["best_val_loss"]) == (12, 2.5, 2.5)


def test_keep_checkpoints_keeps_the_last_ones_under_their_own_names(data, tmp_path):
    assert here(train.main, *flags(data, tmp_path, "--eval_interval=2", "--keep_checkpoints=3")).returncode == 0
    kept = sorted(p.name for p in tmp_path.glob("ckpt-*.pt"))
    assert kept == ["ckpt-00000008.pt", "ckpt-00000010.pt", "ckpt-00000012.pt"]
    assert [torch.load(tmp_path / name, weights_only=True)["iter_num"] for name in kept] == [8, 10, 12]


def test_an_out_dir_that_cannot_be_written_is_refused_before_the_model_is_built(data, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(train, "GPT", None)
    done = here(train.main, *flags(data, tmp_path / "file" / "out"))
    assert done.returncode == 2 and "can't be written" in done.stderr and len(done.stderr.splitlines()) == 1


def test_out_of_memory_names_what_was_asked_for_and_what_lowers_it(data, tmp_path):
    done = run("train.py", *flags(data, tmp_path, "--n_embd=1000000", "--n_head=1", "--n_layer=1"))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "out of memory" in done.stderr and "--batch_size" in done.stderr
