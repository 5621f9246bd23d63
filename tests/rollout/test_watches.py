"""Two watches: over code that blocks the event loop, and over groups that give nothing to train on."""

import asyncio
import logging
import time

import pytest
from players import Scripted, trained
from simulation import trajectory

from arl.api.errors import StarvedError
from arl.rollout.group import Fruitless, Reason
from arl.rollout.ledger import GroupOutcome
from arl.rollout.watches import LagMonitor, StarvationWatch


def told(caplog: pytest.LogCaptureFixture, *blocks: tuple[float, float]) -> list[str]:
    """Warnings of a monitor that begins at 0 and sees (when it ended, seconds) blocks."""
    monitor = LagMonitor("MyAgent")
    monitor.note(0.0, 0.0)
    for now, lag_s in blocks:
        monitor.note(lag_s, now)
    return [record.getMessage() for record in caplog.records]


def test_repeated_blocks_are_a_warning_that_names_the_likely_culprit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (warning,) = told(caplog, (70, 1.5), (80, 0.5), (90, 2.0))
    assert warning.startswith("the event loop was blocked for 3.5 of the last 60 s, probably by MyAgent")


def test_a_blocked_start_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, (5, 4.0), (20, 10.0), (59, 2.0), (61, 2.0)) == []


def test_single_blocks_far_apart_are_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, *((100 * i, 2.5) for i in range(1, 20))) == []


def test_a_loop_that_stays_blocked_is_reported_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    assert len(told(caplog, *((float(now), 2.0) for now in range(2, 302, 2)))) == 4


async def test_the_lag_is_how_late_the_loop_wakes_up() -> None:
    monitor = LagMonitor("MyAgent")
    watch = asyncio.ensure_future(monitor.run())
    await asyncio.sleep(0)
    time.sleep(0.5)  # noqa: ASYNC251 - this is what it must notice
    for _ in range(3):
        await asyncio.sleep(0)
    watch.cancel()
    assert monitor.worst_s > 0.2


EQUAL = Fruitless(outcome=GroupOutcome.REJECTED, reason=Reason.EQUAL_REWARDS, reward=1.0)
FAILED = Fruitless(outcome=GroupOutcome.DROPPED, reason=Reason.FAILED)


def test_a_window_of_fruitless_groups_is_one_warning_with_counts_and_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = StarvationWatch(window=10, patience=1000)
    watch.fruitful()
    for group in (FAILED, *[EQUAL] * 8):
        watch.fruitless(group)
    (record,) = caplog.records
    assert record.getMessage() == (
        "9 of the last 10 groups gave nothing to train on, and others run in their place: 8 rejected, as the rewards "
        "of each, process rewards included, are equal (mean reward 1); 1 dropped, as too many of their episodes "
        "failed. "
        f"What to do: {Reason.EQUAL_REWARDS.advice}"
    )


def test_later_warnings_are_further_and_further_apart(caplog: pytest.LogCaptureFixture) -> None:
    watch = StarvationWatch(window=10, patience=1000)
    warned: list[int] = []
    for number in range(1, 200):
        watch.fruitless(EQUAL)
        if len(caplog.records) > len(warned):
            warned.append(number)
    assert warned == [10, 30, 70, 150]


def test_there_is_no_warning_while_enough_groups_can_be_trained(caplog: pytest.LogCaptureFixture) -> None:
    watch = StarvationWatch(window=10, patience=1000)
    for number in range(200):
        watch.fruitful() if number % 5 == 0 else watch.fruitless(EQUAL)
    assert caplog.records == []


def test_a_detail_is_logged_at_once_and_only_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = StarvationWatch(window=10, patience=1000)
    for detail in ("no token_rewards", "no token_rewards", "no baseline"):
        watch.fruitless(Fruitless(outcome=GroupOutcome.DROPPED, reason=Reason.NOT_COMPARABLE, detail=detail))
    assert [record.getMessage() for record in caplog.records] == [
        "a group was dropped: no token_rewards",
        "a group was dropped: no baseline",
    ]


def test_too_many_fruitless_groups_in_a_row_end_the_run_with_all_reasons() -> None:
    watch = StarvationWatch(window=4, patience=10)
    watch.fruitless(FAILED)
    watch.fruitful()
    for group in (FAILED, *[EQUAL] * 8):
        watch.fruitless(group)
    with pytest.raises(StarvedError, match=r"last 10 groups .* 9 rejected, as .*; 1 dropped, as .*group_size"):
        watch.fruitless(EQUAL)


def test_a_run_whose_groups_are_all_too_easy_says_so_long_before_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    solved = trajectory((999,), reward=1.0)
    with caplog.at_level(logging.WARNING, logger="arl"), pytest.raises(ExceptionGroup) as ended:
        trained(Scripted(lambda _: solved), drop_equal_rewards=True)
    (error,) = ended.value.exceptions
    assert isinstance(error, StarvedError)
    assert "the last 1000 groups were all rejected or dropped" in str(error)
    assert caplog.records[0].getMessage().startswith("32 of the last 32 groups gave nothing to train on")
    assert "(mean reward 1)" in caplog.records[0].getMessage()
