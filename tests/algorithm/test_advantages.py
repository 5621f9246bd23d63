"""Every estimator agrees with its definition, whatever the order in which episodes finished."""

import random
from dataclasses import replace

import pytest
import torch
from advantage_cases import (
    ESTIMATORS,
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
    taken,
    trajectory,
)
from advantage_references import reference_advantages, reference_returns
from hypothesis import given, settings
from hypothesis import strategies as st

from arl.algorithm.advantages import with_advantages

seeds = st.integers(0, 2**20)
every_estimator = pytest.mark.parametrize(("advantage", "others"), ESTIMATORS, ids=name_of)
SHIFTED = [
    (a, o) for a, o in ESTIMATORS if a["kind"] in ("returns", "gigpo") and a.get("baseline") not in ("none", "greedy")
]


def close(numbers: list[float]) -> object:
    return pytest.approx(numbers, rel=1e-6, abs=1e-6)


@every_estimator
@settings(max_examples=14, deadline=None)
@given(seed=seeds, has_branches=st.booleans())
def test_an_estimator_agrees_with_its_definition(advantage: Settings, others: Settings, seed: int, has_branches: bool):
    groups, config = random_groups(seed, has_branches=has_branches), config_of(advantage, **others)
    batch = taken(groups, config)
    found = rows_of(with_advantages(batch, config))
    expected = reference_advantages(batch, config)
    for rows, references in zip(found, expected, strict=True):
        for row, reference in zip(rows, references, strict=True):
            assert row == close(reference)


@pytest.mark.parametrize(("advantage", "others"), [e for e in ESTIMATORS if e[0]["kind"] == "gae"], ids=name_of)
@settings(max_examples=12, deadline=None)
@given(seed=seeds)
def test_returns_agree_with_their_definition(advantage: Settings, others: Settings, seed: int):
    groups, config = random_groups(seed), config_of(advantage, **others)
    batch = taken(groups, config)
    found = rows_of(with_advantages(batch, config), "returns")
    for rows, references in zip(found, reference_returns(batch, config), strict=True):
        for row, reference in zip(rows, references, strict=True):
            assert row == close(reference)


@every_estimator
@settings(max_examples=6, deadline=None)
@given(seed=seeds, has_branches=st.booleans())
def test_the_order_of_groups_and_trajectories_changes_no_bit(
    advantage: Settings, others: Settings, seed: int, has_branches: bool
):
    groups, config, rng = (
        random_groups(seed, has_branches=has_branches),
        config_of(advantage, **others),
        random.Random(seed),
    )
    there = rows_of(with_advantages(taken(groups, config), config))
    order = rng.sample(range(len(groups)), len(groups))
    within = [rng.sample(range(len(g.trajectories)), len(g.trajectories)) for g in groups]
    shuffled = [
        group(
            *(groups[i].trajectories[j] for j in within[i]),
            group_id=groups[i].group_id,
            greedy_rewards=dict(groups[i].greedy_rewards),
            episodes=[groups[i].episode_indices[j] for j in within[i]],
        )
        for i in order
    ]
    here = rows_of(with_advantages(taken(shuffled, config), config))
    assert here == [[there[i][j] for j in within[i]] for i in order]


@every_estimator
def test_only_trained_tokens_have_advantages(advantage: Settings, others: Settings):
    groups, config = random_groups(3), config_of(advantage, **others)
    batch = with_advantages(taken(groups, config), config)
    for values in (batch.advantages, batch.returns):
        assert (values.dtype, values.shape) == (torch.float32, batch.token_ids.shape)
        assert not values[~batch.loss_mask].any()


@pytest.mark.parametrize(("advantage", "others"), SHIFTED, ids=name_of)
@settings(max_examples=6, deadline=None)
@given(seed=seeds, shift=st.sampled_from([-2.5, 0.25, 64.0]))
def test_a_constant_added_to_all_rewards_of_a_group_changes_nothing(
    advantage: Settings, others: Settings, seed: int, shift: float
):
    groups, config = random_groups(seed, has_process=False), config_of(advantage | {"turn_discount": 1.0}, **others)
    shifted = [
        replace(
            g,
            trajectories=tuple(
                replace(t, reward=t.reward + shift, rewards={n: r + shift for n, r in t.rewards.items()})
                for t in g.trajectories
            ),
        )
        for g in groups
    ]
    here, there = (rows_of(with_advantages(taken(g, config), config)) for g in (shifted, groups))
    for rows, references in zip(here, there, strict=True):
        for row, reference in zip(rows, references, strict=True):
            assert row == pytest.approx(reference, rel=1e-5, abs=1e-5)


@every_estimator
@pytest.mark.parametrize(
    "rewards", [(1e6, -1e6, 0.0), (0.1 + 0.2, 0.3, 0.3), (1e6, 1e6 * (1 + 2e-16), 1e6)], ids=["far", "near", "near far"]
)
def test_extreme_rewards_give_finite_advantages(advantage: Settings, others: Settings, rewards: tuple[float, ...]):
    members = [trajectory(r, rewards={"right": r}, token_rewards=(r, -r, r, -r)) for r in rewards]
    groups, config = [group(*members, greedy_rewards={"agent": 0.0})], config_of(advantage, **others)
    filled = with_advantages(taken(groups, config), config)
    assert filled.advantages.isfinite().all()
    assert filled.returns.isfinite().all()


@pytest.mark.parametrize(
    "advantage",
    [returns(b, s) for b in ("group_mean", "leave_one_out", "length_weighted") for s in ("none", "group_std")],
    ids=name_of,
)
@pytest.mark.parametrize("rewards", [(0.3, 0.1 + 0.2, 0.3), (1e6, 1e6 + 1e-10, 1e6)])
def test_rewards_that_are_equal_up_to_rounding_teach_nothing(advantage: Settings, rewards: tuple[float, ...]):
    (values,) = one_each([of_rewards(*rewards)], advantage)
    assert values == [0.0] * 3


@every_estimator
def test_a_batch_in_which_nothing_is_trained_has_no_advantages(advantage: Settings, others: Settings):
    groups, config = (
        [group(trajectory(1.0, (0, 0), rewards={"right": 1.0}), greedy_rewards={"agent": 0.0})],
        config_of(advantage, **others),
    )
    assert rows_of(with_advantages(taken(groups, config), config)) == [[[0.0, 0.0]]]


@every_estimator
def test_an_empty_batch_stays_empty(advantage: Settings, others: Settings):
    assert advantages_of([], advantage, **others) == []


def test_rejection_keeps_what_is_above_the_threshold_and_not_what_is_at_it():
    assert one_each([of_rewards(0.5, 0.6, -1.0)], {"kind": "rejection", "threshold": 0.5}) == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize(("length", "penalty"), [(6, 0.0), (7, 0.25), (8, 0.5), (10, 1.0), (11, 1.0)])
def test_the_penalty_for_length_rises_over_the_buffer(length: int, penalty: float):
    overlong = {"max_tokens": 10, "buffer_tokens": 4, "penalty": 2.0}
    long = trajectory(1.0, (0, *[1] * length))
    assert one_each([group(long)], returns(), overlong=overlong) == [[1.0 - 2.0 * penalty]]


@pytest.mark.parametrize(("length", "reward"), [(10, 1.0), (11, -1.0)])
def test_without_a_buffer_the_penalty_begins_beyond_the_limit(length: int, reward: float):
    long = trajectory(1.0, (0, *[1] * length))
    assert one_each([group(long)], returns(), overlong={"max_tokens": 10, "penalty": 2.0}) == [[reward]]
