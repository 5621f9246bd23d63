"""The code agent's episodes, rewards, feedback and refusals, without a model."""

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import islice
from pathlib import Path
from typing import Any, Self

import code_agent
import code_tasks
import pytest
import pytest_asyncio
from code_agent import FEEDBACK_CHARS, CodeAgentConfig, Grader, prepare, prompt
from code_tasks import GIVEN_UP, fenced
from played import TOKENIZER, played
from sandbox.conftest import PATIENT, go_without

from arl.api.errors import DatasetError, SandboxError
from arl.api.types import Example, SamplingParams, Trajectory
from arl.engine.tiny import TinyShape, write_tiny_model
from arl.sandbox import BubblewrapSandbox, ProgramOutcome, Sandbox
from arl.workflow.agent import MultiTurnWorkflow

MBPP = {"text": "Write double(x).", "test_list": ["assert double(2) == 4", "assert double('ab') == 'abab'"]}
HUMAN_EVAL = {
    "prompt": 'def half(x):\n    """Half of x.\n\n    >>> half(4)\n    2\n    """\n',
    "canonical_solution": "    return x // 2\n",
    "test": "def check(candidate):\n    assert candidate(10) == 5\n    assert candidate(7) == 3\n",
    "entry_point": "half",
}
RIGHT, WRONG, TABLE = (fenced(f"def double(x):\n    return {value}") for value in ("x + x", "x + 1", "{2: 4}[x]"))
FAILURE = "This test fails:\nassert double(2) == 4\nAssertionError, where the last call gave 3"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bubblewrap() -> AsyncIterator[Sandbox]:
    try:
        async with BubblewrapSandbox(limits=PATIENT) as sandbox:
            yield sandbox
    except SandboxError as reason:
        go_without(reason)


in_the_module = pytest.mark.asyncio(loop_scope="module")


async def episode(sandbox: Sandbox, *answers: str, data: Example = MBPP) -> tuple[Trajectory, str]:
    """Run the agent with a model that says `answers`; also the text of all that it saw and said."""
    grader = Grader(sandbox, timeout_s=20)
    agent = MultiTurnWorkflow(
        TOKENIZER,
        grader,
        feedback=grader.feedback,
        prompt=lambda row: prompt(grader.assignment(row)),
        sampling=SamplingParams(max_new_tokens=500),
        max_turns=3,
    )
    (made,) = await played(agent, data, *answers)
    return made


@in_the_module
async def test_a_failing_test_is_shown_and_a_mended_function_is_rewarded(bubblewrap: Sandbox) -> None:
    trajectory, text = await episode(bubblewrap, WRONG, RIGHT)
    assert f"user\n{FAILURE}<|im_end|>" in text
    assert (trajectory.reward, trajectory.metrics) == (1.0, {"turns": 2, "tests_passed": 1.0, "context_full": 0})


@in_the_module
@pytest.mark.parametrize(
    ("answers", "told", "share_passed"),
    [((TABLE,), 0, 0.5), ((WRONG, "I give up.", WRONG), 1, 0.0)],
    ids=["passes only what was shown", "never right"],
)
async def test_a_function_that_fails_a_test_has_no_reward(
    bubblewrap: Sandbox, answers: tuple[str, ...], told: int, share_passed: float
) -> None:
    trajectory, text = await episode(bubblewrap, *answers)
    assert (text.count(FAILURE), text.count("SyntaxError: invalid syntax")) == (told, told)
    assert "double('ab')" not in text
    assert trajectory.reward == 0.0
    assert trajectory.metrics == {"turns": len(answers), "tests_passed": share_passed, "context_full": 0}


@in_the_module
async def test_of_human_eval_the_examples_are_what_is_mended_by(bubblewrap: Sandbox) -> None:
    wrong, right = "```python\n    return x / 4\n```", fenced("def half(x):\n    return x // 2")
    trajectory, text = await episode(bubblewrap, wrong, right, data=HUMAN_EVAL)
    assert "fails:\nassert half(4) == 2\nAssertionError, where the last call gave 1.0" in text
    assert (trajectory.reward, trajectory.metrics["turns"]) == (1.0, 2)


@in_the_module
async def test_demonstrations_say_of_a_failure_what_the_sandbox_says(bubblewrap: Sandbox) -> None:
    grader = Grader(bubblewrap, timeout_s=20)
    ambiguous = (task for task in code_tasks.tasks(seed=5) if len(task.readings()) == 2)
    tried = [(task, reading.code) for task in islice(ambiguous, 4) for reading in task.readings()]
    empty = next(
        (task, code)
        for task in code_tasks.tasks(seed=5)
        for code in [task.code.replace("in xs]", "in xs if x > 99]")]
        if task.argument == "xs" and "ValueError" in (task.failure(code) or "")
    )
    for task, code in (*tried, empty, (tried[0][0], GIVEN_UP)):
        failure = task.failure(code)
        expected = None if failure is None else code_agent.objection(task.tests[0], failure)
        assert await grader.feedback(code if code == GIVEN_UP else fenced(code), task.row, 0) == expected


class Examined(list[str]):
    """A sandbox that finds code wrong where it is `wrong`; and the programs that it was given."""

    def __init__(self, *, fails: int = 0) -> None:
        super().__init__()
        self.fails = fails
        self.num_open = 0

    async def __aenter__(self) -> Self:
        self.num_open += 1
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.num_open -= 1

    async def run(self, program: str, *, stdin: str = "", **_: Any) -> ProgramOutcome:
        task = json.loads(stdin)
        self.append(task["answer"])
        await asyncio.sleep(0)
        if self.fails:
            self.fails -= 1
            raise SandboxError("the sandbox is gone")
        failures = [("no " * 999 if task["answer"] == "wrong" else None) for _ in task["tests"]]
        said = f"\n{task['token']}{json.dumps(failures)}\n"
        return ProgramOutcome(exit_code=0, stdout=said, stderr="", wall_s=0.1, ended_by="exit")


async def test_a_program_that_a_group_writes_many_times_runs_once() -> None:
    sandbox = Examined()
    grader = Grader(sandbox)
    async with asyncio.TaskGroup() as group:
        for answer in ("right", "wrong") * 8:
            group.create_task(grader.feedback(answer, MBPP, 0))
            group.create_task(grader(answer, MBPP))
    assert sorted(sandbox) == ["right", "wrong"]
    await grader("right", {**MBPP, "test_list": ["assert double(3) == 6"]})
    assert len(sandbox) == 3


async def test_only_the_last_reports_are_kept_and_a_sandbox_that_failed_is_asked_again() -> None:
    sandbox = Examined(fails=1)
    grader = Grader(sandbox, num_kept=2)
    with pytest.raises(SandboxError, match="is gone"):
        await grader.feedback("a", MBPP, 0)
    for answer in ("a", "b", "a", "c", "a", "b"):
        assert (await grader(answer, MBPP)).value == 1.0
    assert list(sandbox) == ["a", "a", "b", "c", "b"]
    said = await grader.feedback("wrong", MBPP, 0)
    assert said is not None
    assert len(said) < FEEDBACK_CHARS + 50
    assert said.endswith("[cut here]")


async def test_without_a_sandbox_it_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r"(?s)no sandbox was found.*bubblewrap.*kind='unsafe'") as refused:
        await prepare(CodeAgentConfig(run_dir=tmp_path / "run"))
    assert "docker" in str(refused.value)
    assert not (tmp_path / "run").exists()


async def test_a_file_gives_the_tasks_and_a_row_of_another_form_is_an_error_at_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    settings = {"dataset": str(path), "num_held_out": 1, "sandbox": "unsafe"}
    path.write_text("".join(json.dumps(row) + "\n" for row in (MBPP, {"question": "?"}, MBPP)))
    with pytest.raises(DatasetError, match=r"\['question'\]"):
        await prepare(CodeAgentConfig(model="none", **settings))
    path.write_text("".join(json.dumps(row) + "\n" for row in (MBPP, MBPP, HUMAN_EVAL)))
    model = write_tiny_model(tmp_path / "model", shape=TinyShape(hidden_size=32, num_layers=1, head_dim=8))
    setup = await prepare(CodeAgentConfig(model=str(model), **settings))
    assert [list(setup.dataset), list(setup.eval_dataset or ())] == [[MBPP, MBPP], [HUMAN_EVAL]]
    assert isinstance(setup.workflow, MultiTurnWorkflow)
    assert "Complete the function" in setup.workflow.messages(HUMAN_EVAL)[1]["content"]
