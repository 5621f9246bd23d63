"""A code agent: it writes a function, sees which test fails and what went wrong, and fixes it.

    python examples/agents/code_agent.py

builds a tiny model, warm-starts it on demonstrations, and trains it on made-up tasks on two CPU cores in minutes. The
model's programs run in a sandbox (docs/sandbox.md); without one, the script says what to install. The same agent with a
real model and MBPP:

    python examples/agents/code_agent.py --model Qwen/Qwen3-0.6B --dataset google-research-datasets/mbpp \\
        --subset full --engine.kind sglang --engine.addresses http://127.0.0.1:30000 \\
        --train.device cuda --train.dtype bfloat16 --run_dir runs/mbpp

It also takes a file in the form of MBPP or HumanEval (`--dataset tasks.jsonl`), or rules to find from examples
(`--dataset reasoning-gym`). Read and score its episodes without training:

    arl try examples/agents/code_agent.py --n 4
    arl eval examples/agents/code_agent.py --n 8
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import code_tasks
from code_formats import Assignment, assignment, gym_rows
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from arl import (
    Example,
    Experiment,
    ExperimentConfig,
    MultiTurnWorkflow,
    SamplingParams,
    Setup,
    Shared,
    finetuning,
    load_splits,
    load_tokenizer,
)
from arl.rewards import CallTests, Score, UnitTestReport, code_of, run_unit_tests
from arl.sandbox import Kind, Sandbox, find_sandbox

SYSTEM = "Write a Python function in a ```python block. If a test fails, mend the function and write all of it again."
GENERATED, REASONING_GYM = "generated", "reasoning-gym"
FEEDBACK_CHARS = 1000
"""The most characters of a failing test's message that the agent sees."""


class CodeAgentConfig(ExperimentConfig):
    """The code agent's settings, in addition to the settings of every run."""

    tiny_settings: ClassVar[Mapping[str, Any]] = {
        "run_dir": "runs/code",
        "steps": 32,
        "rollout": {"batch_size": 16, "group_size": 8, "max_staleness": 2},
        "train": {"optimizer": {"lr": 2e-4, "schedule": "linear", "total_steps": 32, "min_lr_ratio": 0.1}},
        "evaluation": {"every": 16},
        "max_new_tokens": 64,
    }

    dataset: str = GENERATED
    """Tasks in the form of MBPP or HumanEval (code_formats.py): a dataset on the hub, a file, a directory; `generated`
    and `reasoning-gym` make their own."""
    subset: str | None = None
    """Which configuration of a dataset on the hub."""
    eval_dataset: str | None = None
    """The dataset of held-out tasks. Unset: `dataset`'s `test` split, or the last num_held_out rows if `dataset` is a
    single file."""
    num_tasks: PositiveInt = 4096
    """How many tasks to make (`generated` and `reasoning-gym` only)."""
    num_held_out: PositiveInt = 192
    """How many held-out tasks to evaluate on, at most."""
    num_shown: NonNegativeInt = 1
    """How many tests of a task in MBPP's form the agent sees; the others only decide the reward. Of a task in
    HumanEval's form it sees the examples in the prompt."""
    sandbox: Kind = "auto"
    """Where the agent's code runs. `auto` takes bubblewrap, or else docker. `unsafe` runs on this machine,
    unconfined."""
    test_timeout_s: PositiveFloat = 5.0
    """The longest that each test may take, in seconds."""
    max_turns: PositiveInt = 3
    """How many times the agent may write the function in an episode."""
    max_new_tokens: PositiveInt = 1024
    """Tokens that each turn may have."""
    temperature: PositiveFloat = 1.0
    """The temperature that turns are sampled at."""


class Grader(Shared):
    """Tests the agent's programs in the sandbox. It is the reward, and gives the feedback.

    Each program runs once, for all tests of its task, even if several episodes write it. The reports on the last
    `num_kept` programs are kept. sandbox: opened and closed with the grader.
    """

    def __init__(self, sandbox: Sandbox, *, num_shown: int = 1, timeout_s: float = 5.0, num_kept: int = 4096) -> None:
        super().__init__()
        self._sandbox = sandbox
        self._num_shown = num_shown
        self._timeout_s = timeout_s
        self._num_kept = num_kept
        self._examined: OrderedDict[tuple[str, CallTests], Examination] = OrderedDict()

    async def _open(self, opened: AsyncExitStack) -> None:
        await opened.enter_async_context(self._sandbox)

    def assignment(self, data: Example) -> Assignment:
        return assignment(data, self._num_shown)

    async def __call__(self, answer: str, data: Example) -> Score:
        """The reward: 1 if all tests that count pass."""
        task = self.assignment(data)
        share = (await self.report(answer, task)).share_passed
        return Score(float(share == 1.0), metrics={"tests_passed": share})

    async def feedback(self, answer: str, data: Example, attempt: int) -> str | None:
        """The user's message about the first shown test that fails."""
        task = self.assignment(data)
        failures = await self._failures(answer, task)
        for test, failure in zip(task.shown, failures, strict=False):
            if failure is not None:
                return objection(test, failure)
        return None

    async def report(self, answer: str, task: Assignment) -> UnitTestReport:
        """The results of the tests that count."""
        failures = await self._failures(answer, task)
        return UnitTestReport(failures=failures[task.num_unmarked :])

    async def _failures(self, answer: str, task: Assignment) -> tuple[str | None, ...]:
        key = (code_of(answer), task.tests)
        examination = self._examined.setdefault(key, Examination())
        self._examined.move_to_end(key)
        if len(self._examined) > self._num_kept:
            self._examined.popitem(last=False)
        async with examination.running:
            if examination.report is None:
                examination.report = await run_unit_tests(self._sandbox, *key, timeout_s=self._timeout_s)
            return examination.report.failures


@dataclass(slots=True, eq=False)
class Examination:
    """The examination of one program, running or done."""

    running: asyncio.Lock = field(default_factory=asyncio.Lock)
    report: UnitTestReport | None = None


def objection(test: str, failure: str) -> str:
    text = f"This test fails:\n{test}\n{failure}"
    shown = text if len(text) <= FEEDBACK_CHARS else text[:FEEDBACK_CHARS] + "\n[cut here]"
    return shown.encode("utf-8", "replace").decode("utf-8")  # a program may print invalid text


def prompt(task: Assignment) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.question}]


def tasks(config: CodeAgentConfig) -> tuple[Sequence[Example], Sequence[Example]]:
    """Training and held-out tasks. Made-up tasks are never in both."""
    if config.dataset == GENERATED:
        held_out = code_tasks.held_out(config.num_held_out)
        return code_tasks.training(config.num_tasks, held_out), held_out
    if config.dataset == REASONING_GYM:
        held_out = gym_rows("held_out", config.num_held_out)
        return gym_rows("training", config.num_tasks, held_out), held_out
    return load_splits(config.dataset, config.eval_dataset, num_held_out=config.num_held_out, subset=config.subset)


async def prepare(config: CodeAgentConfig) -> Setup:
    grader = Grader(find_sandbox(config.sandbox), num_shown=config.num_shown, timeout_s=config.test_timeout_s)
    async with grader:
        pass  # fail before the model is made if there is no sandbox
    training, held_out = await asyncio.to_thread(tasks, config)
    for row in (*training, *held_out):
        grader.assignment(row)
    model = config.model
    if config.is_tiny:
        model = str(await asyncio.to_thread(tiny_model, config.run_dir / "model", config.num_held_out, config.seed))
    agent = MultiTurnWorkflow(
        load_tokenizer(model),
        grader,
        feedback=grader.feedback,
        prompt=lambda row: prompt(grader.assignment(row)),
        sampling=SamplingParams(max_new_tokens=config.max_new_tokens, temperature=config.temperature),
        max_turns=config.max_turns,
    )
    return Setup(model=model, workflow=agent, dataset=training, eval_dataset=held_out)


def tiny_model(directory: Path, num_held_out: int, seed: int) -> Path:
    """A tiny model, warm-started on good and bad functions for tasks that are not held out."""

    def lessons() -> list[list[Example]]:
        held_out = code_tasks.held_out(num_held_out)
        return code_tasks.lessons(lambda row: prompt(assignment(row, 1)), objection, held_out, seed)

    return finetuning.warm_start(directory, lessons, phrases=code_tasks.phrases(), seed=seed)


experiment = Experiment(config=CodeAgentConfig, prepare=prepare)

if __name__ == "__main__":
    experiment.main()
