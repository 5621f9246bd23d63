"""Finished groups as flat arrays: the form in which they cross to another process, and lie in a checkpoint.

header      JSON: what is not per token, for each group and each of its trajectories
arrays      one array for each field of the tokens: all trajectories end to end
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from arl.api.types import Group, Trajectory, TurnSpan

Array = npt.NDArray[Any]

_DTYPES = {
    "token_ids": np.int32,
    "loss_mask": np.int8,
    "behavior_logprobs": np.float64,
    "versions": np.int32,
    "token_rewards": np.float64,
}
"""The arrays. token_rewards holds the rewards of those trajectories that have them, the others one entry per token."""

_PLAIN = ("reward", "is_truncated", "role", "temperature")
_DICTS = ("rewards", "metrics")


def flatten(groups: Sequence[Group]) -> tuple[bytes, dict[str, Array]]:
    """The header and the arrays from which `restore` makes the groups again."""
    trajectories = [t for group in groups for t in group.trajectories]
    arrays = {name: _joined((getattr(t, name) or () for t in trajectories), kind) for name, kind in _DTYPES.items()}
    return json.dumps([_group_record(group) for group in groups]).encode(), arrays


def restore(header: bytes, arrays: Mapping[str, Array]) -> list[Group]:
    """The groups that `flatten` took. Raises ValueError, KeyError or TypeError if the two do not fit together."""
    records = json.loads(header)
    tokens, rewards = 0, 0
    groups: list[Group] = []
    for record in records:
        trajectories: list[Trajectory] = []
        for values in record["trajectories"]:
            end = tokens + values.pop("length")
            for name in _DTYPES.keys() - {"token_rewards"}:
                values[name] = tuple(arrays[name][tokens:end].tolist())
            if values.pop("has_token_rewards"):
                values["token_rewards"] = tuple(arrays["token_rewards"][rewards : rewards + end - tokens].tolist())
                rewards += end - tokens
            tokens = end
            values["turns"] = tuple(
                TurnSpan(start=start, stop=stop, reward=reward, state=state)
                for start, stop, reward, state in values["turns"]
            )
            trajectories.append(Trajectory(**values))
        groups.append(_group(record, trajectories))
    return groups


def write_groups(file: BinaryIO, groups: Sequence[Group]) -> None:
    """Write `groups` as an .npz."""
    header, arrays = flatten(groups)
    np.savez(file, header=np.frombuffer(header, np.uint8), **arrays)


def read_groups(file: BinaryIO) -> list[Group]:
    """Read the groups that `write_groups` wrote. Raises one of checkpoint.UNREADABLE for anything else."""
    with np.load(file, allow_pickle=False) as arrays:
        if missing := {"header", *_DTYPES} - set(arrays.files):
            raise ValueError(f"it has no {', '.join(sorted(missing))}")
        return restore(arrays["header"].tobytes(), {name: arrays[name] for name in _DTYPES})


def _joined(rows: Iterable[Iterable[float]], dtype: npt.DTypeLike) -> Array:
    return np.fromiter(chain.from_iterable(rows), dtype)


def _group_record(group: Group) -> dict[str, Any]:
    """A group without its tokens, as JSON."""
    return {
        "group_id": group.group_id,
        "example_id": group.example_id,
        "stamp": group.stamp,
        "episode_indices": group.episode_indices,
        "greedy_rewards": dict(group.greedy_rewards),
        "trajectories": [_record(t) for t in group.trajectories],
    }


def _record(t: Trajectory) -> dict[str, Any]:
    """A trajectory without its tokens, as JSON."""
    return {
        "length": len(t.token_ids),
        "has_token_rewards": t.token_rewards is not None,
        "turns": [(turn.start, turn.stop, turn.reward, turn.state) for turn in t.turns],
        **{name: getattr(t, name) for name in _PLAIN},
        **{name: dict(getattr(t, name)) for name in _DICTS},
    }


def _group(record: Mapping[str, Any], trajectories: Sequence[Trajectory]) -> Group:
    return Group(
        group_id=record["group_id"],
        example_id=(record["example_id"][0], record["example_id"][1]),
        stamp=record["stamp"],
        trajectories=tuple(trajectories),
        episode_indices=tuple(record["episode_indices"]),
        greedy_rewards=record["greedy_rewards"],
    )
