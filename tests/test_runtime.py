"""What a machine comes to: names, dtypes, devices."""

import pytest
import torch

import runtime
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
        shares += rt.my_share(range(24, 32))
    assert sorted(shares) == list(range(24, 32))
