"""Shares of a minibatch: nothing lost, nothing twice, and the same sequences on the other side."""

from dataclasses import fields, replace

import pytest
import torch
from train_sequences import random_sequences

from arl.api.types import TrainSequence
from arl.engine.fsdp.minibatch import PackedSequences, divide


@pytest.mark.parametrize("num_shares", [1, 2, 4, 12])
def test_every_trained_sequence_is_in_one_share(num_shares: int):
    sequences = random_sequences(9)
    sequences[3] = replace(sequences[3], loss_mask=torch.zeros_like(sequences[3].loss_mask))
    shares = divide(sequences, num_shares, share_prefixes=True)
    assert len(shares) == num_shares
    assert sorted(i for share in shares for i in share) == [0, 1, 2, 4, 5, 6, 7, 8]


def test_shares_are_balanced_by_tokens():
    sequences = random_sequences(40)
    loads = [sum(len(sequences[i]) for i in share) for share in divide(sequences, 4, share_prefixes=False)]
    assert max(loads) - min(loads) <= max(map(len, sequences))


@pytest.mark.parametrize("count", [0, 1, 7])
def test_packed_sequences_come_out_as_they_went_in(count: int):
    sequences = random_sequences(count)
    arrived = PackedSequences.of(sequences).unpack()
    assert len(arrived) == count
    for ours, theirs in zip(arrived, sequences, strict=True):
        for field in fields(TrainSequence):
            mine, value = getattr(ours, field.name), getattr(theirs, field.name)
            if isinstance(value, torch.Tensor):
                assert mine.dtype == value.dtype, field.name
                assert torch.equal(mine, value), field.name
            else:
                assert mine == value, field.name
