"""KeptIds: the ids from which each token was sampled, if that was not the whole vocabulary.

    tokens    ..  {  "  a   b   "  }          index   -1 -1 0 1 2 2 2 3          -1: the whole vocabulary
    sets      0: only 123     1: only 34, 125     2: all but 0, 1, .., 31, 128     3: ..

States of a grammar repeat, and within a string nearly every token is allowed. So each set is stored once, as the ids in
it or as the ids missing from it, whichever are fewer. A trajectory that waits holds the sets as bytes.

Packed into those bytes, the sets that top_p, top_k and min_p keep at 32k tokens do not outweigh the tokens:

    set 3, 17, 40 --renamed by frequency--> 0, 2, 9 --gaps--> 0, 1, 6 --a byte each--> zstd

A text keeps some ids repeatedly. These get small numbers, so sets have small gaps, and similar contexts have similar
series of gaps, which zstd finds. docs/figures.md has the sizes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

_HEAD = struct.Struct("<4sIIIII")
_MARK = b"set2"
"""The format. Raise it when the bytes change."""
_LEVEL = 6
_LONG = 255
"""A gap of this size or more is stored as this byte, and the rest of it among the long gaps."""
MAX_ID = (1 << 24) - 1
"""Ids are below 2^24, so tables of all ids stay small, whatever a server sends."""

Numbers = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Sets:
    """The arrays of KeptIds, unchecked."""

    index: npt.NDArray[np.int32]
    sizes: npt.NDArray[np.int32]
    lists_excluded: npt.NDArray[np.bool_]
    ids: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int64] = field(init=False)
    """int64[S + 1]: where each set's ids begin, and at the end the number of all."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "starts", np.append(0, self.sizes.cumsum(dtype=np.int64)))

    @property
    def num_bytes(self) -> int:
        arrays = (self.index, self.sizes, self.lists_excluded, self.ids, self.starts)
        return sum(array.nbytes for array in arrays)

    def listed(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(the number of its set, the id) of everything that sets list."""
        return np.repeat(np.arange(len(self.sizes), dtype=np.int64), self.sizes), self.ids.astype(np.int64)

    def listed_by(self, chosen: Numbers) -> npt.NDArray[np.int32]:
        """The ids that these sets list, set after set."""
        sizes = self.sizes[chosen].astype(np.int64)
        shifts = self.starts[chosen] - (sizes.cumsum() - sizes)
        return self.ids[np.repeat(shifts, sizes) + np.arange(int(sizes.sum()))]


def pack(sets: Sets) -> bytes:
    """The bytes that `unpack` reads. Sets that no token has are left out; the others are numbered by first use."""
    import zstandard

    sets = _by_first_use(sets)
    renamed, names = _renamed(sets.ids, sets.sizes)
    gaps = np.diff(renamed, prepend=0) - 1
    is_first = firsts_of(sets)
    gaps[is_first] = renamed[is_first]
    is_long = gaps >= _LONG
    counts = (len(sets.index), len(sets.sizes), len(sets.ids), len(names), int(is_long.sum()))
    parts = (
        _planes(_steps(sets.index)),
        _planes(sets.sizes),
        sets.lists_excluded.tobytes(),
        _planes(names),
        np.minimum(gaps, _LONG).astype(np.uint8).tobytes(),
        _planes(gaps[is_long] - _LONG),
    )
    return _HEAD.pack(_MARK, *counts) + zstandard.compress(b"".join(parts), _LEVEL)


def firsts_of(sets: Sets) -> npt.NDArray[np.bool_]:
    """For each id, whether it is the first of a set."""
    is_first = np.zeros(len(sets.ids) + 1, np.bool_)  # the last set may list nothing
    is_first[sets.starts] = True
    return is_first[:-1]


def counts_of(data: bytes) -> tuple[int, int, int, int, int]:
    """The numbers of tokens, sets, listed ids, names and long gaps. Raises ValueError for bytes of another format."""
    if len(data) < _HEAD.size:
        raise ValueError("kept ids end early")
    mark, *counts = _HEAD.unpack_from(data)
    if mark != _MARK:
        raise ValueError(f"kept ids are of the format {mark!r}, and this version of arl reads {_MARK!r}")
    return tuple(counts)


def unpack(data: bytes) -> Sets:
    """Raises ValueError for bytes that `pack` did not write. The numbers themselves are not checked."""
    import zstandard

    num_tokens, num_sets, num_ids, num_names, num_long = counts_of(data)
    lengths = (4 * num_tokens, 4 * num_sets, num_sets, 4 * num_names, num_ids, 4 * num_long)
    try:
        body = zstandard.decompress(data[_HEAD.size :])
    except zstandard.ZstdError as error:
        raise ValueError(f"kept ids are not those of {num_tokens} tokens: {error}") from None
    if len(body) != sum(lengths):
        raise ValueError(f"kept ids have {len(body)} bytes, which are not those of {num_tokens} tokens")
    ends = np.cumsum(lengths)
    steps, sizes, marks, names, gaps, rest = np.split(np.frombuffer(body, np.uint8), ends[:-1])
    sizes = _from_planes(sizes).astype(np.int32)
    gaps = gaps.astype(np.int64)
    is_long = gaps == _LONG
    if int(is_long.sum()) != num_long or (sizes < 0).any() or int(sizes.sum(dtype=np.int64)) != num_ids:
        raise ValueError(f"kept ids contradict themselves: {num_sets} sets do not have {num_ids} ids")
    gaps[is_long] += _from_planes(rest)
    steps = _from_planes(steps)
    is_new = steps == 0
    num_before = is_new.cumsum() - is_new
    index = np.where(is_new, num_before, np.where(steps == 1, -1, num_before - steps + 1)).astype(np.int32)
    return Sets(index, sizes, marks != 0, _from_gaps(gaps, sizes, _from_planes(names)))


def _by_first_use(sets: Sets) -> Sets:
    """The same sets for the same tokens, without unused sets, in the order of their first use."""
    is_set = sets.index >= 0
    used, firsts, numbers = np.unique(sets.index[is_set], return_index=True, return_inverse=True)
    order = np.argsort(firsts)
    if np.array_equal(used[order], np.arange(len(sets.sizes))):
        return sets
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    index = np.full(len(sets.index), -1, np.int32)
    index[is_set] = places[numbers]
    chosen = used[order]
    return Sets(index, sets.sizes[chosen], sets.lists_excluded[chosen], sets.listed_by(chosen))


def _steps(index: Numbers) -> Numbers:
    """For each token: 0 for a set that no earlier token has, 1 for no set, and n + 2 for the n-th of the earlier sets,
    counted back from the last."""
    num_before = np.maximum.accumulate(np.append(-1, index[:-1])) + 1 if len(index) else index
    return np.where(index < 0, 1, np.where(index == num_before, 0, num_before - index + 1))


def _renamed(ids: Numbers, sizes: Numbers) -> tuple[Numbers, Numbers]:
    """(each set's ids by new names, ascending; the id of each name). The most frequent id is 0."""
    counts = np.bincount(ids)
    used = counts.nonzero()[0]
    names = used[np.argsort(-counts[used], kind="stable")]
    name_of = np.empty(len(counts), np.int64)
    name_of[names] = np.arange(len(names))
    of_sets = np.repeat(np.arange(len(sizes), dtype=np.int64) * max(len(names), 1), sizes)
    return np.sort(of_sets + name_of[ids]) - of_sets, names


def _from_gaps(gaps: Numbers, sizes: Numbers, names: Numbers) -> Numbers:
    """Each set's ids, ascending, from the gaps between their names."""
    totals = (gaps + 1).cumsum()
    starts = sizes.cumsum(dtype=np.int64) - sizes
    before = np.repeat(np.append(0, totals)[starts], sizes)
    renamed = totals - before - 1
    if len(renamed) and int(renamed.max()) >= len(names):
        raise ValueError("kept ids name an id that they do not have")
    ids = names[renamed]
    of_sets = np.repeat(np.arange(len(sizes), dtype=np.int64) << 32, sizes)
    return (np.sort(of_sets + ids) - of_sets).astype(np.int32)


def _planes(numbers: Numbers) -> bytes:
    """Numbers below 2^32 by planes: all lowest bytes first, because the others are mostly 0."""
    return numbers.astype("<u4").view(np.uint8).reshape(-1, 4).T.tobytes()


def _from_planes(data: Numbers) -> npt.NDArray[np.int64]:
    return np.ascontiguousarray(data.reshape(4, -1).T).view("<u4")[:, 0].astype(np.int64)


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
        return self._unpacked().listed()

    def allows(self, token_ids: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """bool[T]: whether each of these ids, one for each token, is in the token's set."""
        sets = self._unpacked()
        is_free = sets.index < 0
        wanted = (sets.index.astype(np.int64) << 32) | token_ids
        of_sets, ids = sets.listed()
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
        of_sets[sets.listed()] ^= True
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
            self._numbers[key] = len(self._sets)
            is_long = self._vocab_size is not None and 2 * len(ids) > self._vocab_size
            if is_long:
                is_other = np.ones(self._vocab_size or 0, np.bool_)
                is_other[ids] = False
                ids = is_other.nonzero()[0].astype(np.int32)
            self._sets.append(ids)
            self._marks.append(is_long)
        self._index.append(self._numbers[key])

    def kept_ids(self) -> KeptIds:
        return KeptIds(
            index=np.array(self._index, np.int32),
            sizes=np.array([len(ids) for ids in self._sets], np.int32),
            lists_excluded=np.array(self._marks, np.bool_),
            ids=np.concatenate((np.zeros(0, np.int32), *self._sets)),
        )
