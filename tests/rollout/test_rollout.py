"""RolloutController: what becomes of groups, and when a run must stop."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from players import Scripted, TwoTurns, controlled, engine_with_latency, examples, train, trained
from records import trajectory
from virtual_time import run_in_virtual_time

from arl.api.errors import DatasetError, FailureBudgetError
from arl.api.types import Example, Group
from arl.rollout.controller import run_examples
from arl.rollout.episode import EpisodeRunner
from arl.rollout.ledger import GroupOutcome


def returns(*answers: object) -> Callable[[int], object]:
    """An act that gives these answers in turn, again and again; an exception is raised."""
    position = iter(range(10**9))

    def act(_: int) -> object:
        answer = answers[next(position) % len(answers)]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return act


def ran(
    act: Callable[[int], object], num_versions: int = 1, **settings: object
) -> tuple[list[Group], dict[str, float]]:
    """The trained groups, and the counters."""
    groups, controller = trained(Scripted(act), num_versions, **settings)
    return groups, controller.counters()


GOOD, BETTER = trajectory((999,), reward=0.0), trajectory((999,), reward=1.0)


def test_a_group_goes_on_without_its_failed_episodes() -> None:
    (group,), counters = ran(returns(GOOD, ValueError(), GOOD), group_size=3, min_group_size=2)
    assert group.episode_indices == (0, 2)
    assert (counters["episodes_trained"], counters["episodes_failed"], counters["episodes_dropped"]) == (2, 1, 1)


@pytest.mark.parametrize(
    ("answers", "settings", "counted"),
    [
        ((ValueError(), ValueError(), GOOD, GOOD, GOOD, GOOD), {"group_size": 3}, {"episodes_dropped": 3}),
        ((None, None, GOOD, GOOD, GOOD, GOOD), {"group_size": 3}, {"episodes_rejected": 3, "episodes_dropped": 0}),
        ((GOOD, GOOD, GOOD, BETTER), {"drop_equal_rewards": True}, {"episodes_rejected": 2}),
        (
            (GOOD, GOOD, BETTER, BETTER),
            {"keep": lambda group: group.trajectories[0].reward > 0},
            {"episodes_rejected": 2},
        ),
    ],
    ids=["too few left by failures", "too few left by rejections", "equal rewards", "refused by the user's filter"],
)
def test_a_group_with_nothing_to_train_on_is_rejected_or_dropped_and_replaced(
    answers: tuple[object, ...], settings: dict[str, object], counted: dict[str, float]
) -> None:
    (group,), counters = ran(returns(*answers), **settings)
    assert group.group_id == 1
    assert {name: counters[name] for name in counted} == counted


class Augmented(list[Example]):
    """Another example with each reading."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return {"number": self.reads}


def test_the_episodes_of_a_group_share_one_reading_of_their_example() -> None:
    seen: list[int] = []

    async def main() -> None:
        act = lambda number: seen.append(number) or GOOD  # noqa: E731
        controller, buffer, engine = controlled(Scripted(act), 5, group_size=3, batch_size=1, max_staleness=0)
        controller._datasets = {"": Augmented(examples(5))}
        await train(controller, buffer, engine, range(2))

    run_in_virtual_time(main())
    assert seen[:6] == [1, 1, 1, 2, 2, 2]


def test_too_many_failures_end_the_run_with_the_first_ones_traceback() -> None:
    first = ValueError("the first")
    with pytest.raises(ExceptionGroup) as raised:
        ran(returns(first, KeyError("later")))
    (error,) = raised.value.exceptions
    assert isinstance(error, FailureBudgetError)
    assert error.__cause__ is first


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(DatasetError, match="the dataset is empty"):
        controlled(TwoTurns(), 0)


@pytest.mark.parametrize("cap", [1, 3, 7])
def test_no_more_episodes_run_at_once_than_allowed(cap: int) -> None:
    running, peaks = list[int](), list[int]()

    async def counted() -> object:
        running.append(1)
        peaks.append(len(running))
        await asyncio.sleep(1)
        running.pop()
        return GOOD

    ran(lambda _: counted(), 20, batch_size=4, group_size=2, max_staleness=3, max_concurrent_episodes=cap)
    assert max(peaks) == cap


def test_a_group_is_admitted_when_those_before_it_need_no_more_places() -> None:
    """Otherwise it would age in a queue; and places go to the groups in their order."""
    order: list[int] = []
    admitted: list[int] = []

    async def main() -> None:
        async def act(number: int) -> object:
            order.append(number)
            admitted.append(buffer.num_running)
            await asyncio.sleep(1)
            return GOOD

        controller, buffer, engine = controlled(
            Scripted(act), 9, group_size=3, max_staleness=3, max_concurrent_episodes=1, shuffle=False
        )
        await train(controller, buffer, engine, range(2))

    run_in_virtual_time(main())
    assert order[:9] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert set(admitted) == {1}


def test_rare_successes_keep_a_run_alive() -> None:
    groups, _ = ran(returns(*[None] * 600, GOOD), 3, group_size=1)
    assert len(groups) == 3


async def test_a_controller_runs_once() -> None:
    controller, _, _ = controlled(TwoTurns(), 3)
    run = asyncio.ensure_future(controller.run())
    await asyncio.sleep(0)
    run.cancel()
    with pytest.raises(RuntimeError, match="make another controller, and give it this one's state_dict"):
        await controller.run()


def stragglers(**settings: object) -> tuple[list[Group], dict]:
    """Example 0 never ends; the others take a second."""

    async def act(number: int) -> object:
        await asyncio.sleep(1 if number else 10**6)
        return GOOD

    settings = {"shuffle": False, "batch_size": 2, "episode_timeout_s": 10**5, **settings}
    return ran(act, 3, **settings)


def test_a_straggler_is_waited_for_unless_a_limit_is_set() -> None:
    _, counters = stragglers(episode_timeout_s=1000, max_failure_rate=1.0)
    assert counters["straggler_groups"] == 0
    assert counters["episodes_failed"] == 2


def test_a_straggler_past_its_limit_is_cut_replaced_and_counted_with_its_length_bias() -> None:
    groups, counters = stragglers(drop_stragglers_after_s=30)
    assert [g.example_id[1] for g in groups] == [1, 2, 3, 4, 5, 6]
    assert (counters["straggler_groups"], counters["straggler_episodes"], counters["episodes_dropped"]) == (1, 2, 2)
    assert (counters["straggler_episode_s"], counters["finished_episode_s"]) == (30.0, 1.0)


@pytest.mark.parametrize("turns", [2 + k / 2 for k in range(12)])
def test_a_cut_in_any_of_a_groups_last_moments_does_no_harm(turns: float) -> None:
    """The group is never full, as one of its episodes is rejected; the other ends when the group is about to be cut."""
    tick_s, calls = 1e-5, iter(range(10**9))

    async def act(number: int) -> object:
        if number == 0 and next(calls) == 0:
            return None
        await asyncio.sleep(1 if number else 5 - turns * tick_s)
        return GOOD

    async def main() -> None:
        controller, buffer, engine = controlled(
            Scripted(act), 4, batch_size=2, max_staleness=0, shuffle=False, min_group_size=1, drop_stragglers_after_s=5
        )
        await train(controller, buffer, engine, range(2))
        outcomes = controller.ledger.outcomes(0)
        assert sorted(row for rows in outcomes.values() for row in rows) == [0, 1, 2, 3]
        assert len(outcomes[GroupOutcome.TRAINED]) == 4 - len(outcomes[GroupOutcome.DROPPED])

    run_in_virtual_time(main(), tick_s)


def test_limits_shorter_than_every_episode_end_the_run() -> None:
    with pytest.raises(ExceptionGroup) as raised:
        ran(lambda _: asyncio.sleep(9, GOOD), drop_stragglers_after_s=1)
    assert "rollout.drop_stragglers_after_s is shorter than a usual episode" in str(raised.value.exceptions[0])


def test_episodes_of_an_ended_run_are_cancelled() -> None:
    cancelled: list[int] = []

    async def act(number: int) -> object:
        try:
            await asyncio.sleep(1 if number < 2 else 10**6)
        except asyncio.CancelledError:
            cancelled.append(number)
            raise
        return GOOD

    ran(act, shuffle=False, max_staleness=2)
    assert sorted(cancelled) == [2, 2]


def test_evaluation_keeps_the_order_of_examples_reports_failures_and_runs_so_many_at_once() -> None:
    async def act(number: int) -> object:
        await asyncio.sleep(10 - number)
        return {0: BETTER, 1: None, 2: 1 / number if number > 2 else "malformed"}.get(number, GOOD)

    async def main() -> None:
        runner = EpisodeRunner(workflow=Scripted(act), timeout_s=100)
        ended = await run_examples(engine_with_latency(), runner, examples(4), max_concurrent=2)
        assert [e.reward for e in ended] == [1, 0, 0, 0]
        assert [e.error is not None for e in ended] == [False, False, True, False]
        assert asyncio.get_running_loop().time() == 17  # 10 + 7 in one place, 9 + 8 in the other

    run_in_virtual_time(main())


def test_a_workflow_that_returns_old_tokens_fails_and_the_run_goes_on() -> None:
    versions = iter((9, 9, 9, 0, 9, 9))
    groups, counters = ran(lambda _: trajectory((next(versions),)), 2, group_size=2, min_group_size=1)
    assert [group.num_episodes for group in groups] == [2, 1]
    assert counters["episodes_failed"] == 1
