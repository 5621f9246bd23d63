"""Keeping a pool of servers fit to serve: weight updates, fencing off what fails, bringing it back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from arl.api.config import ClientConfig
from arl.api.engine import UpdateStats, WeightUpdate
from arl.api.errors import ArlError, ServerError, ServerFailedError, TransportError, first_error
from arl.engine.client.loading import Loading
from arl.engine.client.server_client import Greeting, difference, greet
from arl.engine.client.server_pool import Server, ServerPool

_PROBE_TIMEOUT_S = 10.0
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0
_CLEANUP_TIMEOUT_S = 3.0
_MAX_CONCURRENT_ABORTS = 64


class Upkeep:
    """Acts on the servers of `pool`, and runs its background tasks in `tasks`, which it neither opens nor closes.

    | task | runs while | ends when |
    |---|---|---|
    | probe of a fenced server | it is fenced | it holds the newest weights, is healthy and admitted; or it is removed |
    | abort of a request that nobody waits for | a few seconds at most | the server acknowledged, or could not |
    | unloading of adapters that nobody names | half a minute for each at most | the same |
    """

    def __init__(self, pool: ServerPool, config: ClientConfig, tasks: asyncio.TaskGroup) -> None:
        self._pool = pool
        self._config = config
        self._loading = Loading(pool, config.pause_mode, self._spawn)
        self._group = tasks
        self._tasks: set[asyncio.Task[None]] = set()
        self._abort_slots = asyncio.Semaphore(_MAX_CONCURRENT_ABORTS)
        self._greetings: dict[Server, Greeting] = {}
        self._probes: dict[Server, asyncio.Task[None]] = {}
        self._target: WeightUpdate | None = None
        self._is_inspecting = False
        self._is_closed = False

    @property
    def is_paused(self) -> bool:
        """Whether the engine as a whole is."""
        return self._loading.is_paused

    async def pause(self) -> None:
        self._loading.is_paused = True
        await self._on_each(self._pool.serving, self._loading.pause)

    async def resume(self) -> None:
        self._loading.is_paused = False
        await self._on_each(self._pool.serving, self._loading.resume)
        self._pool.wake_all()

    def abort(self, server: Server, rid: str) -> None:
        """Tell the server, in the background, that nobody waits for this request any more."""
        holders = self._pool.serving if server is self._pool.router else [server]
        for holder in holders:
            if not self._is_closed and holder.state != "fenced":
                self._spawn(self._abort(holder, rid))

    async def close(self) -> None:
        """End the tasks, abort what runs, leave no server paused and no adapter loaded. A few seconds at most."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        try:
            async with asyncio.timeout(_CLEANUP_TIMEOUT_S), asyncio.TaskGroup() as group:
                router = self._pool.router
                for server in self._pool.servers:
                    for attempt in (router or server).attempts:
                        group.create_task(self._abort(server, attempt.rid))
                    if server.state != "serving":
                        group.create_task(self._leave_running(server))
                    group.create_task(self._loading.unload(server, [*server.adapters]))
                for server in [router] if router else self._pool.servers:
                    self._pool.lose_attempts(server, "the engine was closed")
        except TimeoutError:
            pass  # a server that does not answer is left as it is

    # Joining and leaving

    async def start(self, servers: Sequence[Server]) -> None:
        """Take in the first servers. Raises ServerError naming those that are not there, or do not fit together."""
        if self._pool.router is not None:
            await self._pool.router.client.check_health()
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(_greet(server)) for server in servers]
        answers = {server: call.result() for server, call in zip(servers, calls, strict=True)}
        missing = [f"{s.address} ({answer})" for s, answer in answers.items() if isinstance(answer, ServerError)]
        if missing:
            raise ServerError(
                f"no inference server answers at {'; '.join(missing)}. Start it, or correct engine.addresses"
            )
        for server, answer in answers.items():
            if isinstance(answer, Greeting):
                self._welcome(server, answer)
        self._pool.servers += servers

    async def add(self, server: Server) -> None:
        """Bring a new server to the current weights, then let it serve. Raises ServerError, and leaves it out."""
        self._pool.servers.append(server)
        self._pool.fence(server, "it is being added")
        try:
            async with asyncio.timeout(self._config.update_timeout_s):
                self._welcome(server, await greet(server.client))
                while not await self._restore(server):
                    pass  # newer weights came meanwhile
        except TimeoutError:
            raise ServerError(
                f"{server.address} was not ready within {self._config.update_timeout_s:g} s (engine.update_timeout_s)"
            ) from None
        except TransportError as error:
            raise ServerError(f"{server.address} could not be given the current weights: {error}") from error
        finally:
            if server.state == "fenced":
                self._drop(server)
                if server.pauses:
                    await self._leave_running(server)

    async def remove(self, server: Server, drain_timeout_s: float) -> None:
        """Let its requests end, hand on those that do not end in time, and drop it."""
        others = [other for other in self._pool.servers if other is not server and not other.is_leaving]
        if not others or (server.state != "fenced" and all(other.state == "fenced" for other in others)):
            raise ServerError(f"{server.address} is the last server that serves; add another before removing it")
        self._pool.set_leaving(server, True)
        try:
            if not await self._drained(server, drain_timeout_s):
                async with asyncio.TaskGroup() as group:
                    for attempt in server.attempts:
                        group.create_task(self._abort(server, attempt.rid))
                if not await self._drained(server, _CLEANUP_TIMEOUT_S):
                    self._pool.lose_attempts(server, f"{server.address} was removed")
        except BaseException:
            self._pool.set_leaving(server, False)
            raise
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLEANUP_TIMEOUT_S):
                await self._loading.unload(server, [*server.adapters])
        self._drop(server)
        if server.state != "serving":
            await self._leave_running(server)

    def _welcome(self, server: Server, greeting: Greeting) -> None:
        if sentence := difference([*self._greetings.values(), greeting]):
            raise ServerError(f"the servers do not serve the same model: {sentence}")
        self._greetings[server] = greeting
        server.initial_label, server.client.num_ranks = greeting.label, greeting.num_ranks
        # The other modes wait for what is on its way, or have it sampled again.
        server.num_late = greeting.num_late if self._config.pause_mode == "in_place" else 0

    def _drop(self, server: Server) -> None:
        self._greetings.pop(server, None)
        if probe := self._probes.pop(server, None):
            probe.cancel()
        self._pool.drop(server)

    async def _drained(self, server: Server, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                while server.attempts:
                    await self._pool.changed()
        except TimeoutError:
            return False
        return True

    async def _leave_running(self, server: Server) -> None:
        try:
            async with asyncio.timeout(_CLEANUP_TIMEOUT_S):
                await server.client.resume()
        except (ServerError, TimeoutError) as error:
            server.reason = str(error)

    # Weight updates

    async def update(self, update: WeightUpdate) -> UpdateStats:
        """Bring every serving server to `update`; those that are fenced get it from their probes.

        Raises ServerError if no server holds it in the end, ValueError if some server serves newer weights.
        """
        newest = max((server.version for server in self._pool.serving), default=self._pool.version)
        if update.version < newest:
            raise ValueError(f"version {update.version} was published, but the servers hold {newest} already")
        self._target = update
        started = asyncio.get_running_loop().time()
        stats: list[UpdateStats] = []

        async def load(server: Server) -> None:
            async with server.busy:
                if server in self._pool.serving:  # otherwise it was fenced, or removed, while others were updated
                    stats.append(await self._loading.load(server, update))
                    self._pool.admit(server)

        serving = self._pool.serving
        turns = [serving] if self._config.update_order == "all" else [[server] for server in serving]
        refusals = [refusal for servers in turns for refusal in await self._on_each(servers, load)]
        if not stats:
            await self._wait_for_probes(update, may_return=len(refusals) < len(self._pool.servers))
            waited = asyncio.get_running_loop().time() - started
            return UpdateStats(pause_s=waited, load_s=waited)
        return UpdateStats(pause_s=max(s.pause_s for s in stats), load_s=max(s.load_s for s in stats))

    async def _wait_for_probes(self, update: WeightUpdate, *, may_return: bool) -> None:
        """All servers are fenced, perhaps for a moment: wait until a probe has brought one back with the update."""
        try:
            async with asyncio.timeout(self._config.absence_timeout_s if may_return else 0):
                while not any(server.version == update.version for server in self._pool.serving):
                    await self._pool.changed()
        except TimeoutError:
            raise ServerError(f"no server took version {update.version}: {self._pool.report()}") from None

    async def _on_each(
        self, servers: Sequence[Server], act: Callable[[Server], Awaitable[None]]
    ) -> list[ServerError | TransportError]:
        """Act on these servers at once, each under update_timeout_s; one that fails is fenced.

        Returns the refusals: failures which nothing but other weights or another server would mend.
        """
        refusals: list[ServerError | TransportError] = []

        async def guarded(server: Server) -> None:
            try:
                async with asyncio.timeout(self._config.update_timeout_s):
                    await act(server)
            except TimeoutError:
                self._lose(server, f"took longer than {self._config.update_timeout_s:g} s (engine.update_timeout_s)")
            except (ServerError, TransportError) as error:
                self._lose(server, str(error))
                if not isinstance(error, ServerFailedError):
                    refusals.append(error)
            except BaseException:
                self._lose(server, "was interrupted in the middle of a weight update")
                raise

        try:
            async with asyncio.TaskGroup() as group:
                for server in servers:
                    group.create_task(guarded(server))
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        return refusals

    # Fencing

    def fence(self, server: Server, reason: str) -> None:
        """Give the server no more requests until its probe finds it well. Requests in flight on it may go on."""
        if not self._is_closed and self._pool.fence(server, reason):
            self._probes[server] = self._spawn(self._probe(server))

    def suspect(self, server: Server, reason: str) -> None:
        """The server failed a request: fence it. A router: look which of the servers behind it is not what it was."""
        if server is not self._pool.router:
            self.fence(server, reason)
        elif not self._is_closed and not self._is_inspecting:
            self._is_inspecting = True
            self._spawn(self._inspect_all())

    async def _inspect_all(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for server in self._pool.serving:
                    group.create_task(self._inspect(server))
        finally:
            self._is_inspecting = False

    async def _inspect(self, server: Server) -> None:
        try:
            async with server.busy, asyncio.timeout(_PROBE_TIMEOUT_S):  # an update may hold it for longer
                told = await server.client.holding(with_adapters=server.adapter is not None)
                if not (server.keeps(told) if server.is_updated else told.label == server.initial_label):
                    self.fence(server, f"it lost its weights: it serves {told.label!r}, not version {server.version}")
        except (ArlError, TimeoutError) as error:
            self.fence(server, str(error) or f"{server.address} does not answer")

    def _lose(self, server: Server, reason: str) -> None:
        """Fence a server that failed an update. If it was paused already, its requests will not end: they are lost.

        Behind a router nobody knows which are its: all are lost, and sent again.
        """
        was_paused = server.state == "paused"
        self.fence(server, reason)
        if was_paused:
            self._pool.lose_attempts(self._pool.router or server, f"{server.address} failed: {reason}")

    async def _probe(self, server: Server) -> None:
        """Bring a fenced server back, however long it takes."""
        backoff = _FIRST_BACKOFF_S
        while True:
            try:
                if await self._restore(server):
                    return
            except (ServerError, TimeoutError) as error:
                server.reason = str(error) or f"{server.address} does not answer"
                self._pool.lose_attempts(server, f"{server.address} failed: {server.reason}")
            except ArlError as error:
                # No fault of the server's, which may end what it runs. If the weights have no sender any more, whoever
                # trains learns it from a call of its own.
                server.reason = str(error)
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _MAX_BACKOFF_S)

    async def _restore(self, server: Server) -> bool:
        """Admit the server if it is healthy and holds the newest weights, after loading them if need be.

        False if weights newer still were published meanwhile.
        """
        async with server.busy:
            target = self._target
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                told = await server.client.holding(with_adapters=server.adapter is not None)
            if (target is None or target.adapter is not None) and told.label != server.initial_label:
                raise ServerError(f"it serves weights {told.label!r}, where it began with {server.initial_label!r}")
            if not server.keeps(told):
                # It may have been started again, as another than it was. It is not resumed: it may hold a mixture.
                self._welcome(server, await greet(server.client, sets_going=False))
            if self._target is not target:
                return False  # before a load of weights that may be gone, which would count as the server's fault
            if target is not None and not server.holds(target.version, told):
                async with asyncio.timeout(self._config.update_timeout_s):
                    await self._loading.load(server, target)
            if not self.is_paused:
                async with asyncio.timeout(_PROBE_TIMEOUT_S):
                    await server.client.resume()  # it may have been fenced in the middle of a pause
                    await server.client.check_health()
            if self._target is not target:
                return False
            self._pool.admit(server)
            return True

    # Tasks

    async def _abort(self, server: Server, rid: str) -> None:
        try:
            async with self._abort_slots, asyncio.timeout(_CLEANUP_TIMEOUT_S):
                await server.client.abort(rid)
        except (ServerError, TimeoutError) as error:
            self.fence(server, f"it did not abort a request: {error}")

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._group.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._is_closed = True  # the group ends with it, and takes no more tasks


async def _greet(server: Server) -> Greeting | ServerError:
    try:
        return await greet(server.client)
    except ServerError as error:
        return error
