"""Who may import whom, what an import costs, and what a character model can do without."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from dataset import write_dataset
from tokenizer import CharTokenizer

ROOT = Path(__file__).resolve().parents[1]
# Each layer may import its own and the layers below. A new top-level file must take its place here.
COMMANDS = {"prepare", "train", "sample"}
LAYERS = [
    {"bench"},  # times what two of the commands run
    COMMANDS,
    {"plan", "preflight", "run"},
    {"checkpoint", "dataset", "guard", "inference", "optimizer", "sharded", "tokenizer"},
    {"model", "model_numpy", "runtime", "configurator", "fetch"},
    {"cpu"},  # torch alone
]
MODULES = {path.stem: path for path in sorted(ROOT.glob("*.py"))}
HEAVY = {"datasets", "huggingface_hub", "safetensors", "tiktoken", "tqdm", "transformers", "wandb"}


def imports_of(path):
    """(module, at the top level?) for every import in a file, inside functions too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else names
        for name in names:
            yield name.split(".")[0], node in tree.body


def ours(path):
    return {name for name, _ in imports_of(path) if name in MODULES}


def python(code):
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


def test_every_top_level_file_has_a_layer():
    assert set(MODULES) == set().union(*LAYERS)


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_sideways_or_down_never_up(name):
    depth = next(depth for depth, layer in enumerate(LAYERS) if name in layer)
    above = set().union(*LAYERS[:depth])
    assert not ours(MODULES[name]) & above


def test_no_command_imports_another():
    assert not any(ours(MODULES[name]) & COMMANDS for name in COMMANDS)


def test_imports_form_no_circle():
    left = {name: ours(path) for name, path in MODULES.items()}
    while free := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in free:
            del left[name]
    assert not left, "a circle among these"


def test_the_numpy_model_shares_nothing_with_what_it_checks():
    assert {name for name, _ in imports_of(MODULES["model_numpy"])} == {"numpy"}


@pytest.mark.parametrize("path", sorted(ROOT.glob("data/*/prepare.py")), ids=lambda path: path.parent.name)
def test_data_preparation_needs_neither_commands_nor_the_model(path):
    assert not ours(path) & (COMMANDS | {"bench", "model", "checkpoint", "optimizer", "runtime"})


@pytest.mark.parametrize("name", MODULES)
def test_heavy_packages_are_imported_where_they_are_used(name):
    assert not {module for module, at_top in imports_of(MODULES[name]) if at_top} & HEAVY


def test_importing_any_module_prints_nothing_and_reads_no_arguments():
    code = f"import sys; sys.argv = ['x', '--no_such_option=1']; import {', '.join(MODULES)}"
    done = python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_character_model_is_trained_and_sampled_with_torch_and_numpy_alone(tmp_path):
    tokenizer = CharTokenizer("\nabc")
    ids = tokenizer.encode("abc\n" * 50)
    write_dataset(tmp_path / "abc", {"train": [ids], "val": [ids]}, tokenizer, source="a test", sha256="")
    train_flags = [
        f"--dataset={tmp_path / 'abc'}", f"--out_dir={tmp_path / 'out'}", "--device=cpu", "--compile=False",
        "--n_layer=1", "--n_head=1", "--n_embd=8", "--block_size=8", "--batch_size=2", "--max_iters=2",
        "--gradient_accumulation_steps=1", "--eval_iters=1",
    ]  # fmt: skip
    sample_flags = [f"--out_dir={tmp_path / 'out'}", "--device=cpu", "--num_samples=1", "--max_new_tokens=5"]
    done = python(f"""
import sys
sys.modules.update(dict.fromkeys({HEAVY}))  # None there makes an import fail as if it were not installed
import train, sample
train.main({train_flags})
sample.main({sample_flags})
""")
    assert done.returncode == 0, done.stderr
    assert "iter 1: loss" in done.stdout or "step 2: train loss" in done.stdout
