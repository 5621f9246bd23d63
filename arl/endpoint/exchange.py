"""One HTTP request of an episode. Sends the answer whole or as events, and keeps it when the program has taken it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

from aiohttp import web

from arl.api.errors import (
    EngineClosedError,
    ImageError,
    ModelError,
    PromptTooLongError,
    RequestTimeoutError,
    ServerError,
    first_error,
)
from arl.endpoint.calls import CallAnswer, ChatCall, RefusedCallError
from arl.endpoint.session import EpisodeSession
from arl.runtime.http.bodies import BodyError, RequestBody, RequestError, dropped, loaded, validated
from arl.runtime.http.server import EventStream, event, json_response, request_error

KEEP_ALIVE_S = 10.0
"""Seconds between two comments in a stream that still waits for its answer."""
_OF_IMAGES = b"base64"
"""Every body with images has this word. To read an image may take half a second, so a thread does."""
_READING = ThreadPoolExecutor(4, "arl-calls")


B = TypeVar("B", bound=RequestBody)
W = TypeVar("W")


class CallBody(RequestBody):
    """The fields that the bodies of all protocols share."""

    model: str = "arl"
    stream: bool = False


class Wire(Protocol):
    """A call in one protocol, and the way to write its answers."""

    @property
    def call(self) -> ChatCall: ...

    @property
    def asked(self) -> CallBody: ...

    def whole(self, answers: Sequence[CallAnswer]) -> Any:
        """The JSON of a response."""
        ...

    def events(self, answers: Sequence[CallAnswer]) -> Iterable[str]:
        """A stream: each event with its empty line."""
        ...


class Exchange:
    """A request with a valid key, and its answer. role: the agent that makes it. body: as it was sent."""

    def __init__(self, request: web.Request, session: EpisodeSession, role: str) -> None:
        self.request = request
        self.session = session
        self.role = role
        self.body = b""
        self.stream = EventStream(request)
        self._answers: Sequence[CallAnswer] = ()

    @cached_property
    def content(self) -> Any:
        """The JSON of the body, without fields that are ignored. Raises BodyError."""
        return loaded(self.body)

    def parsed(self, model: type[B]) -> B:
        """The body. Raises BodyError."""
        return validated(model, self.content)

    async def understood(self, read: Callable[[Exchange], W]) -> W:
        """What `read` makes of the body, without the fields that the endpoint may ignore as it cannot honour them."""
        while True:
            try:
                if _OF_IMAGES not in self.body:
                    return read(self)
                return await asyncio.get_running_loop().run_in_executor(_READING, read, self)
            except BodyError as error:
                if not self._is_ignored(error):
                    raise

    def _is_ignored(self, error: BodyError) -> bool:
        policy = self.session.policy
        if policy.unsupported != "ignore" or not (error.can_be_dropped and error.param):
            return False
        if not dropped(self.content, error.param):
            return False
        self.session.counts.ignored += 1
        policy.warn(f"/v1/{self.request.path.rpartition('/v1/')[2]}", error.param, error.message)
        return True

    async def respond(
        self, content: Any, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> web.StreamResponse:
        """Send JSON; returns when it has been sent. Raises ConnectionResetError if the program has gone away."""
        response = json_response(content, status, headers)
        await response.prepare(self.request)
        await response.write_eof()
        return self._taken(response)

    async def end_stream(self, events: str) -> web.StreamResponse:
        """Send the last events, as `respond` does."""
        return self._taken(await self.stream.end(events))

    async def complete(self, read: Callable[[Exchange], Wire]) -> web.StreamResponse:
        """Answer a call of the model. Forget answers that nobody took, or that the program asks for again.

        read: gives the call in a body, or raises RequestError for a wrong field.
        """
        session, wire = self.session, await self.understood(read)
        key = blake2b(f"{self.role} {self.request.path}\n".encode() + self.body, digest_size=16).digest()
        if self.request.headers.get("x-stainless-retry-count", "0") != "0":  # as both SDKs say
            session.repeat(key, self.role)
        try:
            if wire.asked.stream:
                wire = await self._keeping_alive(self._sample(wire, read))
                response = await self.end_stream("".join(wire.events(self._answers)))
            else:
                wire = await self._sample(wire, read)
                response = await self.respond(wire.whole(self._answers))
        except BaseException:
            session.not_sent(key, self.role, self._answers)
            raise
        session.sent(key, self._answers)
        return response

    async def _sample(self, wire: Wire, read: Callable[[Exchange], Wire]) -> Wire:
        """Let the model answer. Returns the call that it answered, which may lack a field that is ignored."""
        while True:
            try:
                self._answers = await self.session.speaker(self.role).acomplete(wire.call)
                return wire
            except BodyError as error:
                if not self._is_ignored(error):
                    raise
                wire = await self.understood(read)

    async def _keeping_alive(self, answering: Awaitable[W]) -> W:
        """Wait for the answer. Begin the stream only if that takes long, so that an error can have its status."""

        async def tick() -> None:
            while True:
                await asyncio.sleep(KEEP_ALIVE_S)
                await self.stream.send(": the model is answering\n\n")

        try:
            async with asyncio.TaskGroup() as group:
                ticking = group.create_task(tick())
                answered = await answering
                ticking.cancel()
                return answered
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None

    @property
    def is_over(self) -> bool:
        """Whether the connection is gone."""
        transport = self.request.transport
        return transport is None or transport.is_closing()

    def _taken(self, response: web.StreamResponse) -> web.StreamResponse:
        if self.is_over:
            raise ConnectionResetError("the program closed the connection before the answer was sent")
        return response


def refusal_of(error: Exception, said: str = "messages") -> RequestError:
    """The error to send to the program, whatever went wrong. said: the field with what the model is shown."""
    match error:
        case RequestError():
            return error
        case PromptTooLongError():
            text = f"This model's maximum context length is exceeded: {error}"
            return RefusedCallError(text, param=said, code="context_length_exceeded")
        case ModelError() | ImageError():
            return RefusedCallError(str(error), param=said, code="invalid_value")
        case RequestTimeoutError():
            return RefusedCallError(str(error), status=504, code="timeout")
        case ServerError() | EngineClosedError():
            return RefusedCallError(str(error), status=503, code="engine_unavailable")
        case web.HTTPException() | web.RequestPayloadError():
            return request_error(error, {})
        case _:
            return RefusedCallError(f"{type(error).__name__}: {error}", status=500, code="internal_error")


def openai_error(error: RequestError) -> dict[str, Any]:
    """The error in OpenAI's shape; its SDK chooses the exception by the status, with message, param and code."""
    kind = "invalid_request_error" if error.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    named = {name: getattr(error, name, None) for name in ("param", "code")}
    return {"error": {"message": error.message, "type": kind, **named}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One path of the server, and the shape of its protocol's errors: OpenAI's unless it says otherwise."""

    method: str = "POST"
    path: str
    answer: Callable[[Exchange], Awaitable[web.StreamResponse]]
    said: str = "messages"
    """The field with what the model is shown."""
    error: Callable[[RequestError], Any] = openai_error
    """The body of a refusal."""
    error_event: Callable[[RequestError], str] = lambda error: event(openai_error(error))
    """A refusal in a stream that has begun."""

    async def refuse(self, exchange: Exchange, error: RequestError) -> web.StreamResponse:
        """Answer with an error, which tells SDKs that another try would change nothing."""
        if exchange.stream.has_begun:
            return await exchange.end_stream(self.error_event(error))
        return await exchange.respond(self.error(error), error.status, {"x-should-retry": "false"})


def completing(path: str, read: Callable[[Exchange], Wire], **shape: Any) -> Endpoint:
    """A path that calls the model. shape: of its errors."""
    return Endpoint(path=path, answer=lambda exchange: exchange.complete(read), **shape)
