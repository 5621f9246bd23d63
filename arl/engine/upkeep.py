"""Keeping a pool of servers fit to serve: pausing, weight updates, fencing off what fails, bringing it back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from arl.api.config import ClientConfig
from arl.api.engine import UpdateStats, WeightUpdate
from arl.api.errors import ServerError
from arl.engine.server_pool import Server, ServerPool

_PROBE_TIMEOUT_S = 5.0
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0
_CLEANUP_TIMEOUT_S = 3.0
_MAX_CONCURRENT_ABORTS = 64


class Upkeep:
    """Acts on the servers of `pool`, and runs its background tasks in `tasks`, which it neither opens nor closes.

    | task | runs while | ends when |
    |---|---|---|
    | probe of a fenced server | it is fenced | it is healthy, holds the newest weights and is admitted |
    | abort of a request that nobody waits for | a few seconds at most | the server acknowledged, or could not |
    """

    def __init__(self, pool: ServerPool, config: ClientConfig, tasks: asyncio.TaskGroup) -> None:
        self._pool = pool
        self._config = config
        self._group = tasks
        self._tasks: set[asyncio.Task[None]] = set()
        self._abort_slots = asyncio.Semaphore(_MAX_CONCURRENT_ABORTS)
        self._target: WeightUpdate | None = None
        self._is_closed = False
        self.is_paused = False

    async def check_start(self) -> None:
        """Learn what each server calls its weights. Raises ServerError naming those that do not answer."""
        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(_greet(server)) for server in self._pool.servers]
        if missing := "; ".join(filter(None, (answer.result() for answer in answers))):
            raise ServerError(f"no inference server answers at {missing}. Start it, or correct engine.addresses")

    async def pause(self) -> None:
        self.is_paused = True
        await self._on_each(self._pool.serving, self._pause)

    async def resume(self) -> None:
        self.is_paused = False
        await self._on_each(self._pool.serving, self._resume)
        self._pool.wake_all()

    async def update(self, update: WeightUpdate) -> UpdateStats:
        """Bring every serving server to `update`; those that are fenced get it from their probes.

        Raises ServerError if no server holds it in the end.
        """
        self._target = update
        if not (serving := self._pool.serving):
            return await self._wait_for_probes()
        stats: list[UpdateStats] = []

        async def load(server: Server) -> None:
            stats.append(await self._load(server, update))
            self._pool.admit(server, update.version)

        await self._on_each(serving, load)
        if not stats:
            raise ServerError(f"no server took version {update.version}: {self._pool.report()}")
        return UpdateStats(pause_s=max(s.pause_s for s in stats), load_s=max(s.load_s for s in stats))

    def fence(self, server: Server, reason: str) -> None:
        """Give the server no more requests until its probe finds it well. Requests in flight on it may go on."""
        if not self._is_closed and self._pool.fence(server, reason):
            self._spawn(self._probe(server))

    def abort(self, server: Server, rid: str) -> None:
        """Tell the server, in the background, that nobody waits for this request any more."""
        if not self._is_closed and server.state != "fenced":
            self._spawn(self._abort(server, rid))

    async def close(self) -> None:
        """End the tasks, abort what runs and leave no server paused. A few seconds at most."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        try:
            async with asyncio.timeout(_CLEANUP_TIMEOUT_S), asyncio.TaskGroup() as group:
                for server in self._pool.servers:
                    for attempt in server.attempts:
                        group.create_task(self._abort(server, attempt.rid))
                    self._pool.lose_attempts(server, "the engine was closed")
                    if server.state != "serving":
                        group.create_task(self._leave_running(server))
        except TimeoutError:
            pass  # a server that does not answer is left as it is

    async def _leave_running(self, server: Server) -> None:
        try:
            await server.client.resume()
        except ServerError as error:
            server.reason = str(error)

    # Weight updates

    async def _load(self, server: Server, update: WeightUpdate) -> UpdateStats:
        now = asyncio.get_running_loop().time
        await update.prepare(server.client)
        started = now()
        await self._pause(server)
        paused = now()
        await update.load(server.client, flush_cache=self._config.pause_mode != "in_place")
        loaded = now()
        server.version, server.is_updated = update.version, True
        if not self.is_paused:
            await self._resume(server)
        return UpdateStats(pause_s=now() - started, load_s=loaded - paused)

    async def _wait_for_probes(self) -> UpdateStats:
        """All servers are fenced, perhaps for a moment: wait until a probe has brought one back with the update."""
        now = asyncio.get_running_loop().time
        started = now()
        try:
            async with asyncio.timeout(self._config.update_timeout_s):
                while not self._pool.serving:
                    await self._pool.changed()
        except TimeoutError:
            raise ServerError(f"no server could be given new weights: {self._pool.report()}") from None
        return UpdateStats(pause_s=now() - started, load_s=now() - started)

    async def _pause(self, server: Server) -> None:
        self._pool.pause(server)
        await server.client.pause(self._config.pause_mode)

    async def _resume(self, server: Server) -> None:
        await server.client.resume()
        self._pool.resume(server)

    async def _on_each(self, servers: Iterable[Server], act: Callable[[Server], Awaitable[None]]) -> None:
        """Act on all servers at once, each under update_timeout_s; one that fails is fenced and its requests lost."""

        async def guarded(server: Server) -> None:
            try:
                async with asyncio.timeout(self._config.update_timeout_s):
                    await act(server)
            except TimeoutError:
                self._lose(server, f"took longer than {self._config.update_timeout_s:g} s (engine.update_timeout_s)")
            except ServerError as error:
                self._lose(server, str(error))
            except asyncio.CancelledError:
                self._lose(server, "was interrupted in the middle of a weight update")
                raise

        async with asyncio.TaskGroup() as group:
            for server in servers:
                group.create_task(guarded(server))

    # Fencing

    def _lose(self, server: Server, reason: str) -> None:
        self.fence(server, reason)
        self._pool.lose_attempts(server, f"{server.address} failed: {reason}")

    async def _probe(self, server: Server) -> None:
        """Bring a fenced server back, however long it takes."""
        backoff = _FIRST_BACKOFF_S
        while True:
            try:
                if await self._restore(server):
                    return
            except (ServerError, TimeoutError) as error:
                server.reason = str(error) or f"{server.address} does not answer /health"
                self._pool.lose_attempts(server, f"{server.address} failed: {server.reason}")
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _MAX_BACKOFF_S)

    async def _restore(self, server: Server) -> bool:
        """Admit the server if it is healthy and holds the newest weights, after loading them if need be.

        False if weights newer still were published meanwhile.
        """
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            label = await server.client.weight_label()
        target = self._target
        if target is None and label != server.initial_label:
            raise ServerError(f"it serves weights {label!r}, where it began with {server.initial_label!r}")
        if target is not None and label != str(target.version):
            async with asyncio.timeout(self._config.update_timeout_s):
                await self._load(server, target)
        elif not self.is_paused:
            await server.client.resume()  # it may have been fenced in the middle of a pause
        if self._target is not target:
            return False
        self._pool.admit(server, server.version if target is None else target.version)
        return True

    # Tasks

    async def _abort(self, server: Server, rid: str) -> None:
        try:
            async with self._abort_slots, asyncio.timeout(_CLEANUP_TIMEOUT_S):
                await server.client.abort(rid)
        except (ServerError, TimeoutError) as error:
            self.fence(server, f"it did not abort a request: {error}")

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._group.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _greet(server: Server) -> str | None:
    """Returns what is wrong with the server. One that a killed run left paused is set going again."""
    try:
        async with asyncio.timeout(2 * _PROBE_TIMEOUT_S):
            server.initial_label = await server.client.weight_label()
            await server.client.resume()
    except TimeoutError:
        return f"{server.address} (no answer within {2 * _PROBE_TIMEOUT_S:g} s)"
    except ServerError as error:
        return f"{server.address} ({error})"
    return None
