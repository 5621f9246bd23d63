"""Means and standard deviations that do not depend on the order of what they are of."""

import random
import statistics

import pytest
import torch
from advantage_cases import group, trajectory
from hypothesis import given
from hypothesis import strategies as st

from arl.algorithm.batch import Batch
from arl.algorithm.peers import spread_of, whitened

numbers = st.lists(st.floats(-1e6, 1e6), max_size=12)


@given(numbers)
def test_a_spread_is_mean_and_sample_standard_deviation(values: list[float]):
    spread = spread_of(values)
    assert spread.mean == pytest.approx(statistics.mean(values) if values else 0.0)
    assert spread.std == pytest.approx(statistics.stdev(values) if len(values) > 1 else 0.0, rel=1e-6, abs=1e-6)


@given(numbers, st.randoms())
def test_the_order_of_numbers_changes_no_bit(values: list[float], rng: random.Random):
    shuffled = rng.sample(values, len(values))
    assert spread_of(shuffled) == spread_of(values)


def test_a_single_episode_is_whitened_to_zero():
    batch = Batch.of([group(trajectory(0.0, (0, 1, 1)))])
    values = torch.tensor([9.0, 1.0, 2.0], dtype=torch.float64)
    assert whitened(batch, values, by_episode=True).tolist() == [0.0] * 3
    assert whitened(batch, values).tolist() == pytest.approx([0.0, -(0.5**0.5), 0.5**0.5], abs=1e-5)


@pytest.mark.parametrize("values", [[0.1] * 3, [0.3, 0.1 + 0.2], [1e9, 1e9 + 1e-7]])
def test_numbers_that_differ_by_rounding_alone_have_no_spread(values: list[float]):
    assert spread_of(values).std == 0
