"""Giving new weights to one server: prepare while it generates, then pause, load, resume.

A server may fail, or be cut off, at any point of this. Until the pause it holds its old weights, whole. From the first
byte of a load until its end it may hold a mixture, whatever it calls it; nothing is resumed then.
"""

from __future__ import annotations

import asyncio

from arl.api.config import PauseMode
from arl.api.engine import UpdateStats, WeightUpdate
from arl.engine.server_pool import Server, ServerPool


class Loading:
    """Pauses, loads and resumes servers. `is_paused`: the engine as a whole is, so that no server is resumed."""

    def __init__(self, pool: ServerPool, pause_mode: PauseMode) -> None:
        self._pool = pool
        self._pause_mode: PauseMode = pause_mode
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
        await update.prepare(server.client)
        started = now()
        await self.pause(server)
        paused = now()
        self._pool.begin_load(server)
        await update.load(server.client, flush_cache=self._pause_mode != "in_place")
        self._pool.end_load(server, update.version)
        loaded = now()
        if not self.is_paused:
            await self.resume(server)
        return UpdateStats(pause_s=now() - started, load_s=loaded - paused)
