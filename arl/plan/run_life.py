"""One life of a run, as the fitting of costs reads it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from arl.api import events
from arl.api.errors import RunFileError
from arl.api.events import TurnEnded
from arl.eventlog.run_record import RunRecord
from arl.plan.server_load import CpuTimes, Span


class RunLife:
    """The records of one life of a run."""

    def __init__(self, run: RunRecord, number: int) -> None:
        self.run = run
        self.number = number
        self.began = run.lives[number]
        self.settings: dict[str, Any] = self.began.settings
        self.records = [record for life, record in run.system if life == number]
        self.calls = list(run.files.calls(-np.inf, np.inf, number))
        self.batches = self.of_kind(events.BatchTrained)
        versions = {batch.version for batch in self.batches}
        self.steps = [step for step in run.steps if step["version"] in versions]
        self.first = self.began.version + 1
        """The version that its first step made."""
        self._used = self.of_kind(events.CpuUsed)

    @classmethod
    def of(cls, run: RunRecord) -> RunLife:
        trained: defaultdict[int, int] = defaultdict(int)
        for life, record in run.system:
            trained[life] += isinstance(record, events.BatchTrained) and life in run.lives
        if not any(trained.values()):
            raise RunFileError(f"{run.run_dir} has no trained step to learn costs from; train at least five")
        return cls(run, max(trained, key=lambda life: (trained[life], life)))

    def of_kind(self, kind: type[Any]) -> list[Any]:
        return [record for record in self.records if isinstance(record, kind)]

    def cpu(self, name: str) -> CpuTimes | None:
        """When the CPU time of a process was read, and what it was; "" for the controller. None if it is unknown."""
        read = [record for record in self._used if not name or name in record.processes]
        used = [record.processes[name] if name else record.controller for record in read]
        if len(read) < 2:
            return None
        return np.array([record.t for record in read]), np.maximum.accumulate(used)

    def setting(self, *names: str, default: Any = None) -> Any:
        value: Any = self.settings
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        return default if value is None else value

    def pauses(self, server: str) -> list[Span]:
        """When it stood still for new weights."""
        paused, resumed = (
            [record.t for record in self.of_kind(kind) if record.server == server]
            for kind in (events.ServerPaused, events.ServerResumed)
        )
        ends = [next((t for t in resumed if t >= begin), None) for begin in paused]
        return [(begin, end) for begin, end in zip(paused, ends, strict=True) if end is not None]

    @property
    def servers(self) -> list[str]:
        """The servers that answered."""
        return sorted({call.server for call in self.calls if isinstance(call, TurnEnded) and call.server})

    def num_threads(self, section: str) -> int:
        return int(self.setting(section, "num_threads", default=1))

    @property
    def is_local(self) -> bool:
        """Whether its servers are embedded ones."""
        return self.setting("engine", "kind") == "local"

    @property
    def serves_on_cpu(self) -> bool:
        if self.is_local:
            return self.setting("engine", "device", default="cpu") == "cpu"
        return self.setting("engine", "gpus_per_server") == 0

    @property
    def trains_on_cpu(self) -> bool:
        return self.setting("train", "device", default="cpu") == "cpu"
