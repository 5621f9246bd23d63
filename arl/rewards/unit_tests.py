"""UnitTestsReward: rewards an answer's code for the unit tests that it passes, in a sandbox."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from arl.api.errors import ConfigError, DatasetError, RewardError, SandboxError
from arl.api.types import Example
from arl.api.workflow import Shared
from arl.rewards import examiner
from arl.rewards.score import Score, reported
from arl.rewards.threads import together
from arl.sandbox.contract import Limits, ProgramOutcome, Sandbox

_EXAMINER = Path(examiner.__file__).read_text(encoding="utf-8")
_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
_START_S = 10.0
"""Wall time that a program gets in addition to the time of its tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTests:
    """Tests that call the functions of an answer."""

    tests: Sequence[str]
    """Pieces of code, which fail by raising. The answer runs in another process: its functions take and return data."""
    setup: str = ""
    """Runs before each test, and may use the answer's names."""
    prompt: str = ""
    """Code that the answer continues or repeats. The answer and the tests may use its names."""
    entry_point: str | None = None
    """The name of the function that the tests call `candidate`."""

    def __len__(self) -> int:
        return len(self.tests)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintTests:
    """Pairs of a program's stdin and the text that it must print. Blanks at the ends of lines do not count."""

    pairs: Sequence[tuple[str, str]]

    def __len__(self) -> int:
        return len(self.pairs)


UnitTests = CallTests | PrintTests


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTestReport:
    failures: tuple[str | None, ...]
    """For each test why it failed, or None if it passed."""

    @property
    def share_passed(self) -> float:
        return self.failures.count(None) / len(self.failures)


def unit_tests_of(example: Example) -> UnitTests:
    """The tests of a row of MBPP or HumanEval, or of inputs and outputs (see docs/sandbox.md). Raises DatasetError."""
    match example:
        case {"test_list": tests}:
            setup = example.get("test_setup_code") or "\n".join(example.get("test_imports") or ())
            return _checked(CallTests(tests=tuple(tests), setup=setup))
        case {"entry_point": str(entry_point), "test": str(test), "prompt": str(prompt)}:
            return CallTests(tests=(f"{test}\ncheck(candidate)",), setup="", prompt=prompt, entry_point=entry_point)
        case {"tests": tests}:
            return _checked(PrintTests(pairs=tuple((pair["input"], pair["output"]) for pair in tests)))
        case _:
            raise DatasetError(
                f"the example has the columns {sorted(example)}; unit tests need test_list (as in MBPP), prompt, test "
                "and entry_point (as in HumanEval), or tests with an input and an output each"
            )


def code_of(answer: str) -> str:
    """The last fenced block of an answer, or the whole answer if it has none. An unclosed block runs to the end."""
    blocks = _FENCE.findall(answer)
    return blocks[-1] if blocks else answer


async def run_unit_tests(
    sandbox: Sandbox, code: str, tests: UnitTests, *, limits: Limits | None = None, timeout_s: float = 5.0
) -> UnitTestReport:
    """Run tests on code, in an open sandbox. Raises SandboxError if no program could be run.

    limits: of each program: one for all CallTests, or one for each pair of PrintTests. wall_s and cpu_s follow from
    timeout_s, the longest that each test may take.
    """
    limits = limits or Limits()
    if isinstance(tests, PrintTests):
        each = replace(limits, wall_s=timeout_s, cpu_s=timeout_s)
        outcomes = await together(sandbox.run(code, stdin=given, limits=each) for given, _ in tests.pairs)
        failures: list[str | None] = []
        for outcome, (_, expected) in zip(outcomes, tests.pairs, strict=True):
            if not outcome.succeeded:
                failures.append(f"{_ended(outcome)}\n{outcome.stderr[-500:]}".strip())
            elif _lines(outcome.stdout) != _lines(expected):
                failures.append(f"it printed {outcome.stdout[:200]!r}, not {expected[:200]!r}")
            else:
                failures.append(None)
        return UnitTestReport(failures=tuple(failures))
    token = secrets.token_hex(16)
    task = {"answer": _program(code, tests), "tests": [*tests.tests], "setup": tests.setup, "prompt": tests.prompt}
    task |= {"entry_point": tests.entry_point, "timeout_s": timeout_s, "token": token}
    total_s = timeout_s * len(tests) + _START_S
    outcome = await sandbox.run(
        _EXAMINER, stdin=json.dumps(task), limits=replace(limits, wall_s=total_s, cpu_s=total_s)
    )
    return UnitTestReport(failures=_verdict(outcome, token, len(tests)))


class UnitTestsReward(Shared):
    """The share of an example's unit tests that an answer's code passes. With `grade="all"`, 1 if all pass, else 0.

        reward = UnitTestsReward(find_sandbox(), limits=Limits(memory_bytes=256 << 20))

    The code is the last fenced block of the answer. sandbox: opened and closed with the reward. tests_of: returns the
    tests of an example. limits, timeout_s: see run_unit_tests. The share is logged as `episode/tests_passed`.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        tests_of: Callable[[Example], UnitTests] = unit_tests_of,
        grade: Literal["share", "all"] = "share",
        limits: Limits | None = None,
        timeout_s: float = 5.0,
    ) -> None:
        super().__init__()
        if grade not in ("share", "all") or timeout_s <= 0:
            raise ConfigError(f"grade is {grade!r} and timeout_s {timeout_s}; they must be share or all, and above 0")
        self._sandbox = sandbox
        self._tests_of = tests_of
        self._grade = grade
        self._limits = limits
        self._timeout_s = timeout_s

    async def _open(self, opened: AsyncExitStack) -> None:
        await opened.enter_async_context(self._sandbox)

    @reported
    async def __call__(self, answer: str, data: Example) -> Score:
        """Raises DatasetError for an example without tests, RewardError if the sandbox fails."""
        tests = self._tests_of(data)
        try:
            report = await run_unit_tests(
                self._sandbox, code_of(answer), tests, limits=self._limits, timeout_s=self._timeout_s
            )
        except SandboxError as failure:
            raise RewardError(f"unit tests could not be run: {failure}") from failure
        share = report.share_passed
        return Score(share if self._grade == "share" else float(share == 1.0), metrics={"tests_passed": share})


def _checked(tests: UnitTests) -> UnitTests:
    if not len(tests):
        raise DatasetError("an example has no unit tests; leave it out")
    return tests


def _program(code: str, tests: CallTests) -> str:
    """The prompt and the code. Code that defines the entry point itself replaces the prompt's."""
    if not tests.prompt:
        return code
    is_whole = re.search(rf"^(async\s+)?(def|class)\s+{re.escape(tests.entry_point or '')}\b", code, re.MULTILINE)
    return f"{tests.prompt}\n{code}" if is_whole else tests.prompt + code


def _verdict(outcome: ProgramOutcome, token: str, num_tests: int) -> tuple[str | None, ...]:
    """The examiner's verdict, or why there is none. The verdict begins with a token that only the examiner knows."""
    _, is_said, said = outcome.stdout.partition(token)
    if is_said and outcome.succeeded:
        with suppress(ValueError):  # an examinee may write there too
            messages: list[str | None] = json.loads(said.partition("\n")[0])
            return tuple(messages)
    return (f"the tests did not end: {_ended(outcome)}",) * num_tests


def _ended(outcome: ProgramOutcome) -> str:
    return f"ended by {outcome.ended_by}" if outcome.exit_code is None else f"exit code {outcome.exit_code}"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
