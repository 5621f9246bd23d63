"""The radix tree of sequences, and packing: it keeps its budget, loses nothing, and depends on the tokens alone."""

import itertools
import random
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from families import Family, prefixes, slow_num_tokens, train_sequence, trees
from hypothesis import given, settings
from hypothesis import strategies as st

from arl.algorithm.packing import balanced_shares, pack
from arl.algorithm.prefix_tree import MIN_SHARED_TOKENS, PrefixOrder, RowPlan, needed_tokens, prefix_order


def order_of(sequences: Family, min_shared: int = 1) -> PrefixOrder:
    return PrefixOrder.of([torch.tensor(tokens) for tokens in sequences], min_shared)


def places_of(plan: RowPlan) -> list[list[int]]:
    """Where the tokens of the order's sequences lie, one list for each sequence."""
    lengths = plan.order.lengths.tolist()
    numbers = torch.arange(len(lengths)).repeat_interleave(plan.order.lengths)
    positions = torch.tensor([position for length in lengths for position in range(length)], dtype=torch.int64)
    return [part.tolist() for part in plan.places(numbers, positions).split(lengths)] if lengths else []


def row_of(order: PrefixOrder, plan: RowPlan, sequences: Family) -> list[int]:
    """The row's token ids; every sequence that passes through a place has the same token there."""
    row = [-1] * plan.num_tokens
    for index, places in zip(order.indices.tolist(), places_of(plan), strict=True):
        for place, token in zip(places, sequences[index], strict=True):
            assert row[place] in (-1, token)
            row[place] = token
    return row


@settings(max_examples=80, deadline=None)
@given(trees)
def test_each_different_prefix_is_one_token_of_the_row_which_sees_its_own_prefix_and_nothing_else(sequences: Family):
    order = order_of(sequences)
    plan = RowPlan.of(order)
    row = row_of(order, plan, sequences)
    assert order.num_tokens == plan.num_tokens == slow_num_tokens(sequences)
    assert -1 not in row
    assert len(plan.stretches) <= len({tuple(tokens) for tokens in sequences})
    assert [place for s in plan.stretches for place in range(s.start, s.stop)] == list(range(len(row)))
    seen: list[tuple[int, ...]] = []
    for stretch in plan.stretches:
        context = [row[place] for place in plan.context(stretch).tolist()]
        assert len(context) == stretch.depth
        own = row[stretch.start : stretch.stop]
        seen += [(*context, *own[: i + 1]) for i in range(len(own))]
    assert sorted(seen) == sorted(set().union(*map(prefixes, sequences)))


@settings(max_examples=50, deadline=None)
@given(trees, st.data())
def test_the_order_of_some_sequences_is_what_they_alone_would_give(sequences: Family, data: st.DataObject):
    chosen = data.draw(st.lists(st.integers(0, max(len(sequences) - 1, 0)), unique=True)) if sequences else []
    some = order_of(sequences).only(chosen)
    assert sorted(some.indices.tolist()) == sorted(chosen)
    assert row_of(some, RowPlan.of(some), sequences).count(-1) == 0
    assert some.renumbered(sorted(chosen)).indices.tolist() == [sorted(chosen).index(i) for i in some.indices.tolist()]
    assert RowPlan.of(some).num_tokens == slow_num_tokens([sequences[i] for i in chosen])


@settings(max_examples=50, deadline=None)
@given(trees, st.integers(1, 8))
def test_a_context_has_as_many_tokens_as_asked_for_or_is_half_of_its_sequence(sequences: Family, min_shared: int):
    order = order_of(sequences, min_shared)
    plan = RowPlan.of(order)
    columns = zip(order.lengths.tolist(), order.shared.tolist(), strict=True)
    assert all(shared == 0 or shared >= min_shared or 2 * shared >= length for length, shared in columns)
    assert {s.depth for s in plan.stretches} <= {0, *order.shared.tolist()}
    assert row_of(order, plan, sequences).count(-1) == 0


@settings(max_examples=50, deadline=None)
@given(trees)
def test_positions_and_subtrees_are_those_of_the_tree(sequences: Family):
    plan = RowPlan.of(order_of(sequences))
    paths = places_of(plan)
    stops, positions = plan.subtree_stops.tolist(), plan.positions.tolist()
    for path in paths:
        assert [positions[place] for place in path] == list(range(len(path)))
    for place, stop in enumerate(stops):
        below = {p for path in paths if place in path for p in path if p >= place}
        assert below == set(range(place, stop))


@settings(max_examples=50, deadline=None)
@given(trees, st.integers(1, 12))
def test_blocks_hold_every_pair_that_sees_each_other_once_and_no_other(sequences: Family, tile: int):
    plan = RowPlan.of(order_of(sequences))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("arl.algorithm.prefix_tree._TILE", tile)
        blocks = plan.blocks()
    place = torch.arange(plan.num_tokens)
    expected = (place <= place[:, None]) & (place[:, None] < plan.subtree_stops)
    count = torch.zeros_like(expected, dtype=torch.int64)
    for block in blocks:
        seen = torch.ones(block.queries[1] - block.queries[0], block.keys[1] - block.keys[0], dtype=torch.int64)
        seen = seen.tril() if block.is_causal else seen if block.mask is None else (block.mask == 0).long()
        count[slice(*block.queries), slice(*block.keys)] += seen
    assert torch.equal(count, expected.long())
    tiles = [block.queries for block in blocks if block.queries == block.keys]
    assert [p for run in tiles for p in range(*run)] == place.tolist()
    assert blocks[: len(tiles)] == [block for block in blocks if block.queries == block.keys]
    whole = {(s.start, s.stop) for s in plan.stretches}
    assert all(stop - start <= tile or (start, stop) in whole for start, stop in tiles)


def test_unshared_sequences_keep_their_order():
    sequences = [train_sequence([9, 9, 1]), train_sequence([1, 1, 1, 1])]
    plan = RowPlan.of(prefix_order(sequences, share_prefixes=False))
    assert places_of(plan) == [[0, 1], [2, 3, 4]]


@pytest.mark.parametrize("common", [MIN_SHARED_TOKENS - 1, MIN_SHARED_TOKENS])
@pytest.mark.parametrize("num_own", [MIN_SHARED_TOKENS - 1, MIN_SHARED_TOKENS])
def test_short_common_beginnings_of_longer_sequences_are_not_shared(common: int, num_own: int):
    sequences = [train_sequence([*range(common), *range(100 + i, 100 + i + num_own), 0]) for i in range(2)]
    expected = common if common >= MIN_SHARED_TOKENS or common >= num_own else 0
    assert prefix_order(sequences).shared.tolist() == [0, expected]


@pytest.mark.parametrize(("trained", "needed"), [([2, 3], 3), ([1], 1), ([], 1), ([4], 4)])
def test_nothing_is_forwarded_from_the_last_trained_token_on(trained: list[int], needed: int):
    others = [train_sequence([1, 2]), train_sequence([3, 4, 5], [])]
    for before in (0, 1, 2):
        sequences = [*others[:before], train_sequence([5, 6, 7, 8, 9], trained), *others[before:]]
        assert needed_tokens(sequences)[before].tolist() == [5, 6, 7, 8, 9][:needed]


PROMPT, ANSWERS = list(range(40)), [[100 + i] * 10 for i in range(8)]
GROUP = [PROMPT + answer for answer in ANSWERS]


def everything(groups: list[list[int]]) -> list[int]:
    return sorted(i for group in groups for i in group)


@settings(max_examples=50, deadline=None)
@given(trees)
def test_what_fits_into_one_bin_is_one_bin(sequences: Family):
    assert len(pack(order_of(sequences), max(slow_num_tokens(sequences), 1))) == min(len(sequences), 1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 60), max_size=40), st.integers(60, 80))
def test_no_two_bins_of_unlike_sequences_would_fit_into_one(lengths: list[int], budget: int):
    loads = sorted(sum(lengths[i] for i in members) for members in pack(PrefixOrder.unshared(lengths), budget))
    assert len(loads) < 2 or loads[0] + loads[1] > budget


OTHERS = [[200 + i] * 60 for i in range(2)]
BRANCHES = [[*PROMPT, *[50 + b] * 20, 100 + i] for i in range(3) for b in range(2)]


@pytest.mark.parametrize(
    ("order", "budget", "bins"),
    [
        pytest.param(
            PrefixOrder.unshared([2, 2, 6, 8, 4, 8]), 10, [[0, 3], [1, 5], [2, 4]], id="small ones fill the gaps"
        ),
        pytest.param(
            order_of([GROUP[0], OTHERS[0], *GROUP[1:4], OTHERS[1], *GROUP[4:]]),
            120,
            [[0, 2, 3, 4, 6, 7, 8, 9], [1, 5]],
            id="a family shares a bin rather than filling the gaps of others",
        ),
        pytest.param(order_of(BRANCHES), 40 + 20 + 3, [[0, 2, 4], [1, 3, 5]], id="a branch of a cut family"),
    ],
)
def test_what_is_alike_shares_a_bin_and_the_rest_fills_the_gaps(order: PrefixOrder, budget: int, bins: list[list[int]]):
    assert pack(order, budget) == bins


def test_a_family_larger_than_the_budget_is_cut_where_its_prefix_is_repeated_least():
    assert [len(members) for members in pack(order_of(GROUP), 40 + 3 * 10)] == [3, 3, 2]


@settings(max_examples=50, deadline=None)
@given(trees, st.integers(5, 60), st.randoms(use_true_random=False))
def test_packing_does_not_depend_on_the_order_of_unlike_sequences(sequences: Family, budget: int, rng: random.Random):
    def loads(sequences: Family) -> list[int]:
        return sorted(slow_num_tokens([sequences[i] for i in members]) for members in pack(order_of(sequences), budget))

    shuffled = rng.sample(sequences, len(sequences))
    assert loads(shuffled) == loads(sequences)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 60), max_size=7), st.integers(1, 3))
def test_no_share_of_unlike_sequences_is_much_larger_than_it_has_to_be(lengths: list[int], num_shares: int):
    shares = balanced_shares([train_sequence([i] * (n + 1)) for i, n in enumerate(lengths)], num_shares)
    assert len(shares) == num_shares
    assert everything(shares) == list(range(len(lengths)))
    homes = itertools.product(range(num_shares), repeat=len(lengths))
    best = min(
        max(sum(n for n, h in zip(lengths, home, strict=True) if h == k) for k in range(num_shares)) for home in homes
    )
    assert max(sum(lengths[i] for i in share) for share in shares) <= 13 / 11 * best * 1.01


@pytest.mark.parametrize(
    ("families", "num_shares", "expected"),
    [
        pytest.param([40] * 4, 2, [[0, 1], [2, 3]], id="families stay together where that is balanced"),
        pytest.param([40], 4, [[0]] * 4, id="a family is cut where one share would get too much"),
        pytest.param([40, 43, 46, 49, 52], 5, [[0], [1], [2], [3], [4]], id="as many shares as families"),
        pytest.param([200, 200], 4, [[0], [0], [1], [1]], id="pieces go where their prefix is already"),
    ],
)
def test_shares_hold_whole_families_if_they_can(families: list[int], num_shares: int, expected: list[list[int]]):
    """families: the length of each one's prefix; each has 8 answers of 10 tokens."""
    sequences = [train_sequence([*range(1000 * f, 1000 * f + n), *a]) for a in ANSWERS for f, n in enumerate(families)]
    shares = balanced_shares(sequences, num_shares)
    assert sorted(sorted({i % len(families) for i in share}) for share in shares) == expected
    assert max(map(len, shares)) == len(sequences) / num_shares


def test_without_sharing_shares_are_balanced_by_lengths():
    sequences = [train_sequence(tokens) for tokens in [*GROUP, [7] * 401]]
    assert balanced_shares(sequences, 2, share_prefixes=False) == [[8], list(range(8))]
    assert balanced_shares(sequences, 2)[0] == [8]


def test_a_budget_or_a_number_of_shares_below_one_is_refused():
    with pytest.raises(ValueError, match="budget is 0"):
        pack(PrefixOrder.unshared([1]), 0)
    with pytest.raises(ValueError, match="num_shares is 0"):
        balanced_shares([], 0)


def units_of(count: int, rng: random.Random) -> list[int]:
    """All sequences for themselves, or a few, and the others in units of any size."""
    numbers = rng.choice(([-1], [-1, 3, 5, 1000]))
    return [rng.choice(numbers) for _ in range(count)]


def are_together(groups: list[list[int]], units: list[int]) -> bool:
    homes = [{k for k, group in enumerate(groups) for i in group if units[i] == unit} for unit in {*units} - {-1}]
    return all(len(home) == 1 for home in homes)


@settings(max_examples=100, deadline=None)
@given(trees, st.integers(1, 80), st.randoms(use_true_random=False))
def test_everything_is_packed_once_with_units_whole_within_the_budget_or_the_largest_piece(
    sequences: Family, budget: int, rng: random.Random
):
    units = units_of(len(sequences), rng)
    bins = pack(order_of(sequences), budget, units)
    assert everything(bins) == list(range(len(sequences)))
    assert are_together(bins, units)
    pieces = [[i] for i in range(len(units))] + [
        [i for i in range(len(units)) if units[i] == u] for u in {*units} - {-1}
    ]
    largest = max((slow_num_tokens([sequences[i] for i in piece]) for piece in pieces), default=0)
    for members in bins:
        assert slow_num_tokens([sequences[i] for i in members]) <= max(budget, largest)


def test_what_a_unit_has_in_common_counts_once_and_a_unit_too_large_is_the_budget():
    units = [7, -1, 7, 8, 8, -1, -1, -1]
    assert pack(order_of(GROUP), 60, units) == [[0, 2], [1, 5], [3, 4], [6, 7]]
    assert pack(order_of(GROUP), 59, units) == pack(order_of(GROUP), 60, units)


def test_long_branches_of_one_episode_are_not_forwarded_one_at_a_time():
    order = order_of([[*tokens, 9, turn] for turn, tokens in enumerate(branching(100))])
    bins = pack(order, 50)
    assert len(bins) < 10
    assert sum(order.only(members).num_tokens for members in bins) < 5 * order.num_tokens


@settings(max_examples=100, deadline=None)
@given(trees, st.integers(1, 5), st.randoms(use_true_random=False))
def test_everything_is_in_one_share_with_its_unit_and_none_forwards_more_than_all_together(
    sequences: Family, num_shares: int, rng: random.Random
):
    units = units_of(len(sequences), rng)
    tied = [replace(train_sequence([*tokens, 0]), unit=unit) for tokens, unit in zip(sequences, units, strict=True)]
    shares = balanced_shares(tied, num_shares)
    assert len(shares) == num_shares
    assert everything(shares) == list(range(len(sequences)))
    assert are_together(shares, units)
    assert max(slow_num_tokens([sequences[i] for i in share]) for share in shares) <= prefix_order(tied).num_tokens


def test_shares_of_equal_units_are_equal():
    sequences = [replace(train_sequence([*tokens, 0]), unit=i // 2) for i, tokens in enumerate(GROUP)]
    assert [len(share) for share in balanced_shares(sequences, 4)] == [2, 2, 2, 2]


def branching(num_turns: int) -> Family:
    """Each turn's thoughts are gone in the next prompt: every turn is a path beside the one that goes on."""
    said = [[3 * turn] * 9 for turn in range(num_turns)]
    return [
        [token for words in said[: turn + 1] for token in words] + [1] * (turn % 13 + 5) for turn in range(num_turns)
    ]


def num_lines_run(call: Callable[[], object]) -> int:
    count = 0

    def trace(frame: object, event: str, arg: object) -> Callable[..., object]:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("budget", [300, 4000])
def test_packing_a_deep_tree_takes_as_much_for_each_sequence_however_many_there_are(budget: int):
    few, many = ([train_sequence([*tokens, 0]) for tokens in branching(turns)] for turns in (200, 600))
    for sequences in (few, many):
        order = prefix_order(sequences)
        assert num_lines_run(lambda order=order: pack(order, budget)) < 500 * len(sequences)
    assert num_lines_run(lambda: balanced_shares(few, 8)) < 5000 * len(few), "it packs some ten times"
