"""OpenAIProxy: gives each episode a base URL. A Sampler answers the episode's calls, and the session records them.

    program --HTTP--> key? --> endpoint --> EpisodeSession --> Sampler
                       | no: 401             | dialogues by role --> trajectories

It runs in the event loop that opens it, on loopback unless its settings say otherwise. Paths are /e/EPISODE/v1/..., and
/e/EPISODE/ROLE/v1/... if an episode has several agents. Each protocol has a module.
"""

from __future__ import annotations

import secrets
from asyncio import CancelledError
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from aiohttp import web

from arl.api.engine import Sampler
from arl.api.errors import ArlError, ConfigError
from arl.api.settings.endpoint import EndpointConfig, endpoint_to_open
from arl.api.types import AGENT, SamplingParams
from arl.api.workflow import Shared
from arl.endpoint import anthropic, chat, responses
from arl.endpoint.calls import CallPolicy, RefusedCallError
from arl.endpoint.exchange import Endpoint, Exchange, refusal_of
from arl.endpoint.session import EpisodeSession, is_role
from arl.runtime.http.server import (
    Handler,
    body_of,
    endpoint_socket,
    is_same,
    json_response,
    serving,
    tls_of,
    warn_if_open,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


HEADER = "X-Session-ID"
"""Verifiers' clients send the id of the rollout that a call belongs to in this header."""
KEY_HEADER = "X-ARL-Key"
"""A URL's key, for clients that fill the usual headers themselves."""
MODEL = "arl"
"""The only model in GET /v1/models. Calls may name any model."""


class SharedURL:
    """One URL for many episodes, for programs that keep one client. It is valid within `OpenAIProxy.shared_url`.

    A call needs the URL's key and, in a header, the id of an admitted run; GET needs no id, because its answers are the
    same for all. base_url: for OpenAI's clients.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.api_key = f"arl-{secrets.token_urlsafe(32)}"
        self._places: dict[str, tuple[EpisodeSession, str]] = {}

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    @contextmanager
    def admitting(self, run_id: str, session: EpisodeSession, role: str = AGENT) -> Iterator[None]:
        """Give calls with this id (nobody can guess it) to the session within the block.

        Its turns are those of a role of its name. role: for which the model is asked.
        """
        session.speaker(run_id, role)
        self._places[run_id] = (session, run_id)
        try:
            yield
        finally:
            del self._places[run_id]

    def place_of(self, request: web.Request) -> tuple[EpisodeSession, str] | None:
        """The session and the role that a call belongs to; None if it is not admitted."""
        if request.method == "GET":
            return next(iter(self._places.values()), None)
        return self._places.get(request.headers.get(HEADER, ""))


async def _models(exchange: Exchange) -> web.StreamResponse:
    card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "arl"}
    if (length := exchange.session.policy.context_length) is not None:
        card["max_model_len"] = length
    return await exchange.respond({"object": "list", "data": [card]})


async def _no_such_path(exchange: Exchange) -> web.StreamResponse:
    known = ", ".join(f"{method} {path}" for method, path in _ROUTES)
    what = f"{exchange.request.method} {exchange.request.path} is not served here"
    raise RefusedCallError(f"{what}; the paths are {known}", status=404, code="not_found")


_ROUTES = {
    (endpoint.method, endpoint.path): endpoint
    for endpoint in (
        *chat.ENDPOINTS,
        responses.ENDPOINT,
        *anthropic.ENDPOINTS,
        Endpoint(method="GET", path="/v1/models", answer=_models),
    )
}
_UNKNOWN = Endpoint(path="*", answer=_no_such_path)
_MAX_BODY_BYTES = 64 << 20
"""A conversation's text is far smaller; aiohttp's default is one megabyte."""
_SHUTDOWN_S = 1.0
_NO_KEY = secrets.token_urlsafe()
"""Stands for the key of an unknown episode, so that every request compares keys."""
_INVALID_KEY = RefusedCallError(
    "Incorrect API key provided: it is not the key of this episode, or the episode is over",
    status=401,
    code="invalid_api_key",
)


@dataclass(kw_only=True, eq=False, repr=False)
class OpenAIProxy(CallPolicy, Shared):
    """An endpoint in front of a Sampler, for programs that speak OpenAI's or Anthropic's protocol.

        async with OpenAIProxy(tokenizer, sampling=SamplingParams(max_new_tokens=1024)) as proxy:
            async with proxy.episode(engine) as session:
                answer = await program(base_url=session.base_url, api_key=session.api_key)
                return session.trajectories(reward)

    sampling: parameters that a call does not name.
    overrides_sampling: always take temperature, top_p, top_k, min_p and seed from `sampling`, so that all trained
        tokens were sampled alike.
    reasoning: "apart" sends the text within <think> in `reasoning_content`; "inline" leaves it in the answer.
    context_length: tokens that the model can hold. A call that asks for more than the room left gets the room left.
    call_format: how the model writes tool calls; by default as its chat template says.
    template_options, rewriting: as in Conversation. A call may add options: `chat_template_kwargs`.
    unsupported: what becomes of a field that cannot be honoured: "refuse" the call, or "ignore" the field, which is
        logged once and counted. Fields without which a call would mean something else are always refused.
    constrains_strict_tools: hold calls of tools with `strict: true` to their schemas, by a grammar.
    endpoint: the address; by default the run's settings (`endpoint.host` and so on), and without a run a free port of
        loopback.

    The proxy stays open until the last one that entered it leaves, so a workflow may enter one that its user opened.
    """

    endpoint: EndpointConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        Shared.__init__(self)
        self.address = self.endpoint or EndpointConfig()
        """Where it listens; while it is open, the settings that it took."""
        self._sessions: dict[str, EpisodeSession] = {}
        self._shared: dict[str, SharedURL] = {}
        self._others: dict[str, Handler] = {}
        self.url = ""
        """The beginning of episodes' URLs, while it is open."""
        self.port = 0
        """At which it listens then."""

    async def _open(self, opened: AsyncExitStack) -> None:
        self.address = endpoint = endpoint_to_open(self.endpoint)
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._dispatch)
        tls = tls_of(endpoint)
        server = serving(app, endpoint_socket(endpoint), tls=tls, shutdown_timeout_s=_SHUTDOWN_S)
        self.port = await opened.enter_async_context(server)
        self.url = endpoint.url(self.port)
        warn_if_open(endpoint)

        async def end_sessions() -> None:
            for session in tuple(self._sessions.values()):
                await session.aclose()

        opened.push_async_callback(end_sessions)

    @contextmanager
    def answering(self, name: str, handler: Handler) -> Iterator[None]:
        """Within the block, give requests for /name and beneath it to `handler`, which checks their keys."""
        if name in self._others:
            raise ArlError(f"this OpenAIProxy has another /{name} already; give each ServedWorkflow a proxy of its own")
        self._others[name] = handler
        try:
            yield
        finally:
            del self._others[name]

    @asynccontextmanager
    async def episode(self, engine: Sampler) -> AsyncIterator[EpisodeSession]:
        """An episode; `engine` answers its calls. Its URL and key are valid within the block."""
        if not self.is_open:
            raise ArlError("this OpenAIProxy is not open; use it, or the workflow that has it, within `async with`")
        name = secrets.token_hex(8)
        session = self._sessions[name] = EpisodeSession(f"{self.url}/e/{name}", engine, self)
        try:
            yield session
        finally:
            del self._sessions[name]
            await session.aclose()

    @contextmanager
    def shared_url(self) -> Iterator[SharedURL]:
        """A URL for programs that keep one client for all episodes. Its block admits them one by one."""
        name = secrets.token_hex(8)
        shared = self._shared[name] = SharedURL(f"{self.url}/e/{name}")
        try:
            yield shared
        finally:
            del self._shared[name]

    async def _dispatch(self, request: web.Request) -> web.StreamResponse:
        if other := self._others.get(request.path.split("/", 2)[1]):
            return await other(request)
        _, prefix, name, rest = (*request.path.split("/", 3), "", "", "")[:4]
        role, endpoint = AGENT, _ROUTES.get((request.method, f"/{rest}"))
        if endpoint is None:
            role, _, rest = rest.partition("/")
            endpoint = _ROUTES.get((request.method, f"/{rest}")) if is_role(role) else None
        if prefix != "e" or endpoint is None:
            endpoint = _UNKNOWN
        door = (self._sessions.get(name) or self._shared.get(name)) if prefix == "e" else None
        # The key, as arl's, OpenAI's or Anthropic's clients send it.
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        usual = bearer.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        is_valid = is_same(request.headers.get(KEY_HEADER, usual), door.api_key if door else _NO_KEY)
        place = door.place_of(request) if isinstance(door, SharedURL) else door and (door, role)
        if not is_valid or place is None:
            return json_response(endpoint.error(_INVALID_KEY), _INVALID_KEY.status)
        return await _answer(Exchange(request, *place), endpoint)


def proxy_of(
    tokenizer: PreTrainedTokenizerBase | None, sampling: SamplingParams | None, proxy: OpenAIProxy | None
) -> OpenAIProxy:
    """A workflow's proxy: the given one, or one for a tokenizer. Raises ConfigError for both or neither."""
    if proxy is not None and tokenizer is None and sampling is None:
        return proxy
    if tokenizer is None or proxy is not None:
        raise ConfigError("pass either a tokenizer (and sampling), or a proxy, which has both")
    return OpenAIProxy(tokenizer, sampling=sampling or SamplingParams())


async def _answer(exchange: Exchange, endpoint: Endpoint) -> web.StreamResponse:
    """The one boundary that turns a call's failure into an answer, and counts it."""
    session = exchange.session
    try:
        async with session.answering():
            exchange.body = await body_of(exchange.request)
            return await endpoint.answer(exchange)
    except CancelledError:
        session.counts.cancelled += 1
        raise
    except Exception as error:  # noqa: BLE001
        if isinstance(error, ConnectionResetError) or exchange.is_over:
            session.counts.cancelled += 1
            return _hung_up(exchange.request)
        refusal = refusal_of(error, endpoint.said)
        session.note(error, refusal)
        with suppress(ConnectionResetError):
            return await endpoint.refuse(exchange, refusal)
        return _hung_up(exchange.request)


def _hung_up(request: web.Request) -> web.StreamResponse:
    """The response if the program has gone away: aiohttp takes anything else for a failure of the server."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=HTTPStatus.BAD_REQUEST)
