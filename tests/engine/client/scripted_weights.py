"""Weight updates whose course a test decides."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from arl.api.engine import DiskWeights, WeightServer

Act = Callable[[WeightServer], Awaitable[None]]


def weights(version: int) -> DiskWeights:
    return DiskWeights(version=version, directory=Path(f"/weights/{version}"))


async def nothing(server: WeightServer) -> None: ...


@dataclass(frozen=True)
class ScriptedWeights:
    version: int
    before: Act = nothing
    """Called by `prepare`."""
    midway: Act = nothing
    """Called when the server has loaded some of the weights, and already shows their label."""
    num_bytes: int = 0
    adapter: str | None = None
    calls: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """The calls so far, each with the address of the server."""

    async def prepare(self, server: WeightServer) -> None:
        self.calls.append(("prepare", server.address))
        await self.before(server)

    async def load(self, server: WeightServer, *, flush_cache: bool) -> None:
        self.calls.append(("load", server.address))
        await server.load_directory(Path(f"/weights/{self.version}"), version=self.version, flush_cache=flush_cache)
        await self.midway(server)


def raising(error: Exception, *, at: str, times: int = 1) -> Act:
    """Fails so many times at one server."""
    left = [times]

    async def act(server: WeightServer) -> None:
        if server.address == at and left[0]:
            left[0] -= 1
            raise error

    return act


def waiting(gate: asyncio.Event, *, at: str) -> Act:
    """Waits at one server."""

    async def act(server: WeightServer) -> None:
        if server.address == at:
            await gate.wait()

    return act
