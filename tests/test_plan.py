"""What --plan promises: the memory that a run then takes, what fits, and numbers that can be worked out by hand."""

import dataclasses
import json
import re
import shlex
import subprocess
import sys

import pytest
import torch
from tiny import ROOT, flags, here, make_dataset

import configurator
import plan
import train
from train import TrainConfig


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data") / "tiny")


# The estimate first, then the run, both in one process of its own; VmHWM is the most that the run ever took.
MEASURE = """
import json, sys
import configurator, plan, runtime, train
argv = sys.argv[1:]
cfg = configurator.parse(train.TrainConfig, argv)
parts = plan.memory(cfg)
rt = runtime.Runtime(cfg)
before = rt.used_memory()
train.main(argv)
print("MEASURED", json.dumps([before, parts, rt.used_memory(most=True)]))
"""


@pytest.mark.parametrize(
    "most, shape",
    [
        ("optimizer moments", "--n_layer=3 --n_embd=1024 --vocab_size=100 --block_size=8 --batch_size=1"),
        ("activations", "--n_layer=8 --n_embd=128 --vocab_size=100 --block_size=256 --batch_size=16 "
                        "--gradient_accumulation_steps=1"),
        ("loss and backward", "--n_layer=1 --n_embd=64 --vocab_size=50304 --block_size=256 --batch_size=48"),
    ],
)  # fmt: skip
def test_the_memory_estimate_is_within_15_percent_of_what_the_run_takes(data, tmp_path, most, shape):
    argv = flags(data, tmp_path, "--dropout=0", "--eval_iters=1", "--max_iters=2", *shape.split())
    done = subprocess.run([sys.executable, "-c", MEASURE, *argv], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    runtime, parts, peak = json.loads(done.stdout.split("MEASURED")[1])
    assert max(parts, key=parts.get) == most
    estimate = sum(parts.values())
    print(f"{most}: estimate {(runtime + estimate) / 1e6:.0f} MB, peak {peak / 1e6:.0f} MB")
    assert runtime + estimate == pytest.approx(peak, rel=0.15)
    assert estimate == pytest.approx(peak - runtime, rel=0.15)  # so it isn't runtime that makes it right
    assert peak - runtime > 200e6


def planned(*argv):
    return here(train.main, *argv)


GPT2 = (str(ROOT / "config" / "train_gpt2.py"), "--dataset=not_here")


def test_gpt2_on_paper_has_the_numbers_that_can_be_worked_out_by_hand(tmp_path):
    there = ("--device=cuda", "--backend=nccl", "--dtype=bfloat16")  # which needn't be here
    done = planned(*GPT2, f"--out_dir={tmp_path / 'out'}", "--plan=8 x A100 40GB", *there)
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert "124,475,904 parameters, 85,056,000 of them outside the tables" in out
    assert "491,520 an iteration, 294,912,000,000 in all: 2,369.2 a parameter (Chinchilla's optimum: 20)" in out
    flops = (6 * (124_475_904 - 1024 * 768) + 12 * 12 * 768 * 1024) * 491_520
    assert f"{flops:.3g} FLOPs an iteration, {flops * 600_000:.3g} in all" in out
    assert f"{flops * 600_000 / (8 * 312e12 * 0.4) / 3600:.1f} hours, if the cards reach 40%" in out
    assert "0.50 GB weights" in out and "1.00 GB optimizer moments" in out and "1.49 GB a checkpoint" in out
    assert "not_here isn't here; planned for 50,257 token ids" in out and "40.00" in out
    assert not (tmp_path / "out").exists()


SMALL = ("--n_layer=6", "--n_head=4", "--n_embd=256", "--block_size=256", "--vocab_size=5000", "--dtype=float32",
         "--dataset=not_here", "--batch_size=24", "--gradient_accumulation_steps=8")  # fmt: skip


@pytest.fixture
def simple_count(monkeypatch):
    """Ten megabytes a block and row, and a hundred for the loss: what is made of the count is the test's, not it."""

    def count(cfg, n_layer, device_type, dtype):
        kept = n_layer * cfg.batch_size * 10e6
        return kept, kept + 100e6, 50e6, 0

    monkeypatch.setattr(plan, "count", count)


def remedy(done):
    """The flags that a refusal names."""
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    return shlex.split(re.search(r"are there; (.*) would$", done.stderr.strip()).group(1))


def test_what_does_not_fit_is_refused_with_the_largest_micro_batch_that_does_and_the_same_tokens(simple_count):
    tight = (*SMALL, "--plan=2 x A100 2GB")
    wanted = remedy(planned(*tight))
    values = dict(flag.removeprefix("--").split("=") for flag in wanted)
    assert values.keys() == {"batch_size", "gradient_accumulation_steps"}
    assert int(values["batch_size"]) * int(values["gradient_accumulation_steps"]) == 24 * 8
    assert 1 < int(values["batch_size"]) < 24 and int(values["gradient_accumulation_steps"]) % 2 == 0
    assert planned(*tight, *wanted).returncode == 0
    sizes = [n for n in range(int(values["batch_size"]) + 1, 25) if 192 % n == 0 and 192 // n % 2 == 0]
    larger = (f"--batch_size={sizes[0]}", f"--gradient_accumulation_steps={192 // sizes[0]}")
    assert planned(*tight, *larger).returncode == 2


def test_where_no_micro_batch_fits_fewer_layers_are_named(simple_count):
    tight = (*SMALL, "--plan=2 x A100 1.2GB")
    wanted = remedy(planned(*tight))
    assert any(flag.startswith("--n_layer=") for flag in wanted) and "--batch_size=1" in wanted
    assert planned(*tight, *wanted).returncode == 0


def test_where_nothing_fits_that_is_said(simple_count):
    done = planned(*SMALL, "--plan=2 x A100 1.01GB")
    assert done.returncode == 2 and "nothing here would" in done.stderr


def test_this_machine_refuses_what_it_cannot_hold(simple_count):
    done = planned(*SMALL, "--plan=True", "--device=cpu", "--batch_size=100000", "--gradient_accumulation_steps=1")
    assert done.returncode == 2 and "it doesn't fit" in done.stderr


def test_on_this_machine_the_steps_of_training_are_timed(data, tmp_path, monkeypatch):
    wanted, sizes = train.train_step, []

    def train_step(model, optimizer, guard, data, micro_batches, cfg, rt):
        sizes.append((cfg.batch_size, cfg.gradient_accumulation_steps))
        return wanted(model, optimizer, guard, data, micro_batches, cfg, rt)

    monkeypatch.setattr(train, "train_step", train_step)
    done = planned(*flags(data, tmp_path / "out", "--plan=True"))
    assert done.returncode == 0 and sizes[:2] == [(1, 1)] * 2 and set(sizes[2:]) == {(4, 2)}, done.stderr
    assert re.search(r"[\d.]+ ms an iteration \(timed on \d steps of 2 micro-batch\(es\)\)", done.stdout), done.stdout
    assert "hours in all" in done.stdout and not (tmp_path / "out").exists()


CFG = configurator.parse(TrainConfig, list(SMALL))


def test_fsdp_shares_weights_and_moments_and_gathers_a_few_blocks(simple_count):
    alone = plan.memory(CFG, "cuda", torch.bfloat16, 4, "ddp")
    shared = plan.memory(CFG, "cuda", torch.bfloat16, 4, "fsdp")
    once = dataclasses.replace(CFG, gradient_accumulation_steps=4)
    assert shared["weights"] == alone["weights"] / 4 and shared["optimizer moments"] == alone["optimizer moments"] / 4
    assert shared["gathered by fsdp"] > 0 == alone["gathered by fsdp"]
    assert (
        shared["gradients"]
        == alone["gradients"]
        == 4 * plan.memory(once, "cuda", torch.bfloat16, 4, "fsdp")["gradients"]
    )


def test_muon_keeps_one_moment_of_the_blocks_matrices(simple_count):
    adamw, muon = plan.memory(CFG), plan.memory(dataclasses.replace(CFG, optimizer="muon"))
    assert adamw["optimizer moments"] - muon["optimizer moments"] == 4 * 6 * 12 * 256**2


def test_the_count_is_a_line_in_the_number_of_blocks():
    """Which is what memory() relies on, so that GPT-3 costs no more than a toy."""
    counts = [plan.count(CFG, n_layer, "cpu", torch.float32) for n_layer in (2, 3, 5)]
    for two, three, five in zip(*counts, strict=True):
        assert five == pytest.approx(two + 3 * (three - two), rel=1e-6)


@pytest.mark.parametrize("hardware", ["8", "A100 40GB", "0 x A100 40GB", "8 x A100", "8xA100"])
def test_hardware_that_is_not_understood_is_refused_with_an_example(hardware):
    done = planned(*SMALL, f"--plan={hardware}")
    assert done.returncode == 2 and '"8 x A100 40GB"' in done.stderr and len(done.stderr.splitlines()) == 1


def test_ranks_that_cannot_share_the_micro_batches_are_refused(simple_count):
    done = planned(*SMALL, "--plan=3 x A100 40GB")
    assert done.returncode == 2 and "--gradient_accumulation_steps=8" in done.stderr and "3 ranks" in done.stderr


def test_a_card_that_is_not_in_the_table_gets_no_hours(simple_count):
    done = planned(*SMALL, "--plan=1 x Abacus 40GB")
    assert done.returncode == 0 and "unknown: Abacus isn't in runtime.py's table of peaks" in done.stdout
