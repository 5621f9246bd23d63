"""Groups of trajectories as training sequences, and back."""

import pytest
import torch
from advantage_cases import group, trajectory

from arl.algorithm.batch import flat, regrouped, to_sequences
from arl.api.algorithm import OverlongConfig


def test_sequences_carry_what_the_sampler_said_of_their_trajectories():
    first = trajectory(1.0, behavior_logprobs=(0.0, -0.5, 0.0, -1.5), versions=(-1, 3, -1, 4), temperature=0.5)
    [[_, sequence]] = to_sequences([group(trajectory(), first)], OverlongConfig())
    assert sequence.token_ids.tolist() == [0, 1, 2, 3]
    assert sequence.loss_mask.tolist() == [False, True, False, True]
    assert sequence.behavior_logprobs.tolist() == sequence.proximal_logprobs.tolist() == [0.0, -0.5, 0.0, -1.5]
    assert sequence.versions.tolist() == [-1, 3, -1, 4]
    assert sequence.temperature == 0.5
    assert (sequence.token_ids.dtype, sequence.loss_mask.dtype) == (torch.int64, torch.bool)
    assert sequence.advantages.dtype == sequence.behavior_logprobs.dtype == torch.float32


@pytest.mark.parametrize(("mask_truncated", "trained"), [(False, [2, 2]), (True, [2, 0])])
def test_trajectories_that_were_cut_off_are_masked_out_where_it_is_asked_for(mask_truncated: bool, trained: list[int]):
    whole, cut = trajectory(), trajectory(is_truncated=True)
    [sequences] = to_sequences([group(whole, cut)], OverlongConfig(mask_truncated=mask_truncated))
    assert [int(s.loss_mask.sum()) for s in sequences] == trained


def test_a_flat_batch_is_regrouped_as_it_was():
    batch = to_sequences([group(trajectory(), trajectory()), group(), group(trajectory())], OverlongConfig())
    again = regrouped(flat(batch), batch)
    assert [len(sequences) for sequences in again] == [2, 0, 1]
    assert all(a is b for a, b in zip(flat(again), flat(batch), strict=True))
