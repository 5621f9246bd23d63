"""TensorBoard. A continued run writes one more event file, and TensorBoard hides earlier steps that come again."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from arl.api.tracker_config import TensorBoardConfig
from arl.api.tracking import TrackedRun, TrackedTrajectory, Tracker
from arl.api.types import Evaluation, StepStats
from arl.tracking.rows import COLUMNS, evaluation_metrics, rows


class TensorBoardTracker(Tracker):
    """Writes with tensorboard's own writer, which needs no torch."""

    def __init__(self, config: TensorBoardConfig) -> None:
        self._config = config

    def open(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        events: Any = event_pb2  # protobuf makes their classes when they are imported
        summaries: Any = summary_pb2
        self._event, self._summary, self._text_of = events.Event, summaries.Summary, text_pb
        self._writer = EventFileWriter(str((self._config.directory or run.run_dir / "tensorboard").absolute()))
        began = events.SessionLog(status=events.SessionLog.START)
        self._writer.add_event(self._event(wall_time=time.time(), step=run.version + 1, session_log=began))
        self._write(run.version, {}, {"settings": _code(json.dumps(run.settings, indent=2))})

    def step(self, stats: StepStats, trajectories: Sequence[TrackedTrajectory]) -> None:
        said = _said(stats.version, trajectories)
        self._write(stats.version, stats.metrics, {"trajectories": said} if said else {})

    def evaluation(self, evaluation: Evaluation) -> None:
        self._write(evaluation.version, evaluation_metrics(evaluation), {})

    def held_out(self, evaluation: Evaluation, trajectories: Sequence[TrackedTrajectory]) -> None:
        self._write(evaluation.version, {}, {"held_out": _said(evaluation.version, trajectories)})

    def close(self, error: str | None) -> None:
        self._writer.close()

    def _write(self, step: int, numbers: Mapping[str, float], texts: Mapping[str, str]) -> None:
        """Write an event, and flush it, so that it is there if the process is killed."""
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in numbers.items()]
        for tag, text in texts.items():
            values.extend(self._text_of(tag, text).value)
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()


_AS_THEY_ARE = ("error", "example", "expected", "text")
"""Columns that may be long texts, the last ones."""


def _said(version: int, trajectories: Sequence[TrackedTrajectory]) -> str:
    """Trajectories in Markdown: of each its numbers, and its texts as they are."""
    said: list[str] = []
    for row in rows(version, trajectories):
        known = dict(zip(COLUMNS, row, strict=True))
        texts = [(name, text) for name in _AS_THEY_ARE if (text := known.pop(name))]
        numbers = ", ".join(f"{name} {value}" for name, value in known.items() if value not in (None, ""))
        said.append(f"**{numbers}**")
        said += [f"{name}\n\n{_code(text)}" for name, text in texts]
    return "\n\n".join(said)


def _code(text: str) -> str:
    """A block of code in Markdown, which no text can end."""
    return "\n".join(f"    {line}" for line in text.splitlines())
