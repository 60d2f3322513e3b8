"""cpu.py changes what a step costs, and nothing that it computes."""

import ctypes
import math
import subprocess
import sys

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from tiny import ROOT

import cpu
from model import GPT, GPTConfig


def random_qkv(B, nh, T, hs, dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.randn(B, nh, T, hs, dtype=dtype, requires_grad=True) for _ in range(3)]


def result_and_gradients(attention, qkv):
    y = attention(*qkv)
    dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).sin().view(y.shape)
    return [y, *torch.autograd.grad(y, qkv, dy)]


# One piece; a last piece that is short; pieces of several heads, the last with fewer; one row.
@pytest.mark.parametrize("shape", [(2, 3, 16, 8), (1, 2, 300, 4), (5, 7, 256, 4), (1, 1, 1, 4)])
def test_attention_in_pieces_is_attention(shape):
    qkv = random_qkv(*shape)
    found = result_and_gradients(lambda q, k, v: cpu.CausalAttention.apply(q, k, v, 0.0), qkv)
    expected = result_and_gradients(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), qkv)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def plain_with_dropout(q, k, v, p, masks):
    """Attention written out, its weights dropped where the masks, which are of the pieces, say so."""
    B, nh, T, hs = q.shape
    mask = torch.ones(B * nh, T, T, dtype=q.dtype)
    for (heads, rows, past), some in zip(cpu.pieces(B * nh, T), masks, strict=True):
        mask[heads, rows, past] = some.to(q.dtype)
    weights = (q @ k.mT / math.sqrt(hs)).masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf).softmax(-1)
    return weights * mask.view(B, nh, T, T) / (1 - p) @ v


def test_attention_with_dropout_drops_weights_and_scales_the_rest(monkeypatch):
    qkv, masks, make = random_qkv(2, 3, 200, 4), [], cpu.keep_mask
    monkeypatch.setattr(cpu, "keep_mask", lambda *args: masks.append(make(*args)) or masks[-1])
    found = result_and_gradients(lambda q, k, v: cpu.attend(q, k, v, dropout_p=0.3), qkv)
    assert sum(mask.float().mean() for mask in masks) / len(masks) == pytest.approx(0.7, abs=0.01)
    expected = result_and_gradients(lambda q, k, v: plain_with_dropout(q, k, v, 0.3, masks), qkv)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("T", [64, 200])
def test_in_bfloat16_attention_is_not_twice_as_far_from_the_truth_as_torchs(T):
    """Which keeps scores in float32; here they are rounded like every other product."""
    qkv = [t.detach().bfloat16().requires_grad_() for t in random_qkv(2, 3, T, 16)]
    exact = result_and_gradients(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [t.detach().double().requires_grad_() for t in qkv],
    )
    ours, torchs = (
        result_and_gradients(attention, qkv)
        for attention in (cpu.attend, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    )
    for a, b, true in zip(ours, torchs, exact, strict=True):
        assert (a - true).norm() <= 2 * (b - true).norm()


@pytest.mark.parametrize(
    "dtype, T, p, ours",
    [(torch.float32, 64, 0, False), (torch.bfloat16, 64, 0, True), (torch.bfloat16, 512, 0, False),
     (torch.float32, 64, 0.1, True), (torch.bfloat16, 512, 0.1, True)],
)  # fmt: skip
def test_torchs_own_attention_computes_where_it_is_the_faster_one(monkeypatch, dtype, T, p, ours):
    apply, calls = cpu.CausalAttention.apply, []
    monkeypatch.setattr(cpu.CausalAttention, "apply", lambda *args: calls.append(args) or apply(*args))
    q = torch.zeros(1, 2, T, 8, dtype=dtype)
    assert cpu.attend(q, q, q, dropout_p=p).shape == q.shape and bool(calls) == ours
    with torch.no_grad():
        assert cpu.attend(q[:, :, -1:], q, q, is_causal=False).shape == (1, 2, 1, 8)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.999999999, 1e-9])
def test_a_mask_keeps_each_number_with_the_probability_asked_for(p):
    torch.manual_seed(0)
    mask = cpu.keep_mask((1001, 1003), p)
    n = mask.numel()
    assert mask.dtype == torch.int8 and set(mask.unique().tolist()) <= {0, 1}
    assert mask.float().sum().item() == pytest.approx(n * (1 - p), abs=5 * math.sqrt(n * p * (1 - p)) + n / 2**16)
    shifted = (mask[1:] * mask[:-1]).float().mean() - (1 - p) ** 2  # neighbours know nothing of each other
    assert abs(shifted) < 0.005
    torch.manual_seed(0)
    assert torch.equal(cpu.keep_mask((1001, 1003), p), mask)


def test_dropout_keeps_the_mean_and_its_gradient_has_the_same_mask():
    dropout, x = cpu.Dropout(0.2), torch.ones(400, 500, requires_grad=True)
    y = dropout(x)
    assert set(y.unique().tolist()) == {0.0, 1.25} and y.mean().item() == pytest.approx(1, abs=0.01)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert dropout.eval()(x) is x


def test_a_model_trains_the_same_and_keeps_its_state(monkeypatch):
    config = GPTConfig(vocab_size=2000, block_size=150, n_layer=2, n_head=2, n_embd=16, dropout=0.0)
    torch.manual_seed(0)
    plain = GPT(config)
    fast = GPT(config)
    fast.load_state_dict(plain.state_dict())
    cpu.speed_up(fast)
    assert fast.state_dict().keys() == plain.state_dict().keys()
    assert {type(m) for m in fast.modules() if isinstance(m, torch.nn.Dropout)} == {cpu.Dropout}
    idx = torch.randint(2000, (3, 151))
    for model in (plain, fast, fast):  # the second time in memory that was used
        model.zero_grad()
        model(idx[:, :-1], idx[:, 1:]).backward()
    for a, b in zip(fast.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-7)


@torch._inductor.config.patch(fallback_random=True)
def test_compiled_it_drops_the_same_in_one_graph():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=600, block_size=16, n_layer=1, n_head=2, n_embd=16, dropout=0.2))
    cpu.speed_up(model)
    idx, losses = torch.randint(600, (3, 17)), []
    for forward in (model, torch.compile(model, fullgraph=True)):
        torch.manual_seed(1)
        losses.append(forward(idx[:, :-1], idx[:, 1:]).item())
    torch.manual_seed(2)
    assert (
        losses[0]
        == pytest.approx(losses[1], abs=1e-5)
        != pytest.approx(model(idx[:, :-1], idx[:, 1:]).item(), abs=1e-5)
    )


FAULTS = """
import resource, sys
import torch
import cpu
if sys.argv[1] == "keep":
    cpu.keep_memory()
for _ in range(20):
    torch.ones(2**23)  # 32 MB: 8,192 pages
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(2**23)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="keep_memory is for glibc")
def test_memory_that_is_kept_is_not_faulted_in_again():
    faults = {
        how: int(subprocess.check_output([sys.executable, "-c", FAULTS, how], cwd=ROOT)) for how in ("keep", "leave")
    }
    assert faults["keep"] < 2000 < 8192 < faults["leave"]
