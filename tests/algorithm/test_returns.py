"""Baselines, scales and process rewards, each on numbers that can be checked by hand."""

import math
import statistics
from dataclasses import replace

import pytest
import torch
from advantage_cases import (
    MASK,
    Settings,
    advantages_of,
    config_of,
    group,
    name_of,
    of_rewards,
    one_each,
    random_groups,
    returns,
    rows_of,
    trajectory,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from arl.algorithm.advantages import with_advantages
from arl.algorithm.batch import Batch
from arl.api.errors import TrajectoryError
from arl.api.types import Group, Trajectory, TurnSpan

RELATIVE = ("group_mean", "leave_one_out", "length_weighted")


def close(*numbers: float) -> object:
    return pytest.approx(list(numbers), rel=1e-6, abs=1e-6)


LONG, SHORT = trajectory(1.0, (0, 1, 1, 1)), trajectory(0.0, (0, 1))
HALF_STD = 0.5 / (math.sqrt(0.5) + 1e-6)


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (returns("none"), (1.0, 0.0)),
        (returns("greedy"), (0.75, -0.25)),
        (returns("group_mean"), (0.5, -0.5)),
        (returns("group_mean", "group_std"), (HALF_STD, -HALF_STD)),
        (returns("leave_one_out"), (1.0, -1.0)),
        (returns("length_weighted"), (0.25, -0.75)),
        (returns("none", "batch_std"), (0.25 / (0.5 + 1e-6), -0.75 / (0.5 + 1e-6))),
    ],
    ids=name_of,
)
def test_a_long_success_beside_a_short_failure(advantage: Settings, expected: tuple[float, float]):
    """The other role has a baseline of its own, in which it is alone."""
    pair = group(LONG, SHORT, greedy_rewards={"agent": 0.25})
    assert one_each([pair], advantage) == [close(*expected)]
    alone = trajectory(9.0, role="critic")
    if advantage["baseline"] not in ("none", "greedy"):
        assert one_each([group(LONG, alone, SHORT)], advantage) == [close(expected[0], 0.0, expected[1])]


def test_a_greedy_baseline_that_is_missing_is_named():
    lonely = group(trajectory(1.0), trajectory(1.0, role="critic"), group_id=7, greedy_rewards={"agent": 0.0})
    with pytest.raises(TrajectoryError, match=r"group 7 has no greedy reward for role 'critic', only for \['agent'\]"):
        one_each([lonely], returns("greedy"))


@pytest.mark.parametrize("baseline", RELATIVE)
@pytest.mark.parametrize("scale", ["none", "group_std"])
@pytest.mark.parametrize("rewards", [(0.7,), (0.1, 0.1, 0.1), (1e9 + 0.1,) * 7])
def test_an_episode_alone_or_among_equals_has_advantage_zero(baseline: str, scale: str, rewards: tuple[float, ...]):
    assert one_each([of_rewards(*rewards)], returns(baseline, scale)) == [[0.0] * len(rewards)]


def test_a_reward_without_spread_is_not_scaled_up():
    assert one_each([of_rewards(0.5, 0.5)], returns("none", "group_std")) == [[0.5, 0.5]]


# Whitening over the batch ---------------------------------------------------------------------------------------------


def test_a_group_of_equal_rewards_is_not_nothing_once_the_batch_is_whitened():
    long, short = trajectory(1.0, (0, 1, 1, 1)), trajectory(0.0, (0, 1))
    ((_, _), (equal, _)) = one_each([group(long, short), of_rewards(1.0, 1.0)], returns("group_mean", "batch_std"))
    centred = [0.5] * 3 + [-0.5] + [0.0] * 4
    assert equal == pytest.approx(-statistics.mean(centred) / (statistics.stdev(centred) + 1e-6), abs=1e-6)


@pytest.mark.parametrize("rewards", [(3.0,), (2.0, 2.0)])
def test_a_batch_of_equal_advantages_is_whitened_to_zero(rewards: tuple[float, ...]):
    assert one_each([of_rewards(*rewards)], returns("none", "batch_std")) == [[0.0] * len(rewards)]


def test_a_trajectory_that_is_masked_out_counts_in_no_statistic_over_tokens():
    kept, cut = of_rewards(1.0, 0.0), group(trajectory(100.0, is_truncated=True), group_id=1)
    overlong = {"mask_truncated": True}
    together = advantages_of([kept, cut], returns("none", "batch_std"), overlong=overlong)
    assert together[0] == advantages_of([kept], returns("none", "batch_std"))[0]


# Rewards normalised apart (GDPO) --------------------------------------------------------------------------------------

GDPO = returns("group_mean", "group_std", separate_rewards=True)


def parted(right: float, brief: float, mask: tuple[int, ...] = MASK) -> Trajectory:
    return trajectory(right + brief, mask, rewards={"right": right, "brief": brief})


def test_rewards_normalised_apart_tell_apart_what_their_sums_do_not():
    members = (parted(1.0, 0.0), parted(0.0, 1.0), parted(0.0, 1.0), parted(0.0, 1.0))
    (values,) = one_each([group(*members)], GDPO)
    right, brief = statistics.stdev([1.0, 0.0, 0.0, 0.0]), statistics.stdev([0.0, 1.0, 1.0, 1.0])
    sums = [0.75 / right - 0.75 / brief, *[-0.25 / right + 0.25 / brief] * 3]
    assert values == close(*(s for s in sums))
    (values,) = one_each([group(parted(1.0, 0.0), parted(0.0, 2.0), parted(0.0, 0.0))], GDPO)
    assert values[0] == pytest.approx(values[1], abs=1e-5)
    assert values[0] > 0.1


def test_rewards_normalised_apart_are_whitened_over_trajectories_whatever_their_lengths():
    rewards = ((1.0, 0.3), (0.0, 0.9), (0.0, 0.1))
    members = tuple(parted(*r) for r in rewards)
    longer = tuple(parted(*r, mask=(0, *[1] * n)) for n, r in enumerate(rewards, start=1))
    values, of_longer = one_each([group(*members)], GDPO), one_each([group(*longer)], GDPO)
    assert values == of_longer
    assert statistics.mean(values[0]) == pytest.approx(0.0, abs=1e-6)
    assert statistics.stdev(values[0]) == pytest.approx(1.0, abs=1e-5)


def test_a_reward_that_some_trajectories_do_not_have_is_named():
    members = (parted(1.0, 0.0), trajectory(1.0, rewards={"right": 1.0}))
    with pytest.raises(TrajectoryError, match=r"rewards\['brief'\] is there for some trajectories in group 4, role"):
        one_each([group(*members, group_id=4)], GDPO)


def test_rewards_normalised_apart_have_to_be_there():
    with pytest.raises(TrajectoryError, match="rewards is empty in group 0, role 'agent'"):
        one_each([of_rewards(1.0, 0.0)], GDPO)


def test_a_penalty_for_length_is_one_more_reward_among_those_normalised_apart():
    short, long = trajectory(0.0, (0, 1), rewards={"right": 1.0}), trajectory(0.0, (0, 1, 1), rewards={"right": 1.0})
    (values,) = one_each([group(short, long)], GDPO, overlong={"max_tokens": 1})
    assert values == close(math.sqrt(0.5), -math.sqrt(0.5))


# Process rewards ------------------------------------------------------------------------------------------------------


def rewarded(*rewards: float, mask: tuple[int, ...] = (0, 1, 1, 1)) -> Group:
    return group(trajectory(0.0, mask, token_rewards=rewards))


def test_a_token_has_all_later_rewards_discounted_by_the_tokens_in_between():
    ((row,),) = advantages_of([rewarded(0.0, 1.0, 10.0, 100.0)], returns(token_discount=0.5))
    assert row == close(0.0, 1 + 5 + 25, 10 + 50, 100)


def test_a_turns_reward_lies_at_its_last_token():
    turns = (TurnSpan(start=1, stop=3, reward=1.0), TurnSpan(start=3, stop=4, reward=10.0))
    ((row,),) = advantages_of([group(trajectory(0.0, (0, 1, 1, 1), turns=turns))], returns(token_discount=0.5))
    assert row == close(0.0, 0.5 + 2.5, 1.0 + 5.0, 10.0)


def test_a_later_turns_reward_is_discounted_by_the_turns_in_between():
    turns = tuple(TurnSpan(start=s, stop=s + 1, reward=r) for s, r in ((1, 1.0), (2, 10.0), (4, 100.0)))
    turned = trajectory(0.0, (0, 1, 1, 1, 1), turns=turns)
    ((row,),) = advantages_of([group(turned)], returns(turn_discount=0.1))
    assert row == close(0.0, 1 + 1 + 1, 10 + 10, 10, 100)


@pytest.mark.parametrize("baseline", RELATIVE)
def test_process_rewards_of_a_trajectory_alone_or_among_equals_teach_nothing(baseline: str):
    alone = group(trajectory(0.0, token_rewards=(0.0, 1.0, 0.0, 2.0)))
    equal = group(*(trajectory(0.0, (0, 1, 1), token_rewards=(0.0, 0.1, 0.1)) for _ in range(3)))
    tokens = advantages_of([alone, equal], returns(baseline, "group_std"))
    assert tokens == [[[0.0] * 4], [[0.0] * 3] * 3]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**20), shift=st.sampled_from([-3.0, 0.5, 16.0]), baseline=st.sampled_from(RELATIVE))
def test_a_constant_added_to_all_process_rewards_changes_nothing(seed: int, shift: float, baseline: str):
    groups = [
        replace(g, trajectories=tuple(_rewarded_where_trained(t) for t in g.trajectories)) for g in random_groups(seed)
    ]
    shifted = [
        replace(g, trajectories=tuple(_rewarded_where_trained(t, shift) for t in g.trajectories)) for g in groups
    ]
    advantage = returns(baseline, "group_std", token_discount=0.9)
    here, there = advantages_of(groups, advantage), advantages_of(shifted, advantage)
    for rows, others in zip(here, there, strict=True):
        for row, other in zip(rows, others, strict=True):
            assert row == pytest.approx(other, rel=1e-5, abs=1e-5)


def _rewarded_where_trained(t: Trajectory, shift: float = 0.0) -> Trajectory:
    """Without rewards where nothing is trained, for those of several tokens would meet at one."""
    rewards = t.token_rewards and tuple((r + shift) * m for r, m in zip(t.token_rewards, t.loss_mask, strict=True))
    return replace(t, token_rewards=rewards, turns=tuple(replace(turn, reward=turn.reward + shift) for turn in t.turns))


# A KL in the reward ---------------------------------------------------------------------------------------------------

KL = {"coefficient": 0.5, "place": "reward", "estimator": "k1"}


def penalised(advantage: dict[str, object], *distances: tuple[float, ...]) -> list[list[float]]:
    """Advantages of one group's trajectories of reward 1, whose trained tokens have these log-ratios to a reference.

    Their untrained tokens have others, which nobody should look at.
    """
    members = [trajectory(1.0, (0, *[1] * len(d))) for d in distances]
    batch = Batch.of([group(*members)])
    log_ratios = torch.tensor([r for i, d in enumerate(distances) for r in (9.0 * i, *d)])
    proximal = -torch.ones(len(log_ratios))
    batch = replace(batch, proximal_logprobs=proximal, reference_logprobs=proximal - log_ratios)
    return rows_of(with_advantages(batch, config_of(advantage, kl=KL)))[0]


def test_without_a_baseline_each_token_answers_for_its_own_and_later_penalties():
    (row,) = penalised(returns(), (2.0, 0.0, 1.0))
    assert row == close(0.0, 1.0 - 1.5, 1.0 - 0.5, 1.0 - 0.5)


def test_with_a_groups_baseline_a_trajectorys_penalties_come_off_its_reward():
    tokens = penalised(returns("group_mean"), (2.0, 0.0), (0.0, 0.0))
    assert [row[1:] for row in tokens] == [close(-0.5, -0.5), close(0.5, 0.5)]


def test_penalties_are_never_scaled_up_where_rewards_are_equal():
    first, second = penalised(returns("none", "group_std"), (2.0, 0.0), (0.0, 0.0))
    assert first == close(0.0, 0.0, 1.0)
    assert second == close(0.0, 1.0, 1.0)
