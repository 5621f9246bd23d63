"""Giving new weights to one server: prepare while it generates, then pause, load, resume.

A server may fail, or be cut off, at any point of this. Until the pause it holds its old weights, whole. From the first
byte of a load until its end it may hold a mixture, whatever it calls it; nothing is resumed then.

An adapter is loaded beside the others while the server generates, and from then on new requests name it: there is no
pause, and no mixture. Requests in flight end under the adapter that they named. One that nobody names any more is
unloaded, in the background: SGLang waits for the requests that it believes in flight before it does that, and loads no
other adapter meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from arl.api.config import PauseMode
from arl.api.engine import UpdateStats, WeightUpdate
from arl.api.errors import ServerError
from arl.engine.client.server_pool import Server, ServerPool

_UNLOAD_TIMEOUT_S = 30.0

logger = logging.getLogger(__name__)


class Loading:
    """Pauses, loads and resumes servers. `is_paused`: the engine as a whole is, so that no server is resumed.

    spawn: runs a task in the background.
    """

    def __init__(
        self, pool: ServerPool, pause_mode: PauseMode, spawn: Callable[[Coroutine[Any, Any, None]], object]
    ) -> None:
        self._pool = pool
        self._pause_mode: PauseMode = pause_mode
        self._spawn = spawn
        self.is_paused = False

    async def pause(self, server: Server) -> None:
        self._pool.pause(server)
        await server.client.pause(self._pause_mode)

    async def resume(self, server: Server) -> None:
        await server.client.resume()
        self._pool.resume(server)

    async def load(self, server: Server, update: WeightUpdate) -> UpdateStats:
        """Bring the server to `update`. The caller holds server.busy, and fences the server if this raises."""
        now = asyncio.get_running_loop().time
        began = now()
        if update.adapter is not None and update.adapter not in server.adapters:
            server.adapters.append(update.adapter)  # before it is there: a load that is given up may still come about
        await update.prepare(server.client)
        started = now()
        if update.adapter is not None:
            self._turn_to(server, update, update.adapter)
            return UpdateStats(pause_s=0.0, load_s=started - began)
        await self.pause(server)
        paused = now()
        self._pool.begin_load(server)
        await update.load(server.client, flush_cache=self._pause_mode != "in_place")
        self._pool.end_load(server, update.version, None)
        loaded = now()
        if not self.is_paused:
            await self.resume(server)
        return UpdateStats(pause_s=now() - started, load_s=loaded - paused)

    def _turn_to(self, server: Server, update: WeightUpdate, adapter: str) -> None:
        """From here on requests name the adapter, which the server has. In one go: no request sees half of it."""
        self._pool.begin_load(server)
        self._pool.end_load(server, update.version, adapter)
        if unused := self._pool.unused_adapters(server):
            self._spawn(self.unload(server, unused))

    async def unload(self, server: Server, adapters: list[str]) -> None:
        """Forget adapters that nobody names any more. Where that fails, the next load tries again."""
        for name in adapters:
            try:
                async with asyncio.timeout(_UNLOAD_TIMEOUT_S):
                    await server.client.unload_adapter(name)
            except (ServerError, TimeoutError) as error:
                logger.warning("%s did not unload the adapter %s: %s", server.address, name, error)
                return
            if name in server.adapters:  # otherwise it was unloaded by a former task that took long
                server.adapters.remove(name)
