"""Arrays beside the tokens, for models of another kind: what such a model needs of each token, by name.

arl carries them from an episode to the train engine, through buffer, checkpoints and processes, and never looks inside.
docs/extending.md shows them in use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

Arrays = Mapping[str, "Array"]
"""Name -> numbers, whose first axis is the tokens."""

_NONE: Arrays = {}


def no_arrays() -> Arrays:
    """The default of a record's arrays: one mapping for all of them, as there may be many records."""
    return _NONE


_NUMBERS = "biuf"
"""The kinds of numpy's dtypes that every process and file reads back as they were."""


def arrays_flaw(arrays: Arrays, num_rows: int, rows: str) -> str | None:
    """Why these cannot lie beside so many tokens; None if they can. rows: the field with the tokens."""
    import numpy as np

    for name, array in arrays.items():
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance] - users' own
            return f"a name in arrays is {name!r:.40}; it must be a str"
        if not isinstance(array, np.ndarray):  # pyright: ignore[reportUnnecessaryIsInstance]
            return f"arrays[{name!r}] is a {type(array).__name__}; it must be a numpy array of numbers"
        if array.dtype.kind not in _NUMBERS:
            return f"arrays[{name!r}] has dtype {array.dtype}; it must hold bools, integers or floats"
        if array.ndim == 0 or len(array) != num_rows:
            has = "no axis" if array.ndim == 0 else f"{len(array)} rows"
            return f"arrays[{name!r}] has {has} for {num_rows} {rows}; its first axis must be the tokens"
    return None


def kept_arrays(arrays: Arrays) -> Arrays:
    """The arrays as records keep them: plain, contiguous, in native byte order, and read-only.

    One that is all of this, and owns its memory, is kept. Others are copied: what they view may change, as a mapped
    file may.
    """
    import numpy as np

    kept: dict[str, Array] = {}
    for name, given in arrays.items():
        flags, is_plain = given.flags, type(given) is np.ndarray and given.dtype.isnative
        if is_plain and flags.owndata and flags.c_contiguous and not flags.writeable:
            kept[name] = given
            continue
        kept[name] = np.array(given, dtype=given.dtype.newbyteorder("="), order="C", subok=False)
        kept[name].flags.writeable = False
    return kept
