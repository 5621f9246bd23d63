"""--help-all shows each setting with what it is, its default and the variants that have it; --help those people set."""

import contextlib
import io
import re
from functools import cache
from typing import Any

import pytest
from pydantic import model_validator

from arl.api.settings.algorithm import AlgorithmConfig, preset
from arl.api.settings.engines import EngineConfig, SGLangEngineConfig
from arl.api.settings.run import Config
from arl.api.settings.sections import settings_of
from arl.run.script import COMMON, load_config


class AgentConfig(Config):
    """An agent's own configuration."""

    model: str = "tiny"
    """The model."""
    share: float = 0.5
    """How much, of 100%."""


class TunedConfig(AgentConfig):
    engine: EngineConfig = SGLangEngineConfig(addresses=("http://a:1",), update_timeout_s=7.0)
    """The servers."""
    algorithm: AlgorithmConfig = preset("gspo")

    @model_validator(mode="before")
    @classmethod
    def _few_steps(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {"steps": 7, **given}


@cache
def shown(config: type[Config], flag: str = "--help-all") -> dict[str, str]:
    """What --help-all says, by flag. argparse breaks lines at hyphens too, within a word: the terminal is wide."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setenv("COLUMNS", "10000")
        with pytest.raises(SystemExit) as exit_:
            load_config(config, [flag])
    assert exit_.value.code == 0
    entries = re.split(r"\n  (?=--)", out.getvalue())[1:]
    return {entry.split()[0].rstrip(","): " ".join(entry.split()) for entry in entries}


@pytest.mark.parametrize(
    ("config", "flag", "default"),
    [
        (AgentConfig, "--engine.kind", "local"),
        (AgentConfig, "--train.lora", "null"),
        (AgentConfig, "--train.lora.target_modules", "all-linear"),
        (AgentConfig, "--train.optimizer.betas", "[0.9, 0.95]"),
        (AgentConfig, "--log.console", "true"),
        (TunedConfig, "--steps", "7"),
        (TunedConfig, "--engine.kind", "sglang"),
        (TunedConfig, "--engine.update_timeout_s", "7.0"),
        (TunedConfig, "--algorithm.loss.kind", "gspo"),
        (TunedConfig, "--algorithm.minibatches", "4"),
    ],
)
def test_a_default_is_what_the_class_makes_of_it(config: type[Config], flag: str, default: str) -> None:
    assert f"(default: {default})" in shown(config)[flag]


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--steps", r"\(default: 100\)"),
        ("--engine.num_servers", r"\[local, sglang_processes, vllm_processes\] How many servers to start"),
        ("--engine.addresses", r"\[sglang, vllm\] Base URLs"),
        ("--weights.directory", r"\[disk, delta, adapter\] Where the files are written; "),
        ("--engine.request_timeout_s", r"^[^\[]*$"),
        ("--algorithm.loss.clip_high", r"\[ppo, gspo, gmpo, cispo\] The ratio is clipped"),
        ("--algorithm.advantage.turn_discount", r"\[returns\] .*\(default: 1.0\) \[gigpo\] .*\(default: 0.95\)"),
        ("--engine.kind", r"local: The embedded server, in .* sglang: SGLang servers that already run\."),
        ("--share", r"How much, of 100%\. \(default: 0.5\)"),
    ],
)
def test_a_setting_of_some_variants_names_them_and_a_kind_says_what_each_is(flag: str, said: str) -> None:
    assert re.search(said, shown(AgentConfig)[flag])


def test_a_setting_without_a_default_is_required() -> None:
    assert shown(Config)["--model"].endswith("on the hub. (required)")


def test_every_setting_has_its_flag_and_a_text() -> None:
    assert [setting.name for setting in settings_of(Config) if not setting.about] == []
    assert {f"--{setting.name}" for setting in settings_of(Config)} <= shown(Config).keys()


def test_help_shows_25_settings_and_the_class_s_own_and_says_how_to_see_all() -> None:
    names = shown(AgentConfig, "--help").keys()
    assert len(COMMON) == 25
    assert names - {"--help-all", "--config", "--dry-run"} == {*(f"--{name}" for name in COMMON), "--share"}
    assert "--help-all" in names
