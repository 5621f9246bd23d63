"""More episodes than a group trains: which are kept, what becomes of the others, and what it costs is counted."""

import asyncio
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from players import Moody, Scripted, controlled, engine_with_latency, train, trained
from records import trajectory
from virtual_time import run_in_virtual_time

from arl.api.types import Group
from arl.api.workflow import ExampleRecord
from arl.rollout.ledger import GroupOutcome


def sampled(*episodes: Callable[[], object], **options: object) -> tuple[Group, dict[str, float], float]:
    """The group of the first example, whose episodes do this in turn; the counters then; and the time it took.

    Each is a function without arguments that returns or raises what arun_episode does, or a coroutine.
    """

    async def main() -> tuple[Group, dict[str, float], float]:
        turn = iter([*episodes, *[lambda: asyncio.sleep(10**6)] * 1000])
        controller, buffer, _ = controlled(
            Scripted(lambda _: next(turn)()),
            50,
            **{"batch_size": 1, "max_staleness": 0, "episode_retries": 0, "max_failure_rate": 1.0, **options},
        )
        async with asyncio.TaskGroup() as tasks:
            rollout = tasks.create_task(controller.run())
            (group,) = await buffer.take_batch(0)
            took = asyncio.get_running_loop().time()
            await asyncio.sleep(0.001)
            controller.trained([group])
            counters = controller.counters()
            rollout.cancel()
        return group, counters, took

    return run_in_virtual_time(main())


def after(seconds: float, reward: float = 0.0) -> Callable[[], object]:
    return lambda: asyncio.sleep(seconds, trajectory((9,), reward=reward))


def fails() -> object:
    raise ValueError("bad luck")


FIRST = {"group_size": 2, "extra_episodes": 2}


def test_the_first_to_finish_are_kept_and_the_others_cancelled_and_counted_with_the_time_they_had_run() -> None:
    cancelled: list[float] = []

    async def noting(seconds: float) -> object:
        try:
            return await asyncio.sleep(seconds, trajectory((9,)))
        except asyncio.CancelledError:
            cancelled.append(seconds)
            raise

    group, counters, took = sampled(*(partial(noting, seconds) for seconds in (4, 1, 9, 2)), **FIRST)
    assert (group.episode_indices, took, sorted(cancelled)) == ((1, 3), 2, [4, 9])
    assert (counters["episodes_trained"], counters["episodes_surplus"], counters["episodes_dropped"]) == (2, 2, 0)
    assert (counters["overtaken_episodes"], counters["overtaken_episode_s"]) == (2, 2.0)
    assert (counters["finished_episodes"], counters["finished_episode_s"]) == (2, 1.5)


async def stubborn() -> object:
    """Slow to end."""
    try:
        await asyncio.sleep(10**6)
    finally:
        await asyncio.sleep(500)


async def deaf() -> object:
    """Finishes anyway."""
    try:
        await asyncio.sleep(10**6)
    except asyncio.CancelledError:
        return trajectory((9,))


@pytest.mark.parametrize("overtaken", [stubborn, deaf])
def test_an_overtaken_episode_that_does_not_heed_its_cancellation_holds_nothing_up_and_is_not_trained(
    overtaken: Callable[[], object],
) -> None:
    group, counters, took = sampled(overtaken, after(1), after(2), group_size=2, extra_episodes=1)
    assert (group.episode_indices, took, counters["episodes_surplus"]) == ((1, 2), 2, 1)


def test_episodes_without_a_place_are_not_begun_once_enough_have_finished_and_the_next_group_gets_it() -> None:
    begun: list[int] = []

    def begins(number: int) -> object:
        begun.append(number)
        return after(1)()

    groups, controller = trained(Scripted(begins), 5, group_size=2, extra_episodes=4, max_concurrent_episodes=2)
    assert [group.episode_indices for group in groups] == [(0, 1)] * 5
    assert len(begun) == 2 * 5
    counters = controller.counters()
    assert (counters["episodes_surplus"], counters["overtaken_episodes"]) == (4 * 5, 0)


def test_extra_episodes_make_up_for_failed_and_rejected_ones_unless_there_are_too_many() -> None:
    group, counters, _ = sampled(fails, after(1), lambda: None, after(2), **FIRST)
    assert group.episode_indices == (1, 3)
    assert (counters["episodes_failed"], counters["episodes_dropped"]) == (1, 1)
    assert (counters["episodes_rejected"], counters["episodes_surplus"]) == (1, 0)
    group, counters, _ = sampled(fails, fails, fails, after(1), after(1), after(1), **FIRST)
    assert group.group_id == 1, "too few were left of the first"
    assert (counters["episodes_dropped"], counters["episodes_surplus"]) == (4, 2)


def test_a_cut_group_settles_its_example_before_its_episodes_have_ended() -> None:
    """One has ended, one is slow to end, and another, which never begins, waits for its place all the while."""
    first, played = iter([after(1, reward=1.0)]), list[int]()

    def act(number: int) -> object:
        played.append(number)
        return next(first, stubborn)()

    async def main() -> None:
        controller, buffer, _ = controlled(
            Scripted(act),
            3,
            curriculum=lambda stage, records: range(3),
            group_size=3,
            max_concurrent_episodes=1,
            drop_stragglers_after_s=5,
        )
        async with asyncio.TaskGroup() as tasks:
            rollout = tasks.create_task(controller.run())
            taking = tasks.create_task(buffer.take_batch(0))
            await asyncio.sleep(6)
            assert controller.ledger.outcomes(0)[GroupOutcome.DROPPED] == [0]
            assert controller.ledger._experience.records()[0] == ExampleRecord(
                index=0, num_dropped=1
            )  # its reward does not count
            assert controller.counters()["episodes_dropped"] == 3
            assert buffer.num_charged == 0
            await asyncio.sleep(600)
            assert played.count(0) == 2
            taking.cancel()
            rollout.cancel()

    run_in_virtual_time(main())


@given(
    seed=st.integers(0, 2**32),
    max_staleness=st.integers(0, 3),
    extra=st.integers(0, 4),
    cap=st.integers(8, 30),  # with fewer, each group may take longer than stragglers are given, and the run starves
    has_baseline=st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_every_episode_of_every_group_has_one_end_and_tokens_are_fresh(
    seed: int, max_staleness: int, extra: int, cap: int, has_baseline: bool
) -> None:
    async def main() -> None:
        controller, buffer, engine = controlled(
            Moody(),
            23,
            engine_with_latency(seed),
            has_baseline=has_baseline,
            batch_size=2,
            group_size=3,
            extra_episodes=extra,
            max_staleness=max_staleness,
            max_concurrent_episodes=cap,
            max_failure_rate=1.0,
            episode_retries=0,
            drop_stragglers_after_s=6.0,
        )
        batches = await train(controller, buffer, engine, range(12), train_s=0.3)
        for version, batch in enumerate(batches):
            assert all(version - group.oldest_version <= max_staleness for group in batch)
            assert all(2 <= group.num_episodes <= 3 for group in batch)
        counters, ledger, waiting = controller.counters(), controller.ledger, buffer.untrained(12)
        ends = sum(counters[f"episodes_{end}"] for end in ("trained", "rejected", "dropped", "surplus"))
        settled = sum(len(indices) for e in range(ledger.epoch + 1) for indices in ledger.outcomes(e).values())
        lost_of_waiting = sum(3 + extra - group.num_episodes for group in waiting)
        assert ends - lost_of_waiting == (3 + extra) * settled

    run_in_virtual_time(main())
