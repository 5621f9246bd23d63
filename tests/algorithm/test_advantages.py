"""Every estimator agrees with its definition, in any order of groups; distillation's with its gradient."""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from advantage_cases import (
    ESTIMATORS,
    SCALES,
    Settings,
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

from arl.algorithm.advantages import max_likelihood_advantages, pass_at_k_advantages, with_advantages
from arl.algorithm.batch import Batch
from arl.algorithm.groups import spread_of, whitened
from arl.algorithm.losses.reinforcement import PolicyLoss
from arl.api.errors import TrajectoryError
from arl.api.settings.algorithm import AlgorithmConfig, preset
from arl.api.settings.presets import PRESETS
from arl.api.train_engine import PackedTokens, TokenOutputs
from arl.api.types import Group

seeds = st.integers(0, 2**20)
every_estimator = pytest.mark.parametrize(("advantage", "others"), ESTIMATORS, ids=name_of)


@every_estimator
@settings(max_examples=14, deadline=None)
@given(seed=seeds, has_branches=st.booleans())
def test_an_estimator_agrees_with_its_definition(advantage: Settings, others: Settings, seed: int, has_branches: bool):
    groups, config = random_groups(seed, has_branches=has_branches), config_of(advantage, **others)
    batch = taken(groups, config)
    filled = with_advantages(batch, config)
    assert filled.advantages.tolist() == pytest.approx(reference_advantages(batch, config), rel=1e-6, abs=1e-6)
    assert not filled.advantages[~batch.loss_mask].any()
    assert filled.advantages.dtype == filled.returns.dtype == torch.float32
    if config.critic:
        assert filled.returns.tolist() == pytest.approx(reference_returns(batch, config), rel=1e-6, abs=1e-6)


@every_estimator
@settings(max_examples=6, deadline=None)
@given(seed=seeds, has_branches=st.booleans())
def test_the_order_of_groups_and_trajectories_changes_no_bit(
    advantage: Settings, others: Settings, seed: int, has_branches: bool
):
    groups, rng = random_groups(seed, has_branches=has_branches), random.Random(seed)
    config = config_of(advantage, **others)
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
    starts = list(itertools.accumulate((len(g.trajectories) for g in groups), initial=0))
    assert here == [there[starts[i] + j] for i in order for j in within[i]]


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


def test_rejection_keeps_what_is_above_the_threshold_and_not_what_is_at_it():
    assert one_each(of_rewards(0.5, 0.6, -1.0), {"kind": "rejection", "threshold": 0.5}) == [0.0, 1.0, 0.0]


@every_estimator
def test_where_nothing_is_trained_there_are_no_advantages(advantage: Settings, others: Settings):
    config = config_of(advantage, **others)
    untrained = group(trajectory(1.0, (0, 0), rewards={"right": 1.0}), greedy_rewards={"agent": 0.0})
    for groups, expected in (([], []), ([untrained], [[0.0, 0.0]])):
        assert rows_of(with_advantages(taken(groups, config), config)) == expected


@pytest.mark.parametrize(
    ("baseline", "scale"),
    [*itertools.product(("group_mean", "leave_one_out", "length_weighted"), SCALES), ("none", "batch_std")],
)
@pytest.mark.parametrize("rewards", [(0.7,), (0.3, 0.1 + 0.2, 0.3), (1e6, 1e6 + 1e-10, 1e6), (1e9 + 0.1,) * 7])
def test_rewards_that_are_equal_up_to_rounding_teach_nothing(baseline: str, scale: str, rewards: tuple[float, ...]):
    assert one_each(of_rewards(*rewards), returns(baseline, scale)) == [0.0] * len(rewards)


def test_pass_at_ks_advantages_add_up_to_zero_in_a_large_group():
    values = pass_at_k_advantages([1.0] * 3 + [0.0] * 253, 16)
    assert sum(values) == pytest.approx(0.0, abs=1e-9)
    assert values[0] > 0 > values[-1]


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_the_expected_gradient_of_max_likelihood_is_that_of_log_p_up_to_the_order_n_minus_1(n: int, p: float):
    """By p, over all outcomes of n answers. The score of a success is 1 / p, that of a failure -1 / (1 - p)."""
    expected = 0.0
    for outcome in itertools.product((1.0, 0.0), repeat=n):
        chance = math.prod(p if right else 1 - p for right in outcome)
        scores = [1 / p if right else -1 / (1 - p) for right in outcome]
        expected += (
            chance * math.fsum(a * s for a, s in zip(max_likelihood_advantages(outcome), scores, strict=True)) / n
        )
    assert expected == pytest.approx((1 - (1 - p) ** (n - 1)) / p)


def test_each_role_has_its_own_named_rewards_and_their_weights():
    roles = [trajectory(role=role, rewards={name: r}) for role, name in (("a", "x"), ("b", "y")) for r in (0.0, 1.0)]
    pair = group(*roles, episodes=(0, 1, 0, 1))
    weighed = returns("group_mean", separate_rewards=True, reward_weights={"y": 3.0})
    assert one_each(pair, weighed)[2:] == pytest.approx([3 * a for a in one_each(pair, weighed)[:2]])


@pytest.mark.parametrize(
    ("lacking", "advantage", "message"),
    [
        (
            group(trajectory(), trajectory(role="critic"), group_id=7, greedy_rewards={"agent": 0.0}),
            returns("greedy"),
            r"group 7 has no greedy reward for role 'critic', only for \['agent'\]",
        ),
        (
            group(trajectory(rewards={"right": 1.0, "brief": 0.0}), trajectory(rewards={"right": 1.0}), group_id=4),
            returns("group_mean", separate_rewards=True),
            r"group 4, role 'agent', have the named rewards \['brief', 'right'\] and \['right'\]; advantage.separate",
        ),
        (
            group(*[trajectory(rewards={"right": 1.0, "brief": 0.0})] * 2, group_id=3),
            returns("group_mean", separate_rewards=True, reward_weights={"rigth": 2.0}),
            r"reward_weights has 'rigth', but the batch's trajectories have the named rewards \['brief', 'right'\]",
        ),
        (
            of_rewards(1.0, 0.0),
            returns("group_mean", separate_rewards=True),
            r"group 0, role 'agent', have the named rewards \[\]",
        ),
    ],
)
def test_a_reward_that_is_missing_is_named(lacking: Group, advantage: Settings, message: str):
    with pytest.raises(TrajectoryError, match=message):
        one_each(lacking, advantage)


@given(values=st.lists(st.floats(-1e6, 1e6), max_size=12), rng=st.randoms())
def test_the_order_of_numbers_changes_no_bit_of_their_spread(values: list[float], rng: random.Random):
    shuffled = rng.sample(values, len(values))
    assert spread_of(shuffled) == spread_of(values)
    batch = Batch.of([group(*[trajectory(0.0, (0, 1))] * len(values))])
    rows = [torch.tensor([(0.0, v) for v in order], dtype=torch.float64) for order in (values, shuffled)]
    one, other = (sorted(whitened(batch, row.flatten()).tolist()) for row in rows)
    assert one == other


SAMPLER, TEACHER = (0.4, 0.3, 0.2, 0.1), (0.1, 0.2, 0.3, 0.4)
ALGORITHM = preset("distillation", weights=[{"level": "token"}], minibatches=2)


def advantage(token: int, student: tuple[float, ...]) -> float:
    """Of a token that the sampler drew and the teacher was asked about, when the student has come to `student`."""
    gain = math.log(TEACHER[token]) - math.log(SAMPLER[token])
    drawn = trajectory(0.0, (0, 1), token_rewards=(0.0, gain))
    log_prob = [torch.tensor([0.0, math.log(policy[token])]) for policy in (SAMPLER, student)]
    batch = replace(Batch.of([group(drawn)]), behavior_logprobs=log_prob[0], proximal_logprobs=log_prob[1])
    return float(with_advantages(batch, ALGORITHM).advantages[1])


@pytest.mark.parametrize("student", [SAMPLER, TEACHER, (0.05, 0.15, 0.3, 0.5)], ids=["fresh", "there", "beyond"])
def test_the_expected_gradient_is_that_of_the_divergence(student: tuple[float, ...]):
    """Over all tokens the sampler could have drawn, by the student's logits."""
    logits = torch.tensor(student, dtype=torch.float64).log().requires_grad_()
    current = logits.log_softmax(-1)
    loss = PolicyLoss.of(ALGORITHM)
    behavior = torch.tensor(SAMPLER, dtype=torch.float64)
    tokens = PackedTokens(
        behavior_logprobs=behavior.log(),
        proximal_logprobs=current.detach(),
        advantages=torch.tensor([advantage(token, student) for token in range(4)], dtype=torch.float64),
        sequence_ids=torch.arange(4),
    )
    zeros = torch.zeros_like(current)
    losses = loss(TokenOutputs(logprobs=current, entropy=zeros, values=zeros), tokens)
    (ours,) = torch.autograd.grad((behavior * losses.loss).sum(), logits, retain_graph=True)
    divergence = (current.exp() * (current - torch.tensor(TEACHER, dtype=torch.float64).log())).sum()
    (theirs,) = torch.autograd.grad(divergence, logits)
    assert ours.tolist() == pytest.approx(theirs.tolist(), abs=1e-6)


def of_task(groups: list[Group], task: str) -> list[Group]:
    return [replace(group, task=task) for group in groups]


EVERY_PRESET = [preset(name) for name in PRESETS]


@pytest.mark.parametrize(
    "config",
    [*EVERY_PRESET, *(config_of(advantage, **others) for advantage, others in ESTIMATORS)],
    ids=lambda c: c.preset,
)
@settings(max_examples=4, deadline=None)
@given(seed=seeds)
def test_a_task_has_the_advantages_that_it_has_alone_and_one_task_those_of_a_run_without(
    config: AlgorithmConfig, seed: int
):
    first, second = random_groups(seed), random_groups(seed + 1)
    tasks = {"a": of_task(first, "a"), "b": of_task(second, "b")}
    both = [group for pair in itertools.zip_longest(tasks["a"], tasks["b"]) for group in pair if group]

    def rows(groups: list[Group]) -> list[list[float]]:
        return rows_of(with_advantages(taken(groups, config), config))

    owners = [group.task for group in both for _ in group.trajectories]
    mixed = rows(both)
    for name, groups in tasks.items():
        assert [row for row, owner in zip(mixed, owners, strict=True) if owner == name] == rows(groups)
    assert rows(of_task(both, "one")) == rows(of_task(both, ""))
