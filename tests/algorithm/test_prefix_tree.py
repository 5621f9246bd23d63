"""The depth-first order is the radix tree, and the packed row holds each of its tokens once, after its ancestors."""

import pytest
import torch
from families import Family, prefixes, slow_num_tokens, train_sequence, trees
from hypothesis import given, settings
from hypothesis import strategies as st

from arl.algorithm.prefix_tree import MIN_SHARED_TOKENS, PrefixOrder, RowPlan, needed_tokens, positions_of, prefix_order


def order_of(sequences: Family, min_shared: int = 1) -> PrefixOrder:
    return PrefixOrder.of([torch.tensor(tokens) for tokens in sequences], min_shared)


def row_of(order: PrefixOrder, plan: RowPlan, sequences: Family) -> list[int]:
    """The row's token ids; every sequence that passes through a place has the same token there."""
    row = [-1] * plan.num_tokens
    for index, runs in zip(order.indices, plan.runs, strict=True):
        for place, token in zip(positions_of(runs).tolist(), sequences[index], strict=True):
            assert row[place] in (-1, token)
            row[place] = token
    return row


@settings(max_examples=50, deadline=None)
@given(trees)
def test_each_different_prefix_is_one_token_of_the_row(sequences: Family):
    order = order_of(sequences)
    plan = RowPlan.of(order)
    assert order.num_tokens == plan.num_tokens == slow_num_tokens(sequences)
    assert -1 not in row_of(order, plan, sequences)


@settings(max_examples=50, deadline=None)
@given(trees)
def test_a_token_of_the_row_sees_its_own_prefix_and_nothing_else(sequences: Family):
    order = order_of(sequences)
    plan = RowPlan.of(order)
    row = row_of(order, plan, sequences)
    seen: list[tuple[int, ...]] = []
    for stretch in plan.stretches:
        context = [row[place] for place in positions_of(stretch.context).tolist()]
        assert len(context) == stretch.num_context_tokens
        own = row[stretch.start : stretch.stop]
        seen += [(*context, *own[: i + 1]) for i in range(len(own))]
    assert sorted(seen) == sorted(set().union(*map(prefixes, sequences)))


@settings(max_examples=50, deadline=None)
@given(trees)
def test_stretches_are_no_more_than_different_sequences_and_cover_the_row(sequences: Family):
    stretches = RowPlan.of(order_of(sequences)).stretches
    assert len(stretches) <= len({tuple(tokens) for tokens in sequences})
    places = [place for s in stretches for place in range(s.start, s.stop)]
    assert places == list(range(slow_num_tokens(sequences)))
    assert all(s.num_tokens for s in stretches)


@settings(max_examples=50, deadline=None)
@given(trees, st.data())
def test_the_order_of_some_sequences_is_what_they_alone_would_give(sequences: Family, data: st.DataObject):
    chosen = data.draw(st.lists(st.integers(0, max(len(sequences) - 1, 0)), unique=True)) if sequences else []
    some = order_of(sequences).only(chosen)
    assert sorted(some.indices) == sorted(chosen)
    assert RowPlan.of(some).num_tokens == slow_num_tokens([sequences[i] for i in chosen])


@settings(max_examples=50, deadline=None)
@given(trees, st.integers(1, 8))
def test_a_context_has_at_least_as_many_tokens_as_asked_for(sequences: Family, min_shared: int):
    order = order_of(sequences, min_shared)
    plan = RowPlan.of(order)
    assert all(s.num_context_tokens == 0 or s.num_context_tokens >= min_shared for s in plan.stretches)
    for index, runs in zip(order.indices, plan.runs, strict=True):
        assert len(positions_of(runs)) == len(sequences[index])


def test_a_first_child_continues_the_stretch_of_its_parent():
    plan = RowPlan.of(order_of([[1, 2], [1, 2, 3], [1, 2, 4], [1, 5]]))
    assert [(s.start, s.stop, s.context) for s in plan.stretches] == [(0, 3, ()), (3, 4, ((0, 2),)), (4, 5, ((0, 1),))]


def test_unshared_sequences_keep_their_order():
    sequences = [train_sequence([9, 9, 1]), train_sequence([1, 1, 1, 1])]
    plan = RowPlan.of(prefix_order(sequences, share_prefixes=False))
    assert plan.runs == (((0, 2),), ((2, 5),))


@pytest.mark.parametrize("common", [MIN_SHARED_TOKENS - 1, MIN_SHARED_TOKENS])
def test_short_common_beginnings_are_not_shared(common: int):
    sequences = [train_sequence([*range(common), 100 + i, 0]) for i in range(2)]
    expected = common if common >= MIN_SHARED_TOKENS else 0
    assert prefix_order(sequences).shared == (0, expected)


@pytest.mark.parametrize(("trained", "needed"), [([2, 3], 3), ([1], 1), ([], 1), ([4], 4)])
def test_nothing_is_forwarded_from_the_last_trained_token_on(trained: list[int], needed: int):
    assert needed_tokens(train_sequence([5, 6, 7, 8, 9], trained)).tolist() == [5, 6, 7, 8, 9][:needed]
