"""Loss weights are shares of the whole minibatch."""

from typing import get_args

import pytest
from advantage_cases import group, trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from arl.algorithm.batch import Batch, loss_weights
from arl.api.algorithm import Aggregation

AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
Masks = list[list[list[int]]]

masks = st.lists(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), max_size=4), max_size=4)
"""Of groups of sequences."""


def weighed(groups: Masks, aggregation: Aggregation, sequence_tokens: int = 8) -> list[list[float]]:
    """Of each trajectory of groups whose masks these are, after an untrained first token."""
    batch = Batch.of([group(*(trajectory(0.0, (0, *mask)) for mask in masks)) for masks in groups])
    weights = loss_weights(batch, aggregation, sequence_tokens=sequence_tokens)
    return [row.tolist()[1:] for row in batch.split(weights)]


def reference(groups: Masks, aggregation: Aggregation, sequence_tokens: int) -> list[list[float]]:
    """Each token's weight, found by counting for it alone."""
    trained = [[sum(mask) for mask in row] for row in groups]
    weights = []
    for masks_, counts in zip(groups, trained, strict=True):
        for mask, count in zip(masks_, counts, strict=True):
            row = []
            for token in mask:
                weight = 0.0
                if token and aggregation == "token_mean":
                    weight = 1 / sum(n for row_ in trained for n in row_)
                elif token and aggregation == "sequence_mean":
                    weight = 1 / len([n for row_ in trained for n in row_ if n]) / count
                elif token and aggregation == "sequence_sum":
                    weight = 1 / len([n for row_ in trained for n in row_ if n]) / sequence_tokens
                elif token:
                    weight = 1 / len([row_ for row_ in trained if any(row_)]) / sum(counts)
                row.append(weight)
            weights.append(row)
    return weights


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@settings(max_examples=40, deadline=None)
@given(groups=masks, sequence_tokens=st.integers(1, 64))
def test_weights_agree_with_counting(aggregation: Aggregation, groups: Masks, sequence_tokens: int):
    found, expected = weighed(groups, aggregation, sequence_tokens), reference(groups, aggregation, sequence_tokens)
    assert len(found) == len(expected)
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("aggregation", [a for a in AGGREGATIONS if a != "sequence_sum"])
@settings(max_examples=20, deadline=None)
@given(groups=masks)
def test_the_weights_of_a_mean_add_up_to_one(aggregation: Aggregation, groups: Masks):
    is_trained = any(token for group in groups for mask in group for token in mask)
    assert sum(sum(row) for row in weighed(groups, aggregation)) == pytest.approx(1.0 if is_trained else 0.0)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_minibatch_in_which_nothing_is_trained_weighs_nothing(aggregation: Aggregation):
    assert weighed([[[0, 0]], []], aggregation) == [[0.0, 0.0]]
