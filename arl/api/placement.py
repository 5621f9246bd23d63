"""What runs where: the content of the table at a run's start, and of its record in the event log."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import msgspec


class PlacedPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a run, and where it runs. A field is empty where that is not known."""

    part: str
    """controller, trainer, server, workers, mirror, ray."""
    name: str = ""
    """policy rank 3; else empty."""
    host: str = ""
    address: str = ""
    pid: int | None = None
    device: str = ""
    """cpu, GPU 0, GPUs 0-3."""
    note: str = ""


class SharedPath(msgspec.Struct, frozen=True, kw_only=True):
    """A directory that several machines must see."""

    name: str
    """The setting: run_dir, weights.directory, model."""
    path: str
    seen: dict[str, str]
    """Machine -> yes, no, read only, another one (the same path, other files), or not checked and why."""


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A sentence that says what is wrong with a placement, and what to do about it."""

    text: str
    is_mistake: bool = True
    """False: a warning, because the run may work."""
    ends_start: bool = True
    """A mistake keeps a run from starting, unless the run could train in spite of it."""


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the placement that the trainer's process knows."""

    parts: list[PlacedPart] = []
    """Its ranks, in order."""
    shared: list[SharedPath] = []
    findings: list[Finding] = []


def gpus_text(numbers: Sequence[int]) -> str:
    """GPU 0, or GPUs 0-3; empty for none."""
    if not numbers:
        return ""
    return f"GPU{'s' * (len(numbers) > 1)} {ranges_text(numbers)}"


def ranges_text(numbers: Sequence[int]) -> str:
    """0-3, 6."""
    runs = [
        [number for _, number in run] for _, run in groupby(enumerate(sorted(numbers)), lambda one: one[1] - one[0])
    ]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
