"""Settings from flags and files, and how a script ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from arl.api.errors import ConfigError
from arl.api.settings.algorithm import AlgorithmConfig, preset
from arl.api.settings.engines import LoRAConfig, SGLangEngineConfig
from arl.api.settings.run import Config, TrackioConfig, WandbConfig
from arl.run.script import load_config


class AgentConfig(Config):
    """An agent's own configuration."""

    model: str = "tiny"


class ChosenConfig(AgentConfig):
    algorithm: AlgorithmConfig = preset("dapo", loss={"clip_low": 0.125}, epochs=3)


GSPO = ["--algorithm.preset", "gspo"]
DAPO: Any = {"preset": "dapo", "loss": {"clip_low": 0.125}, "overlong": {"max_tokens": 9999}}


@pytest.mark.parametrize(
    ("config", "file", "flags", "expected"),
    [
        (ChosenConfig, {}, ["--algorithm.preset", "dapo"], preset("dapo", loss={"clip_low": 0.125}, epochs=3)),
        (
            ChosenConfig,
            {},
            ["--algorithm.loss.clip_high", "0.5"],
            preset("dapo", loss={"clip_low": 0.125, "clip_high": 0.5}, epochs=3),
        ),
        (ChosenConfig, {}, [*GSPO, "--algorithm.loss.clip_high", "0.5"], preset("gspo", loss={"clip_high": 0.5})),
        (
            AgentConfig,
            DAPO,
            ["--algorithm.overlong.buffer_tokens", "3"],
            preset("dapo", loss={"clip_low": 0.125}, overlong={"max_tokens": 9999, "buffer_tokens": 3}),
        ),
        (AgentConfig, {"preset": "dapo"}, GSPO, preset("gspo")),
        (AgentConfig, {}, ["--algorithm.weights", "sequence"], preset("decoupled_ppo", weights=["sequence"])),
        (
            AgentConfig,
            {"preset": "icepop", "rejections": [{"level": "geometric", "lower": 0.5}]},
            ["--algorithm.weights", '[{"level": "token", "upper": 3}, "geometric"]'],
            preset(
                "icepop",
                weights=[{"level": "token", "upper": 3}, "geometric"],
                rejections=[{"level": "geometric", "lower": 0.5}],
            ),
        ),
        (AgentConfig, DAPO, ["--algorithm.preset", "dapo"], AlgorithmConfig.model_validate(DAPO)),
    ],
)
def test_flags_change_single_fields_of_an_algorithm(
    config: type[AgentConfig], file: dict[str, Any], flags: list[str], expected: AlgorithmConfig, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"algorithm": file} if file else {}))
    loaded = load_config(config, ["--config", str(path), *flags])
    assert loaded.algorithm.model_dump() == expected.model_dump()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--rollout.max_stalness", "4"], "--rollout.max_stalness is not a setting; did you mean --rollout.max_stale"),
        (["--rollout.max_staleness", "-1"], "rollout.max_staleness is '-1': Input should be greater than or equal"),
        (["--engine.kind", "sglang"], "engine: addresses is empty; name at least one server"),
        (["--engine.kind", "tgi"], "engine.kind is 'tgi'; allowed there: local, sglang, "),
        (["--algorithm.loss.clip_low", "2"], "algorithm.loss.clip_low is '2' with loss.kind=ppo: Input should be le"),
        (
            ["--algorithm.preset", "sapo", "--algorithm.loss.dual_clip", "3"],
            "algorithm.loss.dual_clip is not a setting with loss.kind=sapo; allowed there: kind",
        ),
        (["--algorithm.preset", "GRPO"], "algorithm: no preset is named 'GRPO'; did you mean grpo"),
        (["--engine.addresses", "http://a:1"], "engine.addresses is not a setting with engine.kind=local; allowed"),
        (
            ["--log.trackers", "weights"],
            "log.trackers[0].kind is 'weights'; allowed there: trackio, wandb, tensorboard, ",
        ),
        (
            ["--log.trackers", "trackio", "--log.trackers", '{"kind": "wandb", "projet": "sums"}'],
            "log.trackers[1].projet is not a setting with trackers[1].kind=wandb; allowed there: entity, group, kind",
        ),
        (["--algorithm.minibatches", "3"], "algorithm.minibatches is 3; it must divide rollout.batch_size=32"),
        (
            ["--train.optimizer.total_steps", "9"],
            "total_steps is set, but schedule is constant; it needs a decaying sch",
        ),
        (["--algorithm", "dapo"], "--algorithm: 'dapo' was given for a whole section; write --algorithm.preset dapo"),
        (["--train.lora", "true"], "such as --train.lora.rank VALUE, or --train.lora alone for its defaults"),
        (["--lr", "1e-4"], "--lr is not a setting; did you mean --train.optimizer.lr or --algorithm.critic.lr"),
        (["--no-shuffle"], "--no-shuffle is not a setting; did you mean --no-rollout.shuffle"),
        (
            ["--algorithm.weights.0.upper", "2"],
            """--algorithm.weights takes all of its value at once, as JSON, such as --algorithm.weights '[{"level":""",
        ),
        (
            ["--algorithm.rejections", "token"],
            "algorithm.rejections[0]: 'token' was given for a part of a list; each part is a mapping, such as",
        ),
        (["--rollout.n=4"], "--rollout.n=4 is not a setting; did you mean --rollout.group_size"),
        (["--qqq"], "--qqq is not a setting; --help-all lists all of them"),
        (["--rollout.shuffle", "true"], "true belongs to no setting; each value has its flag, and a switch is --NAME"),
        (["--rollout.shuffle=true"], "--rollout.shuffle is a switch; give it without a value, or as --no-rollout.shu"),
        (["--config", "nowhere.yaml"], "--config nowhere.yaml cannot be read"),
        (["--config"], "--config: expected one argument"),
        (["--config", "d.yaml", "--algorithm.preset", "gspo"], "is gspo, but d.yaml sets algorithm.loss for dapo"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(
    flags: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("d.yaml").write_text("algorithm: {preset: dapo, loss: {clip_high: 0.35}}\n")
    with pytest.raises(ConfigError) as error:
        load_config(AgentConfig, flags)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"\xff\xfe\x00", "run.yaml is not YAML"),
        (b"- steps", "run.yaml holds list; it must hold a mapping of settings"),
        (b"rollout: {batchsize: 4}", "rollout.batchsize is not a setting; allowed there: batch_size, "),
        (b"train: {lora: true}", "train.lora: True was given for a whole section; set its fields, such as --tr"),
        (b"train: {lora: {target_modules: 3}}", "train.lora.target_modules is 3: Input should be 'all-linear'\n"),
        (b"algorithm: dapo", "algorithm: 'dapo' was given for a whole section; write preset('dapo'), in a file {"),
    ],
)
def test_a_wrong_file_or_value_in_it_is_named_with_what_to_write(content: bytes, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load_config(AgentConfig, ["--config", str(path)])
    assert sentence in str(error.value)


def test_a_list_is_its_flag_given_again_and_a_section_that_may_be_unset_has_its_defaults_by_its_name_alone() -> None:
    flags = ["--engine.kind", "sglang", "--engine.addresses", "http://a:1", "--engine.addresses", "http://b:2"]
    assert load_config(AgentConfig, flags).engine == SGLangEngineConfig(addresses=("http://a:1", "http://b:2"))
    trackers = ["--log.trackers", "trackio", "--log.trackers", '{"kind": "wandb", "tags": ["a", "b"]}']
    assert load_config(AgentConfig, trackers).log.trackers == (TrackioConfig(), WandbConfig(tags=("a", "b")))
    assert load_config(AgentConfig, ["--train.lora"]).train.lora == LoRAConfig()
    assert load_config(AgentConfig, ["--train.lora", "null"]).train.lora is None
    assert load_config(AgentConfig, ["--train.lora", '{"rank": 3}']).train.lora == LoRAConfig(rank=3)


def test_a_missing_setting_is_named() -> None:
    with pytest.raises(ConfigError, match="model is missing; give it as --model VALUE"):
        load_config(Config, [])


SCRIPT = """
import asyncio, sys, threading
import arl.run.script
from arl.api.settings.run import Config
from arl.api.errors import ServerError
from arl.run.script import run_script

async def main(config):
    if config.model in ("hangs", "leaves"):
        arl.run.script._PATIENCE_S = 0.1
        asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
        print("trained")
    if config.model == "leaves":
        sys.exit("enough" if config.seed else 0)
    if config.model in ("fails", "hangs"):
        raise ServerError("no server answers") if config.seed else ValueError("the user's own")
    try:
        print("ready", flush=True)
        await asyncio.Event().wait()
    finally:
        print("asked to end", flush=True)
        if config.model == "patient":  # until its stdin is closed
            asyncio.get_running_loop().add_reader(sys.stdin, (closed := asyncio.Event()).set)
            await closed.wait()
        await asyncio.sleep(60 if config.model == "slow" else 0)
        print("saved", flush=True)

run_script(main, Config)
"""


HUNG = "1 calls in threads (asyncio.to_thread) did not return: the process ends without them"


def _script(*flags: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", SCRIPT, *flags]
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}  # as where a script writes to a file
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=environment, **pipes)


AGAIN, LOST = (
    "the same command continues from its newest checkpoint, if there is one",
    "what was not saved within checkpoint.notice_s=0.1 is lost\n",
)


@pytest.mark.parametrize(
    ("flags", "number", "code", "saved", "said"),
    [
        (["--model", "x"], signal.SIGINT, 130, "saved\n", AGAIN),
        (["--model", "x"], signal.SIGTERM, 143, "saved\n", AGAIN),
        (["--model", "x"], signal.SIGUSR1, 138, "saved\n", AGAIN),
        (["--model", "slow", "--checkpoint.notice_s", "0.1"], signal.SIGTERM, 143, "", LOST),
    ],
)
def test_a_signal_lets_the_script_clean_up_for_as_long_as_its_notice_and_exit_with_its_code(
    flags: list[str], number: signal.Signals, code: int, saved: str, said: str
) -> None:
    with _script(*flags) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, number)
        out, err = process.communicate(timeout=30)
    assert (out, process.returncode) == (f"asked to end\n{saved}", code)
    assert err == said if said == LOST else said in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("first", "second", "end"),
    [
        (signal.SIGUSR1, signal.SIGTERM, ("saved\n", 138)),
        (signal.SIGTERM, signal.SIGTERM, ("saved\n", 143)),
        (signal.SIGTERM, signal.SIGINT, ("", 130)),
    ],
)
def test_of_signals_after_the_first_only_ctrl_c_ends_the_script_unsaved(
    first: signal.Signals, second: signal.Signals, end: tuple[str, int]
) -> None:
    with _script("--model", "patient") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, first)
        assert process.stdout.readline() == "asked to end\n"
        os.kill(process.pid, second)
        if second == signal.SIGINT:
            process.wait(timeout=30)
        out, err = process.communicate(timeout=30)
    assert (out, process.returncode) == end
    assert ("a second Ctrl-C: ended before it had saved" in err) == (second == signal.SIGINT)


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--model", "x", "--stpes", "3"], 2, "error: --stpes is not a setting; did you mean --steps\n"),
        (["--model", "fails", "--seed", "1"], 1, "error: no server answers\n"),
        (["--model", "hangs", "--seed", "1"], 1, f"error: no server answers\n{HUNG}\n"),
        (["--model", "leaves", "--seed", "1"], 1, f"enough\n{HUNG}\n"),
        (["--model", "leaves", "--seed", "0"], 0, f"{HUNG}\n"),
    ],
)
def test_an_error_ends_the_script_with_one_sentence_and_its_code(flags: list[str], code: int, said: str) -> None:
    """Also what the script had said itself, and not yet written to a pipe, is not lost."""
    with _script(*flags) as process:
        assert process.communicate(timeout=30) == ("trained\n" if {"hangs", "leaves"} & {*flags} else "", said)
    assert process.returncode == code
