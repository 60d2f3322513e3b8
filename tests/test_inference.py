"""Weights laid out for generation: the same numbers, or in 8 bits nearly."""

import copy

import pytest
import torch

from configurator import UserError
from inference import Int8Linear, PackedLinear, ready
from model import GPT, GPTConfig
from runtime import Runtime, RuntimeConfig


@pytest.fixture(scope="module")
def small():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=200, block_size=32, n_layer=2, n_head=2, n_embd=32)).eval()
    for p in model.parameters():
        if p.dim() == 1:
            torch.nn.init.normal_(p, mean=p.mean().item(), std=0.3)  # no bias is 0
    return model


def readied(model, rows, quantize="none", **options):
    """(a copy of the model, ready; the runtime)."""
    rt = Runtime(RuntimeConfig(device="cpu", **options))
    return ready(copy.deepcopy(model), rt, rows, quantize), rt


def logits(model, rt, idx):
    with torch.no_grad(), rt.autocast():
        return model(idx).float()


IDX = torch.arange(60).view(3, 20)


@pytest.mark.parametrize("rows", [1, 3])
def test_weights_laid_out_for_generation_give_the_same_logits_and_tokens(small, rows):
    laid_out, rt = readied(small, rows, dtype="float32")
    if rows == 1:
        assert laid_out.lm_head.weight.stride() != small.lm_head.weight.stride()
    else:
        assert isinstance(laid_out.lm_head, PackedLinear)
    torch.testing.assert_close(logits(laid_out, rt, IDX[:rows]), logits(small, rt, IDX[:rows]), rtol=0, atol=1e-6)
    tokens = [model.generate(IDX[:rows], 20, temperature=0).tolist() for model in (laid_out, small)]
    assert tokens[0] == tokens[1]
    assert torch.equal(laid_out.transformer.wte.weight, small.transformer.wte.weight)


def test_in_a_narrow_dtype_the_matrices_are_kept_in_it_and_the_logits_are_those_of_autocast(small):
    laid_out, rt = readied(small, 2, dtype="bfloat16")
    layers = [m for m in laid_out.modules() if isinstance(m, (torch.nn.Linear, PackedLinear))]
    assert {m.weight.dtype for m in layers} == {torch.bfloat16} and len(layers) == 2 * 4 + 1
    torch.testing.assert_close(logits(laid_out, rt, IDX), logits(small, rt, IDX), rtol=0, atol=0.02)


@pytest.mark.parametrize("rows", [1, 3])
def test_int8_weights_move_the_logits_by_a_few_percent_and_take_a_quarter_of_the_memory(small, rows):
    laid_out, rt = readied(small, rows, "int8", dtype="float32")
    exact = logits(small, rt, IDX[:rows])
    error = (logits(laid_out, rt, IDX[:rows]) - exact).norm() / exact.norm()
    assert 0 < error < 0.03
    assert {m.weight.dtype for m in laid_out.modules() if isinstance(m, Int8Linear)} == {torch.int8}
    assert not any(isinstance(m, torch.nn.Linear) for m in laid_out.modules())


def test_int8_is_refused_where_there_is_no_kernel_for_it(small, monkeypatch):
    rt = Runtime(RuntimeConfig(device="cpu"))
    rt.device = torch.device("cuda")
    with pytest.raises(UserError, match="--quantize=int8 works with --device=cpu"):
        ready(small, rt, 1, "int8")
    monkeypatch.delattr(torch, "_weight_int8pack_mm")
    with pytest.raises(UserError, match="--quantize=int8"):
        readied(small, 1, "int8")
