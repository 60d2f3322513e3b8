"""AdamW's groups and Muon's mathematics."""

from types import SimpleNamespace

import pytest
import torch
from tiny import flags, here, make_dataset, metrics, run, same, weights

import train
from model import GPT, GPTConfig
from optimizer import Average, load_state, make_optimizer, orthogonalise

OPTIONS = dict(learning_rate=0.02, beta1=0.9, beta2=0.99, weight_decay=0.1)
CONFIG = GPTConfig(block_size=8, vocab_size=12, n_layer=2, n_head=2, n_embd=16)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data") / "tiny")


def trained(name, updates=3, spoil=None, **options):
    """A tiny GPT after some updates with the optimizer `name`; `spoil` is the update to be skipped."""
    torch.manual_seed(0)
    model = GPT(CONFIG)
    optimizer = make_optimizer(model, SimpleNamespace(optimizer=name, **{**OPTIONS, **options}))
    for update in range(updates):
        torch.manual_seed(update)
        idx = torch.randint(12, (4, 8))
        model(idx, idx.roll(1)).backward()
        if update == spoil:
            for p in model.parameters():
                p.grad.fill_(torch.nan)
        optimizer.found_inf = torch.tensor(float(update == spoil))
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("shape", [(16, 16), (64, 16), (16, 64), (128, 128), (512, 128)])
def test_an_update_is_the_orthogonal_factor_of_its_matrix(shape):
    torch.manual_seed(0)
    batch = torch.randn(3, *shape)
    u, s, vt = torch.linalg.svd(batch, full_matrices=False)
    inside = u.mT @ orthogonalise(batch) @ vt.mT  # U^T O V: diagonal, about 1
    diagonal = inside.diagonal(dim1=1, dim2=2)
    strong = s > 0.02 * s.amax(dim=1, keepdim=True)  # five rounds don't lift the weakest all the way
    assert ((diagonal > 0.6) & (diagonal < 1.3))[strong].all()
    assert (inside - torch.diag_embed(diagonal)).abs().max() < 1e-3


def test_an_update_does_not_depend_on_the_scale_of_the_gradient():
    matrix = torch.randn(1, 8, 8)
    assert torch.allclose(orthogonalise(matrix), orthogonalise(matrix * 1000), atol=1e-4)


def test_muon_moves_the_blocks_matrices_and_adamw_the_rest():
    model, muon = trained("muon")
    for name, p in model.named_parameters():
        is_block_matrix = ".h." in name and p.dim() == 2
        assert ("momentum" in muon.state[p]) == is_block_matrix and ("exp_avg" in muon.state[p]) != is_block_matrix
    first = trained("muon", updates=1)[0], trained("adamw", updates=1)[0]
    for (name, p), q in zip(first[0].named_parameters(), first[1].parameters(), strict=True):
        assert torch.equal(p, q) != (".h." in name and p.dim() == 2), name
    assert sum(p.numel() for group in muon.param_groups for p in group["params"]) == model.num_params()


def test_q_k_and_v_are_orthogonalised_as_three_matrices():
    before = GPT(CONFIG)
    torch.manual_seed(0)
    before = GPT(CONFIG).transformer.h[0].attn.c_attn.weight.detach().clone()
    model, _ = trained("muon", updates=1, weight_decay=0.0)
    moved = (before - model.transformer.h[0].attn.c_attn.weight.detach()) / (0.02 * 0.2 * 16**0.5)
    for part in moved.split(16):
        values = torch.linalg.svdvals(part)
        assert values.max() < 1.3 and values.median() > 0.6
    # All three together would have the singular values of three stacked orthogonal matrices, up to √3.
    assert torch.linalg.svdvals(moved).max() > 1.3


def test_a_step_is_that_of_torchs_own_muon(monkeypatch):
    """Which works in bfloat16 only; both in float64 for the test, they agree to rounding."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    torch.manual_seed(0)
    model = GPT(CONFIG).double()
    theirs = torch.nn.Parameter(model.transformer.h[0].mlp.c_fc.weight.detach().clone())
    reference = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    ours = make_optimizer(model, SimpleNamespace(optimizer="muon", **OPTIONS), torch.float64)
    for update in range(3):
        torch.manual_seed(update)
        idx = torch.randint(12, (4, 8))
        model(idx, idx.roll(1)).backward()
        theirs.grad = model.transformer.h[0].mlp.c_fc.weight.grad.clone()
        ours.step()
        reference.step()
        ours.zero_grad()
        assert torch.allclose(model.transformer.h[0].mlp.c_fc.weight, theirs, atol=1e-10)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_skipped_update_leaves_weights_and_state_as_they_were(name):
    (model, optimizer), (other, reference) = trained(name, 3, spoil=2), trained(name, 2)
    assert same(model.state_dict(), other.state_dict())
    mine, its = optimizer.state_dict()["state"], reference.state_dict()["state"]
    assert all(same(mine[i], its[i]) for i in its)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_options_of_the_new_run_win_over_those_in_a_saved_state(name):
    _, optimizer = trained(name)
    model, other = trained(name, 0, weight_decay=0.3)
    load_state(other, optimizer.state_dict())
    assert {group["weight_decay"] for group in other.param_groups} == {0.0, 0.3}
    assert len(other.state) == len(list(model.parameters()))


# ---- in a run


def test_a_run_with_muon_resumes_to_the_last_bit(data, tmp_path):
    recipe = ("--optimizer=muon", "--max_iters=14", "--lr_schedule=wsd")
    assert here(train.main, *flags(data, tmp_path / "whole", *recipe)).returncode == 0
    assert (
        here(train.main, *flags(data, tmp_path / "out", *recipe, "--max_iters=5", "--lr_decay_iters=14")).returncode
        == 0
    )
    done = here(train.main, "--init_from=resume", f"--out_dir={tmp_path / 'out'}", "--max_iters=14")
    assert done.returncode == 0, done.stderr
    assert same(weights(tmp_path / "out"), weights(tmp_path / "whole"))
    assert metrics(tmp_path / "out") == metrics(tmp_path / "whole")


def test_two_ranks_with_muon_give_the_losses_of_one(data, tmp_path):
    recipe = ("--optimizer=muon", "--max_iters=14", "--gradient_accumulation_steps=4")
    assert here(train.main, *flags(data, tmp_path / "one", *recipe)).returncode == 0
    done = run("train.py", *flags(data, tmp_path / "two", *recipe), ranks=2)
    assert done.returncode == 0, done.stderr
    one, two = (list(metrics(tmp_path / name).values()) for name in ("one", "two"))
    assert two == pytest.approx(one, abs=1e-5)


def test_muon_learns_faster_than_adamw_does_at_any_rate(tmp_path):
    data, losses = make_dataset(tmp_path / "data", n_words=3000), {}
    recipe = ("--n_embd=32", "--gradient_accumulation_steps=1", "--batch_size=8", "--dropout=0", "--max_iters=120",
              "--eval_interval=120", "--eval_iters=20")  # fmt: skip
    for name, rate in (("muon", "16e-3"), ("adamw", "16e-3"), ("adamw", "8e-3"), ("adamw", "4e-3")):
        out = tmp_path / f"{name}{rate}"
        done = here(train.main, *flags(data, out, *recipe, f"--optimizer={name}", f"--learning_rate={rate}"))
        assert done.returncode == 0, done.stderr
        losses[name, rate] = metrics(out, "step", "val_loss")[120]
    muon = losses.pop(("muon", "16e-3"))
    assert muon < min(losses.values()) - 0.1


# ---- the average of the weights


def test_the_average_is_the_exponential_one():
    model = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
        average = Average(model, 0.75)
        for value in (5.0, 9.0):
            model.weight.fill_(value)
            average.update()
    assert average.weights[0].tolist() == [[3.75, 3.75]]  # 1, 0.75 + 1.25 = 2, 1.5 + 2.25
    with average.applied():
        assert model.weight[0, 0] == 3.75
        assert average.weights[0][0, 0] == 9.0
    assert model.weight[0, 0] == 9.0


def test_an_average_disturbs_no_run_is_evaluated_and_becomes_the_best_where_it_is_better(tmp_path):
    """At this rate, which doesn't fall, the weights jump about and their average doesn't."""
    data = make_dataset(tmp_path / "data", n_words=3000)
    recipe = ("--decay_lr=False", "--learning_rate=2e-2", "--dropout=0", "--gradient_accumulation_steps=1",
              "--max_iters=200", "--eval_interval=100", "--eval_iters=0")  # fmt: skip
    assert here(train.main, *flags(data, tmp_path / "without", *recipe)).returncode == 0
    done = here(train.main, *flags(data, tmp_path / "with", *recipe, "--ema_decay=0.9"))
    assert done.returncode == 0 and "of the averaged weights" in done.stdout
    assert same(weights(tmp_path / "with"), weights(tmp_path / "without"))
    losses = metrics(tmp_path / "with", "step", "average_loss")
    assert losses[200] < min(metrics(tmp_path / "with", "step", "val_loss").values())
    best = torch.load(tmp_path / "with" / "best.pt", weights_only=True)
    average = torch.load(tmp_path / "with" / "ckpt.pt", weights_only=True)["average"]
    assert best["best_val_loss"] == min(losses.values()) and best["iter_num"] == 200
    assert all(torch.equal(best["model"][name], average[name]) for name in average)
    only = ("--eval_only=True", "--eval_iters=0", "--device=cpu", "--dtype=float32", f"--dataset={data}")
    done = here(train.main, f"--init_from={tmp_path / 'with'}", *only)
    assert f"val loss {losses[200]:.4f}" in done.stdout, done.stderr


def test_an_average_resumes_to_the_last_bit_and_one_that_cannot_be_is_refused(data, tmp_path):
    recipe = ("--ema_decay=0.9", "--max_iters=10", "--lr_decay_iters=10")
    assert here(train.main, *flags(data, tmp_path / "whole", *recipe)).returncode == 0
    assert here(train.main, *flags(data, tmp_path / "out", *recipe, "--max_iters=5")).returncode == 0
    resume = ("--init_from=resume", f"--out_dir={tmp_path / 'out'}")
    assert here(train.main, *resume, "--max_iters=10").returncode == 0
    states = [torch.load(tmp_path / name / "ckpt.pt", weights_only=True) for name in ("whole", "out")]
    assert same(states[0]["average"], states[1]["average"]) and same(states[0]["model"], states[1]["model"])
    states[1]["average"]["transformer.wpe.weight"] = torch.zeros(1)
    torch.save(states[1], tmp_path / "out" / "ckpt.pt")
    done = here(train.main, *resume, "--max_iters=12")
    assert done.returncode == 2 and "average of transformer.wpe.weight" in done.stderr
