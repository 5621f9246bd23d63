"""Failed episodes: one line each, a traceback where it helps, and an end where they are too many."""

from pathlib import Path

import pytest

from arl.api.errors import FailureBudgetError, PromptTooLongError, RunFileError
from arl.rollout.episode import FailureLog
from arl.rollout.watches import FailureBudget


def raised(error: Exception) -> Exception:
    """The error, with a traceback."""
    try:
        raise error
    except type(error) as caught:
        return caught


def test_an_error_in_the_users_code_shows_its_traceback_a_few_times_and_then_where_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "episodes.log"
    failures = FailureLog(path)
    for number in range(5):
        failures.note(raised(ValueError(f"bad luck {number}")), "an episode", "it runs again")
    failures.note(raised(KeyError("of another type")), "an episode", "it runs again")
    assert [record.exc_info is not None for record in caplog.records] == [True, True, True, False, False, True]
    assert caplog.records[3].getMessage().endswith(f"(traceback in {path})")
    assert path.read_text().count("Traceback") == 6


def test_many_failures_of_a_type_do_not_flood_the_log_but_fill_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failures = FailureLog(tmp_path / "episodes.log")
    for number in range(1, 61):
        failures.note(PromptTooLongError(f"prompt {number}"), "an episode", "it runs again")
    told = [line.split(": prompt ")[1].split(";")[0] for line in caplog.messages if ": prompt " in line]
    assert told == [*map(str, range(1, 21)), "40", "60"]
    assert "from here on, one line for every 20 attempts that fail with PromptTooLongError" in caplog.messages
    assert (tmp_path / "episodes.log").read_text().count("an episode failed") == 60


def test_failures_are_summed_up_by_type_where_there_are_any(caplog: pytest.LogCaptureFixture) -> None:
    failures = FailureLog()
    failures.sum_up()
    for error in (ValueError(), PromptTooLongError(), PromptTooLongError()):
        failures.note(error, "an episode", "it runs again")
    failures.sum_up()
    assert caplog.messages[3:] == ["attempts at episodes that failed: 2 with PromptTooLongError, 1 with ValueError"]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where a directory should be")
    with pytest.raises(RunFileError, match=r"logs/episodes\.log, which keeps the tracebacks of episodes, cannot be"):
        FailureLog(tmp_path / "logs" / "episodes.log").note(ValueError(), "an episode", "it runs again")


def test_the_failure_budget_looks_at_the_last_full_window_and_ends_the_run_from_its_first_failure() -> None:
    budget, first = FailureBudget(max_failure_rate=0.5, window=4), ValueError("first")
    for error in [KeyError("of old"), KeyError("of old"), None, None] * 9 + [None, first, KeyError("second")]:
        budget.record(error)
    with pytest.raises(FailureBudgetError, match=r"3 of the last 4 episodes failed.*0\.5.*ValueError: first") as ended:
        budget.record(KeyError("third"))
    assert ended.value.__cause__ is first
