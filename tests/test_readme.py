"""What the README promises: its workflow runs as it stands, its commands are targets, and its map is the tree."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from scripted_launch import use_fakes

from arl.api import Config, ModelRequest, ScriptedEngine
from arl.cli import load_config
from arl.engine.tiny import TURN_END, tiny_tokenizer

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TOKENIZER = tiny_tokenizer()


def only_block(language: str) -> str:
    (block,) = re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return block


def add(request: ModelRequest) -> list[int]:
    """What a model that can add says to `a + b = ?`."""
    found = re.search(r"(\d) \+ (\d) = \?", str(TOKENIZER.decode(list(request.input_ids))))
    assert found is not None
    return TOKENIZER.encode(f"{int(found[1]) + int(found[2])}{TURN_END}")


async def test_the_workflow_trains_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    TOKENIZER.save_pretrained(tmp_path / "model")
    use_fakes(monkeypatch, ScriptedEngine(add))
    script: dict[str, Any] = {"__name__": "adder"}
    exec(only_block("python"), script)
    flags = ["--model", str(tmp_path / "model"), "--run_dir", str(tmp_path / "run"), "--steps", "2"]
    flags += ["--rollout.batch_size", "4", "--rollout.group_size", "2", "--no-log.console"]
    experiment = script["experiment"]
    await experiment.train(load_config(experiment.config, flags))
    assert "held-out reward 1.000 -> 1.000 in 2 steps" in capsys.readouterr().out


def test_the_workflow_has_at_most_20_lines() -> None:
    assert len([line for line in only_block("python").splitlines() if line.strip()]) <= 20


def test_the_make_targets_exist() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"(?:^    |`)make ([\w-]+)", README, re.MULTILINE)
    assert {"quickstart", "test"} <= set(named) <= set(targets)


def test_the_flags_of_the_command_for_a_real_model_are_settings() -> None:
    """All but --dataset, which is the example's own."""
    (command,) = re.findall(r"math_agent\.py (--model .*?)\n\n", README, re.DOTALL)
    flags = shlex.split(command.replace("--dataset openai/gsm8k", "").replace("\\\n", ""))
    config = load_config(Config, flags)
    assert config.engine.kind == "sglang"
    assert config.train.device == "cuda"


def test_the_map_names_every_wing() -> None:
    mapped = {line.split()[0].rstrip("/") for line in only_block("text").splitlines()}
    wings = {str(init.parent.relative_to(ROOT)) for init in (ROOT / "arl").glob("*/__init__.py")}
    assert {path for path in mapped if not (ROOT / path).is_dir()} == set()
    assert wings <= mapped
