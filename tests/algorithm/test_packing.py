"""Packing keeps its budget, loses nothing, and depends on lengths alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arl.algorithm.packing import balanced_shards, pack

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


@given(LENGTHS, st.integers(1, 80))
def test_every_sequence_is_packed_once_within_the_budget(lengths: list[int], budget: int):
    bins = pack(lengths, budget)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) <= budget or len(members) == 1 for members in bins)


@given(LENGTHS, st.integers(60, 80))
def test_no_two_bins_would_fit_into_one(lengths: list[int], budget: int):
    loads = sorted(sum(lengths[i] for i in members) for members in pack(lengths, budget))
    assert len(loads) < 2 or loads[0] + loads[1] > budget


def test_large_sequences_are_placed_first_so_that_small_ones_fill_the_gaps():
    assert pack([2, 2, 6, 8, 4, 8], 10) == [[0, 3], [1, 5], [2, 4]]


@given(LENGTHS, st.integers(1, 6))
def test_shards_hold_everything_and_differ_by_one_sequence_at_most(lengths: list[int], num_shards: int):
    shards = balanced_shards(lengths, num_shards)
    assert len(shards) == num_shards
    assert sorted(i for shard in shards for i in shard) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in shard) for shard in shards]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_a_budget_or_a_number_of_shards_below_one_is_refused():
    with pytest.raises(ValueError, match="budget is 0"):
        pack([1], 0)
    with pytest.raises(ValueError, match="num_shards is 0"):
        balanced_shards([1], 0)
