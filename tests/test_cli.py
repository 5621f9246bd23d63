"""Settings from flags and files, and how a script ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from arl.api.config import (
    Config,
    EngineConfig,
    LocalEngineConfig,
    OptimizerConfig,
    SGLangEngineConfig,
    TrainConfig,
)
from arl.api.errors import ConfigError
from arl.cli import load_config


class AgentConfig(Config):
    """An agent's own configuration."""

    model: str = "tiny"
    dataset: str = "reasoning-gym"


def test_flags_override_the_file_which_overrides_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("rollout: {batch_size: 4, group_size: 3}\nsteps: 3\n")
    config = load_config(AgentConfig, ["--config", str(path), "--rollout.group_size", "5"])
    assert (config.steps, config.rollout.batch_size, config.rollout.group_size) == (3, 4, 5)
    assert config.dataset == "reasoning-gym"
    assert type(config) is AgentConfig


def test_an_engine_is_chosen_by_kind() -> None:
    flags = ["--engine.kind", "sglang", "--engine.addresses", "http://a:1", "--engine.addresses", "http://b:2"]
    engine = load_config(AgentConfig, flags).engine
    assert isinstance(engine, SGLangEngineConfig)
    assert engine.addresses == ("http://a:1", "http://b:2")


def test_an_engine_section_without_kind_speaks_of_the_embedded_one() -> None:
    engine = load_config(AgentConfig, ["--engine.num_servers", "2"]).engine
    assert isinstance(engine, LocalEngineConfig)
    assert engine.num_servers == 2


class TunedConfig(AgentConfig):
    engine: EngineConfig = SGLangEngineConfig(addresses=("http://a:1",), max_retries=7)
    train: TrainConfig = TrainConfig(num_threads=3, optimizer=OptimizerConfig(lr=0.5, eps=0.25))


def test_a_section_given_in_part_keeps_what_the_class_set_in_its_default() -> None:
    config = load_config(TunedConfig, ["--train.optimizer.lr", "0.125", "--engine.max_retries", "2"])
    assert config.train == TrainConfig(num_threads=3, optimizer=OptimizerConfig(lr=0.125, eps=0.25))
    assert config.engine == SGLangEngineConfig(addresses=("http://a:1",), max_retries=2)


def test_a_section_of_another_kind_than_its_default_stands_alone() -> None:
    assert load_config(TunedConfig, ["--engine.kind", "local"]).engine == LocalEngineConfig()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--rollout.max_stalness", "4"], "--rollout.max_stalness is not a setting; did you mean --rollout.max_stale"),
        (
            ["--rollout.max_staleness", "-1"],
            "rollout.max_staleness is '-1': Input should be greater than or equal to 0",
        ),
        (["--engine.kind", "sglang"], "engine: addresses is empty; name at least one server"),
        (["--engine.kind", "vllm"], "expected tags: 'local', 'sglang'"),
        (["--engine.addresses", "http://a:1"], "engine.addresses is not a setting with engine.kind=local; allowed"),
        (["--rollout.min_group_size", "9", "--rollout.group_size", "4"], "min_group_size is 9; "),
        (["--ppo.minibatches", "3"], "ppo.minibatches is 3; it must divide rollout.batch_size=32"),
        (["--train.optimizer.schedule", "cosine"], "train.optimizer: schedule is cosine; it needs total_steps"),
        (["--ppo.proximal", "bypassed", "--ppo.behavior_weight_cap", "2"], "there is no weight to cap"),
        (["--train.optimizer.total_steps", "9"], "are for a decaying schedule; schedule is constant"),
        (["--steps", "many"], "steps is 'many': Input should be a valid integer"),
        (["--steps"], "--steps: expected one argument"),
        (["--config", "nowhere.yaml"], "--config nowhere.yaml cannot be read"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(flags: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(AgentConfig, flags)
    assert sentence in str(error.value)


def test_an_unknown_field_in_the_file_is_named_with_what_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("rollout: {batchsize: 4}\n")
    with pytest.raises(ConfigError, match=r"rollout.batchsize is not a setting; allowed there: batch_size, "):
        load_config(AgentConfig, ["--config", str(path)])


def test_a_missing_setting_is_named() -> None:
    with pytest.raises(ConfigError, match="model is missing; give it as --model VALUE"):
        load_config(Config, [])


SCRIPT = """
import asyncio
from arl.api.config import Config
from arl.api.errors import ServerError
from arl.cli import run

async def main(config):
    if config.model == "fails":
        raise ServerError("no server answers")
    try:
        print("ready", flush=True)
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        print("saved", flush=True)

run(main, Config)
"""


def _script(*flags: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", SCRIPT, *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_lets_the_script_clean_up_and_exit_with_its_code(number: signal.Signals, code: int) -> None:
    with _script("--model", "x") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, number)
        out, err = process.communicate(timeout=30)
    assert (out, process.returncode) == ("saved\n", code)
    assert "run the same command again to continue" in err
    assert "Traceback" not in err


def test_a_wrong_setting_ends_the_script_with_one_sentence_and_code_2() -> None:
    with _script("--model", "x", "--stpes", "3") as process:
        out, err = process.communicate(timeout=30)
    assert (out, process.returncode) == ("", 2)
    assert err == "error: --stpes is not a setting; did you mean --steps\n"


def test_an_error_of_the_run_ends_the_script_with_its_sentence_and_code_1() -> None:
    with _script("--model", "fails") as process:
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (1, "error: no server answers\n")
