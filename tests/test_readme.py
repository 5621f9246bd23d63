"""What the README promises: its code runs as it stands, its commands are targets, and its map names the wings."""

import json
import math
import re
import shlex
import shutil
from pathlib import Path
from unittest.mock import create_autospec

import pytest
from scripted_launch import use_fakes

import arl
from arl.api.fakes import ScriptedEngine
from arl.api.settings.run import Config
from arl.api.types import ModelRequest
from arl.engine.tiny import TURN_END, tiny_tokenizer
from arl.run.script import load_config

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TOKENIZER = tiny_tokenizer()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


THREE_LINES, ADDER = blocks("python")


def add(request: ModelRequest) -> list[int]:
    """What a model that can add says to `a + b = ?`."""
    found = re.search(r"(\d) \+ (\d) = \?", str(TOKENIZER.decode(list(request.input_ids))))
    assert found is not None
    return TOKENIZER.encode(f"{int(found[1]) + int(found[2])}{TURN_END}")


def test_the_adder_trains_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    TOKENIZER.save_pretrained("runs/quickstart/trained")
    use_fakes(monkeypatch, ScriptedEngine(add))
    exec(ADDER.replace("steps=50", "steps=2, batch_size=4, group_size=2"), {"__name__": "adder"})
    assert "held-out reward 1.000 ± 0.000 -> 1.000 ± 0.000 in 2 steps" in capsys.readouterr().out


@pytest.mark.slow
def test_the_adder_learns_on_the_quickstarts_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `make quickstart`, which comes first."""
    trained = ROOT / "runs" / "quickstart" / "trained"
    if not trained.is_dir():
        pytest.skip("needs the trained model: make quickstart")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, "runs/quickstart/trained")
    exec(ADDER, {"__name__": "adder"})
    summary = json.loads(Path("runs/run/summary.json").read_text())
    error = math.hypot(*(summary[f"eval_standard_error_{when}"] for when in ("before", "after")))
    assert summary["eval_reward_after"] - summary["eval_reward_before"] > 2 * error


def test_the_three_lines_ask_for_what_train_takes_and_the_adder_has_12_with_one_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arl, "train", create_autospec(arl.train))
    exec(THREE_LINES, {})
    three, adder = ([line for line in block.splitlines() if line.strip()] for block in (THREE_LINES, ADDER))
    assert (len(three), len(adder) <= 12) == (3, True)
    assert [line for line in adder if "import" in line] == ["import arl"]


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
    mapped = {line.split()[0].rstrip("/") for line in blocks("text")[0].splitlines()}
    wings = {str(init.parent.relative_to(ROOT)) for init in (ROOT / "arl").glob("*/__init__.py")}
    assert {path for path in mapped if not (ROOT / path).is_dir()} == set()
    assert wings <= mapped
