"""The greedy episode of a group: its rewards are the baseline, and it is never trained."""

import asyncio

import pytest
from players import trained
from records import trajectory

from arl.api.engine import Sampler
from arl.api.fakes import ScriptedEngine
from arl.api.types import Example, Group, ModelRequest, SamplingParams, Trajectory
from arl.api.workflow import RolloutWorkflow
from arl.rollout.ledger import GroupOutcome


def is_greedy(request: ModelRequest) -> list[int]:
    return [int(request.sampling.temperature == 0)]


class Told(RolloutWorkflow):
    """Asks how it is sampled, and does what `greedy` or `sampled`, functions of the example's number, say."""

    def __init__(self, greedy: object, sampled: object) -> None:
        self._acts = sampled, greedy

    async def arun_episode(self, engine: Sampler, data: Example) -> object:
        response = await engine.agenerate(ModelRequest(input_ids=[1], sampling=SamplingParams(temperature=0.8)))
        answer = self._acts[response.output_ids[0]](data["number"])
        return await answer if asyncio.iscoroutine(answer) else answer


def of(reward: float, role: str = "agent") -> Trajectory:
    return trajectory((0,), reward, role=role)


def ran(greedy: object, sampled: object = lambda _: of(0.0), **options: object) -> tuple[list[Group], dict, dict]:
    """One batch of one group: the groups, the counters, and how the examples ended."""
    settings = {"engine": ScriptedEngine(is_greedy), "has_baseline": True, "shuffle": False, **options}
    groups, controller = trained(Told(greedy, sampled), 1, 4, **settings)
    return groups, controller.counters(), controller.ledger.outcomes(0)


def fails(number: int) -> Trajectory:
    if number == 0:
        raise ValueError("no answer")
    return of(0.5)


def test_the_group_gets_its_reward_if_only_of_a_second_attempt_and_nobody_trains_its_tokens() -> None:
    numbers = iter((0, 1))
    (group,), counters, _ = ran(lambda _: fails(next(numbers)), episode_retries=1)
    assert (group.example_id, group.greedy_rewards) == ((0, 0), {"agent": 0.5})
    assert [t.reward for t in group.trajectories] == [0.0, 0.0]
    assert group.episode_indices == (0, 1)
    assert (counters["baselines_finished"], counters["baselines_missing"], counters["episodes_retried"]) == (1, 0, 1)
    assert (counters["episodes_trained"], counters["finished_episodes"]) == (2, 2)


def test_each_role_has_a_baseline_of_its_own() -> None:
    both = [of(1.0, "author"), of(0.0, "critic"), of(1.0, "critic")]
    (group,), _, _ = ran(lambda _: both, lambda _: both)
    assert group.greedy_rewards == {"author": 1.0, "critic": 0.5}


@pytest.mark.parametrize(
    ("greedy", "ended"),
    [(fails, GroupOutcome.DROPPED), (lambda number: of(0.5) if number else None, GroupOutcome.REJECTED)],
)
def test_a_group_whose_greedy_episode_failed_is_dropped_and_one_whose_returned_none_is_rejected(
    greedy: object, ended: GroupOutcome
) -> None:
    (group,), counters, outcomes = ran(greedy)
    assert group.example_id == (0, 1)
    assert outcomes == {**{outcome: [] for outcome in GroupOutcome}, GroupOutcome.TRAINED: [1], ended: [0]}
    assert (counters["baselines_missing"], counters[f"episodes_{ended.name.lower()}"]) == (1, 2)
    assert counters["episodes_dropped"] + counters["episodes_rejected"] + counters["episodes_failed"] == 2


@pytest.mark.parametrize(("greedy_s", "sampled_s"), [(5, 1), (1, 5)], ids=["it is last", "it is first"])
def test_a_group_waits_for_it_and_for_enough_others_which_do_not_cancel_it(greedy_s: float, sampled_s: float) -> None:
    (group,), counters, _ = ran(
        lambda _: asyncio.sleep(greedy_s, of(0.5)), lambda _: asyncio.sleep(sampled_s, of(0.0)), extra_episodes=2
    )
    assert (group.greedy_rewards, group.num_episodes) == ({"agent": 0.5}, 2)
    assert (counters["baselines_finished"], counters["episodes_surplus"]) == (1, 2)


def test_a_group_that_is_cut_cuts_it_as_well() -> None:
    cancelled: list[int] = []

    async def hangs(number: int) -> Trajectory:
        try:
            await asyncio.sleep(0 if number else 10**6)
        except asyncio.CancelledError:
            cancelled.append(number)
            raise
        return of(0.5)

    (group,), counters, outcomes = ran(hangs, drop_stragglers_after_s=30)
    assert cancelled == [0]
    assert outcomes[GroupOutcome.DROPPED] == [0]
    assert group.example_id == (0, 1)
    assert (counters["straggler_groups"], counters["straggler_episodes"], counters["episodes_dropped"]) == (1, 0, 2)
