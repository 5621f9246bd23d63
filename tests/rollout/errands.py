"""A workflow for worker processes, which import it: it does what the example's `errand` says."""

import asyncio
import logging
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from one_turn import OneTurn

from arl.api.engine import Sampler
from arl.api.errors import EngineClosedError, PromptTooLongError
from arl.api.types import Example, ModelRequest, Trajectory
from arl.runtime.clocks import off_the_clock

log = logging.getLogger("arl.tests.errands")


def _nothing(_: int) -> dict[str, Any]:
    return {}


class UnsendableError(Exception):
    """One argument is missing when it is unpickled."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} {why}")


def _error(home: int) -> Exception:
    """Raises in every other process."""
    return {home: HomelyError("at home")}[os.getpid()]


class HomelyError(Exception):
    """Unpickled only in the process that raised it, as are errors of a module that only a worker can import."""

    def __reduce__(self) -> Any:
        return _error, (os.getpid(),)


class Errands(OneTurn):
    """entering, leaving: raised there. marks: a directory for files that tell what happened."""

    def __init__(self, marks: Path, entering: Exception | None = None, leaving: Exception | None = None) -> None:
        super().__init__(_nothing)
        self._marks = marks
        self._entering = entering
        self._leaving = leaving

    async def __aenter__(self) -> "Errands":
        if self._entering is not None:
            raise self._entering
        (self._marks / f"entered-{os.getpid()}").touch()
        return self

    async def __aexit__(self, *exc: object) -> None:
        (self._marks / f"left-{os.getpid()}").touch()
        if (self._marks / "stay").exists():
            await asyncio.Event().wait()
        if self._leaving is not None:
            raise self._leaving

    async def arun_episode(self, engine: Sampler, data: Example) -> Any:
        return await getattr(self, data["errand"])(engine, data)

    async def plain(self, engine: Sampler, data: Example) -> Trajectory:
        return await super().arun_episode(engine, data)

    async def reject(self, engine: Sampler, data: Example) -> None:
        return None

    async def give_nonsense(self, engine: Sampler, data: Example) -> str:
        return "nonsense"

    async def stumble(self, engine: Sampler, data: Example) -> None:
        raise ValueError("stumbled")

    async def raise_unsendable(self, engine: Sampler, data: Example) -> None:
        raise UnsendableError("this", "cannot travel")

    async def raise_homely(self, engine: Sampler, data: Example) -> None:
        raise HomelyError("at home")

    async def exit(self, engine: Sampler, data: Example) -> None:
        raise SystemExit(3)

    async def interrupt(self, engine: Sampler, data: Example) -> None:
        raise KeyboardInterrupt

    async def cancel_itself(self, engine: Sampler, data: Example) -> None:
        raise asyncio.CancelledError

    async def ask_too_much(self, engine: Sampler, data: Example) -> None:
        try:
            await engine.agenerate(ModelRequest(input_ids=(1,) * 9))
        except PromptTooLongError:
            return

    async def warn(self, engine: Sampler, data: Example) -> None:
        log.warning("a word from %s", os.getpid())

    async def ask_two_and_drop_one(self, engine: Sampler, data: Example) -> Trajectory:
        """It asks again while the first request runs."""
        async with asyncio.TaskGroup() as tasks:
            slow = tasks.create_task(engine.agenerate(ModelRequest(input_ids=(9,))))
            trajectory = await super().arun_episode(engine, data)
            slow.cancel()
        return trajectory

    async def wait(self, engine: Sampler, data: Example) -> None:
        try:
            await engine.agenerate(ModelRequest(input_ids=(9,)))
        finally:
            (self._marks / "cleaned up").touch()

    async def linger(self, engine: Sampler, data: Example) -> None:
        """It ends only with its process."""
        with suppress(asyncio.CancelledError):
            await engine.agenerate(ModelRequest(input_ids=(9,)))
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    async def die(self, engine: Sampler, data: Example) -> Trajectory:
        """The first time, after a request has begun."""
        if not (self._marks / "died").exists():
            (self._marks / "died").touch()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(engine.agenerate(ModelRequest(input_ids=(9,))))
                await engine.agenerate(ModelRequest(input_ids=(1,)))
                os.kill(os.getpid(), getattr(signal, data["signal"]))
        return await super().arun_episode(engine, data)

    async def queue(self, engine: Sampler, data: Example) -> Trajectory:
        """It asks while it waits for a place, and again when it has one."""
        with off_the_clock():
            await engine.agenerate(ModelRequest(input_ids=(1,)))
        return await super().arun_episode(engine, data)

    async def leave_a_task(self, engine: Sampler, data: Example) -> None:
        """It asks when the episode has ended; `join_it` waits for it."""
        self._is_joined = asyncio.Event()
        self._left = asyncio.create_task(self._ask_late(engine))

    async def _ask_late(self, engine: Sampler) -> None:
        await self._is_joined.wait()
        await engine.agenerate(ModelRequest(input_ids=(1,)))

    async def join_it(self, engine: Sampler, data: Example) -> None:
        self._is_joined.set()
        try:
            await self._left
        except EngineClosedError:
            return

    async def block(self, engine: Sampler, data: Example) -> None:
        time.sleep(data["s"])  # noqa: ASYNC251
