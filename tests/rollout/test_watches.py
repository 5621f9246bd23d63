"""Watches over code that blocks the event loop, groups that give nothing to train on, and episodes that return None."""

import asyncio
import time

import pytest

from arl.api.errors import StarvedError
from arl.rollout.group import Fruitless, Reason
from arl.rollout.ledger import GroupOutcome
from arl.rollout.monitors import LagMonitor, ReturnWatch, StarvationWatch


@pytest.mark.parametrize(
    ("blocks", "warnings"),
    [
        ([(70, 1.5), (80, 0.5), (90, 2.0)], ["3.5"]),
        ([(5, 4.0), (20, 10.0), (59, 2.0), (61, 2.0)], []),
        ([(100 * i, 2.5) for i in range(1, 20)], []),
        ([(float(now), 2.0) for now in range(2, 302, 2)], ["4.0"] * 4),
    ],
    ids=["again and again", "at the start", "far apart", "always"],
)
def test_repeated_blocks_are_a_warning_once_in_a_while_that_names_the_likely_culprit(
    blocks: list[tuple[float, float]], warnings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """blocks: (when it ended, seconds)."""
    monitor = LagMonitor("MyAgent")
    for now, lag_s in [(0.0, 0.0), *blocks]:
        monitor.note(lag_s, now)
    assert [m.partition(" of the last 60 s, probably by MyAgent")[0] for m in caplog.messages] == [
        f"the event loop was blocked for {seconds}" for seconds in warnings
    ]


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


def test_a_window_of_fruitless_groups_is_one_warning_with_what_to_do_and_too_many_in_a_row_end_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = StarvationWatch(window=11, patience=10)
    watch.fruitless(FAILED)
    watch.fruitful()
    for group in (FAILED, *[EQUAL] * 8):
        watch.fruitless(group)
    (record,) = caplog.records
    assert record.getMessage() == (
        "10 of the last 11 groups gave nothing to train on, and others run in their place: 8 rejected, as the rewards "
        "of each, process rewards included, are equal (mean reward 1); 2 dropped, as too many of their episodes "
        f"failed. What to do: {Reason.EQUAL_REWARDS.advice}"
    )
    with pytest.raises(StarvedError, match=r"last 10 groups .* 9 rejected, as .*; 1 dropped, as .*group_size"):
        watch.fruitless(EQUAL)


@pytest.mark.parametrize(("fruitful_every", "expected"), [(10**9, [10, 30, 70, 150]), (5, [])])
def test_warnings_come_further_and_further_apart_and_none_while_enough_groups_can_be_trained(
    fruitful_every: int, expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    watch, warned = StarvationWatch(window=10, patience=1000), list[int]()
    for number in range(1, 200):
        watch.fruitless(EQUAL) if number % fruitful_every else watch.fruitful()
        warned += [number] * (len(caplog.records) - len(warned))
    assert warned == expected


def test_a_first_batch_of_nothing_but_none_is_asked_about_once_and_ends_the_run_if_that_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = ReturnWatch("MyAgent", 256)
    for _ in range(1023):
        watch.record(is_rejected=True)
    (question,) = caplog.messages
    assert question.startswith("every one of the first 256 episodes returned None, which means rejected")
    assert question.endswith(
        "Did MyAgent.arun_episode forget its return? If that goes on, the run ends after 1024 episodes"
    )
    with pytest.raises(
        StarvedError, match=r"every one of the first 1,024 episodes .* MyAgent\.arun_episode forget its"
    ):
        watch.record(is_rejected=True)


def test_one_episode_that_returns_something_answers_the_question(caplog: pytest.LogCaptureFixture) -> None:
    watch = ReturnWatch("MyAgent", 256)
    for number in range(3000):
        watch.record(is_rejected=number != 255)
    assert caplog.messages == []
