"""Loss weights are shares of the whole minibatch."""

import random
from typing import get_args

import pytest
from advantage_cases import group, trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from arl.algorithm.batch import Batch, loss_weights
from arl.api.algorithm import Aggregation

Masks = list[list[list[int]]]
"""The loss masks of groups of trajectories."""


def reference(groups: Masks, aggregation: Aggregation, sequence_tokens: int) -> list[list[float]]:
    """Each token's weight, found by counting for it alone."""
    counts = [sum(mask) for masks in groups for mask in masks]
    num_sequences, num_groups = sum(n > 0 for n in counts), sum(any(map(any, masks)) for masks in groups)
    weights = []
    for masks in groups:
        for mask in masks:
            share = {
                "token_mean": sum(counts),
                "sequence_mean": num_sequences * sum(mask),
                "sequence_sum": num_sequences * sequence_tokens,
                "group_mean": num_groups * sum(map(sum, masks)),
            }[aggregation]
            weights.append([1 / share if token else 0.0 for token in mask])
    return weights


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**20), sequence_tokens=st.integers(1, 64))
def test_weights_agree_with_counting(aggregation: Aggregation, seed: int, sequence_tokens: int):
    rng = random.Random(seed)
    share = rng.choice((0.0, 0.2, 1.0))
    groups = [
        [[0, *(int(rng.random() < share) for _ in range(rng.randint(1, 6)))] for _ in range(rng.randint(0, 4))]
        for _ in range(rng.randint(0, 4))
    ]
    batch = Batch.of([group(*(trajectory(0.0, mask) for mask in masks)) for masks in groups])
    found = batch.split(loss_weights(batch, aggregation, sequence_tokens=sequence_tokens))
    for row, expected in zip(found, reference(groups, aggregation, sequence_tokens), strict=True):
        assert row.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)
