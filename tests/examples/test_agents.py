"""Every example is an experiment that takes the user's dataset, and makes a tiny model that knows its words."""

import inspect
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import code_agent
import code_tasks
import math_agent
import multi_agent
import multi_tasks
import openai_sdk_agent
import pytest
import search_agent
import search_tasks
import warm_start
from warm_start import tool_call

from arl.api.errors import DatasetError
from arl.cli import load_config
from arl.commands.command import load_experiment
from arl.engine.fsdp.model import load_tokenizer
from arl.experiment import ExperimentConfig, Setup

EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py") if "experiment.main()" in path.read_text())


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_has_settings_of_its_own_for_the_tiny_model_alone(name: str) -> None:
    assert "math_agent.py" in SCRIPTS
    config = load_experiment(EXAMPLES / name).config
    tiny, other = load_config(config, []), load_config(config, ["--model", "another"])
    assert isinstance(tiny, ExperimentConfig)
    assert tiny.is_tiny
    assert (tiny.steps, tiny.max_new_tokens) == tuple(
        config.tiny_settings[name] for name in ("steps", "max_new_tokens")
    )
    assert other.max_new_tokens == 1024
    assert tiny.run_dir != other.run_dir


QUESTION = {"question": "1 + 1?", "answer": "#### 2"}
DATASETS = [
    (math_agent.MathAgentConfig, math_agent.questions, QUESTION),
    (search_agent.SearchAgentConfig, search_agent.questions, QUESTION | {"context": []}),
    (code_agent.CodeAgentConfig, code_agent.tasks, {"text": "Write f.", "test_list": ["assert f()"]}),
]


def rows_of(path: Path, row: dict[str, Any], count: int = 3) -> str:
    path.write_text((json.dumps(row) + "\n") * count)
    return str(path)


@pytest.mark.parametrize(("config", "read", "row"), DATASETS)
def test_a_file_gives_rows_to_train_on_and_rows_held_out(config: Any, read: Any, row: Any, tmp_path: Path) -> None:
    training, held_out = read(config(dataset=rows_of(tmp_path / "rows.jsonl", row), num_held_out=1))
    assert [len(training), len(held_out)] == [2, 1]
    splits = [rows_of(tmp_path / f"{name}.jsonl", row, size) for name, size in (("a", 5), ("b", 4))]
    training, held_out = read(config(dataset=splits[0], eval_dataset=splits[1]))
    assert [len(training), len(held_out)] == [5, 4]


@pytest.mark.parametrize(("config", "read", "row"), DATASETS[:2])
def test_a_row_without_a_needed_column_is_refused(config: Any, read: Any, row: Any, tmp_path: Path) -> None:
    *_, column = row
    path = rows_of(tmp_path / "rows.jsonl", {name: value for name, value in row.items() if name != column})
    with pytest.raises(DatasetError, match=f"'{column}'"):
        read(config(dataset=path, num_held_out=1))


async def prepared(agent: ModuleType, tasks: ModuleType, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Setup:
    """As a run prepares it, but its model learns nothing, from a few demonstrations."""
    monkeypatch.setattr(warm_start.finetuning, "finetune", lambda *_, **__: None)
    for name in ("NUM_CAREFUL", "NUM_MIXED"):
        monkeypatch.setattr(tasks, name, 32)
    config = agent.experiment.config(**settings)
    setup = agent.prepare(config)
    setup = await setup if inspect.isawaitable(setup) else setup
    assert setup.model == str(config.run_dir / "model")
    assert 0 < len(setup.eval_dataset) <= config.num_held_out
    return setup


@pytest.mark.parametrize(
    ("agent", "tasks", "settings", "num_tokens"),
    [
        (multi_agent, multi_tasks, {"num_questions": 50}, {"ACCEPT": 1, "REJECT": 1}),
        (search_agent, search_tasks, {}, {tool_call("search", query="Amber Harp"): 4}),
        (
            openai_sdk_agent,
            openai_sdk_agent,
            {},
            {tool_call("find_order", number=4821): 4, "Amber Kettle": 1, "Norwick": 1, "891": 2},
        ),
    ],
    ids=["multi", "search", "openai"],
)
async def test_the_tiny_models_words_and_boilerplate_are_few_tokens(
    agent: ModuleType,
    tasks: ModuleType,
    settings: dict[str, int],
    num_tokens: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = load_tokenizer((await prepared(agent, tasks, monkeypatch, run_dir=tmp_path, **settings)).model)
    assert {text: len(tokenizer.encode(text)) for text in num_tokens} == num_tokens


async def test_the_tiny_code_agent_has_the_tokens_for_every_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"run_dir": tmp_path, "num_tasks": 40, "num_held_out": 20, "sandbox": "unsafe"}
    setup = await prepared(code_agent, code_tasks, monkeypatch, **settings)
    tokenizer, limit = load_tokenizer(setup.model), load_config(code_agent.CodeAgentConfig, []).max_new_tokens
    assert all(len(tokenizer.encode(code_tasks.fenced(row["code"]))) < limit for row in setup.dataset)
