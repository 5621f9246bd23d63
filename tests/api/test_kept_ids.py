"""Kept ids say of each token what a plain list of sets says, whatever is done with them."""

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arl.api.sampling_mask import KeptIds

VOCAB = 12
Sets = list[list[int] | None]
some_sets = st.lists(st.none() | st.lists(st.integers(0, VOCAB - 1), min_size=1, unique=True), max_size=8)


def slow_mask(sets: Sets) -> list[list[bool]]:
    return [[of_token is None or i in of_token for i in range(VOCAB)] for of_token in sets]


@given(some_sets)
def test_a_set_is_the_same_whether_its_own_ids_or_the_others_are_stored(sets: Sets) -> None:
    for kept in (KeptIds.of(sets), KeptIds.of(sets, VOCAB)):
        assert kept.mask(VOCAB).tolist() == slow_mask(sets)


@given(some_sets, st.data())
def test_a_token_is_allowed_where_its_set_holds_it(sets: Sets, data: st.DataObject) -> None:
    ids = [data.draw(st.integers(0, VOCAB - 1)) for _ in sets]
    wanted = [row[i] for row, i in zip(slow_mask(sets), ids, strict=True)]
    assert KeptIds.of(sets, VOCAB).allows(np.array(ids, np.int32)).tolist() == wanted


@given(some_sets, st.data())
def test_some_of_the_tokens_keep_their_sets_and_no_others(sets: Sets, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, len(sets) - 1), max_size=10)) if sets else []
    taken = KeptIds.of(sets, VOCAB).take(np.array(places, np.int64))
    chosen = [sets[place] for place in places]
    if taken is None:
        assert all(of_token is None for of_token in chosen)
    else:
        assert taken == KeptIds.of(chosen, VOCAB)
        assert set(taken.index.tolist()) - {-1} == set(range(len(taken.sizes)))


@given(st.lists(some_sets | st.integers(0, 4), max_size=5))
def test_parts_end_to_end_are_the_tokens_of_all(parts: list[Sets | int]) -> None:
    joined = KeptIds.joined([part if isinstance(part, int) else KeptIds.of(part, VOCAB) for part in parts])
    sets = [one for part in parts for one in ([None] * part if isinstance(part, int) else part)]
    if all(isinstance(part, int) for part in parts):
        assert joined is None
    else:
        assert joined == KeptIds.of(sets, VOCAB)


@given(some_sets)
def test_bytes_and_pickles_give_them_back(sets: Sets) -> None:
    for kept in (KeptIds.of(sets, VOCAB), KeptIds.of(sets)):
        for again in (KeptIds.decode(kept.encode()), KeptIds.of_bytes(kept.encode()), kept.packed()):
            assert again == kept
            assert len(again) == len(sets)
            assert pickle.loads(pickle.dumps(again)) == kept
            assert again.lists(VOCAB) == [[i for i in range(VOCAB) if row[i]] for row in slow_mask(sets)]


far_sets = st.lists(st.none() | st.lists(st.integers(0, 1 << 23), min_size=1, unique=True), max_size=8)


@given(far_sets, st.data())
def test_bytes_hold_any_ids_in_any_order_of_use(sets: Sets, data: st.DataObject) -> None:
    """Ids far apart, and sets that are used again, out of order, or by no token."""
    places = data.draw(st.lists(st.integers(0, len(sets) - 1), max_size=20)) if sets else []
    kept, chosen = KeptIds.of(sets), [sets[place] for place in places]
    used = KeptIds(
        index=kept.index[places].astype(np.int32), sizes=kept.sizes, lists_excluded=kept.lists_excluded, ids=kept.ids
    )
    assert KeptIds.decode(used.encode()) == KeptIds.of(chosen)


def test_a_packed_set_is_small_where_contexts_repeat() -> None:
    """50 ids a token, by 400 contexts, each time with another straggler: a seventh of the ids as they are."""
    generator = np.random.default_rng(0)
    frequent = [generator.zipf(1.3, 400) % 50_000 for _ in range(400)]
    contexts = [np.unique(ids)[:49] for ids in frequent]
    sets = [np.unique(np.append(contexts[i], generator.integers(50_000))) for i in generator.integers(400, size=4000)]
    kept = KeptIds.of(sets)
    assert kept.packed().num_bytes * 7 < 4 * len(kept.ids)


def test_bytes_of_another_format_are_an_error() -> None:
    data = KeptIds.of([[1, 2], None]).encode()
    for read in (KeptIds.decode, KeptIds.of_bytes):
        with pytest.raises(ValueError, match="this version of arl reads"):
            read(b"set1" + data[4:])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"index": [2]}, "names a set of kept ids that does not exist; there are 2"),
        ({"ids": [3, 1, 2]}, "do not ascend"),
        ({"ids": [1, 1 << 24, 2]}, "holds 16777216; no vocabulary is so large"),
        ({"ids": [1, 2]}, "list 3 ids together, but 2 came"),
        ({"sizes": [3, 0], "ids": [1, 2, 3]}, "is empty: nothing could be sampled"),
        ({"lists_excluded": [True]}, "2 sets of kept ids came with 1 marks"),
    ],
)
def test_numbers_that_describe_no_sets_are_an_error(change: dict[str, Any], sentence: str) -> None:
    numbers: dict[str, Any] = {"index": [0, 1], "sizes": [2, 1], "lists_excluded": [False, False], "ids": [1, 3, 2]}
    numbers |= change
    kinds = {"lists_excluded": np.bool_}
    arrays: dict[str, Any] = {name: np.array(values, kinds.get(name, np.int32)) for name, values in numbers.items()}
    with pytest.raises(ValueError, match=sentence):
        KeptIds(**arrays)


@pytest.mark.parametrize("cut", [5, 20, -1])
def test_bytes_that_were_cut_are_an_error(cut: int) -> None:
    with pytest.raises(ValueError, match="kept ids"):
        KeptIds.decode(KeptIds.of([[1, 2], None]).encode()[:cut])
