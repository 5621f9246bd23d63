"""What several trackers show alike: the numbers of an evaluation, and trajectories as rows of a table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from arl.api.tracking import TrackedTrajectory
from arl.api.types import Evaluation


def evaluation_metrics(evaluation: Evaluation) -> dict[str, float]:
    """`eval/NAME`, with the names of evaluations.jsonl; `eval/DATASET/NAME` of each named dataset."""
    own = ("reward", "standard_error", "num_episodes", "num_failed", "wall_s")
    known = {name: value for name in own if (value := getattr(evaluation, name)) is not None}
    numbers = {name: float(value) for name, value in known.items()} | dict(evaluation.metrics)
    for dataset, part in (evaluation.by_name or {}).items():
        of_part = {"reward": part.reward, "num_failed": float(part.num_failed), **part.metrics}
        numbers |= {f"{dataset}/{name}": value for name, value in of_part.items()}
    return {f"eval/{name}": value for name, value in numbers.items()}


COLUMNS = ("version", *(field.name for field in fields(TrackedTrajectory)))
"""The columns of a table of trajectories."""


def rows(version: int, trajectories: Sequence[TrackedTrajectory]) -> list[list[Any]]:
    """A row for each trajectory, with the values of COLUMNS. version: of the step."""
    return [[version, *_values(trajectory)] for trajectory in trajectories]


def _values(trajectory: TrackedTrajectory) -> Iterator[Any]:
    for name in COLUMNS[1:]:
        value = getattr(trajectory, name)
        match value:
            case tuple():
                yield "/".join(map(str, value))
            case Mapping():
                yield json.dumps(dict(value), ensure_ascii=False) if value else ""
            case _:
                yield value
