"""Checkpoint files: whole or absent, inert, nanoGPT's too; what isn't one is refused in a line."""

import contextlib
import math
import pickle
import random
import re

import pytest
import torch
from tiny import flags, here, make_dataset, metrics, same, weights

import checkpoint
import sample
import train
from configurator import UserError
from model import GPT, GPTConfig

CONFIG = GPTConfig(block_size=16, vocab_size=20, n_layer=2, n_head=2, n_embd=16)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data") / "tiny")


@pytest.fixture
def file(data, tmp_path):
    assert here(train.main, *flags(data, tmp_path, "--max_iters=4")).returncode == 0
    return tmp_path / "ckpt.pt"


def change(path, **entries):
    state = torch.load(path, weights_only=True)
    state.update(entries)
    torch.save(state, path)


def test_a_checkpoint_holds_tensors_and_plain_types_only(file):
    def plain(value):
        if isinstance(value, dict):
            return all(plain(k) and plain(v) for k, v in value.items())
        if isinstance(value, list | tuple):
            return all(plain(v) for v in value)
        return value is None or isinstance(value, torch.Tensor | str | int | float | bool)

    assert plain(torch.load(file, weights_only=True))


def test_its_keys_are_nanogpts_and_its_names_plain(file):
    state = torch.load(file, weights_only=True)
    assert {"model", "optimizer", "model_args", "iter_num", "best_val_loss", "config"} <= state.keys()
    assert {"transformer.wte.weight", "transformer.h.1.attn.c_attn.weight", "lm_head.weight"} <= state["model"].keys()
    assert state["tokenizer"]["type"] == "char" and state["versions"]["torch"] == torch.__version__


def as_nanogpt(file, path, prefix):
    """What nanoGPT would have written of the same training: erf GELU unsaid, masks as buffers, wrapped names."""
    state = torch.load(file, weights_only=True)
    model = {prefix + name: w for name, w in state["model"].items()}
    model[prefix + "transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
    args = {name: value for name, value in state["model_args"].items() if name != "gelu"}
    keys = ("optimizer", "iter_num", "best_val_loss")
    state = {"model": model, "model_args": args, **{key: state[key] for key in keys}, "config": state["config"]}
    state["best_val_loss"] = torch.tensor(state["best_val_loss"])
    state["config"] = {name: v for name, v in state["config"].items() if name not in ("gelu", "seed", "vocab_size")}
    torch.save(state, path)


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module._orig_mod."])
def test_a_nanogpt_checkpoint_resumes_and_samples(file, tmp_path, prefix):
    as_nanogpt(file, tmp_path / "ckpt.pt", prefix)
    done = here(train.main, "--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=6")
    assert done.returncode == 0, done.stderr
    assert list(metrics(tmp_path)) == [0, 1, 2, 3, 4, 5]
    assert torch.load(tmp_path / "ckpt.pt", weights_only=True)["iter_num"] == 6
    assert (
        here(sample.main, f"--out_dir={tmp_path}", "--max_new_tokens=5", "--start=to", "--device=cpu").returncode == 0
    )


def test_a_nanogpt_checkpoint_gives_the_logits_of_its_erf_gelu(file, tmp_path):
    state = torch.load(file, weights_only=True)
    for name, w in state["model"].items():
        if ".mlp." in name or "wte" in name:
            w *= 20  # where the two GELUs differ by more than rounding
    torch.save(state, file)
    as_nanogpt(file, tmp_path / "nano.pt", "")
    logits = {}
    idx = torch.randint(state["model_args"]["vocab_size"], (2, 16))
    for gelu in ("erf", "tanh"):
        model = GPT.from_weights(GPTConfig(**{**state["model_args"], "gelu": gelu}), state["model"])
        logits[gelu] = model.eval()(idx)
    found = checkpoint.pretrained(str(tmp_path / "nano.pt"))[0].eval()(idx)
    assert torch.allclose(found, logits["erf"], atol=1e-5, rtol=0) and not torch.allclose(
        found, logits["tanh"], atol=1e-4, rtol=0
    )


def test_the_first_save_of_a_new_run_and_only_it_sets_the_former_files_aside_and_no_run_is_lost(tmp_path):
    for run in range(3):
        out = checkpoint.OutDir(str(tmp_path), new_run=True)
        for step in range(3):
            state = {"model": {}, "model_args": {}, "run": run, "step": step}
            out.save(state, best=state if step == 1 else None)
    found = {str(p.relative_to(tmp_path)): torch.load(p) for p in tmp_path.rglob("*.pt")}
    assert {name: (state["run"], state["step"]) for name, state in found.items()} == {
        "ckpt.pt": (2, 2), "best.pt": (2, 1), "previous-1/ckpt.pt": (0, 2), "previous-1/best.pt": (0, 1),
        "previous-2/ckpt.pt": (1, 2), "previous-2/best.pt": (1, 1),
    }  # fmt: skip


def test_a_save_that_breaks_off_at_any_point_leaves_the_former_checkpoint(file, monkeypatch):
    before = weights(file.parent)
    for name in ("fsync", "replace"):
        out = checkpoint.OutDir(str(file.parent), new_run=False)
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint.os, name, lambda *a: (_ for _ in ()).throw(OSError("no space left")))
            with pytest.raises(checkpoint.SaveError):
                out.save({"model": {}, "model_args": {}})
        assert same(weights(file.parent), before)


# ---- files from strangers


class Bomb:
    def __reduce__(self):
        return (open, ("exploded", "w"))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("save", [torch.save, lambda state, path: path.write_bytes(pickle.dumps(state))])
def test_a_checkpoint_that_wants_to_execute_something_is_refused_and_executes_nothing(tmp_path, monkeypatch, save):
    monkeypatch.chdir(tmp_path)
    save({"model": {}, "model_args": {}, "config": Bomb()}, tmp_path / "ckpt.pt")
    with pytest.raises(UserError, match=r"ckpt\.pt can't be read as a checkpoint"):
        checkpoint.load(tmp_path / "ckpt.pt")
    assert not (tmp_path / "exploded").exists()


def test_a_torn_or_random_file_ends_in_one_clear_line(file):
    whole = file.read_bytes()
    rng = random.Random(0)
    torn = [b"", whole[:1], whole[: len(whole) // 2], whole[:-1], rng.randbytes(5000), b"not a checkpoint"]
    for content in torn:
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"ckpt\.pt can't be read") as error:
            checkpoint.load(file)
        assert len(str(error.value).splitlines()) == 1


def without(args, name):
    return {key: value for key, value in args.items() if key != name}


@pytest.mark.parametrize(
    "break_it, message",
    [
        (lambda s: s.pop("model"), "no 'model'"),
        (lambda s: s.pop("model_args"), "no 'model_args'"),
        (lambda s: s["model"].pop("transformer.ln_f.weight"), r"ln_f\.weight .* missing"),
        (lambda s: s["model"].update({"transformer.ln_f.weight": torch.ones(3)}), r"ln_f\.weight .*\(16,\).*\(3,\)"),
        (lambda s: s["model"].update({"transformer.ln_f.weight": "text"}), r"ln_f\.weight"),
        (lambda s: s["model"].update(extra=torch.ones(3)), "extra"),
        (lambda s: s["model_args"].update(n_layer=10**8), "layers"),
        (lambda s: s["model_args"].update(vocab_size=10**8), "wte"),
        (lambda s: s["model_args"].update(n_embd=10**8, n_head=1), "shape"),
        (lambda s: s["model_args"].update(n_head=0), "n_head"),
        (lambda s: s["model_args"].update(n_head="many"), "n_head"),
        (lambda s: s.update(model_args={}), "shape|layers"),
    ],
)
def test_a_checkpoint_whose_parts_do_not_fit_ends_in_one_line_and_takes_no_memory(file, break_it, message):
    state = torch.load(file, weights_only=True)
    break_it(state)
    torch.save(state, file)
    for init in ("--init_from=resume", f"--init_from={file}"):
        done = here(train.main, init, f"--out_dir={file.parent}")
        assert done.returncode == 2, done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert re.search(message, done.stderr), done.stderr


def moment(state, value):
    state["optimizer"]["state"][0]["exp_avg"] = value


def weight(state, value):
    state["model"]["transformer.h.0.attn.c_attn.weight"] = value


LIES = {  # what a stranger may write in place of a tensor of 48 × 16 (c_attn) or 20 × 16 (the table, parameter 0)
    "one number that claims to be a matrix": lambda shape: torch.zeros(1).expand(shape),
    "another shape": lambda shape: torch.zeros(3),
    "integers": lambda shape: torch.zeros(shape, dtype=torch.int64),
    "complex numbers": lambda shape: torch.zeros(shape, dtype=torch.complex64),
    "a sparse matrix": lambda shape: torch.zeros(shape).to_sparse(),
    "nothing in memory": lambda shape: torch.zeros(shape, device="meta"),
    "NaN": lambda shape: torch.full(shape, torch.nan),
    "text": lambda shape: "text",
    "double precision": lambda shape: torch.zeros(shape, dtype=torch.float64),
}


@pytest.mark.parametrize("place", [moment, weight])
@pytest.mark.parametrize("lie", LIES)
def test_no_tensor_from_a_stranger_reaches_memory_that_is_not_its_own(file, place, lie):
    """In a process of its own: the fused kernel would write past the end of a tensor that lies about its size."""
    state = torch.load(file, weights_only=True)
    V = state["model_args"]["vocab_size"]
    place(state, LIES[lie]((48, 16) if place is weight else (V, 16)))
    torch.save(state, file)
    done = here(train.main, "--init_from=resume", f"--out_dir={file.parent}", "--max_iters=6")
    if lie in ("one number that claims to be a matrix", "double precision"):  # made whole, then as good as any other
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    "key, value",
    [("iter_num", -5), ("iter_num", 2.5), ("iter_num", "many"), ("blocks", 2**70), ("best_val_loss", "low"),
     ("best_val_loss", math.nan), ("best_val_loss", torch.ones(2)), ("config", None), ("config", [1]),
     ("optimizer", None), ("optimizer", {}), ("optimizer", {"state": {}, "param_groups": []}), ("scaler", 3)],
    ids=str,
)  # fmt: skip
def test_an_entry_that_no_run_can_have_written_ends_in_one_line(file, key, value):
    change(file, **{key: value})
    done = here(train.main, "--init_from=resume", f"--out_dir={file.parent}", "--max_iters=6")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr


def test_the_refusal_of_a_hostile_file_does_not_advise_to_trust_it(tmp_path):
    torch.save({"model": {}, "model_args": {}, "config": Bomb()}, tmp_path / "ckpt.pt")
    with pytest.raises(UserError) as error:
        checkpoint.load(tmp_path / "ckpt.pt")
    assert "weights_only" not in str(error.value)


def test_a_folder_that_was_moved_goes_on_where_it_is(file, tmp_path):
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "ckpt.pt").write_bytes(file.read_bytes())
    file.unlink()
    assert here(train.main, "--init_from=resume", f"--out_dir={moved}", "--max_iters=5").returncode == 0
    assert torch.load(moved / "ckpt.pt", weights_only=True)["iter_num"] == 5 and not file.exists()


@pytest.mark.parametrize("at", range(8))
def test_a_run_that_dies_between_any_two_renames_of_its_first_save_loses_no_run(file, monkeypatch, at):
    """The former run's latest and best, or the new one's, are there whole, and the former's somewhere."""
    folder, calls = file.parent, [0]
    former = {name: (folder / name).read_bytes() for name in ("ckpt.pt", "best.pt", "metrics.jsonl")}
    out = checkpoint.OutDir(str(folder), new_run=True)
    for name in ("replace", "remove", "link", "mkdir"):
        real = getattr(checkpoint.os, name)

        def dies(*args, real=real):
            calls[0] += 1
            if calls[0] > at:
                raise KeyboardInterrupt  # nothing that the code under test would catch
            return real(*args)

        monkeypatch.setattr(checkpoint.os, name, dies)
    state = {**torch.load(file, weights_only=True), "iter_num": 1}
    with contextlib.suppress(KeyboardInterrupt):
        out.save(state, best=state)
    monkeypatch.undo()
    assert checkpoint.load(file)["iter_num"] in (1, 4)
    files = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert all(content in files for content in former.values())
