"""bench.py: times the real thing, beside transformers on the same weights, and says so in a table."""

import json
import re

import pytest
import torch
from tiny import here

import bench
import train
from model import GPT, GPTConfig

TINY = ["--device=cpu", "--dtype=float32", "--compile=False", "--new_tokens=3", "--repeats=2"]


def rows(printed):
    """{title: the rest of its line}."""
    return {m[1]: m[2].split() for m in re.finditer(r"^((?:train|generate) \S+)(.*)$", printed, re.MULTILINE)}


def test_each_row_has_its_time_rate_share_and_peak(monkeypatch):
    monkeypatch.setattr(bench, "limits", lambda rt: {"FLOP/s": (1e6, lambda: 0), "bytes/s": (1e6, lambda: 0)})
    done = here(bench.main, *TINY, "--train=tiny,tiny:2", "--generate=tiny:3")
    assert done.returncode == 0, done.stderr
    found = rows(done.stdout)
    assert list(found) == ["train tiny", "train tiny:2", "generate tiny:3"]
    for title, tokens in (("train tiny", 4 * 16), ("train tiny:2", 2 * 16), ("generate tiny:3", 3)):
        ms, rate, _, _, peak = found[title]
        assert float(rate.replace(",", "")) == pytest.approx(tokens / float(ms) * 1000, rel=0.02)
        assert 0.05 < float(peak) < 20
    assert torch.__version__ in done.stdout and "float32" in done.stdout


def test_beside_transformers_each_row_has_a_ratio():
    more = ("--compare=transformers", "--new_tokens=100")  # more than the context holds
    done = here(bench.main, *TINY, "--train=tiny", "--generate=tiny:2", *more)
    assert done.returncode == 0, done.stderr
    assert all(re.search(r"\d\.\d\d of its time$", " ".join(words)) for words in rows(done.stdout).values())


def test_what_it_compares_with_computes_the_same():
    shape = {name: value for name, value in bench.SHAPES["tiny"].items() if name != "batch_size"}
    model = GPT(GPTConfig(**{**shape, "dropout": 0.0})).eval()
    idx = torch.randint(64, (2, 16))
    with torch.no_grad():
        torch.testing.assert_close(bench.twin(model, 0.0).eval()(idx).logits, model(idx), rtol=0, atol=1e-5)


def test_it_times_train_pys_own_step(monkeypatch):
    assert bench.train_step is train.train_step
    steps = []
    monkeypatch.setattr(bench, "train_step", lambda *args: steps.append(args) or train.train_step(*args))
    assert here(bench.main, *TINY, "--train=tiny", "--generate=none").returncode == 0
    assert len(steps) == 2 + 2  # warm-up, repeats
    assert [args[4] for args in steps] == [range(n, n + 1) for n in range(4)]  # a new batch each time


def test_turns_are_taken_and_a_slow_row_ends_early():
    order = []
    cfg = bench.BenchConfig(repeats=9, seconds=0.0)
    times = bench.timed({"ours": lambda: order.append("ours"), "theirs": lambda: order.append("theirs")}, cfg)
    assert order == ["ours", "theirs"] * 3 and len(times["ours"]) == 3


def test_a_trace_is_written_for_each_row(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert here(bench.main, *TINY, "--train=tiny:2", "--generate=none", "--profile=True").returncode == 0
    names = {
        event.get("name") for event in json.loads((tmp_path / "out-bench-train-tiny-2.json").read_text())["traceEvents"]
    }
    assert "aten::embedding_dense_backward" in names


@pytest.mark.parametrize("argv", [["--train=huge"], ["--generate=gpt2:0"], ["--train=gpt2:x"], ["--repeats=0"]])
def test_a_row_that_cannot_be_is_refused_in_a_line(argv):
    done = here(bench.main, *TINY, *argv)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
