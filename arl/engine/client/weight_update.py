"""The update of one server: prepare while it generates, then pause, load, resume.

It may fail, or be cut off, at any point. Until the pause the server holds its old weights, whole. From the first byte
of a load until its end it may hold a mixture, whatever label it shows. It is not resumed in that time.

**An adapter** is loaded beside the others while the server generates, and new requests name it from then on. An adapter
that no request names any more is unloaded in the background, because SGLang first waits for the requests that it
believes in flight, and loads no other adapter meanwhile.

The caller holds `server.busy`, and fences the server if a call raises.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from arl.api.engine import UpdateStats, WeightUpdate
from arl.api.errors import ServerError, ServerFailedError
from arl.api.settings.engines import RELEASED, ClientConfig
from arl.engine.client.server_pool import Server, ServerPool, ServerState

_UNLOAD_TIMEOUT_S = 30.0
_RESUME_TIMEOUT_S = 3.0
_RECENT_PAUSES, _ENOUGH_PAUSES = 256, 4
_PATIENCE = 4.0
"""A server is fenced as hung if an update pauses it this many times as long as the longest recent update did."""
_LEAST_PAUSE_S = 5.0
"""No server is fenced for a shorter pause."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


class ServerUpdates:
    """Brings single servers of `pool` to new weights. spawn: runs a coroutine in the background."""

    def __init__(
        self, pool: ServerPool, config: ClientConfig, spawn: Callable[[Coroutine[Any, Any, None]], object]
    ) -> None:
        self._pool = pool
        self._config = config
        self._spawn = spawn
        self._pauses_s: deque[float] = deque(maxlen=_RECENT_PAUSES)

    async def load(self, server: Server, update: WeightUpdate, limit_s: float | None = None) -> UpdateStats:
        """Bring the server to `update`. limit_s: the longest that it may be paused."""
        now = asyncio.get_running_loop().time
        began = now()
        if update.adapter is not None and update.adapter not in server.adapters:
            server.adapters.append(update.adapter)  # before it is loaded: a load that arl gave up may still succeed
        await update.prepare(server.client)
        started = now()
        if update.adapter is not None:
            self._pool.turn_to(server, update.version, update.adapter)
            if unused := server.unused_adapters:
                self._spawn(self.unload(server, unused))
            return UpdateStats(pause_s=0.0, load_s=started - began)
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                resume_s = await self._stop(server)
                paused = now()
                self._pool.begin_load(server)
                await update.load(server.client, flush_cache=self._config.pause_mode != "in_place")
                self._pool.end_load(server, update.version)
                loaded = now()
                if not self._pool.is_held:
                    await self.resume(server)
        except TimeoutError:
            if limit_s is None or not limit.expired():
                raise  # the transport's own
            raise ServerFailedError(f"an update took {limit_s:.3g} s, far longer than any before it") from None
        self._pauses_s.append(now() - started)
        return UpdateStats(pause_s=self._pauses_s[-1], load_s=loaded - paused, resume_s=resume_s)

    def longest_pause_s(self) -> float | None:
        """How long a server may be paused for an update; None while only update_timeout_s limits that."""
        is_known = len(self._pauses_s) >= _ENOUGH_PAUSES
        return max(_LEAST_PAUSE_S, _PATIENCE * max(self._pauses_s)) if is_known else None

    async def _stop(self, server: Server) -> float:
        """Pause it; or wake it, if it sleeps. Returns how long it took to wake."""
        if server.state is not ServerState.ASLEEP:
            await self.pause(server)
            return 0.0
        began = asyncio.get_running_loop().time()
        await server.client.resume_memory()
        seconds = asyncio.get_running_loop().time() - began
        self._pool.wake(server, seconds)
        return seconds

    async def release_memory(self, server: Server) -> None:
        """Pause it, and let it sleep. Does nothing if it sleeps."""
        if server.state is ServerState.ASLEEP:
            return
        await self.pause(server)
        began = asyncio.get_running_loop().time()
        await server.client.release_memory()
        self._pool.sleep(server, asyncio.get_running_loop().time() - began)

    async def pause(self, server: Server) -> None:
        self._pool.pause(server)
        if worked := await _twice(lambda: server.client.pause(self._config.pause_mode)):
            self._pool.note_work(worked)

    async def resume(self, server: Server) -> None:
        await _twice(server.client.resume)
        self._pool.resume(server)

    async def unload(self, server: Server, adapters: list[str]) -> None:
        """Unload adapters that no request names any more. If that fails, the next load tries again."""
        for name in adapters:
            try:
                async with asyncio.timeout(_UNLOAD_TIMEOUT_S):
                    await server.client.unload_adapter(name)
            except (ServerError, TimeoutError) as error:
                logger.warning("%s did not unload the adapter %s: %s", server.address, name, error)
                return
            if name in server.adapters:  # otherwise a former task that took long has unloaded it
                server.adapters.remove(name)


async def leave_running(server: Server) -> None:
    """Resume a server that this engine releases. If it does not answer, it is left as it is.

    One that sleeps has no weights: its label says so to whoever uses it next.
    """
    with suppress(ServerError, TimeoutError):
        async with asyncio.timeout(_RESUME_TIMEOUT_S):
            if await server.client.weight_label() == RELEASED:
                await server.client.resume_memory()
            await server.client.resume()


async def _twice(call: Callable[[], Awaitable[T]]) -> T:
    """Make an idempotent call again if it fails: a fence in the middle of an update loses all running requests."""
    try:
        return await call()
    except ServerFailedError:
        return await call()
