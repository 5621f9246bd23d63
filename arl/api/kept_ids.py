"""KeptIds: the ids from which each token was sampled, if that was not the whole vocabulary.

    tokens    ..  {  "  a   b   "  }          index   -1 -1 0 1 2 2 2 3          -1: the whole vocabulary
    sets      0: only 123     1: only 34, 125     2: all but 0, 1, .., 31, 128     3: ..

States of a grammar repeat, and within a string nearly every token is allowed. So each set is stored once, as the ids in
it or as the ids missing from it, whichever are fewer. A trajectory that waits holds the sets as bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from arl.api.packed_sets import MAX_ID, Sets, counts_of, firsts_of, pack, unpack

Ids = npt.NDArray[np.int32]


class KeptIds:
    """The kept ids of T tokens: S sets, and the number of each token's set. Two are equal if all tokens' sets are.

    Raises ValueError for numbers that describe no sets. Do not change the arrays.
    """

    __hash__ = None  # pyright: ignore[reportAssignmentType]
    __slots__ = ("_bytes", "_sets")

    def __init__(self, *, index: Ids, sizes: Ids, lists_excluded: npt.NDArray[np.bool_], ids: Ids) -> None:
        self._sets: Sets | None = _checked(Sets(index, sizes, lists_excluded, ids))
        self._bytes = b""

    @property
    def index(self) -> Ids:
        """int32[T]: the set of each token; -1: it was sampled among the whole vocabulary."""
        return self._unpacked().index

    @property
    def sizes(self) -> Ids:
        """int32[S]: how many ids each set lists."""
        return self._unpacked().sizes

    @property
    def lists_excluded(self) -> npt.NDArray[np.bool_]:
        """bool[S]: the set lists the ids that it lacks."""
        return self._unpacked().lists_excluded

    @property
    def ids(self) -> Ids:
        """int32: what the sets list, end to end, ascending within each."""
        return self._unpacked().ids

    @classmethod
    def of(cls, kept: Iterable[Sequence[int] | npt.NDArray[Any] | None], vocab_size: int | None = None) -> KeptIds:
        """From the kept ids of each token, in any order; None for the whole vocabulary.

        vocab_size: of the model; without it, no set is stored as the ids that it lacks.
        """
        table = SetTable(vocab_size)
        for of_token in kept:
            if of_token is None:
                table.add_free()
            else:
                ids = np.sort(np.asarray(of_token, dtype=np.int32))
                table.add(ids.tobytes(), ids)
        return table.kept_ids()

    def __len__(self) -> int:
        return counts_of(self._bytes)[0] if self._sets is None else len(self._sets.index)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KeptIds):
            return NotImplemented
        return _set_of_each(self._unpacked()) == _set_of_each(other._unpacked())

    @property
    def num_bytes(self) -> int:
        """The bytes of the present form, packed or not."""
        return len(self._bytes) if self._sets is None else self._sets.num_bytes

    def packed(self) -> KeptIds:
        """The same kept ids, held as few bytes, which each use unpacks."""
        return self if self._sets is None else self.of_bytes(self.encode())

    def listed(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(the number of its set, the id) of everything that sets list."""
        return _listed(self._unpacked())

    def allows(self, token_ids: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """bool[T]: whether each of these ids, one for each token, is in the token's set."""
        sets = self._unpacked()
        is_free = sets.index < 0
        wanted = (sets.index.astype(np.int64) << 32) | token_ids
        of_sets, ids = _listed(sets)
        keys = (of_sets << 32) | ids
        places = np.searchsorted(keys, wanted)
        is_listed = np.zeros(len(self), np.bool_)
        is_inside = places < len(keys)
        is_listed[is_inside] = keys[places[is_inside]] == wanted[is_inside]
        marks = np.append(sets.lists_excluded, False)  # the last stands for the sets of free tokens
        return is_free | (is_listed != marks[sets.index])

    def mask(self, vocab_size: int) -> npt.NDArray[np.bool_]:
        """bool[T, vocab_size]: which ids each token was sampled among."""
        sets = self._unpacked()
        of_sets = np.repeat(sets.lists_excluded[:, None], vocab_size, axis=1)
        of_sets[_listed(sets)] ^= True
        return np.concatenate((of_sets, np.ones((1, vocab_size), np.bool_)))[sets.index]

    def lists(self, vocab_size: int) -> list[list[int]]:
        """The ids of each token, ascending."""
        sets = self._unpacked()
        whole = np.arange(vocab_size)
        parts = np.split(sets.ids, sets.starts[1:-1]) if len(sets.sizes) else []
        lists = [
            (np.delete(whole, part) if mark else part).tolist()
            for mark, part in zip(sets.lists_excluded, parts, strict=True)
        ]
        return [lists[number] if number >= 0 else whole.tolist() for number in sets.index]

    def take(self, places: npt.NDArray[Any] | slice) -> KeptIds | None:
        """Those of the tokens at these places; None if all of them were sampled among the whole vocabulary."""
        sets = self._unpacked()
        used, numbers = np.unique(sets.index[places], return_inverse=True)
        has_free = int(len(used) > 0 and used[0] < 0)
        used = used[has_free:]
        if not len(used):
            return None
        return KeptIds(
            index=(numbers - has_free).astype(np.int32).reshape(-1),
            sizes=sets.sizes[used],
            lists_excluded=sets.lists_excluded[used],
            ids=sets.listed_by(used),
        )

    @classmethod
    def joined(cls, parts: Sequence[KeptIds | int]) -> KeptIds | None:
        """End to end; a number stands for so many tokens without a set. None if no token has one."""
        if len(parts) == 1:
            return None if isinstance(parts[0], int) else parts[0]
        sets = [part if isinstance(part, int) else part._unpacked() for part in parts]
        known = [part for part in sets if isinstance(part, Sets)]
        if not known:
            return None
        rows: list[Ids] = []
        num_sets = 0
        for part in sets:
            if isinstance(part, Sets):
                rows.append(np.where(part.index < 0, part.index, part.index + np.int32(num_sets)))
                num_sets += len(part.sizes)
            else:
                rows.append(np.full(part, -1, np.int32))
        return cls(
            index=np.concatenate(rows),
            sizes=np.concatenate([part.sizes for part in known]),
            lists_excluded=np.concatenate([part.lists_excluded for part in known]),
            ids=np.concatenate([part.ids for part in known]),
        )

    def encode(self) -> bytes:
        """As few bytes, which `decode` and `of_bytes` read."""
        return self._bytes or pack(self._unpacked())

    @classmethod
    def decode(cls, data: bytes) -> KeptIds:
        """Raises ValueError for bytes that `encode` did not write."""
        kept = cls.of_bytes(data)  # which `encode` gives again
        kept._sets = _checked(unpack(data))
        return kept

    @classmethod
    def of_bytes(cls, data: bytes) -> KeptIds:
        """Held as these bytes. Only their format is checked: raises ValueError for another."""
        counts_of(data)
        kept = cls.__new__(cls)
        kept._sets, kept._bytes = None, data
        return kept

    def _unpacked(self) -> Sets:
        return unpack(self._bytes) if self._sets is None else self._sets


def _checked(sets: Sets) -> Sets:
    """Raises ValueError for numbers that describe no sets."""
    num_sets = len(sets.sizes)
    if len(sets.lists_excluded) != num_sets:
        raise ValueError(f"{num_sets} sets of kept ids came with {len(sets.lists_excluded)} marks; each needs one")
    if len(sets.index) and not (sets.index.min() >= -1 and sets.index.max() < num_sets):
        raise ValueError(f"a token names a set of kept ids that does not exist; there are {num_sets}")
    if (sets.sizes < 0).any() or sets.starts[-1] != len(sets.ids):
        raise ValueError(f"sets of kept ids list {sets.sizes.sum()} ids together, but {len(sets.ids)} came")
    if len(sets.ids) and (sets.ids.min() < 0 or not ((np.diff(sets.ids) > 0) | firsts_of(sets)[1:]).all()):
        raise ValueError("the ids of a set of kept ids do not ascend")
    if len(sets.ids) and (last := int(sets.ids.max())) > MAX_ID:
        raise ValueError(f"a set of kept ids holds {last}; no vocabulary is so large")
    if ((sets.sizes == 0) & ~sets.lists_excluded).any():
        raise ValueError("a set of kept ids is empty: nothing could be sampled")
    return sets


def _listed(sets: Sets) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    return np.repeat(np.arange(len(sets.sizes), dtype=np.int64), sets.sizes), sets.ids.astype(np.int64)


def _set_of_each(sets: Sets) -> list[tuple[bool, bytes] | None]:
    parts = np.split(sets.ids, sets.starts[1:-1])
    known = [(bool(mark), part.tobytes()) for mark, part in zip(sets.lists_excluded, parts, strict=False)]
    return [known[number] if number >= 0 else None for number in sets.index]


class SetTable:
    """Collects the sets of a sequence's tokens, one token after another."""

    def __init__(self, vocab_size: int | None) -> None:
        self._vocab_size = vocab_size
        self._index: list[int] = []
        self._numbers: dict[bytes, int] = {}
        self._sets: list[Ids] = []
        self._marks: list[bool] = []

    def __len__(self) -> int:
        return len(self._index)

    def add_free(self) -> None:
        """The next token was sampled among the whole vocabulary."""
        self._index.append(-1)

    def knows(self, key: bytes) -> bool:
        return key in self._numbers

    def add(self, key: bytes, ids: Ids | None = None) -> None:
        """The next token's set. key: equal for equal sets. ids: int32, ascending; they may be left out if it knows the
        key."""
        if key not in self._numbers:
            assert ids is not None
            size = self._vocab_size
            self._numbers[key] = len(self._sets)
            is_long = size is not None and 2 * len(ids) > size
            self._sets.append(_others(ids, size) if is_long and size is not None else ids)
            self._marks.append(is_long)
        self._index.append(self._numbers[key])

    def kept_ids(self) -> KeptIds:
        return KeptIds(
            index=np.array(self._index, np.int32),
            sizes=np.array([len(ids) for ids in self._sets], np.int32),
            lists_excluded=np.array(self._marks, np.bool_),
            ids=np.concatenate((np.zeros(0, np.int32), *self._sets)),
        )


def _others(ids: Ids, vocab_size: int) -> Ids:
    """The ids below vocab_size that are not these."""
    is_other = np.ones(vocab_size, np.bool_)
    is_other[ids] = False
    return is_other.nonzero()[0].astype(np.int32)
