"""Failed episodes: each kind is told once, with a traceback where it helps, and too many of them end the run."""

import json
import traceback
from contextlib import suppress
from pathlib import Path

import pytest

from arl.api.errors import FailureBudgetError, PromptTooLongError, RunFileError
from arl.api.types import SamplingParams
from arl.rollout.episode_events import FailureLog, place_of_error
from arl.rollout.monitors import FailureBudget
from arl.runtime.processes.rpc import OtherTracebackError


def raised(error: Exception) -> Exception:
    """The error, with a traceback."""
    try:
        raise error
    except type(error) as caught:
        return caught


def test_equal_failures_are_told_once_and_then_when_there_are_ten_times_as_many(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their class and their place are equal, and their messages are not."""
    path = tmp_path / "episodes.log"
    failures = FailureLog(path)
    for number in range(1, 3922):
        failures.note(raised(ValueError(f"bad luck {number}")), f"episode {number}", "it runs again")
    first, *later = caplog.records
    assert first.getMessage() == "episode 1 failed with ValueError: bad luck 1; it runs again"
    assert first.exc_info is not None
    assert [record.getMessage() for record in later] == [
        f"the same failure {more} more times, {total} in all; the last one: episode {number} failed with ValueError: "
        f"bad luck {number}; it runs again (traceback in {path})"
        for more, total, number in (("9", "10", 10), ("90", "100", 100), ("900", "1,000", 1000))
    ]
    assert path.read_text().count("Traceback") == 4
    failures.sum_up()
    (place,) = {place_of_error(raised(ValueError()))}
    summed = f"attempts at episodes that failed: 3,921 with ValueError at {place}; tracebacks are in {path}"
    assert caplog.messages[-1] == summed


def test_failures_of_another_class_or_from_another_place_are_others(caplog: pytest.LogCaptureFixture) -> None:
    failures = FailureLog()
    failures.sum_up()
    elsewhere = PromptTooLongError()
    with suppress(PromptTooLongError):
        raise elsewhere
    for error in (ValueError(), PromptTooLongError(), PromptTooLongError()):
        failures.note(raised(error), "an episode", "it runs again")
    failures.note(elsewhere, "an episode", "it runs again")
    assert [record.exc_info is not None for record in caplog.records] == [True, False, False], "arl's own need none"
    failures.sum_up()
    counted = sorted(line.partition(" at ")[0] for line in caplog.messages[-1].partition(": ")[2].split(", "))
    assert counted == ["1 with PromptTooLongError", "1 with ValueError", "2 with PromptTooLongError"]


def test_the_place_of_a_failure_is_in_the_users_code_also_if_a_library_or_another_process_raised() -> None:
    def of(code: str, file: str) -> Exception:
        try:
            exec(compile(code, file, "exec"), {"json": json, "call": lambda: SamplingParams(max_new_tokens=-1)})
        except Exception as error:  # noqa: BLE001 - whatever it is
            return error
        raise AssertionError

    assert place_of_error(of("\n\njson.loads('{')", "/home/me/agent.py")) == "agent.py:3"
    assert place_of_error(of("call()", "/home/me/agent.py")).startswith("test_failed_episodes.py:")
    sent = of("\n1 / 0", "/home/me/agent.py")
    text = "".join(traceback.format_exception(sent))
    sent.__traceback__, sent.__cause__ = None, OtherTracebackError(f"in worker 0:\n{text}")
    assert place_of_error(raised(sent)) == "agent.py:2"
    assert place_of_error(ValueError("never raised")) == ""


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where a directory should be")
    with pytest.raises(RunFileError, match=r"logs/episodes\.log, which keeps the tracebacks of episodes, cannot be"):
        FailureLog(tmp_path / "logs" / "episodes.log").note(ValueError(), "an episode", "it runs again")


def test_the_failure_budget_looks_at_the_last_full_window_and_ends_the_run_from_its_first_failure() -> None:
    budget, first = FailureBudget(max_failure_rate=0.5, window=4), ValueError("first")
    for error in [None, KeyError("of old"), KeyError("of old"), None] * 9 + [None, first, KeyError("second")]:
        budget.record(error)
    with pytest.raises(FailureBudgetError, match=r"3 of the last 4 episodes failed.*0\.5.*ValueError: first") as ended:
        budget.record(KeyError("third"))
    assert ended.value.__cause__ is first


@pytest.mark.parametrize(("rate", "enough"), [(0.2, 6), (0.5, 14), (0.8, 42)])
def test_a_run_whose_first_episodes_all_fail_ends_when_the_allowed_rate_does_not_explain_it(
    rate: float, enough: int
) -> None:
    assert rate**enough <= 1e-4 < rate ** (enough - 1)
    budget, first = FailureBudget(rate), NameError("name 'tokeniser' is not defined")
    for error in (first, *[KeyError()] * (enough - 2)):
        budget.record(error)
    with pytest.raises(FailureBudgetError, match=rf"all of the first {enough} .*tokeniser") as ended:
        budget.record(KeyError())
    assert ended.value.__cause__ is first


def test_one_episode_that_works_and_a_rate_of_1_leave_the_first_failures_alone() -> None:
    some, any_number = FailureBudget(0.5), FailureBudget(1.0)
    for error in [KeyError()] * 13 + [None] + [KeyError()] * 14:
        some.record(error)
    for _ in range(200):
        any_number.record(KeyError())
