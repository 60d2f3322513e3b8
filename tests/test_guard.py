"""No bad update reaches the weights, and a run that goes wrong ends without harm."""

import json
import math

import pytest
import torch
from tiny import flags, here, make_dataset, metrics, same, weights

import train
from guard import ENOUGH, Guard
from optimizer import make_optimizer
from train import TrainConfig


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data") / "tiny")


def incidents(out):
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line["incident"] for line in lines if "incident" in line]


def spoil(monkeypatch, at, what=math.nan, times=1):
    """Make the loss of the model's calls number `at`, `at` + 1 … in training non-finite (or huge), `times` times."""
    forward, calls = train.GPT.forward, [0]

    def spoiled(self, idx, targets=None):
        out = forward(self, idx, targets)
        if self.training and targets is not None:
            calls[0] += 1
            if at <= calls[0] - 1 < at + times:
                out = out * what
        return out

    monkeypatch.setattr(train.GPT, "forward", spoiled)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_update_with_a_non_finite_loss_or_gradient_changes_neither_weights_nor_optimizer(value):
    for loss, grad in ((value, 1.0), (1.0, value)):
        layer = torch.nn.Linear(3, 3)
        optimizer = make_optimizer(layer, TrainConfig(optimizer="adamw", learning_rate=0.1))
        guard = Guard(0, "cpu")
        layer(torch.ones(3)).sum().backward()
        optimizer.found_inf = guard.judge(torch.tensor(1.0), torch.tensor(1.0))
        optimizer.step()
        before = {k: v.clone() for k, v in layer.state_dict().items()}
        moments = [{k: v.clone() for k, v in s.items()} for s in optimizer.state.values()]
        layer.weight.grad[0, 0] = grad
        optimizer.found_inf = guard.judge(torch.tensor(loss), layer.weight.grad.norm())
        optimizer.step()
        assert same(layer.state_dict(), before)
        assert all(same(s, m) for s, m in zip(optimizer.state.values(), moments, strict=True))
        assert guard.report() == (1, 1)


def test_one_bad_update_is_skipped_and_said_and_the_run_goes_on(data, tmp_path, monkeypatch):
    spoil(monkeypatch, at=6)  # the first micro-batch of update 3
    done = here(train.main, *flags(data, tmp_path))
    assert done.returncode == 0, done.stderr
    assert "1 update(s) skipped" in done.stdout and incidents(tmp_path) == ["skipped"]
    assert metrics(tmp_path)[3] is None and len(metrics(tmp_path)) == 12
    assert all(w.isfinite().all() for w in weights(tmp_path).values())
    state = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    assert {int(s["step"].item()) for s in state["optimizer"]["state"].values()} == {11}


def test_several_bad_updates_in_a_row_stop_the_run_and_name_the_last_good_checkpoint(data, tmp_path, monkeypatch):
    spoil(monkeypatch, at=10, times=1000)  # from update 5 on; saved after update 4
    done = here(train.main, *flags(data, tmp_path, "--max_iters=40", "--eval_interval=4"))
    assert done.returncode == 1
    assert f"the last good checkpoint, of iteration 8, is in {tmp_path}" in done.stdout
    assert all(w.isfinite().all() for w in weights(tmp_path).values())
    assert incidents(tmp_path)[-1] == "stopped"


def test_how_many_bad_updates_stop_a_run_is_an_option(data, tmp_path, monkeypatch):
    spoil(monkeypatch, at=2, times=6)
    assert here(train.main, *flags(data, tmp_path / "a", "--max_skips=3")).returncode == 1
    monkeypatch.undo()
    spoil(monkeypatch, at=2, times=6)
    assert here(train.main, *flags(data, tmp_path / "b", "--max_skips=4")).returncode == 0


def test_weights_that_are_not_finite_are_never_written_over_good_ones(data, tmp_path):
    assert here(train.main, *flags(data, tmp_path, "--max_iters=4")).returncode == 0
    good = weights(tmp_path)
    blown = (
        "--init_from=resume",
        f"--out_dir={tmp_path}",
        "--decay_lr=False",
        "--max_skips=1000",
        "--eval_interval=1000",
    )
    for rate in ("1e38", "1e30"):  # the weights overflow, or only what is computed with them
        done = here(train.main, *blown, "--max_iters=8", f"--learning_rate={rate}")
        assert done.returncode == 1 and "the last good checkpoint, of iteration 4, is in" in done.stdout
    assert same(weights(tmp_path), good) and same(weights(tmp_path, "best.pt"), good)


def test_the_guard_changes_no_run_that_has_no_trouble(data, tmp_path):
    for name, zscore in (("off", 0), ("on", 50)):
        assert here(train.main, *flags(data, tmp_path / name, f"--spike_zscore={zscore}")).returncode == 0
    assert same(weights(tmp_path / "off"), weights(tmp_path / "on"))


def judge_all(guard, losses):
    return [bool(guard.judge(torch.tensor(loss), torch.tensor(1.0 + 0.01 * (i % 2)))) for i, loss in enumerate(losses)]


def test_a_loss_far_beyond_its_recent_history_is_a_spike_once_there_is_a_history():
    usual = [3.0 + 0.1 * math.sin(i) for i in range(ENOUGH)]
    assert judge_all(Guard(4, "cpu"), [*usual, 3.05, 9.0, 3.0]) == [False] * ENOUGH + [False, True, False]
    assert not any(judge_all(Guard(4, "cpu"), [3.0, 3.1, 9.0]))
    assert not any(judge_all(Guard(0, "cpu"), [*usual, 9.0]))


def test_a_spike_is_not_part_of_the_history_and_a_falling_loss_none_at_all():
    guard = Guard(4, "cpu")
    usual = [3.0 + 0.1 * math.sin(i) for i in range(ENOUGH)]
    assert judge_all(guard, usual + [9.0] * 5)[-5:] == [True] * 5
    assert not any(judge_all(Guard(4, "cpu"), [4.0 * 0.98**i for i in range(200)]))


def test_after_repeated_spikes_the_run_goes_back_and_on_past_the_data_that_caused_them(data, tmp_path, monkeypatch):
    """Updates 45 to 48 spike; the run returns to the checkpoint of 40 and deals other blocks from there on."""
    dealt = []
    batch = train.Dataset.batch
    monkeypatch.setattr(train.Dataset, "batch", lambda self, split, i: dealt.append(i) or batch(self, split, i))
    spoil(monkeypatch, at=90, what=100.0, times=8)
    run = ("--max_iters=60", "--eval_interval=20", "--spike_zscore=8", "--max_skips=4", "--keep_checkpoints=9")
    done = here(train.main, *flags(data, tmp_path, *run))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "back to the checkpoint of iteration 40" in done.stdout
    assert incidents(tmp_path) == ["skipped", "skipped", "skipped", "skipped", "rolled back"]
    assert list(metrics(tmp_path)) == list(range(60)) and metrics(tmp_path, "step", "val_loss").keys() == {
        0,
        20,
        40,
        60,
    }
    assert dealt == list(range(2 * 49 + 2 * 20)), "no block is dealt twice"
    state = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    assert state["iter_num"] == 60 and state["blocks"] == 4 * len(dealt)


def test_without_a_checkpoint_to_go_back_to_repeated_spikes_stop_the_run(data, tmp_path, monkeypatch):
    spoil(monkeypatch, at=90, what=100.0, times=100)
    run = ("--max_iters=60", "--eval_interval=1000", "--spike_zscore=8", "--max_skips=4")
    done = here(train.main, *flags(data, tmp_path, *run))
    assert done.returncode == 1 and "nothing was saved" in done.stdout
