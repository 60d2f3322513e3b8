"""Every recipe in config/ loads into the config of train.py, and says what its name promises."""

import re
from pathlib import Path

import pytest

import configurator
from configurator import UserError
from train import TrainConfig

CONFIGS = {path.stem: path for path in sorted(Path(__file__).resolve().parents[1].glob("config/*.py"))}
EVAL = {
    "eval_gpt2": "gpt2",
    "eval_gpt2_medium": "gpt2-medium",
    "eval_gpt2_large": "gpt2-large",
    "eval_gpt2_xl": "gpt2-xl",
}


def load(name, *flags):
    return configurator.parse(TrainConfig, [str(CONFIGS[name]), *flags])


def assigned(name):
    return re.findall(r"^(\w+) =", CONFIGS[name].read_text(encoding="utf-8"), re.MULTILINE)


def test_the_recipes_of_the_map_are_all_there():
    expected = {"train_shakespeare_char", "train_shakespeare_char_cpu", "train_gpt2", "finetune_shakespeare", *EVAL}
    assert expected <= set(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_file_loads_with_every_value_that_it_assigns(name):
    namespace = {}
    exec(CONFIGS[name].read_text(encoding="utf-8"), namespace)
    config = load(name)
    assert assigned(name)
    for option in assigned(name):
        assert getattr(config, option) == namespace[option], option


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_file_tells_the_command_that_runs_it(name):
    text = CONFIGS[name].read_text(encoding="utf-8")
    assert re.search(rf"^#.*train\.py config/{name}\.py", text, re.MULTILINE)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_flag_wins_over_every_config_file(name):
    assert load(name, "--max_iters=7").max_iters == 7


@pytest.mark.parametrize("name, model", EVAL.items())
def test_an_eval_config_only_evaluates_the_model_that_it_is_named_after(name, model):
    config = load(name)
    assert config.eval_only and config.init_from == model


def test_gpt2_sees_half_a_million_tokens_an_update_and_300_billion_in_all():
    config = load("train_gpt2")
    tokens = config.batch_size * config.block_size * config.gradient_accumulation_steps
    assert tokens == 491_520
    assert 290e9 < tokens * config.max_iters < 300e9


@pytest.mark.parametrize("name", [name for name in CONFIGS if name.startswith("train_")])
def test_a_schedule_warms_up_and_then_decays_by_the_end_of_the_run(name):
    config = load(name)
    assert config.warmup_iters < config.max_iters
    assert (config.lr_decay_iters or config.max_iters) == config.max_iters
    assert config.min_lr <= config.learning_rate / 10 * (1 + 1e-9)


def test_the_muon_recipes_train_the_same_network_on_the_same_batches_in_half_the_iterations():
    for name in ("train_shakespeare_char", "train_gpt2"):
        plain, muon = load(name), load(f"{name}_muon")
        assert muon.model_config() == plain.model_config() and muon.max_iters == plain.max_iters / 2
        for option in ("dataset", "batch_size", "gradient_accumulation_steps"):
            assert getattr(muon, option) == getattr(plain, option)
        assert (muon.optimizer, plain.optimizer) == ("muon", "adamw")


def test_runs_that_may_stand_side_by_side_have_folders_of_their_own():
    names = [name for name in CONFIGS if not name.startswith("eval_")]
    assert len({load(name).out_dir for name in names}) == len(names)


def test_a_typing_error_in_a_config_file_is_named_with_the_nearest_option(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("batchsize = 3\n")
    with pytest.raises(UserError, match=r"mine\.py.*batchsize.*batch_size"):
        configurator.parse(TrainConfig, [str(path)])
