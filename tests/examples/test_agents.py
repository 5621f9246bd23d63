"""Every example is an experiment that takes the user's dataset, and makes a tiny model that knows its words."""

import inspect
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import code_agent
import math_agent
import math_tasks
import multi_agent
import multi_tasks
import openai_sdk_agent
import pytest
import search_agent
import search_tasks
import terminal_agent
import terminal_tasks
from multi_agent import MultiAgentConfig, SolverAndChecker
from multi_tasks import Teacher
from played import TOKENIZER, played

from arl.api.errors import DatasetError
from arl.api.types import Example, SamplingParams
from arl.cli.command import load_experiment
from arl.engine.model_files import load_tokenizer
from arl.run.experiment import ExperimentConfig, Setup
from arl.run.finetuning import warm_starts
from arl.run.finetuning.warm_starts import tool_call
from arl.run.script import load_config
from arl.workflow.call_formats import parse_tool_calls

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
    monkeypatch.setattr(warm_starts, "finetune", lambda *_, **__: None)
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
        (
            terminal_agent,
            terminal_tasks,
            {"num_tasks": 20, "num_held_out": 5, "sandbox": "docker"},
            {tool_call("bash", command="ls barn"): 4, tool_call("bash", command="wc -l < barn/wolf > moss"): 8},
        ),
    ],
    ids=["multi", "search", "openai", "terminal"],
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


ENTRY = next(e for e in math_tasks.held_out(50) if e["metadata"]["source_dataset"] == "products")
EXPRESSION = math_tasks.expressions(ENTRY)[0]
CALL = tool_call("calculator", expression=EXPRESSION)


def pair(*, max_attempts: int = 2) -> SolverAndChecker:
    return SolverAndChecker(
        tokenizer=TOKENIZER,
        score=math_agent.answer_score(MultiAgentConfig()),
        sampling=SamplingParams(max_new_tokens=500),
        max_attempts=max_attempts,
        max_turns=6,
    )


async def test_both_calculate_and_are_paid_each_for_its_own() -> None:
    made = await played(pair(), ENTRY, CALL, f"It is {ENTRY['answer']}.", CALL, "ACCEPT")
    assert {trajectory.role: trajectory.reward for trajectory, _ in made} == {"solver": 1.0, "checker": 1.0}
    assert all(f"<tool_response>\n{ENTRY['answer']}\n</tool_response>" in text for _, text in made)
    metrics = {name: value for trajectory, _ in made for name, value in trajectory.metrics.items()}
    assert metrics["solver_reward"] == metrics["right_verdicts"] == metrics["accepted"] == 1.0


async def test_the_solver_reads_the_objection_and_the_checker_the_next_answer() -> None:
    made = await played(pair(), ENTRY, "-1", "It is too little. REJECT", ENTRY["answer"], "ACCEPT")
    (solver, solver_saw), (checker, checker_saw) = made
    assert (solver.reward, checker.reward, solver.metrics["attempts"]) == (1.0, 1.0, 2)
    assert "A checker rejected your answer:\nIt is too little. REJECT" in solver_saw
    assert f"Question:\n{ENTRY['question']}\n\nAnswer:\n-1" in checker_saw
    assert f"The next answer:\n{ENTRY['answer']}" in checker_saw


@pytest.mark.parametrize(
    ("said", "solver", "checker"),
    [
        (["-1", "ACCEPT"], 0.0, 0.0),
        (["right", "REJECT", "right", "I would not REJECT it: ACCEPT"], 1.0, 0.5),
        (["-1", "hm", "-1", "REJECT"], 0.0, 0.5),
    ],
)
async def test_the_checker_is_paid_for_being_right(said: list[str], solver: float, checker: float) -> None:
    answers = [ENTRY["answer"] if text == "right" else text for text in said]
    made = await played(pair(), ENTRY, *answers)
    assert {t.role: t.reward if t.role == "checker" else float(t.reward == 1) for t, _ in made} == {
        "solver": solver,
        "checker": checker,
    }


@pytest.fixture
def teacher(monkeypatch: pytest.MonkeyPatch) -> Teacher:
    monkeypatch.setattr(multi_tasks, "NUM_CAREFUL", 100)
    monkeypatch.setattr(multi_tasks, "NUM_MIXED", 100)
    return Teacher(multi_agent.CALCULATOR, math_tasks.held_out(192), seed=0)


def spoken(demonstration: Example) -> list[str]:
    return [message["content"] for message in demonstration["messages"] if message["role"] == "assistant"]


def is_hasty(demonstration: Example) -> bool:
    return not parse_tool_calls(spoken(demonstration)[0])


def test_careful_solvers_and_checkers_take_turns_and_are_right(teacher: Teacher) -> None:
    careful, mixed = teacher.lessons()
    assert [len(careful), len(mixed)] == [200, 200]
    for solver, checker in zip(careful[::2], careful[1::2], strict=True):
        if is_hasty(solver) or is_hasty(checker):
            continue
        answer = spoken(solver)[-1]
        proposed = checker["messages"][1]["content"].split("Answer:\n")[1].split("\n")[0]
        call, verdict, *again = spoken(checker)
        assert len(parse_tool_calls(call)) == 1
        assert (checker["messages"][3]["content"] == "0") == (proposed == answer)
        assert verdict == ("ACCEPT" if proposed == answer else "REJECT")
        assert bool(again) == (verdict == "REJECT")
        if again:
            proposed = checker["messages"][5]["content"].split("The next answer:\n")[1].split("\n")[0]
            assert again[1] == ("ACCEPT" if proposed == answer else "REJECT")


def test_lessons_have_the_workflows_prompts_and_nothing_held_out(teacher: Teacher) -> None:
    lessons = teacher.lessons()
    openings = {demonstration["messages"][0]["content"] for lesson in lessons for demonstration in lesson}
    assert openings == {multi_tasks.SOLVER, multi_tasks.CHECKER}
    asked = {demonstration["messages"][1]["content"] for lesson in lessons for demonstration in lesson}
    assert not any(entry["question"] in asked for entry in math_tasks.held_out(192))
