"""Means and standard deviations that do not depend on the order of what they are of."""

import random
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arl.algorithm.peers import Spread, pooled_spread, spread_of, whitened

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


@given(st.lists(numbers, max_size=6), st.randoms(), st.booleans())
def test_the_order_of_tensors_changes_no_bit(rows: list[list[float]], rng: random.Random, each_part_once: bool):
    parts = [torch.tensor(row, dtype=torch.float64) for row in rows]
    shuffled = rng.sample(parts, len(parts))
    assert pooled_spread(shuffled, each_part_once=each_part_once) == pooled_spread(parts, each_part_once=each_part_once)


def test_a_tensor_may_count_as_one_number_however_long_it_is():
    parts = [torch.tensor(row, dtype=torch.float64) for row in ([3.0, 3.0, 3.0], [], [1.0], [2.0])]
    assert pooled_spread(parts, each_part_once=True) == Spread(2.0, 1.0)
    assert pooled_spread(parts).std == pytest.approx(statistics.stdev([3.0, 3.0, 3.0, 1.0, 2.0]))


def test_one_sequence_that_counts_once_has_nothing_to_be_whitened_by():
    values, mask = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([True, True])
    assert whitened([values], [mask], once=[0])[0].tolist() == [0.0, 0.0]
    assert whitened([values], [mask])[0].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-5)


@pytest.mark.parametrize("values", [[0.1] * 3, [0.3, 0.1 + 0.2], [1e9, 1e9 + 1e-7]])
def test_numbers_that_differ_by_rounding_alone_have_no_spread(values: list[float]):
    assert spread_of(values).std == 0
    assert pooled_spread([torch.tensor(values, dtype=torch.float64)]).std == 0
