"""Records of a run's groups, episodes and tokens; and as tables of Arrow and pandas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from arl.api.events import TrainedSummary, TrajectorySummary
from arl.api.images import Image, placement_flaw
from arl.observe.events.batches import TokenRow
from arl.observe.events.image_store import ImageStore

Place = tuple[int, int, int, int]
"""The place of a trajectory's tokens: life, segment, offset of the batch, row in it."""


@dataclass(slots=True, eq=False)
class GroupRecord:
    """The episodes of one example."""

    life: int
    group: int
    epoch: int
    row: int
    stamp: int
    admitted: float
    example: dict[str, Any]
    task: str = ""
    """The name of its task, in a run of several."""
    episodes: list[EpisodeRecord] = field(default_factory=list["EpisodeRecord"])
    outcome: str = ""
    """kept, rejected, dropped; "" while it runs."""
    reason: str = ""
    detail: str = ""
    ended: float | None = None
    step: int | None = None
    """The version that its training made."""
    taken: float | None = None
    replayed: list[int] = field(default_factory=list[int])
    """The versions that were made by training it again (rollout.replay_groups)."""


@dataclass(slots=True, eq=False)
class EpisodeRecord:
    """One episode, of training or of an evaluation."""

    index: int
    """In RunRecord.episodes."""
    life: int
    episode: str
    began: float
    group: GroupRecord | None = None
    """None in an evaluation."""
    example: dict[str, Any] = field(default_factory=dict[str, Any])
    """Its columns, long ones cut."""
    task: str = ""
    """The name of its task, in a run of several."""
    row: int | None = None
    """The index of its example, in an evaluation that says it."""
    how: str = "running"
    ended: float | None = None
    attempts: int = 1
    reward: float | None = None
    error: str = ""
    message: str = ""
    trajectories: Sequence[TrajectorySummary] = ()
    trained: list[TrainedSummary] = field(default_factory=list[TrainedSummary])
    places: dict[int, Place] = field(default_factory=dict[int, Place])
    """Where the tokens of each trajectory lie. -1: what a failed episode last saw."""
    is_undone: bool = False
    """The run went back to a checkpoint from before this episode was trained, or its evaluation had ended."""

    @property
    def step(self) -> int | None:
        return self.group.step if self.group else None

    @property
    def num_tokens(self) -> int:
        return sum(part.tokens for part in self.trajectories)

    @property
    def num_turns(self) -> int:
        return sum(part.turns for part in self.trajectories)

    @property
    def oldest(self) -> int | None:
        return min((part.oldest for part in self.trajectories if part.oldest is not None), default=None)

    @property
    def newest(self) -> int | None:
        return max((part.newest for part in self.trajectories if part.newest is not None), default=None)

    @property
    def staleness(self) -> int | None:
        """When its batch was taken: versions since the oldest trained token."""
        oldest, step = self.oldest, self.step
        return None if step is None or oldest is None else step - 1 - oldest


@dataclass(slots=True, eq=False)
class TokenRecord:
    """A trajectory, token by token. Columns have length T = number of tokens."""

    row: TokenRow
    columns: dict[str, np.ndarray]
    """token_ids, loss_mask, behavior_logprobs, versions; and what training computed, nan at tokens it did not train."""
    images: Sequence[LoggedImage] = ()
    """What the model saw, in order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoggedImage:
    """An image among tokens, as the log names it: those in [start, stop) are its placeholders."""

    digest: str
    width: int
    height: int
    start: int
    stop: int
    store: ImageStore

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        return self.width, self.height

    @property
    def image(self) -> Image:
        """Read from the disk. Raises ImageError if its file is missing or damaged."""
        return self.store.image(self.digest, self.width, self.height)


def logged_images(row: TokenRow, store: ImageStore) -> list[LoggedImage]:
    """The images of a trajectory. Raises ValueError for a damaged row."""
    images = [
        LoggedImage(digest=digest, width=width, height=height, start=start, stop=stop, store=store)
        for digest, width, height, start, stop in row.images
    ]
    if flaw := placement_flaw(images, row.tokens):
        raise ValueError(flaw)
    return images


# Tables

_Column = tuple[str, Callable[[Any], Any]]

EPISODE_COLUMNS: dict[str, _Column] = {
    "life": ("int64", attrgetter("life")),
    "episode": ("string", attrgetter("episode")),
    "group": ("int64", lambda e: e.group.group if e.group else None),
    "task": ("string", attrgetter("task")),
    "epoch": ("int64", lambda e: e.group.epoch if e.group else None),
    "row": ("int64", lambda e: e.group.row if e.group else None),
    "step": ("int64", attrgetter("step")),
    "how": ("string", attrgetter("how")),
    "outcome": ("string", lambda e: e.group.outcome if e.group else None),
    "reward": ("float64", attrgetter("reward")),
    "began": ("float64", attrgetter("began")),
    "ended": ("float64", attrgetter("ended")),
    "attempts": ("int64", attrgetter("attempts")),
    "error": ("string", attrgetter("error")),
    "message": ("string", attrgetter("message")),
    "trajectories": ("int64", lambda e: len(e.trajectories)),
    "tokens": ("int64", attrgetter("num_tokens")),
    "trained_tokens": ("int64", lambda e: sum(part.trained for part in e.trajectories)),
    "turns": ("int64", attrgetter("num_turns")),
    "oldest": ("int64", attrgetter("oldest")),
    "newest": ("int64", attrgetter("newest")),
    "staleness": ("int64", attrgetter("staleness")),
    "advantage": ("float64", lambda e: _mean(part.advantage for part in e.trained)),
    "entropy": ("float64", lambda e: _mean(part.entropy for part in e.trained)),
    "is_undone": ("bool", attrgetter("is_undone")),
    "example": ("string", lambda e: None if e.group else json_text(e.example)),
}

GROUP_COLUMNS: dict[str, _Column] = {
    **{name: ("int64", attrgetter(name)) for name in ("life", "group", "epoch", "row", "stamp", "step")},
    **{name: ("float64", attrgetter(name)) for name in ("admitted", "ended", "taken")},
    **{name: ("string", attrgetter(name)) for name in ("outcome", "reason", "detail")},
    "episodes": ("int64", lambda group: len(group.episodes)),
    "replayed": ("int64", lambda group: len(group.replayed)),
    "reward": ("float64", lambda group: _mean(e.reward for e in group.episodes if e.reward is not None)),
    "example": ("string", lambda group: json_text(group.example)),
}


def table_of(columns: Mapping[str, _Column], records: Sequence[Any]) -> pa.Table:
    return pa.table(
        {name: [get(record) for record in records] for name, (_, get) in columns.items()},
        schema=pa.schema([(name, pa.type_for_alias(kind)) for name, (kind, _) in columns.items()]),
    )


def table_of_rows(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """The type of a column is that of its values; of values without a common one, it has their texts."""
    columns: dict[str, pa.Array] = {}
    for name in dict.fromkeys(["version", *(name for row in rows for name in row)]):
        values = [row.get(name) for row in rows]
        try:
            columns[name] = pa.array(values)
        except (pa.ArrowException, OverflowError, TypeError):
            columns[name] = pa.array([None if value is None else str(value) for value in values])
    return pa.table(columns)


def mean_of(kind: str, name: str) -> Callable[[EpisodeRecord], float | None]:
    """Over the trajectories that have it."""
    return lambda e: _mean(getattr(part, kind)[name] for part in e.trajectories if name in getattr(part, kind))


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return sum(listed) / len(listed) if listed else None


def json_text(value: Any) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()
