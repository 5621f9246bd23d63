"""KeptIds: which token ids each token was sampled among, where that was not the whole vocabulary.

    tokens    ..  {  "  a   b   "  }          index   -1 -1 0 1 2 2 2 3          -1: the whole vocabulary
    sets      0: only 123     1: only 34, 125     2: all but 0, 1, .., 31, 128     3: ..

States of a grammar repeat, and within a string nearly every token is allowed. So sets are stored once, as the ids that
they hold or as those that they lack, whichever are fewer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]

_HEAD = struct.Struct("<III")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptIds:
    """The kept ids of T tokens: S sets, and the number of each token's set. Two are equal if all tokens' sets are.

    Raises ValueError for numbers that describe no sets.
    """

    index: Ids
    """int32[T]: the set of each token; -1: it was sampled among the whole vocabulary."""
    sizes: Ids
    """int32[S]: how many ids each set lists."""
    lists_excluded: npt.NDArray[np.bool_]
    """bool[S]: the set lists the ids that it lacks."""
    ids: Ids
    """int32: what the sets list, end to end, ascending within each."""

    def __post_init__(self) -> None:
        num_sets = len(self.sizes)
        if len(self.lists_excluded) != num_sets:
            raise ValueError(f"{num_sets} sets of kept ids came with {len(self.lists_excluded)} marks; each needs one")
        if len(self.index) and not (self.index.min() >= -1 and self.index.max() < num_sets):
            raise ValueError(f"a token names a set of kept ids that does not exist; there are {num_sets}")
        if (self.sizes < 0).any() or int(self.sizes.sum(dtype=np.int64)) != len(self.ids):
            raise ValueError(f"sets of kept ids list {self.sizes.sum()} ids together, but {len(self.ids)} came")
        if len(self.ids) and (self.ids.min() < 0 or not (np.diff(self._keys()) > 0).all()):
            raise ValueError("the ids of a set of kept ids do not ascend")
        if ((self.sizes == 0) & ~self.lists_excluded).any():
            raise ValueError("a set of kept ids is empty: nothing could be sampled")

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
        return len(self.index)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KeptIds):
            return NotImplemented
        return self._set_of_each() == other._set_of_each()

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    @property
    def num_bytes(self) -> int:
        return self.index.nbytes + self.sizes.nbytes + self.lists_excluded.nbytes + self.ids.nbytes

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """int64[S + 1]: where each set's ids begin, and their number."""
        return np.concatenate((np.zeros(1, np.int64), self.sizes.cumsum(dtype=np.int64)))

    def listed(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(the number of its set, the id) of everything that sets list."""
        return np.repeat(np.arange(len(self.sizes), dtype=np.int64), self.sizes), self.ids.astype(np.int64)

    def allows(self, token_ids: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """bool[T]: whether each of these ids, one for each token, is in the token's set."""
        is_free = self.index < 0
        wanted = (self.index.astype(np.int64) << 32) | token_ids
        keys = self._keys()
        places = np.searchsorted(keys, wanted)
        is_listed = np.zeros(len(self), np.bool_)
        is_inside = places < len(keys)
        is_listed[is_inside] = keys[places[is_inside]] == wanted[is_inside]
        marks = np.append(self.lists_excluded, False)  # the last stands for the sets of free tokens
        return is_free | (is_listed != marks[self.index])

    def mask(self, vocab_size: int) -> npt.NDArray[np.bool_]:
        """bool[T, vocab_size]: which ids each token was sampled among."""
        of_sets = np.repeat(self.lists_excluded[:, None], vocab_size, axis=1)
        of_sets[self.listed()] ^= True
        return np.concatenate((of_sets, np.ones((1, vocab_size), np.bool_)))[self.index]

    def take(self, places: npt.NDArray[Any] | slice) -> KeptIds | None:
        """Those of the tokens at these places; None if all of them were sampled among the whole vocabulary."""
        index = self.index[places]
        used, numbers = np.unique(index, return_inverse=True)
        has_free = int(len(used) > 0 and used[0] < 0)
        used = used[has_free:]
        if not len(used):
            return None
        sizes = self.sizes[used]
        shifts = self.starts[used] - (sizes.cumsum(dtype=np.int64) - sizes)
        listed = np.repeat(shifts, sizes) + np.arange(int(sizes.sum(dtype=np.int64)))
        return KeptIds(
            index=(numbers - has_free).astype(np.int32).reshape(-1),
            sizes=sizes,
            lists_excluded=self.lists_excluded[used],
            ids=self.ids[listed],
        )

    @classmethod
    def joined(cls, parts: Sequence[KeptIds | int]) -> KeptIds | None:
        """End to end; a number stands for so many tokens without a set. None if no token has one."""
        known = [part for part in parts if isinstance(part, KeptIds)]
        if not known:
            return None
        rows: list[Ids] = []
        num_sets = 0
        for part in parts:
            if isinstance(part, KeptIds):
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
        """As bytes, which `decode` reads; little-endian."""
        head = _HEAD.pack(len(self.index), len(self.sizes), len(self.ids))
        numbers = (part.astype("<i4", copy=False).tobytes() for part in (self.index, self.sizes, self.ids))
        return b"".join((head, *numbers, self.lists_excluded.tobytes()))

    @classmethod
    def decode(cls, data: bytes) -> KeptIds:
        """Raises ValueError for bytes that `encode` did not write."""
        if len(data) < _HEAD.size:
            raise ValueError("kept ids end early")
        num_tokens, num_sets, num_ids = _HEAD.unpack_from(data)
        numbers = num_tokens + num_sets + num_ids
        if len(data) != _HEAD.size + 4 * numbers + num_sets:
            raise ValueError(f"kept ids have {len(data)} bytes, which are not those of {num_tokens} tokens")
        words = np.frombuffer(data, "<i4", numbers, _HEAD.size)
        marks = np.frombuffer(data, np.uint8, num_sets, _HEAD.size + 4 * numbers)
        index, sizes, ids = np.split(words, (num_tokens, num_tokens + num_sets))
        return cls(index=index, sizes=sizes, lists_excluded=marks != 0, ids=ids)

    def _keys(self) -> npt.NDArray[np.int64]:
        """(number of the set, id) of each listed id as one number, ascending."""
        sets, ids = self.listed()
        return (sets << 32) | ids

    def _set_of_each(self) -> list[tuple[bool, bytes] | None]:
        parts = np.split(self.ids, self.starts[1:-1])
        sets = [(bool(mark), part.tobytes()) for mark, part in zip(self.lists_excluded, parts, strict=False)]
        return [sets[number] if number >= 0 else None for number in self.index]


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
