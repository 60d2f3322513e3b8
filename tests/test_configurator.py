"""Config files and flags → one typed config; whatever can't be meant is refused in one line."""

import dataclasses
import re
from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import run

import configurator
import train
from configurator import UserError


@dataclass
class Config:
    rate: float = 0.5  # how fast
    steps: int = 3  # how far; 1e4 is allowed
    name: str = "plain"  # any text
    fast: bool = False  # yes or no
    mode: bool | Literal["auto"] = "auto"  # three ways

    def check(self):
        if self.steps < 0:
            raise ValueError(f"steps must not be negative, but is {self.steps}")


def parse(*argv):
    return configurator.parse(Config, list(argv))


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(0), st.booleans())
def test_whatever_python_prints_of_a_value_is_read_back_as_that_value(rate, steps, fast):
    config = parse(f"--rate={rate}", f"--steps={steps}", f"--fast={fast}")
    assert (config.rate, config.steps, config.fast) == (rate, steps, fast)


@given(st.text())
def test_any_text_is_a_string_option_as_it_stands(text):
    assert parse(f"--name={text}").name == text


@given(st.text())
def test_any_argument_is_either_understood_or_refused_as_the_users_mistake(argument):
    for arg in (argument, f"--{argument}", f"--steps={argument}", f"--mode={argument}"):
        try:
            config = parse(arg)
        except UserError:
            continue
        except SystemExit as end:
            assert arg in ("--help", "-h") and not end.code
            continue
        assert type(config.steps) is int and config.mode in (True, False, "auto")


@pytest.mark.parametrize(
    "flag, value",
    [("--rate=1", 1.0), ("--steps=1e4", 10_000), ("--fast=false", False), ("--fast=1", True), ("--name=2024", "2024"),
     ("--name=a=b", "a=b"), ("--name=", ""), ("--name=é ü", "é ü"), ("--mode=auto", "auto"), ("--mode=True", True)],
)  # fmt: skip
def test_a_flag_takes_the_declared_type(flag, value):
    found = getattr(parse(flag), flag[2:].split("=")[0])
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "flag, names",
    [("--stepz=3", "stepz.*'steps'"), ("--steps=2.5", "steps.*int.*2.5"), ("--fast=maybe", "fast.*bool.*maybe"),
     ("--rate=quick", "rate.*float.*quick"), ("--mode=never", "mode.*auto.*never"), ("--fast", "--name=value"),
     ("-fast=1", "--name=value"), ("steps=3", "--steps=3"), ("nowhere.py", "nowhere.py.*no such"),
     ("--steps=-1", "steps.*-1")],
)  # fmt: skip
def test_a_mistake_is_refused_with_what_was_found_and_what_would_do(flag, names):
    with pytest.raises(UserError, match=names):
        parse(flag)


def test_a_file_is_python_whose_own_affairs_are_its_own(tmp_path):
    path = tmp_path / "a file.py"
    path.write_text(
        "import math\nfrom os import path\n_base = 2\ndef f(): return 1\nsteps = _base * 10\nrate = 1\nname = 7\n"
    )
    assert dataclasses.astuple(parse(str(path)))[:3] == (1.0, 20, "7")


def test_flags_win_over_files_and_later_files_over_earlier(tmp_path):
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text("steps = 1\nrate = 1.0\nname = 'one'\n")
    two.write_text("steps = 2\nrate = 2.0\n")
    config = parse("--rate=3", str(one), str(two))
    assert (config.name, config.steps, config.rate) == ("one", 2, 3.0)


@pytest.mark.parametrize(
    "text, names",
    [("stepz = 3", "stepz.*steps"), ("steps = 'many'", "steps.*int.*many"), ("steps = None", "steps.*None"),
     ("steps = [1]", "steps"), ("steps = ", "SyntaxError"), ("steps = 1 / 0", "ZeroDivisionError"),
     ("fast = 2", "fast.*bool"), ("raise SystemExit", "SystemExit")],
)  # fmt: skip
def test_a_mistake_in_a_file_is_refused_with_the_files_name(tmp_path, text, names):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(UserError, match=r"mine\.py.*" + names):
        parse(str(path))


def test_help_lists_every_option_with_type_default_and_comment_and_ends_well():
    done = run("train.py", "--help")
    assert done.returncode == 0 and not done.stderr
    for field in dataclasses.fields(train.TrainConfig):
        line = re.search(rf"^  --{field.name}=.*$", done.stdout, re.MULTILINE).group()
        assert repr(field.default) in line
        assert re.search(r"(str|int|float|bool|\|\w+) +\S", line), line


def test_a_mistake_ends_with_code_2_and_one_line_without_traceback(tmp_path):
    done = run("train.py", "--learning_rat=1", cwd=tmp_path)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == "train.py: --learning_rat: unknown option 'learning_rat'; did you mean 'learning_rate'?\n"


NANOGPT_OPTIONS = """
    out_dir eval_interval eval_iters log_interval init_from gradient_accumulation_steps batch_size block_size n_layer
    n_head n_embd dropout bias learning_rate max_iters weight_decay beta1 beta2 grad_clip decay_lr warmup_iters
    lr_decay_iters min_lr backend device dtype compile wandb_log wandb_project wandb_run_name eval_only
    always_save_checkpoint dataset
""".split()


def test_every_option_of_nanogpt_is_there_under_its_name():
    assert set(NANOGPT_OPTIONS) <= {field.name for field in dataclasses.fields(train.TrainConfig)}
