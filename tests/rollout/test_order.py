"""The computed order of large datasets: each index once, the same for ever, and no trace of the dataset's order."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from players import as_json

from arl.rollout import ledger as ledgers
from arl.rollout.ledger import ExampleLedger
from arl.rollout.order import ComputedOrder


@given(number=st.integers(1, 3000), seed=st.text(max_size=5))
@settings(max_examples=40, deadline=None)
def test_it_has_every_index_once(number: int, seed: str) -> None:
    order = ComputedOrder(number, seed)
    assert sorted(order) == list(range(number))
    assert order[:5] == [order[place] for place in range(min(5, number))]


def test_it_never_changes_because_checkpoints_hold_places_in_it() -> None:
    assert ComputedOrder(10_000_000, "7-0")[:4] == [8472273, 9430279, 808077, 1190163]
    assert list(ComputedOrder(10, "a")) == GOLDEN


GOLDEN = [1, 6, 7, 0, 3, 8, 4, 5, 9, 2]


def test_neighbours_and_epochs_look_unrelated() -> None:
    """Within five standard deviations of what a random order has."""
    number = 20_000
    first, second = (list(ComputedOrder(number, f"0-{epoch}")) for epoch in (0, 1))
    for order in (first, second):
        rising = sum(a < b for a, b in pairwise(order))
        assert abs(rising - number / 2) < 5 * (number / 12) ** 0.5
        low_half_first = sum(index < number / 2 for index in order[: number // 2])
        assert abs(low_half_first - number / 4) < 5 * (number / 16) ** 0.5
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 8


def test_a_large_dataset_is_handed_out_in_it_and_an_older_checkpoint_goes_on_with_its_shuffle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    older = ExampleLedger(50, shuffle=True, seed=3)
    began = [older.issue().example_id[1] for _ in range(20)]
    monkeypatch.setattr(ledgers, "LARGE", 50)
    large = ExampleLedger(50, shuffle=True, seed=3)
    handed_out = [large.issue().example_id for _ in range(70)]
    orders = [list(ComputedOrder(50, f"3-{epoch}")) for epoch in range(2)]
    assert handed_out == [(0, index) for index in orders[0]] + [(1, index) for index in orders[1][:20]]
    resumed = ExampleLedger(50, shuffle=True, seed=3)
    resumed.load_state_dict(as_json(large.state_dict()), range(70))
    assert resumed.issue().example_id == (1, orders[1][20])
    goes_on = ExampleLedger(50, shuffle=True, seed=3)
    goes_on.load_state_dict(as_json(older.state_dict()), range(20))
    shuffled = list(range(50))
    random.Random("3-0").shuffle(shuffled)
    assert began + [goes_on.issue().example_id[1] for _ in range(30)] == shuffled
