"""The columns of a trajectory: what may be given for them, what they are then, and what they cost."""

import copy
import math
import pickle
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from arl.api.errors import TrajectoryError
from arl.api.types import MAX_NUMBER, MAX_REWARD, Trajectory

PROPER = {
    "token_ids": [5, 6, 7],
    "loss_mask": [0, 1, 1],
    "behavior_logprobs": [0.0, -0.1, -0.25],
    "versions": [-1, 4, 5],
    "token_rewards": [0.0, 0.1, 1e12],
}
DTYPES = {
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    "behavior_logprobs": np.float32,
    "versions": np.int32,
    "token_rewards": np.float64,
}


def made(**changes: Any) -> Trajectory:
    return Trajectory(**{"reward": 1.0, **PROPER, **changes})


def outcome(**changes: Any) -> Trajectory | str:
    try:
        return made(**changes)
    except TrajectoryError as error:
        return str(error)


# Checks entry by entry, in plain Python.


def _is_integer(value: Any, lowest: int, highest: int) -> bool:
    return hasattr(value, "__index__") and lowest <= value.__index__() <= highest


def _is_number(value: Any, lowest: float, highest: float) -> bool:
    return isinstance(value, int | float) and lowest <= value <= highest and math.isfinite(value)


BOUNDS: dict[str, tuple[Callable[[Any, Any, Any], bool], float, float]] = {
    "token_ids": (_is_integer, 0, 2**31 - 1),
    "loss_mask": (_is_integer, 0, 1),
    "behavior_logprobs": (_is_number, -MAX_NUMBER, 1e-4),
    "versions": (_is_integer, -1, 2**31 - 1),
    "token_rewards": (_is_number, -MAX_REWARD, MAX_REWARD),
}


def is_proper(columns: dict[str, Sequence[Any]]) -> bool:
    """Whether a trajectory with these columns is taken."""
    plain = {name: [v.item() if isinstance(v, np.generic) else v for v in row] for name, row in columns.items()}
    if not all(check(v, low, high) for name, (check, low, high) in BOUNDS.items() for v in plain[name]):
        return False
    sampled_first = zip(plain["loss_mask"], plain["versions"], strict=True)
    return not plain["loss_mask"][0] and all(version != -1 for mask, version in sampled_first if mask)


ODD = (
    *(None, "5", "", b"1", [1], (), {}, 1j, True, False, np.int64(1), np.int8(-1), np.float64(-0.5), np.float32(0)),
    *(0, 1, 2, -1, -2, 2**31 - 1, 2**31, -(2**31) - 1, 2**32, 2**63, 2**64, -(2**80), 10**400, np.True_),
    *(0.0, -0.0, 1.0, 0.5, 1e-4, 1.000000001e-4, 1e-45, -1e300, 1e13, 3.4e38, -3.4e38, -3.41e38),
    *(math.nan, math.inf, -math.inf, np.float32("nan"), np.float32("-inf")),
)


@st.composite
def columns(draw: st.DrawFn) -> dict[str, Any]:
    """Proper columns, with odd entries in some places."""
    found = {name: list(values) for name, values in PROPER.items()}
    for name in draw(st.lists(st.sampled_from(list(found)), max_size=2)):
        found[name][draw(st.integers(0, 2))] = draw(st.sampled_from(ODD))
    return found


@given(columns(), st.sampled_from([list, tuple]))
@settings(deadline=None, max_examples=200)
@example({**PROPER, "behavior_logprobs": [0.0, 1e-4, 1e-4]}, list)
def test_what_is_refused_is_what_a_check_of_each_entry_refuses(given: dict[str, Any], kind: type):
    found = outcome(**{name: kind(values) for name, values in given.items()})
    assert isinstance(found, Trajectory) == is_proper(given)
    for name, values in given.items() if isinstance(found, Trajectory) else ():
        assert getattr(found, name).tolist() == [DTYPES[name](value) for value in values]


@pytest.mark.parametrize("name", DTYPES)
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_arrays_are_checked_as_lists_of_their_entries_are(name: str, data: st.DataObject):
    dtypes = ("bool", "int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64")
    odd_ones = (2**31 - 1, 2**31, 2**62, math.nan, math.inf, -0.5, 1e-3, -1e30, 1e13)
    entries = st.integers(-2, 3) | st.sampled_from(odd_ones)
    dtype, values = data.draw(st.sampled_from(dtypes)), data.draw(st.tuples(entries, entries, entries))
    with np.errstate(all="ignore"):
        array = np.array(values, "float64").astype(dtype)
    assert outcome(**{name: array}) == outcome(**{name: array.tolist()})


def test_an_array_of_several_dimensions_is_refused():
    with pytest.raises(TrajectoryError, match="token_ids has several dimensions; it must be flat, with one entry for"):
        made(token_ids=np.zeros((3, 1), np.int32))


def test_columns_are_read_only_and_nobody_elses_and_records_share_them():
    given = np.array([5, 6, 7], np.int32)
    trajectory = made(token_ids=given)
    given[0] = 9
    assert trajectory == made()
    for name, dtype in DTYPES.items():
        column = getattr(trajectory, name)
        assert column.dtype == dtype
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 0
    assert made(**{name: [*getattr(trajectory, name)] for name in DTYPES}) == trajectory, "from numpy's own numbers"
    other = replace(trajectory, reward=2.0)
    assert all(getattr(other, name) is getattr(trajectory, name) for name in DTYPES)


def test_equality_is_of_contents_and_outlives_copies_and_pickles():
    trajectory = made()
    for twin in (made(), copy.copy(trajectory), copy.deepcopy(trajectory), pickle.loads(pickle.dumps(trajectory))):
        assert twin == trajectory
        assert twin.oldest_version == 4
        assert not any(getattr(twin, name).flags.writeable for name in DTYPES)
    changes: list[dict[str, Any]] = [
        {"token_ids": [5, 6, 8]},
        {"behavior_logprobs": [0.0, -0.1, -0.125]},
        {"token_rewards": None},
        {"reward": 0.5},
        {"role": "critic"},
    ]
    assert all(made(**change) != trajectory != change for change in changes)


def test_a_trajectory_takes_13_bytes_a_token_and_less_than_1500_beside_them():
    length, number = 4096, 100  # so many that what Python allocates beside them does not count

    def made(reward: float) -> Trajectory:
        return Trajectory(
            token_ids=range(100_000, 100_000 + length),
            loss_mask=[0] + [1] * (length - 1),
            behavior_logprobs=[-t / length for t in range(length)],
            versions=[5] * length,
            reward=reward,
        )

    made(0.0)  # what the first one leaves in caches is not of the others
    tracemalloc.start()
    try:
        trajectories = [made(float(i)) for i in range(number)]
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(trajectories) == number
    assert held / number < 13 * length + 1500
