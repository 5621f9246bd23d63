"""A batch is flat: columns of its trajectories, one tensor for each field of its tokens, and views for the engine."""

import itertools
from dataclasses import replace

import pytest
import torch
from advantage_cases import group, random_groups, trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from arl.algorithm.batch import Batch, token_rewards
from arl.api.settings.objective import OverlongConfig


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


@pytest.mark.parametrize(("mask_truncated", "trained"), [(False, [2, 2]), (True, [2, 0])])
def test_truncated_trajectories_are_masked_out_if_the_settings_say_so(mask_truncated: bool, trained: list[int]):
    whole, cut = trajectory(), trajectory(is_truncated=True)
    assert Batch.of([group(whole, cut)], OverlongConfig(mask_truncated=mask_truncated)).counts == trained


def test_groups_are_taken_from_a_batch_as_they_would_be_alone():
    members = [trajectory(), trajectory(1.0, (0, 1)), trajectory(2.0, (0, 1, 1)), trajectory(3.0, (0, 1, 0, 1, 1))]
    groups = [group(*members[:2], episodes=(0, 0)), group(), group(*members[2:], group_id=1)]
    batch = Batch.of(groups)
    batch = replace(batch, advantages=torch.arange(14.0))
    some = batch.take([2, 1, 0])
    alone = Batch.of([groups[2], groups[1], groups[0]])
    assert (some.groups, some.trajectories, some.group) == (alone.groups, alone.trajectories, alone.group)
    assert some.loss_mask.tolist() == alone.loss_mask.tolist()
    assert some.advantages.tolist() == [*range(6, 14), *range(6)]
    assert some.episode[2] == some.episode[3] != some.episode[0]
    assert batch.take([0, 1, 2]) is batch
    assert len(batch.take([1])) == len(batch.take([])) == 0


def test_sequences_are_views_of_the_flat_tensors():
    batch = Batch.of([group(trajectory(), trajectory())])
    second = batch.sequences()[1]
    assert second.advantages.data_ptr() == batch.advantages.data_ptr() + 4 * batch.lengths[0]
