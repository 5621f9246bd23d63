"""Records of a run's groups, episodes and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

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
