"""Keeping a pool of servers fit to serve: joining and leaving, weight updates, fencing off what fails.

**One server's update**: prepare while it generates, then pause, load, resume. It may fail, or be cut off, at any point.
Until the pause the server holds its old weights, whole. From the first byte of a load until its end it may hold a
mixture, whatever label it shows: it is not resumed then.

**An adapter** is loaded beside the others while the server generates, and new requests name it from then on. An adapter
that no request names any more is unloaded in the background: SGLang first waits for the requests that it believes in
flight, and loads no other adapter meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from arl.api.engine import ServedModel, UpdateStats, WeightUpdate
from arl.api.engine_config import ClientConfig
from arl.api.errors import ArlError, ServerError, ServerFailedError, TransportError, first_error
from arl.engine.client.server_client import Greeting, ServerClient, difference, expected_of, greet
from arl.engine.client.server_pool import Server, ServerPool, ServerState
from arl.engine.client.server_watch import ServerWatch

_PROBE_TIMEOUT_S = 10.0
_GREETING_PAUSES_S = (0.0, 0.2, 1.0)
"""Before each greeting of a server at the start."""
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0
_CLEANUP_TIMEOUT_S = 3.0
_UNLOAD_TIMEOUT_S = 30.0
_MAX_CONCURRENT_ABORTS = 64
_RECENT_PAUSES, _ENOUGH_PAUSES = 256, 4
_PATIENCE = 4.0
"""A server that an update pauses for so many times the longest of the recent ones hangs, and is fenced."""
_LEAST_PAUSE_S = 5.0
"""But no sooner than this."""

logger = logging.getLogger(__name__)


class Upkeep:
    """Acts on the servers of `pool`, and runs its background tasks in `tasks`, which it neither opens nor closes.

    | task | runs while | ends when |
    |---|---|---|
    | check of a server that failed one request | 10 s at most | it answered; or it did not, and is fenced |
    | probe of a fenced server | it is fenced | it holds the newest weights, is healthy and admitted; or it is removed |
    | abort of a request that nobody waits for | a few seconds at most | the server acknowledged, or could not |
    | unloading of adapters that nobody names | half a minute for each at most | the same |
    | `ServerWatch.listen`, `ServerWatch.hold_floor` | the engine is open | too few servers are left |
    """

    def __init__(
        self, pool: ServerPool, config: ClientConfig, tasks: asyncio.TaskGroup, model: ServedModel, watch: ServerWatch
    ) -> None:
        self._pool = pool
        self._config = config
        self._expected = expected_of(model)
        self._watch = watch
        self._group = tasks
        self._tasks: set[asyncio.Task[None]] = set()
        self._watching: list[asyncio.Task[None]] = []
        self._abort_slots = asyncio.Semaphore(_MAX_CONCURRENT_ABORTS)
        self._pauses_s: deque[float] = deque(maxlen=_RECENT_PAUSES)
        self._probes: dict[Server, asyncio.Task[None]] = {}
        self._target: WeightUpdate | None = None
        self._is_closed = False

    async def pause(self) -> None:
        self._pool.is_held = True
        await self._on_each(self._pool.in_service, self._pause)

    async def resume(self) -> None:
        self._pool.is_held = False
        self._pool.expect(self._pool.in_service)
        await self._on_each(self._pool.in_service, self._resume)
        self._pool.wake_all()

    def abort(self, server: Server, rid: str) -> None:
        """Tell the server, in the background, that nobody waits for this request any more."""
        if not self._is_closed and server.state is not ServerState.FENCED:
            self._spawn(self._abort(server, rid))

    async def close(self) -> None:
        """End the tasks, abort what runs, leave no server paused and no adapter loaded. A few seconds at most."""
        self._is_closed = True
        for task in (*self._tasks, *self._watching):
            task.cancel()
        try:
            async with asyncio.timeout(_CLEANUP_TIMEOUT_S), asyncio.TaskGroup() as group:
                for server in self._pool.servers:
                    for attempt in server.attempts:
                        group.create_task(self._abort(server, attempt.rid))
                    if server.state is not ServerState.SERVING:
                        group.create_task(_leave_running(server))
                    group.create_task(self._unload(server, [*server.adapters]))
                    self._pool.lose_attempts(server, "the engine was closed")
        except TimeoutError:
            pass  # a server that does not answer is left as it is

    # Joining and leaving

    async def start(self, clients: Sequence[ServerClient]) -> None:
        """Take in the first servers. Raises ServerError naming those that do not answer, or do not fit together."""
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(_greet(client)) for client in clients]
        answers = {client: call.result() for client, call in zip(clients, calls, strict=True)}
        if missing := [f"{client.address} ({e})" for client, e in answers.items() if isinstance(e, ServerError)]:
            where = "; ".join(missing)
            raise ServerError(f"no inference server answers at {where}. Start it, or correct engine.addresses")
        for client, answer in answers.items():
            if isinstance(answer, Greeting):
                server = self._pool.join(client)
                self._welcome(server, answer)
                self._pool.admit(server)

    def watch(self) -> None:
        """Begin to watch over the servers, once the tasks' group is open."""
        for watching in (self._watch.listen(self._is_silent, self.suspect), self._watch.hold_floor()):
            self._watching.append(self._group.create_task(watching))
            self._watching[-1].add_done_callback(self._forget)

    async def add(self, client: ServerClient) -> None:
        """Bring a new server to the current weights, then let it serve. Raises ServerError, and leaves it out."""
        server = self._pool.join(client)
        try:
            async with asyncio.timeout(self._config.update_timeout_s):
                self._welcome(server, await greet(client))
                while not await self._restore(server):
                    pass  # newer weights came meanwhile
        except TimeoutError:
            raise ServerError(
                f"{server.address} was not ready within {self._config.update_timeout_s:g} s (engine.update_timeout_s)"
            ) from None
        except TransportError as error:
            raise ServerError(f"{server.address} did not get the current weights: {error}") from error
        finally:
            if server.state is ServerState.JOINING:
                self._pool.drop(server)
                if server.pauses:
                    await _leave_running(server)

    async def remove(self, server: Server, drain_timeout_s: float) -> None:
        """Let its requests end, hand on those that do not end in time, and drop it."""
        others = [other for other in self._pool.servers if other is not server and not other.is_leaving]
        if not others or (server.is_in_service and not any(other.is_in_service for other in others)):
            raise ServerError(f"{server.address} is the last server that serves; add another before removing it")
        if len(others) < self._config.min_servers:
            least = f"engine.min_servers is {self._config.min_servers}"
            raise ServerError(f"{least}, and without {server.address} there are {len(others)}; add another before")
        self._pool.leave(server)
        try:
            if not await self._drained(server, drain_timeout_s):
                async with asyncio.TaskGroup() as group:
                    for attempt in server.attempts:
                        group.create_task(self._abort(server, attempt.rid))
                if not await self._drained(server, _CLEANUP_TIMEOUT_S):
                    self._pool.lose_attempts(server, f"{server.address} was removed")
        except BaseException:
            self._pool.stay(server)
            raise
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLEANUP_TIMEOUT_S):
                await self._unload(server, [*server.adapters])
        if probe := self._probes.pop(server, None):
            probe.cancel()
        is_idle = server.state is ServerState.DRAINING
        self._pool.drop(server)
        self._watch.forget(server)
        if not is_idle:
            await _leave_running(server)

    def _welcome(self, server: Server, greeting: Greeting) -> None:
        """Raises ServerError if it serves another model than it should, than the others, or than it did itself."""
        if greeting.unreached:
            raise ServerError(
                f"weight updates would not reach all of {server.address}, which runs with {greeting.unreached}"
            )
        known = [other.greeting for other in self._pool.servers if other.greeting is not None]
        if sentence := difference([self._expected, *known, greeting]):
            raise ServerError(
                f"the servers do not serve the same model: {sentence}. Start all with the model of this run, or "
                "correct engine.addresses"
            )
        if self._config.pause_mode != "in_place":
            greeting = replace(greeting, num_late=0)  # the other modes wait for late tokens, or sample them again
        self._pool.note_greeting(server, greeting)

    async def _drained(self, server: Server, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                while server.attempts:
                    await self._pool.changed()
        except TimeoutError:
            return False
        return True

    # Weight updates

    async def update(self, update: WeightUpdate) -> UpdateStats:
        """Bring every server in service to `update`; those that are fenced get it from their probes.

        Raises ServerError if no server holds it in the end, ValueError if some server serves newer weights.
        """
        servers = self._pool.in_service
        newest = max((server.version for server in servers), default=self._pool.version)
        if update.version < newest:
            raise ValueError(f"version {update.version} was published, but the servers already hold {newest}")
        self._target = update
        self._pool.newest_sent = max(self._pool.newest_sent, update.version)
        started = asyncio.get_running_loop().time()
        stats: list[UpdateStats] = []

        async def load(server: Server) -> None:
            stats.append(await self._load(server, update, self._longest_pause_s()))
            self._pool.admit(server)

        turns = [servers] if self._config.update_order == "all" else [[server] for server in servers]
        self._pool.expect(servers if len(turns) == 1 else [])
        refusals = [refusal for turn in turns for refusal in await self._on_each(turn, load)]
        if not stats:
            await self._wait_for_probes(update, may_return=len(refusals) < len(self._pool.servers))
            waited = asyncio.get_running_loop().time() - started
            return UpdateStats(pause_s=waited, load_s=waited)
        return UpdateStats(pause_s=max(s.pause_s for s in stats), load_s=max(s.load_s for s in stats))

    async def _wait_for_probes(self, update: WeightUpdate, *, may_return: bool) -> None:
        """All servers are fenced, perhaps for a moment: wait until a probe has brought one back with the update."""
        try:
            async with asyncio.timeout(self._config.absence_timeout_s if may_return else 0):
                while not any(server.version == update.version for server in self._pool.in_service):
                    await self._pool.changed()
        except TimeoutError:
            raise ServerError(f"no server took version {update.version}: {self._pool.report()}") from None

    async def _load(self, server: Server, update: WeightUpdate, limit_s: float | None = None) -> UpdateStats:
        """Bring the server to `update`. The caller holds server.busy, and fences the server if this raises.

        limit_s: the longest that the server may be paused.
        """
        now = asyncio.get_running_loop().time
        began = now()
        if update.adapter is not None:
            self._pool.note_adapter(server, update.adapter)
        await update.prepare(server.client)
        started = now()
        if update.adapter is not None:
            self._pool.turn_to(server, update.version, update.adapter)
            if unused := self._pool.unused_adapters(server):
                self._spawn(self._unload(server, unused))
            return UpdateStats(pause_s=0.0, load_s=started - began)
        try:
            async with asyncio.timeout(limit_s):
                await self._pause(server)
                paused = now()
                self._pool.begin_load(server)
                await update.load(server.client, flush_cache=self._config.pause_mode != "in_place")
                self._pool.end_load(server, update.version)
                loaded = now()
                if not self._pool.is_held:
                    await self._resume(server)
        except TimeoutError:
            raise ServerFailedError(f"an update took {limit_s:.3g} s, far longer than any before it") from None
        self._pauses_s.append(now() - started)
        return UpdateStats(pause_s=self._pauses_s[-1], load_s=loaded - paused)

    def _longest_pause_s(self) -> float | None:
        """How long a server may be paused for an update; None while only update_timeout_s says."""
        is_known = len(self._pauses_s) >= _ENOUGH_PAUSES
        return max(_LEAST_PAUSE_S, _PATIENCE * max(self._pauses_s)) if is_known else None

    async def _pause(self, server: Server) -> None:
        self._pool.pause(server)
        await _twice(lambda: server.client.pause(self._config.pause_mode))

    async def _resume(self, server: Server) -> None:
        await _twice(server.client.resume)
        self._pool.resume(server)

    async def _unload(self, server: Server, adapters: list[str]) -> None:
        """Forget adapters that no request names any more. If that fails, the next load tries again."""
        for name in adapters:
            try:
                async with asyncio.timeout(_UNLOAD_TIMEOUT_S):
                    await server.client.unload_adapter(name)
            except (ServerError, TimeoutError) as error:
                logger.warning("%s did not unload the adapter %s: %s", server.address, name, error)
                return
            self._pool.forget_adapter(server, name)

    async def _on_each(
        self, servers: Sequence[Server], act: Callable[[Server], Awaitable[None]]
    ) -> list[ServerError | TransportError]:
        """Act on these servers at once, each under its lock and update_timeout_s; fence those that fail.

        Returns the refusals: failures that only other weights or another server would mend.
        """
        refusals: list[ServerError | TransportError] = []

        async def guarded(server: Server) -> None:
            try:
                async with asyncio.timeout(self._config.update_timeout_s), server.busy:
                    if server.is_in_service:  # otherwise it was fenced, or removed, while others had their turn
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
            self._watch.note_fence(server)
            self._probes[server] = self._spawn(self._probe(server))

    def suspect(self, server: Server, reason: str) -> None:
        """A call failed. Once may be chance, and a fence costs more than a request: the server is asked how it is.

        A second failure without a success in between fences it.
        """
        self._pool.note_failure(server)
        if server.num_failures > 1:
            self.fence(server, reason)
        elif not self._is_closed and server.is_in_service:
            self._spawn(self._check(server, reason))

    async def _check(self, server: Server, reason: str) -> None:
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                await server.client.model_info()
        except (ServerError, TimeoutError):
            self.fence(server, reason)

    def _is_silent(self, server: Server) -> None:
        reason = f"{server.address} gives no sign of life"
        self.fence(server, reason)
        self._pool.lose_attempts(server, reason)

    def _lose(self, server: Server, reason: str) -> None:
        """Fence a server that failed an update. If it was paused already, its requests will not end: they are lost."""
        was_paused = server.state in (ServerState.PAUSED, ServerState.LOADING)
        self.fence(server, reason)
        if was_paused:
            self._pool.lose_attempts(server, f"{server.address} failed: {reason}")

    async def _probe(self, server: Server) -> None:
        """Bring a fenced server back, however long it takes. After a second failure in a row its requests are lost."""
        backoff, num_failures = _FIRST_BACKOFF_S, 0
        while True:
            is_silent = False
            try:
                if await self._restore(server):
                    self._watch.note_return(server)
                    return
            except (ServerError, TimeoutError) as error:
                is_silent = isinstance(error, ServerFailedError | TimeoutError)
                num_failures += 1
                self._pool.note_probe(server, str(error) or f"{server.address} does not answer")
                if num_failures > 1:
                    self._pool.lose_attempts(server, f"{server.address} failed: {server.probed}")
            except ArlError as error:
                # Not the server's fault, so it may end what it runs. If the weights have lost their sender, the
                # trainer learns of that from a call of its own.
                self._pool.note_probe(server, str(error))
            self._watch.note_probe(server, is_silent=is_silent)
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _MAX_BACKOFF_S)

    async def _restore(self, server: Server) -> bool:
        """Admit the server if healthy and up to date, loading if need be. False if newer weights came meanwhile."""
        async with server.busy:
            target = self._target
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                told = await server.client.holding(with_adapters=server.weights.adapter is not None)
            if (target is None or target.adapter is not None) and told.label != server.initial_label:
                raise ServerError(f"it serves weights {told.label!r}, but it began with {server.initial_label!r}")
            if not server.keeps(told):
                # It may have been started again, as another than it was. It is not resumed: it may hold a mixture.
                self._welcome(server, await greet(server.client, sets_going=False))
            if self._target is not target:
                return False  # before a load of weights that may be gone, which would count as the server's fault
            if target is not None and not server.holds(target.version, told):
                async with asyncio.timeout(self._config.update_timeout_s):
                    await self._load(server, target)
            if not self._pool.is_held:
                async with asyncio.timeout(_PROBE_TIMEOUT_S):
                    await server.client.resume()  # it may have been fenced in the middle of a pause
                    await server.client.check_health()
            if self._target is not target:
                return False
            self._pool.note_success(server)
            self._pool.admit(server)
            return True

    # Tasks

    async def _abort(self, server: Server, rid: str) -> None:
        try:
            async with self._abort_slots, asyncio.timeout(_CLEANUP_TIMEOUT_S):
                await server.client.abort(rid)
        except (ServerError, TimeoutError) as error:
            self.suspect(server, f"it did not abort a request: {error or 'no answer'}")

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._group.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._is_closed = True  # the group ends with it, and takes no more tasks


async def _greet(client: ServerClient) -> Greeting | ServerError:
    """Greets again if a request failed: one bad answer among many servers' does not keep a run from starting."""
    failure = ServerError("")
    for pause_s in _GREETING_PAUSES_S:
        await asyncio.sleep(pause_s)
        try:
            return await greet(client)
        except ServerFailedError as error:
            failure = error
        except ServerError as error:
            return error
    return failure


async def _twice(call: Callable[[], Awaitable[None]]) -> None:
    """Repeat a call that may be repeated, if it fails: a fence in the middle of an update loses all that runs."""
    try:
        await call()
    except ServerFailedError:
        await call()


async def _leave_running(server: Server) -> None:
    with suppress(ServerError, TimeoutError):
        async with asyncio.timeout(_CLEANUP_TIMEOUT_S):
            await server.client.resume()
