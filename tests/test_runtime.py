"""What a machine comes to: names, dtypes, devices."""

import copy

import pytest
import torch

import runtime
from model import GPT, GPTConfig
from runtime import Runtime, RuntimeConfig


@pytest.mark.parametrize(
    "name, tera",
    [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H200", 989), ("NVIDIA A100-SXM4-40GB", 312),
     ("NVIDIA A10G", 70), ("NVIDIA A10", 125), ("NVIDIA L4", 121), ("NVIDIA L40S", 362), ("Tesla T4", 65),
     ("Tesla V100-SXM2-16GB", 125), ("NVIDIA GeForce RTX 4090", 165), ("NVIDIA GH200 480GB", 989)],
)  # fmt: skip
def test_a_known_card_has_the_peak_of_its_data_sheet(name, tera):
    assert runtime.peak_flops_of(name) == tera * 1e12


@pytest.mark.parametrize("name", ["NVIDIA RTX A1000", "NVIDIA L40", "NVIDIA T400", "NVIDIA GeForce RTX 4060", ""])
def test_a_card_that_only_resembles_a_known_one_has_none(name):
    assert runtime.peak_flops_of(name) is None


@pytest.mark.parametrize("native, dtype", [(True, torch.bfloat16), (False, torch.float32)])
def test_a_cpu_computes_in_bfloat16_where_that_is_native_and_else_in_float32(monkeypatch, native, dtype):
    capabilities = {"avx512_bf16": native, "amx_bf16": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert Runtime(RuntimeConfig(device="cpu")).dtype == dtype


def test_a_torch_that_does_not_tell_capabilities_gets_float32(monkeypatch):
    """As torch 2.11 is."""
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert Runtime(RuntimeConfig(device="cpu")).dtype == torch.float32


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", "warp", "meta:x"])
def test_a_device_that_is_not_there_is_refused_by_its_name(device):
    with pytest.raises(runtime.UserError, match=f"--device={device} can't be used here"):
        Runtime(RuntimeConfig(device=device))


def test_micro_batches_are_shared_out_without_gap_or_overlap():
    rt = Runtime(RuntimeConfig(device="cpu"))
    rt.world_size, shares = 4, []
    for rt.rank in range(4):
        shares += rt.my_share(24, 8)
    assert sorted(shares) == list(range(24, 32))


# ---- ready to generate


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
    return rt.ready(copy.deepcopy(model), rows, quantize), rt


def logits(model, rt, idx):
    with torch.no_grad(), rt.autocast():
        return model(idx).float()


IDX = torch.arange(60).view(3, 20)


@pytest.mark.parametrize("rows", [1, 3])
def test_weights_laid_out_for_generation_give_the_same_logits_and_tokens(small, rows):
    ready, rt = readied(small, rows, dtype="float32")
    if rows == 1:
        assert ready.lm_head.weight.stride() != small.lm_head.weight.stride()
    else:
        assert isinstance(ready.lm_head, runtime.PackedLinear)
    torch.testing.assert_close(logits(ready, rt, IDX[:rows]), logits(small, rt, IDX[:rows]), rtol=0, atol=1e-6)
    tokens = [model.generate(IDX[:rows], 20, temperature=0).tolist() for model in (ready, small)]
    assert tokens[0] == tokens[1]
    assert torch.equal(ready.transformer.wte.weight, small.transformer.wte.weight)


def test_in_a_narrow_dtype_the_matrices_are_kept_in_it_and_the_logits_are_those_of_autocast(small):
    ready, rt = readied(small, 2, dtype="bfloat16")
    assert {m.weight.dtype for m in ready.modules() if isinstance(m, torch.nn.Linear)} == {torch.bfloat16}
    torch.testing.assert_close(logits(ready, rt, IDX), logits(small, rt, IDX), rtol=0, atol=0.02)


@pytest.mark.parametrize("rows", [1, 3])
def test_int8_weights_move_the_logits_by_a_few_percent_and_take_a_quarter_of_the_memory(small, rows):
    ready, rt = readied(small, rows, "int8", dtype="float32")
    exact = logits(small, rt, IDX[:rows])
    error = (logits(ready, rt, IDX[:rows]) - exact).norm() / exact.norm()
    assert 0 < error < 0.03
    assert {m.weight.dtype for m in ready.modules() if isinstance(m, runtime.Int8Linear)} == {torch.int8}
    assert not any(isinstance(m, torch.nn.Linear) for m in ready.modules())


def test_int8_is_refused_where_there_is_no_kernel_for_it(small, monkeypatch):
    rt = Runtime(RuntimeConfig(device="cpu"))
    rt.device = torch.device("cuda")
    with pytest.raises(runtime.UserError, match="--quantize=int8 works with --device=cpu"):
        rt.ready(small, 1, "int8")
    monkeypatch.delattr(torch, "_weight_int8pack_mm")
    with pytest.raises(runtime.UserError, match="--quantize=int8"):
        readied(small, 1, "int8")


def test_peak_memory_is_that_since_the_reset():
    rt = Runtime(RuntimeConfig(device="cpu"))
    rt.reset_peak_memory()
    before = rt.peak_memory()
    torch.ones(50_000_000)  # 200 MB, freed at once
    assert rt.peak_memory() - before == pytest.approx(200e6, rel=0.2)
    rt.reset_peak_memory()
    assert rt.peak_memory() < before + 100e6
