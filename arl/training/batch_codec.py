"""Finished groups as flat arrays: the form in which they cross to another process, and lie in a checkpoint.

header      JSON: what is not per token, a list for each field of the groups and of their trajectories; images by digest
arrays      one for each field of the tokens: all trajectories end to end; and Trajectory.arrays
images      beside the two: a checkpoint's are in the run's ImageStore, and a batch takes its own along, each once
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice, pairwise
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt

from arl.api.images import Image, PlacedImage
from arl.api.routed_experts import Routes
from arl.api.sampling_mask import KeptIds
from arl.api.types import Arrays, Group, Trajectory, TurnSpan, no_arrays

Array = npt.NDArray[Any]

FindImage = Callable[[str, int, int], Image]
"""digest, width, height -> the image."""
_RecordT = TypeVar("_RecordT")

_GROUP_FIELDS = ("group_id", "example_id", "stamp", "episode_indices", "greedy_rewards", "example", "task")
_EMPTY = {
    "token_ids": np.zeros(0, np.int32),
    "loss_mask": np.zeros(0, np.bool_),
    "behavior_logprobs": np.zeros(0, np.float32),
    "versions": np.zeros(0, np.int32),
    "token_rewards": np.zeros(0, np.float64),
    "kept_ids": np.zeros(0, np.uint8),
    "routes": np.zeros(0, np.uint8),
}
"""The arrays of no group. Of trajectories that have them: token_rewards and, as bytes, kept_ids and routes."""

_LENGTHS = {"token_rewards": "num_token_rewards", "kept_ids": "num_kept_bytes", "routes": "num_route_bytes"}
"""The field with the number of each trajectory's entries, where it is not the number of its tokens."""


def flatten(groups: Sequence[Group]) -> tuple[bytes, dict[str, Array]]:
    """The header and the arrays from which `restore` makes the groups again."""
    trajectories = [t for group in groups for t in group.trajectories]
    fields = {name: [getattr(t, name) for t in trajectories] for name in Trajectory.__slots__}
    kept = fields["kept_ids"] = [_encoded(t.kept_ids) for t in trajectories]
    routes = fields["routes"] = [_encoded(t.routes) for t in trajectories]
    rows = {name: [row for row in fields.pop(name) if row is not None] for name in _EMPTY}
    images = images_of(groups)
    numbers = {image: number for number, image in enumerate(images)}
    fields |= {
        "images": [[(numbers[p.image], p.start, p.stop) for p in t.images] for t in trajectories],
        "turns": [[(turn.start, turn.stop, turn.reward, turn.state) for turn in t.turns] for t in trajectories],
        "length": [len(t.token_ids) for t in trajectories],
        "num_token_rewards": [0 if t.token_rewards is None else len(t.token_rewards) for t in trajectories],
        "num_kept_bytes": [0 if encoded is None else len(encoded) for encoded in kept],
        "num_route_bytes": [0 if encoded is None else len(encoded) for encoded in routes],
    }
    of_groups = {name: [getattr(group, name) for group in groups] for name in _GROUP_FIELDS}
    about: dict[str, Any] = {"groups": of_groups, "trajectories": fields}
    about["images"] = [(image.digest, image.width, image.height) for image in images]
    about["arrays"], own = _flatten_arrays(fields.pop("arrays"))
    header = json.dumps(about, default=dict).encode()
    columns = {name: np.concatenate((empty, *rows[name])) for name, empty in _EMPTY.items()}
    return header, columns | own


def images_of(groups: Iterable[Group]) -> list[Image]:
    """The images that trajectories of these groups show, each once."""
    return [*{placed.image: None for group in groups for t in group.trajectories for placed in t.images}]


def images_named(header: bytes, find: FindImage) -> tuple[Image, ...]:
    """The images that a header names."""
    return tuple(find(*reference) for reference in json.loads(header)["images"])


def _no_images(digest: str, width: int, height: int) -> Image:
    raise ValueError(f"the image {digest} is needed, but no images were given")


def restore(header: bytes, arrays: Mapping[str, Array], find: FindImage = _no_images) -> list[Group]:
    """The groups that `flatten` took. Their columns are read-only views of `arrays`, which are not checked again.

    Raises ValueError, KeyError or TypeError if the two do not fit together, and what `find` raises.
    """
    known = json.loads(header)
    fields = known["trajectories"]
    for name in _EMPTY:
        fields[name] = _views(name, arrays[name], fields[_LENGTHS.get(name, "length")])
    fields["kept_ids"] = [None if kept is None else KeptIds.of_bytes(kept.tobytes()) for kept in fields["kept_ids"]]
    fields["routes"] = [None if routes is None else Routes.decode(routes.data) for routes in fields["routes"]]
    images = [find(*reference) for reference in known["images"]]
    fields["images"] = [
        tuple(PlacedImage(image=images[i], start=start, stop=stop) for i, start, stop in own)
        for own in fields["images"]
    ]
    fields["arrays"] = _restore_arrays(known["arrays"], fields["length"], arrays)
    turns = _unchecked(TurnSpan, chain.from_iterable(fields["turns"]))
    fields["turns"] = [tuple(islice(turns, len(own))) for own in fields["turns"]]
    trajectories = _unchecked(Trajectory, zip(*(fields[name] for name in Trajectory.__slots__), strict=True))
    of_groups = zip(*(known["groups"][name] for name in _GROUP_FIELDS), strict=True)
    groups: list[Group] = []
    for values in of_groups:
        own = dict(zip(_GROUP_FIELDS, values, strict=True))
        indices, example_id = tuple(own.pop("episode_indices")), tuple(own.pop("example_id"))
        members = tuple(islice(trajectories, len(indices)))
        groups.append(Group(**own, example_id=example_id, episode_indices=indices, trajectories=members))
    return groups


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatBatch:
    """The groups of a batch, flat: 13 bytes a token, kept ids and routes, and few objects for the garbage collector."""

    header: bytes
    arrays: dict[str, Array]
    num_new: int
    """The first groups are new, the others replayed."""
    images: tuple[Image, ...] = ()
    """Those that the header names."""

    @classmethod
    def of(cls, groups: Sequence[Group], replayed: Sequence[Group] = ()) -> FlatBatch:
        members = [*groups, *replayed]
        header, arrays = flatten(members)
        return cls(header=header, arrays=arrays, num_new=len(groups), images=tuple(images_of(members)))

    @property
    def num_bytes(self) -> int:
        files = sum(len(image.data) for image in self.images)
        return len(self.header) + sum(array.nbytes for array in self.arrays.values()) + files

    def write(self, file: BinaryIO, about: bytes) -> None:
        """Write the batch without its images as an .npz, and something about it."""
        texts = {"about": np.frombuffer(about, np.uint8), "header": np.frombuffer(self.header, np.uint8)}
        np.savez(file, allow_pickle=False, **texts, **self.arrays)

    @staticmethod
    def read(file: BinaryIO) -> tuple[bytes, bytes, dict[str, Array]]:
        """(about, header, arrays) that `write` wrote. Raises one of checkpoint.UNREADABLE for anything else."""
        with np.load(file, allow_pickle=False) as arrays:
            texts = (arrays[name].tobytes() for name in ("about", "header"))
            return *texts, {name: arrays[name] for name in arrays.files if name not in ("about", "header")}

    def groups(self) -> tuple[list[Group], list[Group]]:
        """The new and the replayed groups."""
        by_digest = {image.digest: image for image in self.images}
        groups = restore(self.header, self.arrays, lambda digest, *_: by_digest[digest])
        return groups[: self.num_new], groups[self.num_new :]


def write_groups(file: BinaryIO, groups: Sequence[Group]) -> None:
    """Write `groups` as an .npz, without their images."""
    header, arrays = flatten(groups)
    np.savez(file, allow_pickle=False, header=np.frombuffer(header, np.uint8), **arrays)


def read_groups(file: BinaryIO, find: FindImage = _no_images) -> list[Group]:
    """Read the groups that `write_groups` wrote. Raises one of checkpoint.UNREADABLE for anything else.

    find: the images by digest, as ImageStore.image does; its errors pass.
    """
    with np.load(file, allow_pickle=False) as arrays:
        if missing := {"header", *_EMPTY} - set(arrays.files):
            raise ValueError(f"it has no {', '.join(sorted(missing))}")
        names = [name for name in arrays.files if name in _EMPTY or name.startswith(_PREFIX)]
        return restore(arrays["header"].tobytes(), {name: arrays[name] for name in names}, find)


def _encoded(record: KeptIds | Routes | None) -> Array | None:
    return None if record is None else np.frombuffer(record.encode(), np.uint8)


def _views(name: str, array: Array, lengths: Sequence[int]) -> list[Array | None]:
    """The next entries of `array` for each length, read-only; None for none."""
    array = array.view()
    array.flags.writeable = False
    ends = list(accumulate(lengths, initial=0))
    if ends[-1] != len(array):
        raise ValueError(f"{name} has {len(array)} entries for {ends[-1]} tokens")
    return [array[start:end] if start < end else None for start, end in pairwise(ends)]


def _unchecked(kind: type[_RecordT], rows: Iterable[Sequence[Any]]) -> Iterator[_RecordT]:
    """A record for each row, the values of its slots. They were checked when the record was first built."""
    puts = [getattr(kind, name).__set__ for name in kind.__slots__]  # pyright: ignore[reportAttributeAccessIssue]
    for values in rows:
        record = object.__new__(kind)
        for put, value in zip(puts, values, strict=True):
            put(record, value)
        yield record


_PREFIX = "own_"
"""Of the flat arrays of Trajectory.arrays."""


def _flatten_arrays(rows: Sequence[Arrays]) -> tuple[dict[str, Any], dict[str, Array]]:
    """What the header has, as JSON values, and the flat arrays.

    kinds      [name, dtype, shape of a row] of each flat array
    of_each    for each trajectory, the numbers of its arrays' kinds
    """
    parts: dict[tuple[str, str, tuple[int, ...]], list[Array]] = {}
    for arrays in rows:
        for name, array in arrays.items():
            parts.setdefault((name, array.dtype.str, array.shape[1:]), []).append(array)
    numbers = {kind: number for number, kind in enumerate(parts)}
    of_each = [[numbers[name, a.dtype.str, a.shape[1:]] for name, a in arrays.items()] for arrays in rows]
    flat = {f"{_PREFIX}{numbers[kind]}": np.concatenate(own) for kind, own in parts.items()}
    return ({"kinds": [*parts], "of_each": of_each} if parts else {}), flat


def _restore_arrays(known: Mapping[str, Any], lengths: Sequence[int], flat: Mapping[str, Array]) -> list[Arrays]:
    """What `_flatten_arrays` took, as read-only views. lengths: how many rows each trajectory has.

    Raises ValueError, KeyError or TypeError if they do not fit together.
    """
    if not known:
        return [no_arrays()] * len(lengths)
    kinds, of_each = known["kinds"], known["of_each"]
    views: list[Iterator[Array | None]] = []
    for number, (name, dtype, shape) in enumerate(kinds):
        own = [length for length, numbers in zip(lengths, of_each, strict=True) if number in numbers]
        array = flat[f"{_PREFIX}{number}"]
        if (found := [array.dtype.str, *array.shape[1:]]) != (kind := [dtype, *shape]):
            raise ValueError(f"arrays[{name!r}] has rows of {found}, not of {kind}")
        views.append(iter(_views(f"arrays[{name!r}]", array, own)))
    return [{kinds[number][0]: next(views[number]) for number in numbers} for numbers in of_each]
