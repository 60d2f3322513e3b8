"""A run that stops and goes on is the run that never stopped, to the last bit."""

import shutil

import pytest
import torch
from tiny import flags, here, make_dataset, metrics, same, weights

import train


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data") / "tiny")


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """out_dir of a run of 30 updates, more than two epochs, that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole")
    assert here(train.main, *flags(data, out, "--max_iters=30", "--lr_decay_iters=30")).returncode == 0
    return out


@pytest.mark.parametrize("stops", [[1], [12], [13], [3, 4, 25, 29]], ids=str)
def test_stopping_and_resuming_changes_no_loss_and_no_weight(whole, data, tmp_path, stops):
    """Dropout, accumulation and the ends of two epochs (after 12 to 13 updates each) included."""
    done = here(train.main, *flags(data, tmp_path, f"--max_iters={stops[0]}", "--lr_decay_iters=30"))
    assert done.returncode == 0, done.stderr
    for stop in [*stops[1:], 30]:
        done = here(train.main, "--init_from=resume", f"--out_dir={tmp_path}", f"--max_iters={stop}")
        assert done.returncode == 0, done.stderr
    assert same(weights(tmp_path), weights(whole))
    assert metrics(tmp_path) == metrics(whole)
    evaluations = metrics(whole, "step", "val_loss")
    found = metrics(tmp_path, "step", "val_loss")
    assert {step: found[step] for step in evaluations} == evaluations
    states = [torch.load(out / "ckpt.pt", weights_only=True)["optimizer"]["state"] for out in (tmp_path, whole)]
    assert all(same(states[0][i], states[1][i]) for i in states[1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_scaler_and_narrow_products_resume_to_the_last_bit_too(data, tmp_path, dtype):
    recipe = (f"--dtype={dtype}", "--max_iters=9", "--lr_decay_iters=9")
    assert here(train.main, *flags(data, tmp_path / "whole", *recipe)).returncode == 0
    assert here(train.main, *flags(data, tmp_path / "out", *recipe, "--max_iters=5")).returncode == 0
    assert here(train.main, "--init_from=resume", f"--out_dir={tmp_path / 'out'}", "--max_iters=9").returncode == 0
    assert same(weights(tmp_path / "out"), weights(tmp_path / "whole"))
    states = [torch.load(tmp_path / name / "ckpt.pt", weights_only=True)["scaler"] for name in ("out", "whole")]
    assert states[0] == states[1] and bool(states[0]) == (dtype == "float16")


def test_a_resume_from_an_older_checkpoint_measures_its_metrics_again_without_duplicates(whole, data, tmp_path):
    assert here(train.main, *flags(data, tmp_path, "--max_iters=8", "--lr_decay_iters=30")).returncode == 0
    shutil.copy(tmp_path / "ckpt.pt", tmp_path / "older.pt")
    resume = ("--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=30")
    assert here(train.main, *resume).returncode == 0
    shutil.copy(tmp_path / "older.pt", tmp_path / "ckpt.pt")
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"iter": 30, "lo')  # killed while it wrote
    assert here(train.main, *resume).returncode == 0
    assert metrics(tmp_path) == metrics(whole) and same(weights(tmp_path), weights(whole))


def test_resume_takes_the_config_that_the_run_was_started_with_and_flags_over_it(whole, tmp_path):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    done = here(train.main, "--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=32", "--weight_decay=0.3")
    assert done.returncode == 0, done.stderr
    state = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    assert state["config"]["dropout"] == 0.1 and state["config"]["gradient_accumulation_steps"] == 2
    assert state["config"]["weight_decay"] == state["optimizer"]["param_groups"][0]["weight_decay"] == 0.3
    assert state["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.95)


def test_resuming_with_another_batch_size_deals_no_block_twice_and_leaves_out_less_than_a_batch(data, tmp_path):
    assert here(train.main, *flags(data, tmp_path, "--max_iters=7")).returncode == 0  # 7 x 2 x 4 blocks
    dealt = []
    with pytest.MonkeyPatch.context() as patch:
        batch = train.Dataset.batch
        patch.setattr(train.Dataset, "batch", lambda self, split, i: dealt.append(i) or batch(self, split, i))
        more = ("--batch_size=3", "--gradient_accumulation_steps=5", "--max_iters=9")
        assert here(train.main, "--init_from=resume", f"--out_dir={tmp_path}", *more).returncode == 0
    assert dealt == list(range(19, 29))  # blocks 57 to 86
    assert torch.load(tmp_path / "ckpt.pt", weights_only=True)["blocks"] == 87


def test_resuming_a_finished_run_says_so_and_changes_nothing(whole):
    before = (whole / "ckpt.pt").stat().st_mtime_ns
    done = here(train.main, "--init_from=resume", f"--out_dir={whole}")
    assert done.returncode == 0 and "nothing to train: 30 updates are done" in done.stdout
    assert (whole / "ckpt.pt").stat().st_mtime_ns == before


def test_eval_only_of_a_resumed_run_prints_and_leaves_every_file_untouched(whole):
    def files():
        return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in whole.iterdir()}

    before = files()
    done = here(train.main, "--init_from=resume", f"--out_dir={whole}", "--eval_only=True")
    assert done.returncode == 0 and files() == before
    assert f"val loss {metrics(whole, 'step', 'val_loss')[30]:.4f}" in done.stdout


def test_resuming_with_another_architecture_is_refused(whole):
    done = here(train.main, "--init_from=resume", f"--out_dir={whole}", "--n_layer=3")
    assert done.returncode == 2
    assert done.stderr.endswith("--n_layer=3 contradicts --init_from=resume, with 2\n")


def test_resuming_weights_without_an_optimizer_is_refused_with_the_way_out(whole, tmp_path):
    state = torch.load(whole / "ckpt.pt", weights_only=True)
    del state["optimizer"]
    torch.save(state, tmp_path / "ckpt.pt")
    done = here(train.main, "--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=32")
    assert done.returncode == 2 and "optimizer" in done.stderr and "--init_from" in done.stderr
