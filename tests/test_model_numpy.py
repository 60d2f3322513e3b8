"""The oracle itself: shapes, counts and the tied gradient, held to finite differences and to autograd."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from model_numpy import count_gpt2_params, gpt_logits, init_gpt, tied_lm_loss_and_grad

TINY = dict(V=56, T=64, d=64, L=2)


def tied_problem(seed, V=11, d=6, N=20):
    """A random instance of the miniature model; 20 ids out of 7 repeat, and 4 ids of the table never occur."""
    rng = np.random.default_rng(seed)
    E, A = rng.normal(size=(V, d)), rng.normal(size=(d, d))
    return E, A, rng.integers(0, 7, N), rng.integers(0, V, N)


def test_the_count_formula_counts_what_init_gpt_makes():
    P = init_gpt(**TINY, seed=0)
    assert sum(array.size for array in P.values()) == count_gpt2_params(**TINY) == 107_776


def test_a_large_gpt_3_has_175_billion_parameters():
    assert count_gpt2_params(V=50257, T=2048, d=12288, L=96) == 174_604_259_328


def test_init_draws_every_matrix_with_its_deviation():
    L = 2
    P = init_gpt(V=300, T=200, d=96, L=L, seed=0)
    for name, array in P.items():
        if array.ndim == 2:
            std = 0.02 / np.sqrt(2 * L) if "c_proj" in name else 0.02
            assert array.std() == pytest.approx(std, rel=0.02), name
        else:
            assert (array == (1.0 if name.endswith("weight") else 0.0)).all(), name


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    a, b, c = (init_gpt(**TINY, seed=seed)["wte"] for seed in (1, 1, 2))
    assert (a == b).all() and (a != c).all()


def test_logits_never_look_ahead():
    P = init_gpt(**TINY, seed=0)
    idx = np.random.default_rng(0).integers(0, 56, (2, 12))
    changed = idx.copy()
    changed[:, 7] = (changed[:, 7] + 1) % 56
    before, after = gpt_logits(P, idx, n_head=4), gpt_logits(P, changed, n_head=4)
    assert before.shape == (2, 12, 56) and before.dtype == np.float64
    assert (before[:, :7] == after[:, :7]).all()
    assert (before[:, 7:] != after[:, 7:]).any(-1).all()


@pytest.mark.parametrize("seed", range(3))
def test_the_tied_gradient_is_the_slope_of_the_loss(seed):
    E, A, idx, targets = tied_problem(seed)
    _, dE = tied_lm_loss_and_grad(E, A, idx, targets)
    step = 1e-5  # a central difference errs by O(step^2) + O(eps / step): about 1e-10 of each here
    for v, j in np.ndindex(*E.shape):
        up, down = E.copy(), E.copy()
        up[v, j] += step
        down[v, j] -= step
        slope = tied_lm_loss_and_grad(up, A, idx, targets)[0] - tied_lm_loss_and_grad(down, A, idx, targets)[0]
        assert dE[v, j] == pytest.approx(slope / (2 * step), abs=1e-8)


@pytest.mark.parametrize("seed", range(3))
def test_the_tied_loss_and_gradient_are_those_of_autograd(seed):
    E, A, idx, targets = tied_problem(seed)
    table = torch.tensor(E, requires_grad=True)
    hidden = torch.tanh(table[torch.tensor(idx)] @ torch.tensor(A))
    expected = F.cross_entropy(hidden @ table.T, torch.tensor(targets))
    expected.backward()
    loss, dE = tied_lm_loss_and_grad(E, A, idx, targets)
    assert loss == pytest.approx(expected.item(), abs=1e-12)
    np.testing.assert_allclose(dE, table.grad.numpy(), rtol=0, atol=1e-8)


def test_the_tied_loss_survives_logits_that_overflow_exp():
    E, A, idx, targets = tied_problem(seed=0)
    loss, dE = tied_lm_loss_and_grad(1000 * E, A, idx, targets)
    assert np.isfinite(loss) and np.isfinite(dE).all()
