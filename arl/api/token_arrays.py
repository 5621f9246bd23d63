"""Columns: the token-level fields of records as flat, read-only numpy arrays, checked once, when they are built.

The fields may be given as any sequence of numbers. Records import this module when the first of them is built, because
numpy takes longer to import than all of arl.api.
"""

from __future__ import annotations

import math
from array import array as Numbers
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from arl.api.errors import TrajectoryError

Array = npt.NDArray[Any]

if TYPE_CHECKING:
    # The fields' types: any sequence may be given for a column, and an array is read from it.
    class IntColumn:
        def __get__(self, record: object, of: Any) -> npt.NDArray[np.int32]: ...
        def __set__(self, record: object, values: Sequence[int] | Array) -> None: ...

    class BoolColumn:
        def __get__(self, record: object, of: Any) -> npt.NDArray[np.bool_]: ...
        def __set__(self, record: object, values: Sequence[int] | Array) -> None: ...

    class FloatColumn:
        def __get__(self, record: object, of: Any) -> npt.NDArray[np.float32]: ...
        def __set__(self, record: object, values: Sequence[float] | Array) -> None: ...

    class OptionalColumn:
        def __get__(self, record: object, of: Any) -> npt.NDArray[np.float64] | None: ...
        def __set__(self, record: object, values: Sequence[float] | Array | None) -> None: ...


_BOOL, _INT32, _FLOAT32, _FLOAT64 = map(np.dtype, ("bool", "int32", "float32", "float64"))
_MAX_LOGPROB = 1e-4
"""Servers round: the logprob of a certain token may lie a little above 0."""


def integers(name: str, values: Sequence[int] | Array, lowest: int, highest: int, what: str) -> Array:
    """int32, or bool if 1 is the highest. what: describes what each must be.

    Raises TrajectoryError, which names the first entry that is wrong, as the next two do.
    """
    array = _read(values, _INT32)
    # Two such calls take half the time of min() and max().
    if array is None or not (lowest <= array.item(array.argmin()) and array.item(array.argmax()) <= highest):
        array = np.array([_integer(name, t, value, lowest, highest, what) for t, value in _entries(name, values)])
    return _owned(array, values, _BOOL if highest == 1 else _INT32)


def logprobs(name: str, values: Sequence[float] | Array, limit: float, *, may_be_positive: bool = False) -> Array:
    """float32, finite, and at most 0 unless they are logarithms of densities."""
    array, most = _read(values, _FLOAT64), limit if may_be_positive else _MAX_LOGPROB
    if array is None or not (-limit <= array.item(array.argmin()) and array.item(array.argmax()) <= most):
        array = _numbers(name, values, limit)
        if array.max() > most:
            raise TrajectoryError(f"{name} holds a value above 0; log-probabilities are at most 0")
    return _owned(array, values, _FLOAT32)


def rewards(name: str, values: Sequence[float] | Array, limit: float) -> Array:
    """float64, within ±limit."""
    array = _read(values, _FLOAT64)
    if array is None or not (-limit <= array.item(array.argmin()) and array.item(array.argmax()) <= limit):
        array = _numbers(name, values, limit)
    return _owned(array, values, _FLOAT64)


def check_number(where: str, value: Any, limit: float) -> None:
    """Raise TrajectoryError unless it is a finite number within ±limit."""
    if not isinstance(value, int | float) or (isinstance(value, float) and not math.isfinite(value)):
        raise TrajectoryError(f"{where} is {value!r}; it must be a finite number")
    if not -limit <= value <= limit:
        raise TrajectoryError(f"{where} is {value!r:.40}; it must lie between -{limit:g} and {limit:g}")


def are_equal(one: Any, other: Any) -> bool:
    """Whether two fields of records are equal. Columns are, if all their entries are."""
    if all(isinstance(record, Mapping) for record in (one, other)):
        return one.keys() == other.keys() and all(are_equal(one[name], other[name]) for name in one)
    has_column = np.ndarray in (type(one), type(other))
    return np.array_equal(one, other) if has_column else one == other


def _read(values: Sequence[float] | Array, dtype: np.dtype[Any]) -> Array | None:
    """A flat array of these numbers; None if it cannot be, as some are no numbers, or not integers for an integer type.

    A list becomes an array of `dtype`, another array keeps its own.
    """
    try:
        if isinstance(values, list | tuple):
            return np.frombuffer(Numbers(dtype.char, values), dtype)  # half the time of np.array
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        array = _converted(values)
    return array if array.ndim == 1 and array.dtype.kind in ("biu" if dtype is _INT32 else "biuf") else None


def _converted(values: Sequence[float] | Array) -> Array:
    """The array that numpy makes of the values: of objects or text, if they are not all numbers."""
    try:
        return np.array(values)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return np.array(None)


def _numbers(name: str, values: Sequence[float] | Array, limit: float) -> Array:
    for t, value in _entries(name, values):
        check_number(f"{name}[{t}]", value, limit)
    return np.array([float(value) for value in values])


def _owned(array: Array, values: object, dtype: np.dtype[Any]) -> Array:
    """`array` as a column: read-only, and a copy of a writable one.

    A read-only array is taken as it is, as are a dialogue's: nobody may change what it is a view of.
    """
    if array.dtype is not dtype:
        array = array.astype(dtype)
    elif not array.flags.writeable:
        return array
    elif not isinstance(values, list | tuple):
        array = array.copy()
    array.flags.writeable = False
    return array


def _entries(name: str, values: Sequence[Any] | Array) -> enumerate[Any]:
    if getattr(values, "ndim", 1) != 1:
        raise TrajectoryError(f"{name} has several dimensions; it must be flat, with one entry for each token")
    return enumerate(map(_plain, values))


def _plain(value: Any) -> Any:
    """One of numpy's own numbers as Python's."""
    return getattr(value, "tolist", lambda: value)()


def _integer(name: str, t: int, value: Any, lowest: int, highest: int, what: str) -> int:
    if not hasattr(value, "__index__") or not lowest <= value.__index__() <= highest:
        raise TrajectoryError(f"{name}[{t}] is {value!r:.40}; it must be {what}")
    return value.__index__()


# Arrays beside the tokens


_KINDS = "biuf"
"""The kinds of numpy's dtypes that every process and file reads back as they were."""


def arrays_flaw(arrays: Mapping[str, Array], num_rows: int, rows: str) -> str | None:
    """Why these cannot lie beside so many tokens; None if they can. rows: the field with the tokens."""
    for name, array in arrays.items():
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance] - users' own
            return f"a name in arrays is {name!r:.40}; it must be a str"
        if not isinstance(array, np.ndarray):  # pyright: ignore[reportUnnecessaryIsInstance]
            return f"arrays[{name!r}] is a {type(array).__name__}; it must be a numpy array of numbers"
        if array.dtype.kind not in _KINDS:
            return f"arrays[{name!r}] has dtype {array.dtype}; it must hold bools, integers or floats"
        if array.ndim == 0 or len(array) != num_rows:
            has = "no axis" if array.ndim == 0 else f"{len(array)} rows"
            return f"arrays[{name!r}] has {has} for {num_rows} {rows}; its first axis must be the tokens"
    return None


def kept_arrays(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays as records keep them: plain, contiguous, in native byte order, and read-only.

    One that is all of this, and owns its memory, is kept. Others are copied: what they view may change, as a mapped
    file may.
    """
    kept: dict[str, Array] = {}
    for name, given in arrays.items():
        flags, is_plain = given.flags, type(given) is np.ndarray and given.dtype.isnative
        if is_plain and flags.owndata and flags.c_contiguous and not flags.writeable:
            kept[name] = given
            continue
        kept[name] = np.array(given, dtype=given.dtype.newbyteorder("="), order="C", subok=False)
        kept[name].flags.writeable = False
    return kept
