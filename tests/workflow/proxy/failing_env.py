"""An environment of verifiers for tests, whose tasks fail, each in its own way."""

import asyncio
from collections.abc import Iterable

import verifiers.v1 as vf


class FailingTask(vf.Task[vf.TaskData]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.name == "setup hangs":
            await asyncio.Event().wait()

    @vf.reward
    async def fair(self, trace: vf.Trace) -> float:
        if self.data.name == "reward raises":
            raise ZeroDivisionError("nobody was fair")
        return 1.0

    @vf.stop
    async def never_begins(self, request: vf.Request) -> bool:
        return self.data.name == "stops at once"


class Failing(vf.Taskset[FailingTask]):
    def load(self) -> Iterable[FailingTask]:
        for name in ("reward raises", "setup hangs", "stops at once", "nothing fails"):
            yield FailingTask(vf.TaskData(name=name, prompt="Be fair."), self.config.task)


__all__ = ["Failing"]
