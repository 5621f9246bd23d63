"""Finished groups as a file: about 8 bytes for each token, and equal to the bit when they are read back.

The tokens of all trajectories stand one after another in flat arrays; loss_mask and versions as runs, since they
change only where somebody else begins to speak, or other weights do.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, BinaryIO
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from arl.api.types import NOT_SAMPLED, Group, Trajectory, TurnSpan

Array = npt.NDArray[Any]

UNREADABLE = (OSError, EOFError, ValueError, KeyError, TypeError, BadZipFile)
"""What the standard library and numpy raise when they read a file that is damaged."""


def write_groups(file: BinaryIO, groups: Sequence[Group]) -> None:
    """Write `groups` as an .npz."""
    trajectories = [t for group in groups for t in group.trajectories]
    masks = _flat((t.loss_mask for t in trajectories), np.int64)
    versions = _flat((t.versions for t in trajectories), np.int64)
    run_values, run_lengths = _runs(2 * (versions - NOT_SAMPLED) + masks)
    np.savez(
        file,
        groups=np.frombuffer(json.dumps([_record(group) for group in groups]).encode(), np.uint8),
        token_ids=_smallest(_flat((t.token_ids for t in trajectories), np.int64)),
        behavior_logprobs=_exact(_flat((t.behavior_logprobs for t in trajectories), np.float64)),
        token_rewards=_exact(_flat((t.token_rewards or () for t in trajectories), np.float64)),
        run_values=run_values,
        run_lengths=run_lengths,
    )


def read_groups(file: BinaryIO) -> list[Group]:
    """What `write_groups` wrote. Raises one of UNREADABLE for anything else."""
    with np.load(file, allow_pickle=False) as arrays:
        if missing := {"groups", "run_values", "run_lengths"} - set(arrays.files):
            raise ValueError(f"it has no {', '.join(sorted(missing))}")
        runs = np.repeat(arrays["run_values"], arrays["run_lengths"])
        fields = {
            "token_ids": arrays["token_ids"],
            "loss_mask": runs & 1,
            "behavior_logprobs": arrays["behavior_logprobs"],
            "versions": (runs >> 1) + NOT_SAMPLED,
        }
        tokens, rewards = _Cursor(fields), _Cursor({"token_rewards": arrays["token_rewards"]})
        return [_group(record, tokens, rewards) for record in json.loads(arrays["groups"].tobytes())]


class _Cursor:
    """Flat arrays of one length, read trajectory by trajectory."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = arrays
        self._position = 0

    def take(self, length: int) -> dict[str, tuple[Any, ...]]:
        """The next `length` entries of each array, as Python's own numbers."""
        start, self._position = self._position, self._position + length
        return {name: tuple(array[start : self._position].tolist()) for name, array in self._arrays.items()}


def _record(group: Group) -> dict[str, Any]:
    """All of a group but its tokens, as JSON holds it."""
    return {
        "group_id": group.group_id,
        "example_id": group.example_id,
        "stamp": group.stamp,
        "episode_indices": group.episode_indices,
        "greedy_rewards": dict(group.greedy_rewards),
        "trajectories": [
            {
                "length": len(t.token_ids),
                "has_token_rewards": t.token_rewards is not None,
                "reward": t.reward,
                "rewards": dict(t.rewards),
                "turns": [[turn.start, turn.stop, turn.reward, turn.state] for turn in t.turns],
                "is_truncated": t.is_truncated,
                "metrics": dict(t.metrics),
                "role": t.role,
                "temperature": t.temperature,
            }
            for t in group.trajectories
        ],
    }


def _group(record: Mapping[str, Any], tokens: _Cursor, rewards: _Cursor) -> Group:
    trajectories: list[Trajectory] = []
    for values in record["trajectories"]:
        length = values.pop("length")
        values.update(tokens.take(length))
        if values.pop("has_token_rewards"):
            values.update(rewards.take(length))
        values["turns"] = tuple(
            TurnSpan(start=start, stop=stop, reward=reward, state=state)
            for start, stop, reward, state in values["turns"]
        )
        trajectories.append(Trajectory(**values))
    return Group(
        group_id=record["group_id"],
        example_id=(record["example_id"][0], record["example_id"][1]),
        stamp=record["stamp"],
        trajectories=tuple(trajectories),
        episode_indices=tuple(record["episode_indices"]),
        greedy_rewards=record["greedy_rewards"],
    )


def _flat(sequences: Iterable[Iterable[float]], dtype: npt.DTypeLike) -> Array:
    return np.fromiter(chain.from_iterable(sequences), dtype)


def _runs(values: Array) -> tuple[Array, Array]:
    """Each run of equal values: the value, and how often it stands there."""
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1))
    return values[starts], np.diff(starts, append=len(values))


def _smallest(integers: Array) -> Array:
    """In the smallest integer type that holds them all."""
    if not integers.size:
        return integers
    return integers.astype(np.result_type(np.min_scalar_type(integers.min()), np.min_scalar_type(integers.max())))


def _exact(numbers: Array) -> Array:
    """In float32 where that loses nothing, as with what a server computed in it."""
    with np.errstate(over="ignore"):
        narrow = numbers.astype(np.float32)
    return narrow if np.array_equal(narrow, numbers) else numbers
