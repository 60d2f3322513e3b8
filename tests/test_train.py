"""The recipe: schedule, one step, evaluation, and what a whole run does and leaves behind."""

import math
import os
import shutil
from dataclasses import replace

import pytest
import torch
from tiny import flags, here, make_dataset, metrics, run, same, weights

import train
from configurator import UserError
from dataset import Dataset
from guard import Guard
from model import GPT
from optimizer import make_optimizer
from runtime import Runtime
from train import TrainConfig, evaluate, learning_rate_at, micro_batches_at, train_step


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data") / "tiny")


def config(data, *more):
    return train.configurator.parse(TrainConfig, flags(data, "unused", *more))


def pieces(data, *more):
    """(model, optimizer, dataset, config, runtime) of a tiny run, in one process."""
    cfg = config(data, *more)
    dataset = Dataset(data, cfg.block_size, cfg.batch_size, cfg.seed)
    rt = Runtime(cfg)
    model = GPT(replace(cfg.model_config(), vocab_size=dataset.vocab_size))
    return model, make_optimizer(model, cfg), dataset, cfg, rt


# ---- schedule


def schedule(step, **options):
    defaults = dict(learning_rate=1.0, min_lr=0.1, warmup_iters=10, lr_decay_iters=110, max_iters=200)
    return learning_rate_at(step, TrainConfig(**{**defaults, **options}))


def test_the_rate_rises_linearly_falls_as_a_cosine_and_stays_at_min_lr():
    assert schedule(0) == pytest.approx(1 / 11)
    assert schedule(9) == pytest.approx(10 / 11)
    assert schedule(10) == 1.0
    assert schedule(60) == pytest.approx(0.55)
    assert schedule(85) == pytest.approx(0.1 + 0.9 * (1 + math.cos(0.75 * math.pi)) / 2)
    assert schedule(110) == schedule(199) == 0.1


def test_lr_decay_iters_0_means_max_iters():
    assert [schedule(s, lr_decay_iters=0) for s in range(201)] == [schedule(s, lr_decay_iters=200) for s in range(201)]


@pytest.mark.parametrize("warmup", [0, 109, 110, 111, 1000])
def test_the_rate_is_above_0_and_at_most_learning_rate_however_warmup_and_decay_lie(warmup):
    assert all(0 < schedule(step, warmup_iters=warmup) <= 1 for step in range(200))


def test_the_linear_schedule_falls_in_a_straight_line():
    assert [schedule(s, lr_schedule="linear") for s in (10, 60, 110, 150)] == pytest.approx([1, 0.55, 0.1, 0.1])


def test_wsd_is_stable_and_then_falls_in_a_straight_line_over_the_last_decay_frac():
    found = [schedule(s, lr_schedule="wsd", decay_frac=0.2, min_lr=0.0) for s in (0, 10, 87, 88, 99, 109, 110)]
    assert found == pytest.approx([1 / 11, 1, 1, 1, 0.5, 1 / 22, 0])


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_no_schedule_jumps(name):
    rates = [schedule(step, lr_schedule=name) for step in range(200)]
    assert max(abs(b - a) for a, b in zip(rates, rates[1:], strict=False)) < 0.1


def test_without_decay_the_rate_is_constant():
    assert {schedule(step, decay_lr=False) for step in range(200)} == {1.0}


def test_the_batch_grows_from_a_quarter_over_half_to_all_of_it():
    cfg = TrainConfig(gradient_accumulation_steps=8, batch_warmup_iters=4)
    assert [micro_batches_at(step, cfg) for step in range(6)] == [2, 2, 4, 4, 8, 8]
    assert micro_batches_at(0, TrainConfig(gradient_accumulation_steps=5)) == 5


def test_a_run_whose_batch_grows_deals_every_block_once_and_resumes_to_the_last_bit(data, tmp_path):
    recipe = ("--gradient_accumulation_steps=4", "--batch_warmup_iters=4", "--max_iters=6", "--lr_decay_iters=6")
    dealt = []
    with pytest.MonkeyPatch.context() as patch:
        batch = Dataset.batch
        patch.setattr(Dataset, "batch", lambda self, split, i: dealt.append(i) or batch(self, split, i))
        assert here(train.main, *flags(data, tmp_path / "whole", *recipe)).returncode == 0
    assert dealt == list(range(1 + 1 + 2 + 2 + 4 + 4))
    for stop in (1, 3):
        more = flags(data, tmp_path / "out", *recipe) if stop == 1 else ["--init_from=resume"]
        assert here(train.main, *more, f"--out_dir={tmp_path / 'out'}", f"--max_iters={stop}").returncode == 0
    assert here(train.main, "--init_from=resume", f"--out_dir={tmp_path / 'out'}", "--max_iters=6").returncode == 0
    assert same(weights(tmp_path / "out"), weights(tmp_path / "whole"))


def test_a_batch_that_cannot_be_quartered_among_the_ranks_is_refused(data):
    _, _, _, _, rt = pieces(data)
    rt.world_size = 2
    with pytest.raises(UserError, match="=12 .* in quarters, .* nearest that works is 16"):
        rt.check_accumulation(12, parts=4)


# ---- one step


def test_accumulated_micro_batches_give_the_loss_and_gradient_of_one_large_batch(data):
    """The mean over micro-batches, not the last one's loss and not their sum."""
    found = []
    for accumulation, batch_size in ((4, 4), (1, 16)):
        more = (f"--gradient_accumulation_steps={accumulation}", f"--batch_size={batch_size}", "--dropout=0")
        model, optimizer, dataset, cfg, rt = pieces(data, *more, "--grad_clip=0")
        micro_batches = range(48 // batch_size, 48 // batch_size + accumulation)
        loss, grad_norm = train_step(model, optimizer, Guard(0, "cpu"), dataset, micro_batches, cfg, rt)
        found.append((loss.item(), grad_norm.item(), model.state_dict()))
    (loss, norm, params), (loss_once, norm_once, params_once) = found
    assert loss == pytest.approx(loss_once, abs=1e-6) and norm == pytest.approx(norm_once, rel=1e-5)
    assert all(torch.allclose(params[name], params_once[name], atol=1e-5) for name in params)


def test_gradients_are_clipped_to_the_norm_and_the_norm_before_is_told(data, monkeypatch):
    model, optimizer, dataset, cfg, rt = pieces(data, "--grad_clip=0.01")
    norms = []
    step = optimizer.step
    monkeypatch.setattr(
        optimizer,
        "step",
        lambda *a: norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])) or step(),
    )
    _, grad_norm = train_step(model, optimizer, Guard(0, "cpu"), dataset, range(2), cfg, rt)
    assert norms[0].item() == pytest.approx(0.01, rel=1e-3) and grad_norm > 0.1


def test_dropout_is_a_function_of_seed_and_micro_batch_whatever_ran_before(data):
    losses = []
    for disturb in (False, True):
        model, optimizer, dataset, cfg, rt = pieces(data, "--dropout=0.5")
        if disturb:
            torch.rand(1000)
        losses.append(train_step(model, optimizer, Guard(0, "cpu"), dataset, range(5, 7), cfg, rt)[0].item())
    assert losses[0] == losses[1]
    model, optimizer, dataset, cfg, rt = pieces(data, "--dropout=0.5")
    rt.seed += 1
    assert train_step(model, optimizer, Guard(0, "cpu"), dataset, range(5, 7), cfg, rt)[0].item() != losses[0]


def test_decay_is_on_matrices_and_tables_only(data):
    model, optimizer, *_ = pieces(data)
    decayed, others = (group["params"] for group in optimizer.param_groups)
    assert optimizer.param_groups[0]["weight_decay"] > 0 == optimizer.param_groups[1]["weight_decay"]
    assert {p.dim() for p in decayed} == {2} and {p.dim() for p in others} == {1}
    assert sum(p.numel() for p in decayed + others) == model.num_params()


# ---- evaluation


def test_evaluation_of_everything_is_the_mean_over_every_token_of_the_split(data):
    model, _, dataset, cfg, rt = pieces(data, "--eval_iters=0", "--dropout=0.3")
    ids = torch.frombuffer(bytearray((data / "val.bin").read_bytes()), dtype=torch.uint16).long()
    model.eval()
    nats = tokens = 0
    for start in range(0, len(ids) - 1, cfg.block_size):
        block = ids[start : start + cfg.block_size + 1]
        nats += model(block[None, :-1], block[None, 1:]).item() * (len(block) - 1)
        tokens += len(block) - 1
    assert tokens == len(ids) - 1
    assert evaluate(model, dataset, cfg, rt)["val"] == pytest.approx(nats / tokens, abs=1e-6)
    assert model.training


def test_the_same_weights_have_the_same_validation_loss_twice(data):
    model, _, dataset, cfg, rt = pieces(data, "--dropout=0.3")
    assert evaluate(model, dataset, cfg, rt) == evaluate(model, dataset, cfg, rt)


# ---- a run


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """(out_dir, what was printed) of one whole tiny run."""
    out = tmp_path_factory.mktemp("run") / "out dir ü="
    done = here(train.main, *flags(data, out))
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_a_run_learns(finished):
    val = metrics(finished[0], "step", "val_loss")
    assert val[12] < val[0] - 0.3


def test_a_run_makes_exactly_max_iters_updates_and_ends_with_an_evaluation_and_a_save(finished, data):
    out, printed = finished
    assert list(metrics(out)) == list(range(12)) and list(metrics(out, "step", "val_loss")) == [0, 4, 8, 12]
    state = torch.load(out / "ckpt.pt", weights_only=True)
    assert state["iter_num"] == 12
    assert {int(s["step"].item()) for s in state["optimizer"]["state"].values()} == {12}


def test_the_last_evaluation_does_not_depend_on_eval_interval(data, tmp_path):
    done = here(train.main, *flags(data, tmp_path, "--max_iters=3", "--eval_interval=1000"))
    assert done.stdout.count("step 3: train loss ") == 1 and (tmp_path / "ckpt.pt").is_file()


def test_the_log_lines_begin_as_nanogpts_do(finished):
    lines = finished[1].splitlines()
    assert any(line.startswith("iter 3: loss ") and ", time " in line and "ms, " in line for line in lines)
    assert any(line.startswith("step 4: train loss ") and ", val loss " in line for line in lines)


def test_a_run_is_the_same_twice_and_evaluation_does_not_disturb_it(finished, data, tmp_path):
    done = here(train.main, *flags(data, tmp_path, "--eval_interval=5", "--eval_iters=0"))
    assert done.returncode == 0
    assert same(weights(finished[0]), weights(tmp_path)) and metrics(finished[0]) == metrics(tmp_path)


def test_the_best_checkpoint_is_the_one_with_the_lowest_validation_loss(data, tmp_path):
    """A rate far too high after a good start: the last checkpoint isn't the best."""
    assert here(train.main, *flags(data, tmp_path, "--max_iters=8")).returncode == 0
    bad = flags(data, tmp_path, "--init_from=resume", "--max_iters=16", "--learning_rate=3", "--decay_lr=False")
    assert here(train.main, *bad).returncode == 0
    val = metrics(tmp_path, "step", "val_loss")
    best = torch.load(tmp_path / "best.pt", weights_only=True)
    assert best["iter_num"] == min(val, key=val.get) == 8
    assert float(best["best_val_loss"]) == min(val.values()) < val[16]
    assert torch.load(tmp_path / "ckpt.pt", weights_only=True)["iter_num"] == 16


def test_without_always_save_checkpoint_a_worse_one_is_saved_only_at_the_end(data, tmp_path):
    rate = ("--learning_rate=3", "--decay_lr=False", "--always_save_checkpoint=False")
    done = here(train.main, *flags(data, tmp_path, "--max_iters=9", *rate))
    val = metrics(tmp_path, "step", "val_loss")
    assert val[0] < min(val[4], val[8], val[9]), "the test needs a run that only gets worse"
    assert done.stdout.count("saved ") == 1 and not (tmp_path / "best.pt").exists()
    assert torch.load(tmp_path / "ckpt.pt", weights_only=True)["iter_num"] == 9


def test_a_new_run_in_the_same_folder_sets_the_former_one_aside(data, tmp_path):
    assert here(train.main, *flags(data, tmp_path, "--max_iters=4")).returncode == 0
    former = weights(tmp_path)
    assert here(train.main, *flags(data, tmp_path, "--max_iters=4", "--seed=2")).returncode == 0
    assert same(weights(tmp_path / "previous-1"), former) and not same(weights(tmp_path), former)
    assert len(metrics(tmp_path / "previous-1")) == len(metrics(tmp_path)) == 4


def test_eval_only_prints_one_evaluation_and_writes_nothing(data, tmp_path):
    done = here(train.main, *flags(data, tmp_path / "out", "--eval_only=True"))
    assert done.returncode == 0 and done.stdout.count("step 0: train loss ") == 1
    assert not (tmp_path / "out").exists()


def test_fine_tuning_starts_from_the_weights_with_fresh_counters_and_optimizer(finished, data, tmp_path):
    still = ("--learning_rate=0", "--min_lr=0", "--max_iters=1")
    same_as_in_tiny = ("--device=cpu", "--dtype=float32", "--batch_size=4", "--eval_iters=2")
    start = (f"--init_from={finished[0]}", f"--dataset={data}", f"--out_dir={tmp_path}")
    done = here(train.main, *start, *still, *same_as_in_tiny)
    assert done.returncode == 0, done.stderr
    assert same(weights(tmp_path), weights(finished[0], "best.pt"))  # at rate 0; of the shape that it was trained in
    assert metrics(tmp_path, "step", "val_loss")[0] == metrics(finished[0], "step", "val_loss")[12]
    assert torch.load(tmp_path / "ckpt.pt", weights_only=True)["iter_num"] == 1


def test_bfloat16_trains_close_to_float32_and_keeps_its_weights_in_float32(finished, data, tmp_path):
    done = here(train.main, *flags(data, tmp_path, "--dtype=bfloat16"))
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path)[11] == pytest.approx(metrics(finished[0])[11], rel=0.01)
    assert metrics(tmp_path)[11] != metrics(finished[0])[11]
    assert {w.dtype for w in weights(tmp_path).values()} == {torch.float32}


def test_float16_trains_close_to_float32_under_a_scaler_whose_state_is_saved(finished, data, tmp_path):
    done = here(train.main, *flags(data, tmp_path, "--dtype=float16"))
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path)[11] == pytest.approx(metrics(finished[0])[11], rel=0.01)
    assert torch.load(tmp_path / "ckpt.pt", weights_only=True)["scaler"]["scale"] > 1


def test_a_compiled_run_has_the_losses_of_an_eager_one(data, tmp_path):
    shape = ("--n_layer=1", "--dropout=0")
    done = here(train.main, *flags(data, tmp_path, *shape, "--compile=True"))
    eager = here(train.main, *flags(data, tmp_path / "eager", *shape))
    assert done.returncode == eager.returncode == 0, done.stderr
    assert ", compiled;" in done.stdout
    assert list(metrics(tmp_path).values()) == pytest.approx(list(metrics(tmp_path / "eager").values()), abs=1e-4)
    assert weights(tmp_path).keys() == weights(tmp_path / "eager").keys()  # no _orig_mod.


def test_without_a_compiler_it_trains_eagerly_after_one_line(data, tmp_path):
    env = {**os.environ, "CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = run("train.py", *flags(data, tmp_path / "out", "--compile=True", "--max_iters=2"), env=env)
    assert done.returncode == 0, done.stderr
    assert len([line for line in done.stdout.splitlines() if "training eagerly" in line]) == 1
    assert "Traceback" not in done.stderr


def test_wandb_offline_gets_the_run(data, tmp_path):
    done = run("train.py", *flags(data, tmp_path / "out", "--wandb_log=True", "--max_iters=2"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    run_id = torch.load(tmp_path / "out" / "ckpt.pt", weights_only=True)["wandb_run_id"]
    assert run_id
    done = run("train.py", "--init_from=resume", f"--out_dir={tmp_path / 'out'}", "--max_iters=3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert torch.load(tmp_path / "out" / "ckpt.pt", weights_only=True)["wandb_run_id"] == run_id


@pytest.mark.parametrize(
    "more, message",
    [(["--n_head=3"], "n_embd=16 must be a multiple of n_head=3"), (["--batch_size=0"], "batch_size must be at least"),
     (["--learning_rate=nan"], "learning_rate"), (["--dataset=nowhere"], "nowhere"),
     (["--device=warp"], "--device=warp"), (["--init_from=resume"], "no checkpoint"),
     (["--init_from=nowhere"], "nowhere: no checkpoint"),
     (["--vocab_size=5"], "token ids, the model only 5"), (["--block_size=100000"], "block_size")],
)  # fmt: skip
def test_what_cannot_work_ends_with_code_2_before_anything_is_written(data, tmp_path, more, message):
    done = here(train.main, *flags(data, tmp_path / "out", *more))
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) <= 2
    assert not (tmp_path / "out").exists()


def test_paths_with_spaces_umlauts_and_equals_signs_from_another_folder_in_the_c_locale(data, tmp_path):
    folder = tmp_path / "a = ü 中"
    folder.mkdir()
    shutil.copytree(data, folder / "däta set")
    (folder / "my cönfig=1.py").write_text("# träin\nout_dir = 'öut = 1'\nmax_iters = 2\n", encoding="utf-8")
    env = {**os.environ, "LC_ALL": "C"}
    argv = [arg for arg in flags("däta set", "") if not arg.startswith(("--out_dir", "--max_iters"))]
    done = run("train.py", "my cönfig=1.py", *argv, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    assert (folder / "öut = 1" / "ckpt.pt").is_file()
    done = run("train.py", "--init_from=resume", "--out_dir=öut = 1", "--max_iters=3", cwd=folder, env=env)
    assert done.returncode == 0 and "iter 2: loss" in done.stdout, done.stderr


def test_accumulation_that_the_ranks_cannot_share_names_both_and_the_nearest_that_works(data):
    *_, rt = pieces(data)
    rt.world_size = 4
    with pytest.raises(UserError, match=r"=6 .* the 4 of them; .* is 8"):
        rt.check_accumulation(6)
