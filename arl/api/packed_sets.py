"""Packs kept ids into few bytes: the sets that top_p, top_k and min_p keep at 32k tokens must not outweigh the tokens.

    set 3, 17, 40 --renamed by frequency--> 0, 2, 9 --gaps--> 0, 1, 6 --a byte each--> zstd

A text keeps some ids repeatedly. These get small numbers, so sets have small gaps, and similar contexts have similar
series of gaps, which zstd finds. docs/figures.md has the sizes.
"""

from __future__ import annotations

import struct
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
    ids = _from_gaps(gaps, sizes, _from_planes(names))
    return Sets(_from_steps(_from_planes(steps)), sizes, marks != 0, ids)


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


def _from_steps(steps: Numbers) -> Numbers:
    is_new = steps == 0
    num_before = is_new.cumsum() - is_new
    return np.where(is_new, num_before, np.where(steps == 1, -1, num_before - steps + 1)).astype(np.int32)


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
