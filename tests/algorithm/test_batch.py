"""A batch is flat; its loss weights are shares of the whole minibatch; selections choose tokens before it is split."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import pytest
import torch
from advantage_cases import group, random_groups, trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from arl.algorithm.batch import Batch, loss_weights, selected_tokens, token_rewards
from arl.api.settings.algorithm import Aggregation
from arl.api.settings.objective import (
    ClipCovSelection,
    KLCovSelection,
    OverlongConfig,
    SecondMomentSelection,
    SelectionConfig,
)
from arl.api.types import Group


def test_sequences_carry_the_samplers_numbers():
    first = trajectory(1.0, behavior_logprobs=(0.0, -0.5, 0.0, -1.5), versions=(-1, 3, -1, 4), temperature=0.5)
    _, sequence = Batch.of([group(trajectory(), first)]).sequences()
    assert sequence.token_ids.tolist() == [0, 1, 2, 3]
    assert sequence.loss_mask.tolist() == [False, True, False, True]
    assert sequence.behavior_logprobs.tolist() == sequence.proximal_logprobs.tolist() == [0.0, -0.5, 0.0, -1.5]
    assert sequence.versions.tolist() == [-1, 3, -1, 4]
    assert sequence.temperature == 0.5
    assert (sequence.token_ids.dtype, sequence.loss_mask.dtype) == (torch.int64, torch.bool)
    assert sequence.advantages.dtype == sequence.behavior_logprobs.dtype == torch.float32


@pytest.mark.parametrize("mask_truncated", [False, True])
@given(seed=st.integers(0, 2**20))
@settings(deadline=None, max_examples=20)
def test_a_batch_is_its_trajectories_number_by_number(mask_truncated: bool, seed: int):
    groups = random_groups(seed, has_branches=True)
    trajectories = [t for g in groups for t in g.trajectories]
    batch = Batch.of(groups, OverlongConfig(mask_truncated=mask_truncated))
    mask = [bool(m) and not (mask_truncated and t.is_truncated) for t in trajectories for m in t.loss_mask]
    columns = {"token_ids": torch.int64, "versions": torch.int64, "behavior_logprobs": torch.float32}
    for name, dtype in columns.items():
        column = getattr(batch, name)
        assert column.dtype == dtype
        assert column.tolist() == [number for t in trajectories for number in getattr(t, name).tolist()]
    assert batch.loss_mask.tolist() == mask
    assert batch.lengths == tuple(len(t.token_ids) for t in trajectories)
    edges = list(itertools.accumulate(batch.lengths, initial=0))
    assert batch.counts == [sum(mask[start:end]) for start, end in itertools.pairwise(edges)]
    rewards = [[0.0] * len(t.token_ids) if t.token_rewards is None else t.token_rewards for t in trajectories]
    assert token_rewards(batch).tolist() == [float(r) for row in rewards for r in row]
    assert [batch.groups[g].group_id for g in batch.group] == [g.group_id for g in groups for _ in g.trajectories]


def test_groups_are_taken_from_a_batch_as_they_would_be_alone():
    members = [trajectory(), trajectory(1.0, (0, 1)), trajectory(2.0, (0, 1, 1)), trajectory(3.0, (0, 1, 0, 1, 1))]
    groups = [group(*members[:2], episodes=(0, 0)), group(), group(*members[2:], group_id=1)]
    batch = Batch.of(groups)
    batch = replace(batch, advantages=torch.arange(14.0), implicit_rewards=torch.arange(14.0))
    some = batch.take([2, 1, 0])
    alone = Batch.of([groups[2], groups[1], groups[0]])
    assert (some.groups, some.trajectories, some.group) == (alone.groups, alone.trajectories, alone.group)
    assert some.loss_mask.tolist() == alone.loss_mask.tolist()
    assert some.implicit_rewards is not None
    assert some.advantages.tolist() == some.implicit_rewards.tolist() == [*range(6, 14), *range(6)]
    assert some.episode[2] == some.episode[3] != some.episode[0]
    assert batch.take([0, 1, 2]) is batch
    assert len(batch.take([1])) == len(batch.take([])) == 0


def test_sequences_are_views_of_the_flat_tensors():
    batch = Batch.of([group(trajectory(), trajectory())])
    second = batch.sequences()[1]
    assert second.advantages.data_ptr() == batch.advantages.data_ptr() + 4 * batch.lengths[0]


# Loss weights


def counted(groups: Sequence[Group], aggregation: Aggregation, sequence_tokens: int) -> list[float]:
    """Each token's weight, found by counting for it alone."""
    rows = [
        ((g.group_id, episode, t.role), t.loss_mask.tolist())
        for g in groups
        for t, episode in zip(g.trajectories, g.episode_indices, strict=True)
    ]
    episodes, weights = {key for key, mask in rows if any(mask)}, list[float]()
    for mine, mask in rows:
        share = {
            "token_mean": sum(sum(m) for _, m in rows),
            "sequence_mean": len(episodes) * sum(sum(m) for key, m in rows if key == mine),
            "sequence_sum": len(episodes) * sequence_tokens,
            "group_mean": len({g for g, *_ in episodes}) * sum(sum(m) for key, m in rows if key[0] == mine[0]),
        }[aggregation]
        weights += [1 / share if token else 0.0 for token in mask]
    return weights


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**20), size=st.integers(0, 4), sequence_tokens=st.integers(1, 64))
def test_weights_agree_with_counting(aggregation: Aggregation, seed: int, size: int, sequence_tokens: int):
    groups = random_groups(seed, has_branches=True)[:size]
    found = loss_weights(Batch.of(groups), aggregation, sequence_tokens=sequence_tokens)
    assert found.tolist() == pytest.approx(counted(groups, aggregation, sequence_tokens), rel=1e-6, abs=1e-9)


# Selections


SECOND_MOMENT = SecondMomentSelection(limit=0.04)
CLIP_COV = ClipCovSelection(share=0.1, low=0.2, high=2.0)
CLIP_ALL = ClipCovSelection(share=0.2, low=-100.0, high=100.0)
KL_COV = KLCovSelection(share=0.1)
every_selection = pytest.mark.parametrize("config", [SECOND_MOMENT, CLIP_COV, KL_COV], ids=lambda c: c.kind)


@dataclass(kw_only=True)
class Row:
    """One trajectory, of which all is trained where no mask is given."""

    proximal: Sequence[float]
    behavior: Sequence[float]
    advantages: Sequence[float]
    loss_mask: Sequence[int] = ()

    @property
    def mask(self) -> Sequence[int]:
        return self.loss_mask or [1] * len(self.proximal)


def batch_of(*rows: Row) -> Batch:
    def joined(values: Sequence[Sequence[float]]) -> torch.Tensor:
        return torch.tensor([value for row in values for value in row])

    return replace(
        Batch.of([group(*(trajectory(0.0, [0] * len(row.proximal)) for row in rows))]),
        loss_mask=joined([row.mask for row in rows]).bool(),
        proximal_logprobs=joined([row.proximal for row in rows]),
        behavior_logprobs=joined([row.behavior for row in rows]),
        advantages=joined([row.advantages for row in rows]),
    )


def random_rows(seed: int, count: int = 12) -> list[Row]:
    """One advantage per trajectory, prompts, and one trajectory in which nothing is trained."""
    rng, rows = random.Random(seed), []
    for index in range(count):
        length = rng.randrange(2, 12)
        mask = [0] + [rng.randrange(2) if index else 0 for _ in range(length - 1)]
        behavior = [-rng.uniform(0.05, 3) for _ in range(length)]
        proximal = [b + rng.gauss(0, 0.3) for b in behavior]
        advantages = [rng.gauss(0, 1)] * length
        rows.append(Row(proximal=proximal, behavior=behavior, advantages=advantages, loss_mask=mask))
    return rows


def selected(rows: Sequence[Row], config: SelectionConfig | None, seed: int = 0) -> list[list[bool]]:
    batch = batch_of(*rows)
    return [flags.tolist() for flags in batch.split(selected_tokens(batch, config, seed=seed))]


def trained_flags(rows: Sequence[Row], config: SelectionConfig | None, seed: int = 0) -> list[bool]:
    """Of the trained tokens alone."""
    flags = selected(rows, config, seed)
    return [f for row, own in zip(rows, flags, strict=True) for f, m in zip(own, row.mask, strict=True) if m]


def trained(rows: Sequence[Row], name: str) -> list[float]:
    return [v for row in rows for v, m in zip(getattr(row, name), row.mask, strict=True) if m]


def covariances(rows: Sequence[Row]) -> list[float]:
    p, a = trained(rows, "proximal"), trained(rows, "advantages")
    mean_p, mean_a = sum(p) / len(p), sum(a) / len(a)
    return [(x - mean_p) * (y - mean_a) for x, y in zip(p, a, strict=True)]


# All of them ----------------------------------------------------------------------------------------------------------


@every_selection
@pytest.mark.parametrize("seed", range(3))
def test_trained_tokens_are_selected_in_any_order_of_trajectories_and_whatever_the_rounding(
    config: SelectionConfig, seed: int
):
    rows = random_rows(seed)
    there = selected(rows, config)
    assert any(any(tokens) for tokens in there)
    for chosen, row in zip(there, rows, strict=True):
        assert not any(flag and not m for flag, m in zip(chosen, row.mask, strict=True))
    order = random.Random(seed).sample(range(len(rows)), len(rows))
    assert selected([rows[i] for i in order], config) == [there[i] for i in order]
    assert selected([replace(r, proximal=[p * (1 + 1e-6) for p in r.proximal]) for r in rows], config) == there


@every_selection
def test_a_minibatch_in_which_nothing_is_trained_has_nothing_to_select(config: SelectionConfig):
    untrained = Row(proximal=[-1.0], behavior=[-1.0], advantages=[1.0], loss_mask=[0])
    assert selected([untrained], config) == [[False]]
    assert selected([], config) == []


# M2PO -----------------------------------------------------------------------------------------------------------------


def masked_one_by_one(rows: Sequence[Row], limit: float) -> set[int]:
    """Algorithm 1 of 2510.01161: while the mean over remaining trust-region tokens is too large, drop the largest."""
    p, b, a = (trained(rows, name) for name in ("proximal", "behavior", "advantages"))
    moments = [(x - y) ** 2 for x, y in zip(p, b, strict=True)]
    remaining = [i for i in range(len(p)) if (a[i] > 0 and p[i] > b[i]) or (a[i] < 0 and p[i] < b[i])]
    dropped: set[int] = set()
    while remaining and sum(moments[i] for i in remaining) / len(remaining) > limit:
        largest = max(remaining, key=lambda i: moments[i])
        remaining.remove(largest)
        dropped.add(largest)
    return dropped


@pytest.mark.parametrize("limit", [1e-9, 0.005, 0.04, 0.1, 10.0])
@pytest.mark.parametrize("seed", range(8))
def test_second_moment_leaves_out_what_the_papers_algorithm_does(seed: int, limit: float):
    rows = random_rows(seed)
    flags = trained_flags(rows, SecondMomentSelection(limit=limit))
    assert {i for i, flag in enumerate(flags) if flag} == masked_one_by_one(rows, limit)


def test_second_moment_treats_equal_tokens_alike():
    """Dropping one of the two would be enough; which one would depend on the order."""
    s = Row(proximal=[-0.75, -0.75, -1.0625], behavior=[-1.0, -1.0, -1.125], advantages=[1.0] * 3)
    assert selected([s], SecondMomentSelection(limit=0.04)) == [[True, True, False]]


# Covariance -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [1e-6, 0.05, 0.2, 1.0])
def test_kl_cov_selects_the_largest_covariances(share: float):
    rows = random_rows(2)
    values = covariances(rows)
    flags = trained_flags(rows, KLCovSelection(share=share))
    count = max(int(share * len(values)), 1)
    largest = sorted(range(len(values)), key=lambda i: -values[i])[:count]
    assert {i for i, flag in enumerate(flags) if flag} == set(largest)


def test_kl_cov_selects_its_share_of_equal_covariances():
    """Advantages without spread have covariance 0 everywhere, which is no reason to select everything."""
    s = Row(proximal=[-1.0] * 10, behavior=[-1.0] * 10, advantages=[1.0] * 10)
    assert sum(selected([s], KLCovSelection(share=0.2))[0]) == 2


@pytest.mark.parametrize(("share", "low", "high"), [(0.1, 0.2, 2.0), (1.0, 0.2, 2.0), (0.5, 50.0, 60.0)])
@pytest.mark.parametrize("seed", range(5))
def test_clip_cov_draws_its_share_of_the_tokens_in_its_range_or_all_of_these(
    seed: int, share: float, low: float, high: float
):
    rows, config = random_rows(3), ClipCovSelection(share=share, low=low, high=high)
    values = covariances(rows)
    flags = trained_flags(rows, config, seed)
    inside = [low <= v <= high for v in values]
    assert sum(flags) == min(int(share * len(values)), sum(inside))
    assert all(is_inside for is_inside, flag in zip(inside, flags, strict=True) if flag)
    assert selected(rows, config, seed) == selected(rows, config, seed)


def test_clip_cov_draws_every_token_of_its_range_alike():
    """400 draws of one among four candidates: 100 for each, with a standard deviation of 8.7."""
    s = Row(proximal=[-1.0, -1.0, -1.0, -1.0, -2.0], behavior=[-1.0] * 5, advantages=[2.0] * 4 + [0.0])
    config = ClipCovSelection(share=0.2, low=0.01, high=0.1)
    counts = torch.tensor([selected([s], config, seed=seed)[0] for seed in range(400)]).sum(0).tolist()
    assert sum(counts) == 400
    assert counts[4] == 0
    assert all(65 < count < 135 for count in counts[:4])


def test_copies_of_a_sequence_are_drawn_apart():
    """Answers that are the same word for word do not all lose the same token, nor does their order decide."""
    copies = [Row(proximal=[-1.0] * 10, behavior=[-1.0] * 10, advantages=[a] * 10) for a in (1.0, 2.0, 3.0, -9.0)]
    chosen = selected(copies, CLIP_ALL)
    assert len({tuple(flags) for flags in chosen}) > 1
    assert selected(copies[::-1], CLIP_ALL) == chosen[::-1]
