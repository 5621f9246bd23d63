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


def test_a_failure_that_arl_knows_is_one_line_and_its_traceback_is_in_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "logs" / "episodes.log"
    FailureLog(path).note(
        raised(PromptTooLongError("600 tokens\nof 512")), "episode 1 (attempt 1 of 2)", "it runs again"
    )
    (record,) = caplog.records
    line = "episode 1 (attempt 1 of 2) failed with PromptTooLongError: 600 tokens of 512; it runs again"
    assert (record.getMessage(), record.exc_info) == (line, None)
    assert path.read_text().startswith(f"{line}\nTraceback (most recent call last):")


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


def test_failures_are_summed_up_by_type(caplog: pytest.LogCaptureFixture) -> None:
    failures = FailureLog()
    failures.sum_up()
    assert not caplog.records
    for error in (ValueError(), PromptTooLongError(), PromptTooLongError()):
        failures.note(error, "an episode", "it runs again")
    caplog.clear()
    failures.sum_up()
    assert caplog.messages == ["attempts at episodes that failed: 2 with PromptTooLongError, 1 with ValueError"]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where a directory should be")
    with pytest.raises(RunFileError, match=r"logs/episodes\.log, which keeps the tracebacks of episodes, cannot be"):
        FailureLog(tmp_path / "logs" / "episodes.log").note(ValueError(), "an episode", "it runs again")


FIRST = ValueError("first")


def test_the_failure_budget_ends_the_run_from_the_first_failure() -> None:
    budget = FailureBudget(max_failure_rate=0.5, window=4)
    for error in (None, FIRST, KeyError("second")):
        budget.record(error)
    with pytest.raises(FailureBudgetError, match=r"3 of the last 4 episodes failed.*0\.5.*ValueError: first") as ended:
        budget.record(FIRST)
    assert ended.value.__cause__ is FIRST


def test_the_failure_budget_looks_at_the_last_window_alone() -> None:
    budget = FailureBudget(max_failure_rate=0.5, window=4)
    for error in (FIRST, None, None, FIRST) * 20:
        budget.record(error)


def test_failures_before_the_first_full_window_do_not_end_the_run() -> None:
    budget = FailureBudget(max_failure_rate=0.5, window=4)
    for _ in range(3):
        budget.record(FIRST)
