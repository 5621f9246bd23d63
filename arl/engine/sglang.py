"""RemoteSGLangEngine: one InferenceEngine over one or many servers that speak SGLang's protocol.

    agenerate --> wait for a server --> attempt --> tokens kept --> done? --> response
                        ^                  |                          |
                        +--- fault: fence, retry elsewhere <----------+--- aborted: continue when resumed

| task of the engine's group | runs while | ends when |
|---|---|---|
| probe of a fenced server | it is fenced | it is healthy, holds the newest weights and is admitted |
| abort of a cancelled request | a few seconds at most | the server acknowledged, or could not |

**Versions.** A token's version is what the server's spans say. Servers without spans: the version the server held
before the request was sent. Labels are str(version); what a server called its weights before this engine first
updated them is the version that the engine started with. A label that is no version after that means that the server
was restarted behind our back: its answer is thrown away, and it is fenced until it holds the current weights again.

**The prefix cache across versions.** A server keeps the KV of finished prompts for whoever sends the same prefix, and
SGLang does not ask under which weights it was computed. Under in_place the cache can't be flushed by an update (it
fails while requests run), so a later turn would silently be sampled on top of old weights' KV and its logprobs would
be of no version at all. Therefore every request carries its version as `extra_key`, which SGLang makes part of the
cache's key: prefixes are shared within a version alone, in all three modes. What is left under in_place is what the
mode means: a request that was running keeps its own KV. Under retract and abort the update flushes the cache too,
since a retracted request keeps its key and would find its own old KV again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from types import TracebackType
from typing import Self

import aiohttp

from arl.api.config import ClientConfig
from arl.api.engine import DiskWeights, UpdateStats, WeightUpdate
from arl.api.errors import ArlError, EngineClosedError, PromptTooLongError, RequestTimeoutError, ServerError
from arl.api.types import ModelRequest, ModelResponse
from arl.engine.continuation import PartialResponse
from arl.engine.server_client import Answer, ServerClient, ServerFailedError
from arl.engine.server_pool import Attempt, Server, ServerPool

_PROBE_TIMEOUT_S = 5.0
_MAX_BACKOFF_S = 2.0
_FIRST_BACKOFF_S = 0.05
_CLEANUP_TIMEOUT_S = 3.0
_MAX_CONCURRENT_ABORTS = 64
_KEEPALIVE_S = 4.0
"""Idle connections are closed before uvicorn, which SGLang runs on, closes them from its side (5 s)."""


class RemoteSGLangEngine:
    """An InferenceEngine that asks SGLang-protocol servers at `addresses`.

    Use as `async with RemoteSGLangEngine(...) as engine`: tasks and connections live inside the block, which fails
    with ServerError if a server is not there. `version` is what the servers' weights are at the start.
    `eos_token_ids` are the model's; only needed to recognise one as the last token of an aborted answer.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        config: ClientConfig,
        *,
        api_key: str | None = None,
        version: int = 0,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        if not addresses:
            raise ServerError("there is no server to ask: addresses is empty")
        self._addresses = [address.rstrip("/") for address in addresses]
        self._config = config
        self._api_key = api_key
        self._start_version = version
        self._eos_token_ids = tuple(eos_token_ids)
        self._target: DiskWeights | None = None
        self._updating = asyncio.Lock()
        self._abort_slots = asyncio.Semaphore(_MAX_CONCURRENT_ABORTS)
        self._is_paused = False
        self._is_closed = False
        self._session: aiohttp.ClientSession | None = None
        self._pool = ServerPool([], version)
        self._tasks = asyncio.TaskGroup()
        self._running_tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30.0),
            headers=headers,
        )
        try:
            servers = [Server(ServerClient(self._session, a), self._start_version) for a in self._addresses]
            for server in servers:
                server.initial_label = await self._first_label(server)
            self._pool = ServerPool(servers, self._start_version)
            await self._tasks.__aenter__()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self.aclose()
        finally:
            # Without the block's own error, which the group would wrap into an ExceptionGroup.
            await self._tasks.__aexit__(None, None, None)

    @property
    def version(self) -> int:
        """The newest version that every serving server holds."""
        return self._pool.version

    # Generation

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Continue `request.input_ids`; see InferenceEngine.agenerate.

        An answer that was cut short is continued, on the session's server. A request whose server fails is sent to
        another, at most max_retries times, each time from the tokens it already has.
        """
        deadline = asyncio.get_running_loop().time() + self._config.request_timeout_s
        partial = PartialResponse(request, self._eos_token_ids)
        faults = 0
        sent = 0
        while partial.stop_reason is None:
            server = await self._choose(request, deadline)
            try:
                fault = await self._attempt(server, partial, f"{request.rid}.{sent}", deadline)
            except PromptTooLongError:
                if partial.num_tokens == 0:
                    raise
                partial.stop_at_context_end()
                break
            sent += 1
            if fault is not None:
                faults += 1
                await self._back_off(request, fault, faults)
        return partial.response()

    async def _choose(self, request: ModelRequest, deadline: float) -> Server:
        """A server that is serving; waits for one until the deadline."""
        while True:
            self._check_open()
            if not self._is_paused and (server := self._pool.choose(request.session_id)) is not None:
                return server
            try:
                async with asyncio.timeout_at(deadline):
                    await self._pool.changed()
            except TimeoutError:
                raise self._no_server(request) from None

    def _no_server(self, request: ModelRequest) -> ArlError:
        waited = f"request {request.rid} waited {self._config.request_timeout_s:g} s (engine.request_timeout_s)"
        if not self._pool.serving:
            return ServerError(f"{waited} for a server, and none came back: {self._pool.report()}")
        addresses = ", ".join(server.address for server in self._pool.serving)
        return RequestTimeoutError(f"{waited} while generation was paused on {addresses}")

    async def _attempt(self, server: Server, partial: PartialResponse, rid: str, deadline: float) -> str | None:
        """Send the request once and keep what comes back. Returns what went wrong, if that may be tried again."""
        payload = partial.payload(rid, cache_key=str(server.version))
        scope = asyncio.timeout_at(deadline)
        attempt = Attempt(rid=rid, version=server.version, pauses=server.pauses, scope=scope)
        server.attempts.add(attempt)
        try:
            async with scope:
                answer = await server.client.generate(payload)
        except ServerFailedError as fault:
            self._fence(server, str(fault))
            return str(fault)
        except TimeoutError:
            return self._timed_out(server, attempt)
        except asyncio.CancelledError:
            self._abort_later(server, rid)
            raise
        finally:
            server.attempts.discard(attempt)
        if server.version != self._start_version and not _is_version(answer.label, or_empty=True):
            fault = f"{server.address} lost its weights: it serves {answer.label!r}, not version {server.version}"
            self._fence(server, fault)
            return fault
        return self._keep(server, attempt, partial, answer)

    def _keep(self, server: Server, attempt: Attempt, partial: PartialResponse, answer: Answer) -> str | None:
        partial.extend(answer, lambda label: self._version_of(server, attempt, label), attempt.version)
        was_asked_for = server.pauses != attempt.pauses
        if answer.finish != "abort" or was_asked_for or partial.stop_reason is not None:
            return None
        return f"{server.address} aborted the request, and nobody asked for it"

    def _version_of(self, server: Server, attempt: Attempt, label: str) -> int:
        if attempt.version == self._start_version and label == server.initial_label:
            return self._start_version
        return int(label) if _is_version(label) else attempt.version

    def _timed_out(self, server: Server, attempt: Attempt) -> str:
        """A scope ended: the engine closed, the server was lost (which may be tried again), or the time is over."""
        self._check_open()
        if attempt.lost is not None:
            return attempt.lost
        self._abort_later(server, attempt.rid)
        sentence = f"got no answer from {server.address} within {self._config.request_timeout_s:g} s"
        self._fence(server, f"a request {sentence}")
        raise RequestTimeoutError(f"request {attempt.rid} {sentence} (engine.request_timeout_s)")

    async def _back_off(self, request: ModelRequest, fault: str, faults: int) -> None:
        if faults > self._config.max_retries:
            raise ServerError(
                f"request {request.rid} failed {faults} times (engine.max_retries is {self._config.max_retries}); "
                f"the last time: {fault}"
            )
        await asyncio.sleep(min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** (faults - 1)))

    # Pausing and weight updates

    async def pause(self) -> None:
        """Stop generation on every server, in the configured mode; requests wait until resume."""
        self._check_open()
        self._is_paused = True
        await self._on_each(self._pool.serving, self._pause)

    async def resume(self) -> None:
        self._check_open()
        self._is_paused = False
        await self._on_each(self._pool.serving, self._resume)
        self._pool.wake_all()

    async def update_weights(self, update: WeightUpdate) -> UpdateStats:
        """Bring all servers to `update`, each for itself: pause, load, resume. Requests in flight go on.

        A server that fails, or takes longer than update_timeout_s, is fenced off and brought up to date by its probe.
        Raises ServerError if no server holds the update.
        """
        self._check_open()
        async with self._updating:
            self._target = update
            stats: list[UpdateStats] = []
            if serving := self._pool.serving:
                await self._on_each(serving, lambda server: self._update(server, update, stats))
            else:
                stats.append(await self._wait_for_probes())
            if not stats:
                raise ServerError(f"no server took version {update.version}: {self._pool.report()}")
        return UpdateStats(pause_s=max(s.pause_s for s in stats), load_s=max(s.load_s for s in stats))

    async def _update(self, server: Server, update: DiskWeights, stats: list[UpdateStats]) -> None:
        stats.append(await self._load(server, update))
        self._pool.admit(server, update.version)

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

    async def _load(self, server: Server, update: DiskWeights) -> UpdateStats:
        now = asyncio.get_running_loop().time
        started = now()
        await self._pause(server)
        paused = now()
        await server.client.load(update, flush_cache=self._config.pause_mode != "in_place")
        loaded = now()
        server.version = update.version
        if not self._is_paused:
            await self._resume(server)
        return UpdateStats(pause_s=now() - started, load_s=loaded - paused)

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

    def _fence(self, server: Server, reason: str) -> None:
        if not self._is_closed and self._pool.fence(server, reason):
            self._spawn(self._probe(server))

    def _lose(self, server: Server, reason: str) -> None:
        self._fence(server, reason)
        self._pool.lose_attempts(server, f"{server.address} {reason}")

    async def _probe(self, server: Server) -> None:
        """Bring a fenced server back, however long it takes."""
        backoff = _FIRST_BACKOFF_S
        while server.state == "fenced":
            try:
                if await self._restore(server):
                    return
            except (ServerError, TimeoutError) as error:
                server.reason = str(error) or f"no answer within {_PROBE_TIMEOUT_S:g} s"
                self._pool.lose_attempts(server, f"{server.address} failed: {server.reason}")
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _MAX_BACKOFF_S)

    async def _restore(self, server: Server) -> bool:
        """Admit the server if it is healthy and holds the newest weights, after loading them if need be."""
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            label = await server.client.weight_label()
        target = self._target
        if target is None:
            version, expected = self._start_version, server.initial_label
        else:
            version, expected = target.version, str(target.version)
        if label != expected:
            if target is None:
                raise ServerError(f"serves {label!r} and not the weights it began with, {expected!r}")
            async with asyncio.timeout(self._config.update_timeout_s):
                await self._load(server, target)
        elif not self._is_paused:
            await server.client.resume()  # it may have been fenced in the middle of a pause
        if self._target is not target:
            return False
        self._pool.admit(server, version)
        return True

    # Lifecycle

    async def aclose(self) -> None:
        """Abort what runs, let no server stay paused, release connections. Idempotent; takes a few seconds at most."""
        if self._is_closed or self._session is None:
            return
        self._is_closed = True
        self._pool.wake_all()
        for task in self._running_tasks:
            task.cancel()
        try:
            async with asyncio.timeout(_CLEANUP_TIMEOUT_S), asyncio.TaskGroup() as group:
                for server in self._pool.serving:
                    for attempt in list(server.attempts):
                        attempt.lose("the engine was closed")
                        group.create_task(self._abort(server, attempt.rid))
                for server in self._pool.servers:
                    if server.state in ("paused", "fenced"):
                        group.create_task(self._leave_running(server))
        except TimeoutError:
            pass  # a server that does not answer is left as it is
        finally:
            await self._session.close()

    async def _leave_running(self, server: Server) -> None:
        try:
            await server.client.resume()
        except ServerError as error:
            server.reason = str(error)

    def _abort_later(self, server: Server, rid: str) -> None:
        if not self._is_closed and server.state in ("serving", "paused"):
            self._spawn(self._abort(server, rid))

    async def _abort(self, server: Server, rid: str) -> None:
        try:
            async with self._abort_slots, asyncio.timeout(_CLEANUP_TIMEOUT_S):
                await server.client.abort(rid)
        except (ServerError, TimeoutError) as error:
            self._fence(server, f"did not abort a request: {error}")

    def _spawn(self, coroutine: Awaitable[None]) -> None:
        task = self._tasks.create_task(coroutine)  # type: ignore[arg-type]
        self._running_tasks.add(task)
        task.add_done_callback(self._running_tasks.discard)

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineClosedError("the engine is closed")
        if self._session is None:
            raise EngineClosedError("the engine is not open yet: use it inside `async with`")

    async def _first_label(self, server: Server) -> str:
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S * 2):
                return await server.client.weight_label()
        except (ServerError, TimeoutError) as error:
            raise ServerError(
                f"no inference server answers at {server.address} ({error or 'timed out'}); "
                "start it, or correct engine.addresses"
            ) from error


def _is_version(label: str, *, or_empty: bool = False) -> bool:
    return label.isdecimal() or (or_empty and not label)
