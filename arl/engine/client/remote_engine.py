"""RemoteInferenceEngine: one InferenceEngine over one or many servers of a kind (embedded and SGLang, or vLLM).

    agenerate --> wait for a server --> attempt --> tokens kept --> done? --> response
                        ^                  |                          |
                        |          fault: check or fence the server   | no: cut short by a pause
                        +------------------+--------------------------+

**Versions.** The server's spans give each token's version. A server that runs ahead of its results (SGLang on a GPU)
may have sampled the first token after an update in place under the previous version, so that token bears the previous
version. Without spans, all tokens bear the version that the server held before the request was sent; under an adapter,
the adapter's. Labels are str(version); the label that a server had before its first update stands for the engine's
first version. Any other label, or one older than the request, means that somebody else restarted the server. A label
newer than all that this engine has sent means that another training updates it. The engine throws such an answer away,
like one with too many or impossible tokens, and fences the server until it holds the current weights.

**Prefix caches.** Each request names its server's weights (`extra_key`, `cache_salt`), which servers make part of the
cache's key. Otherwise a later turn would silently be sampled on old weights' KV, and its logprobs would have no
version. Under retract and abort an update flushes the cache too: a retracted request keeps its key and would find its
own old KV.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Self

import numpy as np

from arl.api.engine import ServedModel, UpdateStats, WeightProbe, WeightUpdate
from arl.api.errors import (
    ArlError,
    EngineClosedError,
    ImageError,
    PromptTooLongError,
    RequestTimeoutError,
    ServerError,
    ServerFailedError,
    TrajectoryError,
    left,
)
from arl.api.events import NOWHERE, Events
from arl.api.settings.engines import RELEASED, ClientConfig, StockServersConfig
from arl.api.types import ModelRequest, ModelResponse
from arl.data.image_processor import FAMILIES
from arl.engine.client.health import Upkeep, WeightCheck
from arl.engine.client.load_balancer import Line
from arl.engine.client.membership import Membership, Roster, RosterFiles
from arl.engine.client.partial_response import PartialResponse
from arl.engine.client.server_client import (
    MIXTURE,
    Answer,
    ScaledImages,
    ServerClient,
    SharedFaultError,
    UnfitServerError,
)
from arl.engine.client.server_pool import Attempt, Server, ServerPool, version_of
from arl.engine.client.server_processes import ServerProcesses
from arl.engine.client.servers_file import DRAIN_S, base_url
from arl.engine.client.sglang_client import SGLangClient
from arl.engine.client.watchdog import Patience, ServerWatch
from arl.runtime.http.client import Connections
from arl.runtime.http.server import allow_many_connections

_MAX_RETRIES = 3
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0
_SHARE_OF_TIMEOUT = 0.5
"""A server that had a timed-out request for more than this share of its time is fenced; else others were slow."""
_KEEPALIVE_S = 4.0
"""Idle connections are closed before uvicorn, which SGLang runs on, closes them from its side (5 s)."""


def client_class(config: ClientConfig) -> type[ServerClient]:
    if config.protocol == "vllm":
        from arl.engine.client.vllm_client import VLLMClient

        return VLLMClient
    return SGLangClient


class RemoteInferenceEngine:
    """An InferenceEngine that asks the servers at `addresses` (base URLs) of config's kind, within `async with`.

    Entering raises ServerError if a server does not answer, or serves another model than the others. `version` is the
    version of the servers' weights at the start.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        config: ClientConfig,
        *,
        api_key: str | None = None,
        version: int = 0,
        model: ServedModel | None = None,
        processes: ServerProcesses | None = None,
        events: Events = NOWHERE,
        files: RosterFiles | None = None,
    ) -> None:
        """model: what the servers should serve. Without it, token ids and the servers' model are not checked, and stock
        servers scale images themselves, otherwise than a trainer.

        processes: of the servers that arl started, to start one again that hangs. events: gets what happens to servers.
        files: through which servers join and leave meanwhile.
        """
        if not addresses:
            raise ServerError("there is no server to ask: addresses is empty")
        self._addresses = list(dict.fromkeys(map(base_url, addresses)))
        self._config = config
        self._least = None if files is None or files.needs_all else config.min_servers
        self._updating = asyncio.Lock()
        self._model = model or ServedModel(name="the model")
        self._tasks = asyncio.TaskGroup()
        self._connections = Connections(keepalive_s=_KEEPALIVE_S)
        spawn = self._tasks.create_task
        new_client = partial(client_class(config), self._connections, api_key=api_key, spawn=spawn)
        self._pool = ServerPool(version, events)
        self._line = Line(self._pool)
        self._watch = ServerWatch(self._pool, config, processes)
        self._upkeep = Upkeep(self._pool, config, self._tasks, self._model, self._watch)
        self._membership = Membership(self._pool, config, self._upkeep, new_client)
        self._patience = Patience(self._pool, self._upkeep.abort)
        self._roster = Roster(self._pool, config, files, self._membership) if files else None
        self._check = WeightCheck(self._pool)
        self._scaled_images = ScaledImages(self._model.name) if self._model.model_type in FAMILIES else None
        self._is_open = self._is_closed = False
        self._numbers = itertools.count()

    async def __aenter__(self) -> Self:
        allow_many_connections()
        try:
            await self._membership.start(self._addresses, self._least)
            await self._tasks.__aenter__()
            self._upkeep.watch(self._patience.watch(), *([self._roster.run()] if self._roster else []))
        except BaseException:  # whatever it is: __aexit__ will not run
            await self._connections.aclose()
            raise
        self._is_open = True
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            await self.aclose()
        finally:
            await left(self._tasks.__aexit__(None, None, None), error)

    @property
    def version(self) -> int:
        """The newest version that every serving server holds."""
        return self._pool.version

    @property
    def devices(self) -> dict[str, str]:
        """Base URL -> what the server computes on, if it says so."""
        return {server.address: server.greeting.device for server in self._pool.servers if server.greeting is not None}

    @property
    def without_weights(self) -> list[str]:
        """Base URLs of servers that held no whole weights when they were greeted: a run had yet to load them."""
        labels = {server.address: server.greeting.label for server in self._pool.servers if server.greeting is not None}
        return [address for address, label in labels.items() if label in (MIXTURE, RELEASED)]

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Continue `request.input_ids`; see InferenceEngine.agenerate.

        An answer that was cut short is continued on the session's server. A request whose server fails goes to another
        server, at most _MAX_RETRIES times, each time from the tokens that it already has. Raises TrajectoryError for a
        token that the model does not have: it would end an SGLang server; ImageError for images to a model of texts.
        """
        made = await self._begun(request)
        now, clock = asyncio.get_running_loop().time, self._pool.clock
        deadline = clock.now() + self._config.request_timeout_s
        faults = 0
        failed: Server | None = None
        with clock.request():
            while made.stop_reason is None:
                self._check_open()
                asked = now()
                try:
                    server = await self._line.find(request.session_id, deadline, avoid=failed)
                except TimeoutError:
                    raise self._no_server(request) from None
                self._check_open()  # what begins after the engine was closed would be ended by nobody
                made.server, made.sends = server.address, made.sends + 1
                made.queued_s += now() - asked
                # No other attempt has this name, also where a caller sends one request several times. SGLang aborts
                # all whose names begin with the one that it is told, so none begins with another.
                rid = f"{request.rid}.{next(self._numbers):09}"
                fault = await self._attempt(server, made, rid, deadline)
                failed = None if fault is None else server
                if fault is None:
                    continue
                faults += 1
                self._watch.num_failed_requests += 1
                if faults > _MAX_RETRIES:
                    raise ServerError(f"request {request.rid} failed {faults} times; the last error: {fault}")
                await asyncio.sleep(min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** (faults - 1)))
        return made.response()

    async def _begun(self, request: ModelRequest) -> PartialResponse:
        """An empty response to a request that the model understands, with images that no server has to scale."""
        if request.images and (kind := self._model.model_type) not in (None, *FAMILIES):
            raise ImageError(  # stock SGLang would drop them
                f"request {request.rid} has {len(request.images)} images, and {self._model.name} is a {kind}, which "
                f"takes none that arl knows; those of {', '.join(FAMILIES)} do"
            )
        is_scaled = not request.images or all(server.client.is_embedded for server in self._pool.servers)
        if not is_scaled and self._scaled_images is not None:
            request = replace(request, images=await self._scaled_images.of(request.images))
        replays_truncation = self._config.replay_truncation
        made = PartialResponse(request, replays_truncation=replays_truncation, routing=self._model.routing)
        size, ids = self._model.vocab_size, made.prompt_ids
        if size is not None and ids.view(np.uint32).max() >= size:  # unsigned, a negative id is a large one
            position, token_id = next((t, i) for t, i in enumerate(ids) if not 0 <= i < size)
            raise TrajectoryError(
                f"request {request.rid} has token id {token_id} at position {position}, but {self._model.name} has "
                f"{size} tokens (0 to {size - 1})"
            )
        return made

    async def _attempt(self, server: Server, made: PartialResponse, rid: str, deadline: float) -> str | None:
        """Send the request once and keep the answer. Returns the fault, if the request may be tried again."""
        if made.needs_kept_ids:
            server.client.check_kept_ids(made.sampling)
        goes_on = server.client.continues_grammars
        attempt = self._pool.begin(server, rid, self._pool.clock.limit(deadline))
        key, adapter = self._pool.cache_key(server), attempt.weights.adapter
        call = made.call(rid, key, adapter, continues_grammars=goes_on)
        try:
            async with attempt.scope:
                if made.may_cut and (goes_on or not made.is_constrained):  # else a cut loses tokens
                    self._patience.begin(attempt)
                answer = await server.client.generate(call)
                self._patience.answered(attempt)
        except PromptTooLongError:
            if made.num_tokens == 0:
                raise
            made.stop_reason = "length"  # the tokens so far fill the context
            return None
        except ServerFailedError as failure:
            if not isinstance(failure, SharedFaultError):
                blame = self._upkeep.fence if isinstance(failure, UnfitServerError) else self._upkeep.suspect
                blame(server, str(failure))
            return str(failure)
        except TimeoutError:
            return self._timed_out(server, attempt)
        except asyncio.CancelledError:
            self._upkeep.abort(server, rid)
            raise
        finally:
            self._pool.clock.ended(attempt.scope)
            made.may_cut = made.may_cut and not attempt.is_cut
            self._pool.end(server, attempt)
        if (fault := self._flaw(server, attempt, made, answer)) is not None:
            self._upkeep.fence(server, fault)
            return fault
        self._pool.note_answer(server)
        made.extend(answer, attempt.versions(answer), self._model.end_token_ids)
        was_meant = attempt.is_cut or server.pauses != attempt.pauses or server.is_leaving
        if answer.finish != "abort" or was_meant or made.stop_reason is not None:
            return None
        return f"{server.address} aborted the request, and nobody asked for it"

    def _flaw(self, server: Server, attempt: Attempt, made: PartialResponse, answer: Answer) -> str | None:
        """Why the answer cannot be trusted; None if it can."""
        if (flaw := made.flaw(answer, self._model.vocab_size)) is not None:
            return f"{server.address} {flaw}"
        newest = self._pool.newest_sent
        if (label := attempt.foreign_label(answer, newest)) is None:
            return None
        if (version_of(label) or 0) > newest:
            return (
                f"{server.address} serves version {label}, and the newest that this training has sent is {newest}: "
                "another training seems to update this server; give each its own servers"
            )
        return f"{server.address} lost its weights: it serves {label!r}, not version {attempt.weights.version}"

    def _timed_out(self, server: Server, attempt: Attempt) -> str:
        """The scope ended: the engine was closed, the server was lost (a fault), or the time is over."""
        self._check_open()
        if attempt.lost is not None:
            return attempt.lost
        self._upkeep.abort(server, attempt.rid)
        waited_s = asyncio.get_running_loop().time() - attempt.sent_at
        if waited_s > _SHARE_OF_TIMEOUT * self._config.request_timeout_s:
            self._upkeep.fence(server, f"a request got no answer in {waited_s:.3g} s")
        raise RequestTimeoutError(
            f"request {attempt.rid} was not answered within {self._config.request_timeout_s:g} s "
            f"(engine.request_timeout_s); {server.address} had it for the last {waited_s:.3g} s"
        )

    def _no_server(self, request: ModelRequest) -> ArlError:
        waited = f"request {request.rid} waited {self._config.request_timeout_s:g} s (engine.request_timeout_s)"
        if not self._pool.in_service:
            return ServerError(f"{waited} for a server, and none came back: {self._pool.report()}")
        addresses = ", ".join(server.address for server in self._pool.in_service)
        return RequestTimeoutError(f"{waited} while generation was paused on {addresses}")

    async def pause(self) -> None:
        """Stop generation on every server, in the configured mode; requests wait until resume."""
        self._check_open()
        async with self._updating:
            await self._upkeep.pause()

    async def resume(self) -> None:
        self._check_open()
        async with self._updating:
            await self._upkeep.resume()

    async def release_memory(self) -> None:
        """Let the servers, paused, let go of weights and caches, until the next update; see ColocatedServers.

        A server that fails is fenced. Raises ServerError if one refuses.
        """
        self._check_open()
        async with self._updating:
            await self._upkeep.release_memory()

    @property
    def is_asleep(self) -> bool:
        return self._pool.is_asleep

    async def update_weights(self, update: WeightUpdate) -> UpdateStats:
        """Bring all servers to `update`, at once or one after another (update_order). Requests in flight go on.

        A server that fails, or takes longer than update_timeout_s, is fenced and brought up to date when it is well
        again. Raises ServerError if no server holds the update, ValueError if servers hold a newer one.
        """
        self._check_open()
        async with self._updating:
            return await self._upkeep.update(update)

    def wants_probe(self, version: int) -> bool:
        """Whether a server's logprobs are to be compared with the trainer's once it holds this version."""
        is_wanted = isinstance(self._config, StockServersConfig) and self._config.check_weights
        return is_wanted and self._check.is_due(version)

    async def check_weights(self, probe: WeightProbe) -> None:
        """Compare the servers that hold probe.version and are due. Raises ServerError if one computes otherwise."""
        self._check_open()
        async with self._updating:
            await self._check.run(probe)

    def counters(self) -> dict[str, float]:
        """The metrics servers/NAME; totals count since this process began."""
        return self._watch.counters()

    async def add_server(self, address: str) -> None:
        """Let one more server serve, as soon as it holds the current weights.

        Raises ServerError if it can't be reached, is of another kind, serves another model or refuses the weights; the
        engine is then as it was.
        """
        self._check_open()
        await self._membership.add(base_url(address))

    async def remove_server(self, address: str, *, drain_timeout_s: float = DRAIN_S) -> None:
        """Give the server no new requests, wait for those that run there, and forget it. It is left running.

        Requests that still run after drain_timeout_s are continued on other servers from the tokens that they have.
        Raises ConfigError for an unknown address, ServerError if no other server would be left to serve.
        """
        self._check_open()
        await self._membership.remove(base_url(address), drain_timeout_s)

    async def aclose(self) -> None:
        """Abort what runs, leave no server paused, release connections. Idempotent; a few seconds at most."""
        was_open, self._is_open, self._is_closed = self._is_open, False, True
        if not was_open:
            return
        try:
            self._line.turn_away(EngineClosedError("the engine is closed"))
            await self._upkeep.close()
        finally:
            for server in self._pool.servers:
                await server.client.aclose()
            await self._connections.aclose()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineClosedError("the engine is closed")
        if not self._is_open:
            raise EngineClosedError("the engine is not open yet: use it inside `async with`")
