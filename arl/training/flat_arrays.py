"""Trajectory.arrays of many trajectories, flat: those of one name, dtype and row shape lie end to end in one array."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from arl.api.own_arrays import Arrays, no_arrays

Array = npt.NDArray[Any]

_PREFIX = "own_"


def flatten_arrays(rows: Sequence[Arrays]) -> tuple[dict[str, Any], dict[str, Array]]:
    """What the header has, as JSON values, and the flat arrays; both empty if no trajectory has any.

    kinds      [name, dtype, shape of a row] of each flat array
    of_each    for each trajectory, the numbers of its arrays' kinds
    """
    parts: dict[tuple[str, str, tuple[int, ...]], list[Array]] = {}
    for arrays in rows:
        for name, array in arrays.items():
            parts.setdefault((name, array.dtype.str, array.shape[1:]), []).append(array)
    if not parts:
        return {}, {}
    numbers = {kind: number for number, kind in enumerate(parts)}
    of_each = [[numbers[name, a.dtype.str, a.shape[1:]] for name, a in arrays.items()] for arrays in rows]
    flat = {f"{_PREFIX}{numbers[kind]}": np.concatenate(own) for kind, own in parts.items()}
    return {"kinds": [*parts], "of_each": of_each}, flat


def restore_arrays(known: Mapping[str, Any], lengths: Sequence[int], flat: Mapping[str, Array]) -> list[Arrays]:
    """What `flatten_arrays` took, as read-only views. lengths: how many rows each trajectory has.

    Raises ValueError, KeyError or TypeError if they do not fit together.
    """
    if not known:
        return [no_arrays()] * len(lengths)
    kinds, of_each = known["kinds"], known["of_each"]
    views: list[Iterator[Array]] = []
    for number, (name, dtype, shape) in enumerate(kinds):
        own = [length for length, numbers in zip(lengths, of_each, strict=True) if number in numbers]
        views.append(_views(name, flat[f"{_PREFIX}{number}"], (dtype, *shape), own))
    return [{kinds[number][0]: next(views[number]) for number in numbers} for numbers in of_each]


def is_flat_array(name: str) -> bool:
    """Whether an array of a file is one of these."""
    return name.startswith(_PREFIX)


def _views(name: str, array: Array, kind: tuple[Any, ...], lengths: Sequence[int]) -> Iterator[Array]:
    ends = list(accumulate(lengths, initial=0))
    found = (array.dtype.str, *array.shape[1:])
    if found != kind or ends[-1] != len(array):
        raise ValueError(f"arrays[{name!r}] has {len(array)} rows of {found}, not {ends[-1]} of {kind}")
    array = array.view()
    array.flags.writeable = False
    return (array[start:end] for start, end in pairwise(ends))
