"""What README.md tells people to type is understood, and what it points to is there."""

import re
import shlex
import subprocess

import pytest
from tiny import ROOT, flags, here

import configurator
import train
from prepare import PrepareConfig
from sample import SampleConfig
from train import TrainConfig

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
# Indented lines are commands, what follows # is a remark.
COMMANDS = [line.split("  #")[0].strip() for line in TEXT.splitlines() if line.startswith("    ")]
CONFIGS = {"prepare.py": PrepareConfig, "train.py": TrainConfig, "sample.py": SampleConfig}


def check(words):
    match words:
        case ["make", target]:
            dry = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
            assert dry.returncode == 0, dry.stderr
        case ["python3", "-m", "venv", *_]:
            pass
        case ["pip", "install", "-r", path]:
            assert (ROOT / path).is_file()
        case ["python", script] if script.startswith("data/"):
            assert (ROOT / script).is_file()
        case ["python", "prepare.py", text, *options] if text != "--help":
            assert not text.startswith("--")
            configurator.parse(PrepareConfig, [option for option in options if option.startswith("--")])
        case ["python" | "torchrun", *_]:
            script = next(word for word in words if word.endswith(".py"))
            argv = words[words.index(script) + 1 :]
            argv = [str(ROOT / arg) if arg.startswith("config/") else arg for arg in argv]
            if argv != ["--help"]:
                configurator.parse(CONFIGS[script], argv)
        case _:
            pytest.fail(f"no way to check {words}")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_understood(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    for part in command.split("&&"):
        if not part.strip().startswith("source "):
            check(shlex.split(part))


def test_the_commands_for_the_three_kinds_of_people_are_there():
    assert {"make train", "make test", "python train.py --help"} <= set(COMMANDS)
    assert sum(command.startswith("torchrun") for command in COMMANDS) >= 2 and len(COMMANDS) > 15


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([^)]+)\)", TEXT))))
def test_every_link_leads_to_a_file(path):
    assert path.startswith("http") or (ROOT / path).exists()


def test_the_recipe_for_your_own_data_runs_as_printed_and_trains(tmp_path, monkeypatch):
    code = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL).group(1)
    monkeypatch.chdir(tmp_path)
    for name in ("train.txt", "val.txt"):
        (tmp_path / name).write_text("To be, or not to be, that is the question. " * 50)
    exec(code, {})
    data = tmp_path / "data" / "mine"
    done = here(train.main, *flags(data, tmp_path / "out", "--max_iters=1", "--eval_iters=1"))
    assert done.returncode == 0, done.stderr


def test_the_test_command_of_the_readme_is_the_one_that_ci_calls():
    assert re.search(r"^make .*\btest\b", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
