"""Checkpoints as directories that are complete or absent: written aside, synced, renamed; the newest stay.

run_dir/checkpoints/version-00000040/state.json      totals, dataset cursor, ledger
                                     groups.npz      finished groups that wait for a batch
                                     replay.npz      trained groups that may be trained again
                                     engine/         the files of the train engine
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from arl.api.engine import Saving
from arl.api.errors import ArlError, CheckpointError, DamagedCheckpointError
from arl.api.types import NOT_SAMPLED, Group, Trajectory, TurnSpan
from arl.offload import force_to_disk

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]

FORMAT = 1
"""The format of the files here and of the states in them: +1 for each change that this reader cannot read."""
UNREADABLE = (OSError, EOFError, ValueError, KeyError, TypeError, BadZipFile)
"""The errors of the standard library and numpy for a damaged file."""

_ASIDE = ".writing-"
_RETIRED = ".deleting-"

# Finished groups as a file: about 8 bytes per token. Reading gives the same groups to the bit.


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
    """Read the groups that `write_groups` wrote. Raises one of UNREADABLE for anything else."""
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
    """Reads flat arrays of equal length, trajectory by trajectory."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = arrays
        self._position = 0

    def take(self, length: int) -> dict[str, tuple[Any, ...]]:
        """The next `length` entries of each array, as Python's own numbers."""
        start, self._position = self._position, self._position + length
        return {name: tuple(array[start : self._position].tolist()) for name, array in self._arrays.items()}


def _record(group: Group) -> dict[str, Any]:
    """A group without its tokens, as JSON."""
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
    """The value and the length of each run of equal values."""
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1))
    return values[starts], np.diff(starts, append=len(values))


def _smallest(integers: Array) -> Array:
    if not integers.size:
        return integers
    return integers.astype(np.result_type(np.min_scalar_type(integers.min()), np.min_scalar_type(integers.max())))


def _exact(numbers: Array) -> Array:
    """Convert to float32 if that loses nothing, as for numbers that a server computed in float32."""
    with np.errstate(over="ignore"):
        narrow = numbers.astype(np.float32)
    return narrow if np.array_equal(narrow, numbers) else numbers


# Checkpoints ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The state of a run between two steps, without the train engine's."""

    values: dict[str, Any]
    """JSON values. A function stands for the value that it returns; the writing thread calls it."""
    groups: Sequence[Group] = ()
    """Finished, untrained groups: ReplayBuffer.untrained."""
    replay: Sequence[Group] = ()
    """Trained groups that may be trained again: Replay.groups."""
    sync: Callable[[], None] = lambda: None
    """Forces to the disk what `values` refers to: RunLog.sync. Called before the checkpoint gets its name."""

    def text(self, identity: Mapping[str, Any]) -> str:
        known = {"format": FORMAT, "identity": identity, **self.values}
        return json.dumps(known, default=lambda value: value())


class Checkpoints:
    def __init__(self, directory: Path, keep: int, identity: dict[str, Any]) -> None:
        """keep: how many stay on the disk. identity: settings that must not change for a run to continue.

        NAME_digest may describe the contents behind NAME: if the digest is the same, NAME may change.
        """
        self._directory = directory
        self._keep = keep
        self._identity = identity
        self._begun = count()
        self._writing = Lock()

    def newest_version(self) -> int | None:
        return max(self._versions(), default=None)

    def begin(self, version: int, save_engine: Callable[[Path], Saving], state: RunState) -> CheckpointSaving:
        """Copy the train engine aside. The result's `wait` writes the checkpoint. Both raise CheckpointError.

        Another checkpoint may begin before the first is written. Of two of one version, the first complete one stays.
        """
        aside = self._directory / f"{_ASIDE}{version}-{next(self._begun)}"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            aside.mkdir(parents=True)
            engine = save_engine(aside / "engine")
        except (OSError, ArlError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise _unwritten(version, self._directory, error) from error
        return CheckpointSaving(partial(self._complete, version, aside, engine, state))

    def _complete(self, version: int, aside: Path, engine: Saving, state: RunState) -> None:
        """Write what `begin` took, rename the directory, and delete the oldest checkpoints past `keep`."""
        with self._writing:
            try:
                engine.wait()
                if self._path(version).exists():
                    shutil.rmtree(aside)
                    return
                for name, groups in (("groups.npz", state.groups), ("replay.npz", state.replay)):
                    with (aside / name).open("wb") as file:
                        write_groups(file, groups)
                    force_to_disk(aside / name)
                (aside / "state.json").write_text(state.text(self._identity))
                force_to_disk(aside / "state.json")
                force_to_disk(aside)
                state.sync()
                aside.rename(self._path(version))
                force_to_disk(self._directory)
            except (OSError, ArlError) as error:
                shutil.rmtree(aside, ignore_errors=True)
                raise _unwritten(version, self._directory, error) from error
            for old in sorted(self._versions())[: -self._keep]:
                self._delete(old)

    def load_newest(self, load_engine: Callable[[Path], None]) -> RunState | None:
        """Load the newest checkpoint, if any; return its state. Removes half-written ones. Raises CheckpointError."""
        for pattern in (f"{_ASIDE}*", f"{_RETIRED}*"):
            for left_by_a_kill in self._directory.glob(pattern):
                shutil.rmtree(left_by_a_kill, ignore_errors=True)
        version = self.newest_version()
        if version is None:
            return None
        path = self._path(version)
        try:
            state = self._read(path)
            load_engine(path / "engine")
        except DamagedCheckpointError as error:
            earlier = sorted(self._versions())[:-1]
            where = f"version {earlier[-1]}" if earlier else "the beginning, as there is no earlier one"
            advice = f"if it cannot be read later either, delete {path} to continue from {where}"
            raise CheckpointError(f"{error}; {advice}") from error
        return state

    def _read(self, path: Path) -> RunState:
        file = path / "state.json"
        try:
            values = json.loads(file.read_text())
            identity = values["identity"]
        except UNREADABLE as error:
            raise DamagedCheckpointError(f"{file} is unreadable: {type(error).__name__}: {error}") from error
        if values.get("format") != FORMAT:
            raise CheckpointError(
                f"{path} has format {values.get('format')}, and this arl reads {FORMAT}; continue with the arl that "
                "wrote it, or use another run_dir"
            )
        for name, value in self._identity.items():
            if not (name.endswith("_digest") or self._is_same(name, identity)):
                raise CheckpointError(
                    f"{path} was written with {name}={identity.get(name)!r}, this run has {value!r}; "
                    "use another run_dir, or the same settings"
                )
        groups, replay = (self._groups(path / name) for name in ("groups.npz", "replay.npz"))
        return RunState(values=values, groups=groups, replay=replay)

    def _is_same(self, name: str, written: Mapping[str, Any]) -> bool:
        here, there = (identity.get(f"{name}_digest") for identity in (self._identity, written))
        return self._identity[name] == written.get(name) or (here is not None and here == there)

    def _groups(self, file: Path) -> list[Group]:
        try:
            with file.open("rb") as stream:
                return read_groups(stream)
        except UNREADABLE as error:
            raise DamagedCheckpointError(f"{file} is unreadable: {type(error).__name__}: {error}") from error

    def _delete(self, version: int) -> None:
        """Rename, then delete: a kill leaves no half checkpoint under its name."""
        retired = self._directory / f"{_RETIRED}{version}"
        try:
            self._path(version).rename(retired)
            shutil.rmtree(retired)
        except OSError as error:
            log.warning("cannot delete the old checkpoint of version %d: %s", version, error)

    def _path(self, version: int) -> Path:
        return self._directory / f"version-{version:08d}"

    def _versions(self) -> list[int]:
        if not self._directory.is_dir():
            return []
        matches = (re.fullmatch(r"version-(\d{8})", path.name) for path in self._directory.iterdir())
        return [int(match[1]) for match in matches if match]


@dataclass(frozen=True, slots=True)
class CheckpointSaving:
    """The Saving of a whole checkpoint, whose parts are copied aside."""

    complete: Callable[[], None]

    def wait(self) -> None:
        """Block until it is on the disk. Call it once. Raises CheckpointError."""
        self.complete()


def _unwritten(version: int, directory: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"cannot write the checkpoint of version {version} to {directory}: {error}; earlier ones are untouched, and "
        "the same command continues from them once the cause is repaired"
    )
