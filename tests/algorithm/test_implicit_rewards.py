"""PRIME's implicit process rewards, their loss and the advantages made of them, against the paper's formulas."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from advantage_cases import group, random_groups, returns, rows_of, trajectory
from loss_references import gradient
from test_preference_losses import total

from arl.algorithm.advantages import with_advantages
from arl.algorithm.batch import Batch
from arl.algorithm.returns import (
    ImplicitRewardLoss,
    lesson_of,
    outcomes_of,
    read_sequences,
)
from arl.api.errors import TrajectoryError
from arl.api.sampling_mask import KeptIds
from arl.api.settings.algorithm import preset
from arl.api.types import Group

BETA = 0.4
Numbers = list[float]


def branched() -> list[Group]:
    """An episode of two branches, an episode of one, one that is not trained; and a second role of the first."""
    two = [trajectory(1.0, (0, 1, 1)), trajectory(0.5, (0, 1, 0, 1, 1))]
    others = [trajectory(0.0, (0, 1, 1, 1)), trajectory(1.0, (0, 0)), trajectory(0.25, (0, 1), role="critic")]
    return [group(*two, *others, episodes=(0, 0, 1, 2, 0)), group(trajectory(1.0), trajectory(0.0), group_id=1)]


def read(groups: Sequence[Group], seed: int = 0) -> Batch:
    """A batch as a reward model learns from it, with the current logprobs in the place of the sampler's."""
    batch, draw = Batch.of(groups), random.Random(seed)
    size = len(batch.token_ids)
    current, reference = (torch.tensor([-3 * draw.random() for _ in range(size)]).double() for _ in range(2))
    outcomes = batch.over_tokens(outcomes_of(batch))
    return replace(batch, behavior_logprobs=current, reference_logprobs=reference, returns=outcomes)


def reference_loss(current: Sequence[Numbers], reference: Sequence[Numbers], outcome: float) -> float:
    """Algorithm 1, line 8, for one episode, whose trajectories have these logprobs of trained tokens."""
    pairs = zip(itertools.chain(*current), itertools.chain(*reference), strict=True)
    chance = 1 / (1 + math.exp(-BETA * sum(c - r for c, r in pairs)))
    return -outcome * math.log(chance) - (1 - outcome) * math.log(1 - chance)


def episodes_of(batch: Batch) -> dict[int, list[int]]:
    """The trained trajectories of each episode and role."""
    members: dict[int, list[int]] = {}
    for i, episode in enumerate(batch.episode):
        if batch.counts[i]:
            members.setdefault(episode, []).append(i)
    return members


def trained(batch: Batch, name: str) -> list[Numbers]:
    masks, rows = batch.split(batch.loss_mask), batch.split(getattr(batch, name))
    return [row[mask].tolist() for row, mask in zip(rows, masks, strict=True)]


def test_the_loss_is_the_mean_cross_entropy_over_episodes_in_value_and_gradient():
    batch = read(branched())
    value, slopes, _ = total(lesson_of(batch), ImplicitRewardLoss(beta=BETA))
    current, reference, outcomes = trained(batch, "behavior_logprobs"), trained(batch, "reference_logprobs"), {}
    episodes = episodes_of(batch)
    outcomes = dict(zip(episodes, (0.75, 0.0, 0.25, 1.0, 0.0), strict=True))

    def loss(episode: int, place: int | None = None, changed: Numbers | None = None) -> float:
        rows = [changed if i == place and changed is not None else current[i] for i in episodes[episode]]
        return reference_loss(rows, [reference[i] for i in episodes[episode]], outcomes[episode])

    assert value == pytest.approx(sum(map(loss, episodes)) / 5, abs=1e-6)
    expected = {
        i: gradient(lambda row, e=e, i=i: loss(e, i, row) / 5, current[i])  # type: ignore[misc]
        for e, members in episodes.items()
        for i in members
    }
    for i, ours in zip(sorted(expected), slopes, strict=True):
        assert ours == pytest.approx(expected[i], abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_however_a_minibatch_is_split_between_episodes_its_parts_add_up(seed: int):
    batch, loss = read(branched(), seed), ImplicitRewardLoss(beta=BETA)
    lesson = lesson_of(batch)
    whole, _, metrics = total(lesson, loss)
    units = random.Random(seed).sample(sorted(set(lesson.units)), len(set(lesson.units)))
    parts = [total([s for s in lesson if s.unit in part], loss) for part in (units[:1], units[1:3], units[3:])]
    assert sum(value for value, *_ in parts) == pytest.approx(whole)
    for name, value in metrics.items():
        assert sum(of[name] for *_, of in parts) == pytest.approx(value)


def test_a_model_that_says_rightly_who_wins_is_accurate_and_one_that_says_nothing_is_by_half():
    groups = [group(trajectory(1.0), trajectory(0.0), trajectory(1.0), trajectory(0.0))]
    batch = read(groups)
    certain = torch.where(batch.returns > 0.5, 2.0, -2.0).double()
    for rise, accuracy, success in ((certain, 1.0, 0.5), (-certain, 0.0, 0.5), (0 * certain, 0.5, 0.5)):
        moved = replace(batch, behavior_logprobs=batch.reference_logprobs + rise)
        _, _, metrics = total(lesson_of(moved), ImplicitRewardLoss(beta=BETA))
        assert metrics == pytest.approx({"accuracy": accuracy, "success": success})


def test_an_episodes_outcome_is_the_mean_of_its_branches_rewards_of_the_role():
    assert outcomes_of(Batch.of(branched())) == [0.75, 0.75, 0.0, 1.0, 0.25, 1.0, 0.0]


@pytest.mark.parametrize("reward", [-0.1, 1.5])
def test_a_reward_that_is_no_probability_is_refused_by_name(reward: float):
    wrong = group(trajectory(0.5), trajectory(reward, role="critic"), group_id=3)
    with pytest.raises(TrajectoryError, match=rf"group 3, role 'critic', has reward {reward:g}, and .*between 0 and 1"):
        outcomes_of(Batch.of([group(trajectory(1.0)), wrong]))


def test_a_reward_model_reads_text_at_temperature_1_over_the_whole_vocabulary_and_masked_out_trajectories_too():
    kept = KeptIds.joined([3, KeptIds.of([[3, 4]])])
    sampled = trajectory(1.0, (0, 1, 0, 1), temperature=0.5, is_truncated=True, kept_ids=kept)
    batch = Batch.of([group(sampled, trajectory(0.0))], preset("prime", overlong={"mask_truncated": True}).overlong)
    texts = read_sequences(batch)
    assert [(s.temperature, s.kept_ids, s.loss_mask.tolist()) for s in texts] == [
        (1.0, None, [False, True, False, True])
    ] * 2
    lesson = lesson_of(batch)
    assert [(s.temperature, s.kept_ids, int(s.loss_mask.sum())) for s in lesson] == [(1.0, None, 0), (1.0, None, 2)]


def test_beside_arrays_a_temperature_stays_as_it_is_the_users_models_own():
    arrays = {"latents": np.zeros((4, 2))}
    batch = Batch.of([group(trajectory(1.0, temperature=0.7, arrays=arrays), trajectory(0.0, temperature=0.7))])
    for sequences in (read_sequences(batch), lesson_of(batch)):
        assert [s.temperature for s in sequences] == [0.7, 1.0]


# Advantages


def test_advantages_are_the_papers_sum_of_process_returns_and_outcomes_each_against_the_others():
    """Eq. 5: A_t = sum over s >= t of gamma^(s-t) (r_s - mean of the others' mean r) + R - mean of the others' R."""
    draw = random.Random(1)
    rewards, lengths = [1.0, 0.0, 0.0, 1.0], [3, 1, 4, 2]
    process = [[draw.gauss(0, 1) for _ in range(n)] for n in lengths]
    batch = Batch.of([group(*(trajectory(r, (0, *[1] * n)) for r, n in zip(rewards, lengths, strict=True)))])
    flat = [r for row in process for r in (0.0, *row)]
    batch = replace(batch, implicit_rewards=torch.tensor(flat, dtype=torch.float64))
    gamma = 0.9
    config = preset("prime", advantage={"token_discount": gamma})
    for i, row in enumerate(rows_of(with_advantages(batch, config))):
        others = [j for j in range(4) if j != i]
        baseline = sum(sum(process[j]) / lengths[j] for j in others) / 3
        outcome = rewards[i] - sum(rewards[j] for j in others) / 3
        for t in range(lengths[i]):
            later = sum(gamma ** (s - t) * (process[i][s] - baseline) for s in range(t, lengths[i]))
            assert row[t + 1] == pytest.approx(later + outcome, rel=1e-6)


@pytest.mark.parametrize("baseline", ["leave_one_out", "group_mean", "none"])
@pytest.mark.parametrize("scale", ["none", "group_std", "batch_std"])
def test_a_models_process_rewards_are_normalised_as_a_workflows_own(baseline: str, scale: str):
    groups = [
        replace(g, trajectories=tuple(replace(t, turns=(), token_rewards=None) for t in g.trajectories))
        for g in random_groups(5, has_branches=True)
    ]
    config = preset("decoupled_ppo", advantage=returns(baseline, scale), reward_model={})
    batch = Batch.of(groups)
    rewards = torch.randn(len(batch.token_ids), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    rewards = torch.where(batch.loss_mask, rewards, 0.0)
    given = iter(rewards.split(batch.lengths))
    own = [
        replace(g, trajectories=tuple(replace(t, token_rewards=tuple(next(given).tolist())) for t in g.trajectories))
        for g in groups
    ]
    ours = with_advantages(replace(batch, implicit_rewards=rewards), config)
    theirs = with_advantages(Batch.of(own), config)
    torch.testing.assert_close(ours.advantages, theirs.advantages)
    assert ours.advantages.any()
