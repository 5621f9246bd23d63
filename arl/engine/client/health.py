"""Keeps the servers of a pool fit to serve: updates one or all of them, fences those that fail, and probes these.

**An update of one server**: prepare while it generates, then pause, load, resume. It may fail, or be cut off, at any
point. Until the pause the server holds its old weights, whole. From the first byte of a load until its end it may hold
a mixture, whatever label it shows. It is not resumed in that time. An adapter is loaded beside the others while the
server generates, and new requests name it from then on.

**A server that fails** is fenced: it gets no requests, and a probe runs until it is healthy and holds the newest
weights. `Membership` adds and removes servers, `ServerWatch` counts and logs what happens.

**A server can load new weights in part**, and say that it has them all: vLLM on a CPU computes linear layers from
copies that it packed at the start. Then every label is right and every logprob is of a mixture. So `WeightCheck`
compares its logprobs of a few tokens with the trainer's, after its first load and again when it holds weights 1, 2, 4,
8, ... versions later: what a layer missed grows as training goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from arl.api.engine import ServedModel, SharedUpdate, UpdateStats, WeightProbe, WeightUpdate
from arl.api.errors import (
    ArlError,
    ProcessLostError,
    PromptTooLongError,
    ServerError,
    ServerFailedError,
    TransportError,
    first_error,
)
from arl.api.settings.engines import RELEASED, ClientConfig
from arl.engine.client.server_client import Greeting, Holding, difference, expected_of, greet
from arl.engine.client.server_pool import Server, ServerPool, ServerState
from arl.engine.client.watchdog import ServerWatch

_PROBE_TIMEOUT_S = 10.0
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0
_CLEANUP_TIMEOUT_S = 3.0
_RESUME_TIMEOUT_S = 3.0
_UNLOAD_TIMEOUT_S = 30.0
_MAX_CONCURRENT_ABORTS = 64
_STARTS_PER_TURN = 16
"""Servers whose update begins in one turn of the event loop: hundreds at once would block it."""
_RECENT_PAUSES, _ENOUGH_PAUSES = 256, 4
_PATIENCE, _LEAST_PAUSE_S = 4.0, 5.0
"""A server is fenced as hung if an update pauses it this many times as long as the longest recent update did, and for
at least so long."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


class ServerUpdates:
    """Brings single servers of `pool` to new weights. The caller holds `server.busy`, and fences the server if a call
    raises. spawn: runs a coroutine in the background.
    """

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
            in_flight = {attempt.weights.adapter for attempt in server.attempts}
            if unused := [name for name in server.adapters[:-2] if name not in in_flight]:
                # In the background: SGLang first waits for the requests that it believes in flight, and loads no other
                # adapter meanwhile.
                self._spawn(self.unload(server, unused))
            return UpdateStats(pause_s=0.0, load_s=started - began)
        limit = asyncio.timeout(limit_s)
        resume_s = 0.0
        try:
            async with limit:
                if server.state is ServerState.ASLEEP:
                    await server.client.resume_memory()
                    resume_s = now() - started
                    self._pool.wake(server, resume_s)
                else:
                    await self.pause(server)
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


class Upkeep:
    """Acts on the servers of `pool`, and runs its background tasks in `tasks`, which it neither opens nor closes.

    | task | runs while | ends when |
    |---|---|---|
    | check of a server that failed one request | 10 s at most | it answered; or it did not, and is fenced |
    | probe of a fenced server | it is fenced | it holds the newest weights, is healthy and admitted; or it is removed |
    | abort of a request that nobody waits for | a few seconds at most | the server acknowledged, or could not |
    | unloading of adapters that nobody names | half a minute for each at most | the same |
    | `Patience.watch`, `Roster.run` | the engine is open | |
    | `ServerWatch.listen`, `ServerWatch.hold_floor` | the engine is open | too few servers are left |
    """

    def __init__(
        self, pool: ServerPool, config: ClientConfig, tasks: asyncio.TaskGroup, model: ServedModel, watch: ServerWatch
    ) -> None:
        self.updates = ServerUpdates(pool, config, self._spawn)
        self._pool = pool
        self._config = config
        self._expected = expected_of(model)
        self._needs_routes = model.routing is not None
        self._watch = watch
        self._group = tasks
        self._tasks: set[asyncio.Task[None]] = set()
        self._watching: list[asyncio.Task[None]] = []
        self._abort_slots = asyncio.Semaphore(_MAX_CONCURRENT_ABORTS)
        self._probes: dict[Server, asyncio.Task[None]] = {}
        self._target: WeightUpdate | None = None
        self._lost: ProcessLostError | None = None
        self._is_closed = False

    async def pause(self) -> None:
        self._pool.is_held = True
        if not self._pool.is_asleep:
            await self._on_each(self._pool.in_service, self.updates.pause)

    async def resume(self) -> None:
        self._pool.is_held = False
        if self._pool.is_asleep:
            return
        self._pool.expect(self._pool.in_service)
        await self._on_each(self._pool.in_service, self.updates.resume)
        self._pool.wake_all()

    async def release_memory(self) -> None:
        """Let the servers sleep, those out of service as far as they answer. Raises the refusal of one that cannot."""
        self._pool.fall_asleep()
        if refusals := await self._on_each(self._pool.in_service, self.updates.release_memory):
            raise refusals[0]

        async def release(server: Server) -> None:
            """Its probe, or its addition, may be bringing it up to date. Perhaps it is dead: it gets little time."""
            with suppress(ServerError, TimeoutError):
                async with asyncio.timeout(_PROBE_TIMEOUT_S), server.busy:
                    await self._let_sleep(server)

        async with asyncio.TaskGroup() as group:
            for server in self._pool.servers:
                if not server.is_in_service:
                    group.create_task(release(server))

    def abort(self, server: Server, rid: str) -> None:
        """Tell the server, in the background, that nobody waits for this request any more."""
        if not self._is_closed and server.state is not ServerState.FENCED:
            self._spawn(self.abort_now(server, rid))

    async def abort_now(self, server: Server, rid: str) -> None:
        try:
            async with self._abort_slots, asyncio.timeout(_CLEANUP_TIMEOUT_S):
                await server.client.abort(rid)
        except (ServerError, TimeoutError) as error:
            self.suspect(server, f"it did not abort a request: {error or 'no answer'}")

    async def close(self) -> None:
        """End the tasks, abort what runs, leave no server paused and no adapter loaded. A few seconds at most."""
        self._is_closed = True
        for task in (*self._tasks, *self._watching):
            task.cancel()
        try:
            async with asyncio.timeout(_CLEANUP_TIMEOUT_S), asyncio.TaskGroup() as group:
                for server in self._pool.servers:
                    for attempt in server.attempts:
                        group.create_task(self.abort_now(server, attempt.rid))
                    if server.state is not ServerState.SERVING:
                        group.create_task(leave_running(server))
                    group.create_task(self.updates.unload(server, [*server.adapters]))
                    self._pool.lose_attempts(server, "the engine was closed")
        except TimeoutError:
            pass  # a server that does not answer is left as it is

    def forget(self, server: Server) -> None:
        if probe := self._probes.pop(server, None):
            probe.cancel()
        self._watch.forget(server)

    def watch(self, *others: Coroutine[Any, Any, None]) -> None:
        """Begin to watch over the servers, once the tasks' group is open. others: more that lasts as long."""
        for watching in (*others, self._watch.listen(self.fence, self.suspect), self._watch.hold_floor()):
            self._watching.append(self._group.create_task(watching))
            self._watching[-1].add_done_callback(self._forget)

    def welcome(self, server: Server, greeting: Greeting) -> None:
        """Raises ServerError if it serves another model than it should, than the others, or than it did itself."""
        if greeting.unreached:
            raise ServerError(
                f"weight updates would not reach all of {server.address}, which runs with {greeting.unreached}"
            )
        if self._config.colocated and not greeting.releases_memory:
            raise ServerError(
                f"{server.address} cannot let go of its memory, as engine.colocated needs: start it with "
                f"{server.client.memory_flag}, on a GPU"
            )
        if self._needs_routes and not greeting.returns_routes:
            raise ServerError(
                f"{server.address} does not return the routes of a mixture of experts, with which it is trained; start "
                f"it with {server.client.routes_flag}, or set engine.replay_routing=false to do without"
            )
        known = [other.greeting for other in self._pool.servers if other.greeting is not None]
        if sentence := difference([self._expected, *known, greeting]):
            raise ServerError(
                f"the servers do not serve the same model: {sentence}. Start all with the model of this run, or "
                "correct engine.addresses"
            )
        if self._config.pause_mode != "in_place":
            greeting = replace(greeting, num_late=0)  # the other modes wait for late tokens, or sample them again
        server.greeting = greeting

    # Weight updates

    async def update(self, update: WeightUpdate) -> UpdateStats:
        """Bring every server in service to `update`; those that are fenced get it from their probes.

        Raises ServerError if no server holds it in the end, ValueError if some server serves newer weights, and
        ProcessLostError if the process that sends them is lost before any server has them all.
        """
        if self._pool.is_asleep:
            self._pool.wake_up()
        servers = self._pool.in_service
        newest = max((server.version for server in servers), default=self._pool.version)
        if update.version < newest:
            raise ValueError(f"version {update.version} was published, but the servers already hold {newest}")
        self._target, self._lost = update, None
        self._pool.newest_sent = max(self._pool.newest_sent, update.version)
        started = asyncio.get_running_loop().time()
        stats: list[UpdateStats] = []

        async def load(server: Server) -> None:
            stats.append(await self.updates.load(server, update, self.updates.longest_pause_s()))
            self._pool.admit(server)

        turns = [servers] if self._config.update_order == "all" else [[server] for server in servers]
        self._pool.expect(servers if len(turns) == 1 else [])
        if len(turns) > 1 and isinstance(update, SharedUpdate):
            update.expect([server.client for server in servers])
        refusals = [refusal for turn in turns for refusal in await self._on_each(turn, load)]
        if not stats:
            await self._wait_for_probes(update, may_return=len(refusals) < len(self._pool.servers))
            waited = asyncio.get_running_loop().time() - started
            return UpdateStats(pause_s=waited, load_s=waited)
        slowest = {name: max(getattr(one, name) for one in stats) for name in ("pause_s", "load_s", "resume_s")}
        return UpdateStats(**slowest)

    async def _wait_for_probes(self, update: WeightUpdate, *, may_return: bool) -> None:
        """All servers are fenced, perhaps for a moment: wait until a probe has brought one back with the update."""
        try:
            async with asyncio.timeout(self._config.absence_timeout_s if may_return else 0):
                while not any(server.version == update.version for server in self._pool.in_service):
                    if self._lost is not None:
                        raise self._lost
                    await self._pool.changed()
        except TimeoutError:
            raise ServerError(f"no server took version {update.version}: {self._pool.report()}") from None

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
            except BaseException:  # cancelled, or a bug: whatever it is, the server may hold a mixture
                self._lose(server, "was interrupted in the middle of a weight update")
                raise

        try:
            async with asyncio.TaskGroup() as group:
                for index, server in enumerate(servers):
                    if index % _STARTS_PER_TURN == 0:
                        await asyncio.sleep(0)
                    group.create_task(guarded(server))
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        return refusals

    # Fencing

    def fence(self, server: Server, reason: str) -> None:
        """Give the server no more requests until its probe finds it well. Requests in flight on it may go on."""
        if not self._is_closed and self._pool.fence(server, reason):
            self._watch.note_fence(server)
            if probe := self._probes.get(server):
                probe.cancel()  # an update brought the server back before the probe did
            self._probes[server] = self._spawn(self._probe(server))

    def suspect(self, server: Server, reason: str) -> None:
        """A call failed. One failure may be chance, and a fence costs more than a request: check the server first.

        A second failure without a success in between fences it.
        """
        server.num_failures += 1
        if server.num_failures > 1:
            self.fence(server, reason)
        elif not self._is_closed and server.is_in_service:
            self._spawn(self._check(server, reason))

    async def _check(self, server: Server, reason: str) -> None:
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                await server.client.check_alive()
        except (ServerError, TimeoutError):
            self.fence(server, reason)

    def _lose(self, server: Server, reason: str) -> None:
        """Fence a server that failed an update. If it was paused already, its requests will not end: they are lost."""
        was_paused = server.is_paused
        self.fence(server, reason)
        if was_paused:
            self._pool.lose_attempts(server, f"{server.address} failed: {reason}")

    async def _probe(self, server: Server) -> None:
        """Bring a fenced server back, however long it takes. After a second failure in a row its requests are lost.

        The waits double until the server answers a request, so that one which passes every probe and fails every
        request is not readmitted all the time.
        """
        num_failures = 0
        while True:
            wait_s = server.backoff_s
            server.backoff_s = min(max(2 * wait_s, _FIRST_BACKOFF_S), _MAX_BACKOFF_S)
            await asyncio.sleep(wait_s)
            is_silent = False
            try:
                if await self.restore(server):
                    self._watch.note_return(server)
                    return
            except (ServerError, TimeoutError) as error:
                is_silent = isinstance(error, ServerFailedError | TimeoutError)
                num_failures += 1
                server.probed = str(error) or f"{server.address} does not answer"
                if num_failures > 1:
                    self._pool.lose_attempts(server, f"{server.address} failed: {server.probed}")
            except ArlError as error:
                # Not the server's fault, so it may end what it runs.
                server.probed = str(error)
            self._watch.note_probe(server, is_silent=is_silent)

    async def restore(self, server: Server) -> bool:
        """Admit the server if healthy and up to date, loading if need be.

        False if newer weights came meanwhile, or if the servers sleep: then it does, too.
        """
        async with server.busy:
            is_fit = not self._pool.is_asleep and await self._made_fit(server)
            if self._pool.is_asleep:  # perhaps only since then
                await self._let_sleep(server)
                return False
            if is_fit:
                server.num_failures = 0
                self._pool.admit(server)
            return is_fit

    async def _made_fit(self, server: Server) -> bool:
        """Whether it is healthy, and holds the newest weights, after it got what it lacked."""
        target = self._target
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            adapters = frozenset[str]() if server.weights.adapter is None else await server.client.adapters()
            told = Holding(label=await server.client.weight_label(), adapters=adapters)
        if (target is None or target.adapter is not None) and told.label != server.initial_label:
            raise ServerError(f"it serves weights {told.label!r}, but it began with {server.initial_label!r}")
        if not server.keeps(told):
            # It may have been started again, as another than it was. It is not resumed: it may hold a mixture.
            self.welcome(server, await greet(server.client, sets_going=False))
        if self._target is not target:
            return False  # these weights may be gone, and a failed load would count as the server's fault
        if target is not None and not server.holds(target.version, told):
            try:
                await self._bring_up_to_date(server, target, told)
            except (ServerError, TransportError) as error:
                if self._target is target or isinstance(error, ServerFailedError):
                    raise
                return False  # they were removed under the load: newer ones have come
            except ProcessLostError as error:
                if self._target is target:
                    self._lost = error
                    self._pool.wake_all()
                raise
        if not self._pool.is_held:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                await server.client.resume()  # it may have been fenced in the middle of a pause
                await server.client.check_health()
        return self._target is target

    async def _let_sleep(self, server: Server) -> None:
        """The trainer has the devices: a server that was started again meanwhile lets go of its memory, too."""
        async with asyncio.timeout(self._config.update_timeout_s):
            if await server.client.weight_label() != RELEASED:
                await server.client.pause(self._config.pause_mode)
                await server.client.release_memory()

    async def _bring_up_to_date(self, server: Server, target: WeightUpdate, told: Holding) -> None:
        limit_s = self._config.update_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                if told.label == RELEASED:
                    await server.client.resume_memory()
                await self.updates.load(server, target)
        except TimeoutError:
            slow = f"{server.address} did not load version {target.version} within {limit_s:g} s"
            raise ServerFailedError(f"{slow}; raise engine.update_timeout_s if its loads take longer") from None

    # Tasks

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._group.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._is_closed = True  # the group ends with it, and takes no more tasks


_EXACT_GAP, _ROUNDED_GAP = 0.02, 0.5
"""The largest mean difference at the first check, in nats: where both compute in float32, and elsewhere."""
_GROWTH, _LEAST_GAP = 5.0, 2e-3
"""Later a difference may be this many times the smallest so far, and always this large."""
_CHECK_TIMEOUT_S = 60.0


@dataclass(slots=True, kw_only=True)
class _Checked:
    greeting: Greeting | None
    due: int
    """The version at which it is checked next."""
    distance: int = 1
    least: float | None = None


class WeightCheck:
    def __init__(self, pool: ServerPool) -> None:
        self._pool = pool
        self._checked: dict[Server, _Checked] = {}

    def is_due(self, version: int) -> bool:
        return any(self._of(server, version).due <= version for server in self._pool.in_service)

    async def run(self, probe: WeightProbe) -> None:
        """Ask the servers that are due and hold probe.version. Raises ServerError for one that computes otherwise."""
        servers = [one for one in self._pool.in_service if one.version == probe.version]
        due = [one for one in servers if self._of(one, probe.version).due <= probe.version]
        gaps = await asyncio.gather(*(self._gap(server, probe) for server in due))
        for server, gap in zip(due, gaps, strict=True):
            if gap is not None:
                self._judge(server, probe, gap)
        self._checked = {server: told for server, told in self._checked.items() if server in self._pool.servers}

    def _of(self, server: Server, version: int) -> _Checked:
        """A server that was started again is greeted again, and new."""
        known = self._checked.get(server)
        if known is None or known.greeting is not server.greeting:
            known = self._checked[server] = _Checked(greeting=server.greeting, due=version)
        return known

    async def _gap(self, server: Server, probe: WeightProbe) -> float | None:
        """The mean absolute difference of logprobs; None if the server did not answer in time."""
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT_S):
                told = await server.client.score(probe.token_ids, server.weights.adapter)
        except (ServerFailedError, PromptTooLongError, TimeoutError) as error:
            logger.warning("%s could not be checked: %s", server.address, error or "it took too long")
            return None
        return float(np.abs(np.array(told) - probe.logprobs).mean())

    def _judge(self, server: Server, probe: WeightProbe, gap: float) -> None:
        known = self._of(server, probe.version)
        is_exact = probe.is_exact and server.greeting is not None and server.greeting.is_exact
        limit = _EXACT_GAP if is_exact else _ROUNDED_GAP
        if known.least is not None:
            limit = min(limit, max(_GROWTH * known.least, _LEAST_GAP))
        if not gap <= limit:
            raise ServerError(
                f"{server.address} does not compute with the weights of version {probe.version} that it was given: its "
                f"logprobs of {len(probe.token_ids)} tokens differ from the trainer's by {gap:.2g} nats on average "
                f"(at most {limit:.2g} is rounding). A part of its layers may have kept older weights (on a CPU, vLLM "
                "packs linear layers at the start), or it has another dtype or quantization. See docs/servers.md; "
                "engine.check_weights=false trains on"
            )
        known.least = gap if known.least is None else min(known.least, gap)
        known.due, known.distance = probe.version + known.distance, 2 * known.distance
