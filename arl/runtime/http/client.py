"""JSON over HTTP to one server: bounded connections, named timeouts, retries, and errors as exceptions."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any
from weakref import WeakKeyDictionary

import orjson
from yarl import URL

from arl.api.errors import ArlError, ConfigError, NoSuchPathError, RequestTimeoutError, ServerError, ServerFailedError
from arl.runtime.http.connections import Body, Connections, ServerAddress, request_head

_BUSY = 429
_FIRST_WAIT_S = 0.25
_LONGEST_WAIT_S = 8.0
_LONGEST_ASKED_WAIT_S = 120.0
"""The longest wait for a server's Retry-After."""
_MAX_QUOTED = 500
_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A server's response, whatever its status."""

    url: str
    """Without a password."""
    path: str
    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes

    def header(self, name: str) -> str | None:
        """The first header of this name, in whatever case."""
        wanted = name.lower().encode()
        return next((value.decode("latin-1") for given, value in self.headers if given.lower() == wanted), None)

    def json(self) -> Any:
        """Raises ServerError for a body that is not JSON."""
        try:
            return _decoded(self.body)
        except (ValueError, RecursionError) as error:
            raise ServerError(f"{self.url} answered with something other than JSON: {self.body[:200]!r}") from error

    def json_object(self) -> dict[str, Any]:
        """The body as a JSON object; {} for anything else, such as the plain text of an acknowledgement."""
        try:
            content = _decoded(self.body)
        except (ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    @property
    def reason(self) -> str:
        """The server's own words about an error.

        Servers send {"error": {"message": ..}}, {"error": ".."}, {"message": ..}, {"error_message": ..} or text.
        """
        content = self.json_object()
        error = content.get("error", content)
        if isinstance(error, dict):
            error = error.get("message") or error.get("error_message")
        return str(error or self.body.decode(errors="replace").strip() or "(no explanation)")[:_MAX_QUOTED]


@dataclass(slots=True)
class _InLoop:
    connections: Connections
    places: asyncio.Semaphore | nullcontext[None]
    """One place for each request under way; without a limit, of no effect."""
    next_at: float = field(default=0.0)
    """The time at which the next request may begin."""


class JsonClient:
    """A client of one server. It opens connections when it needs them, keeps them, and closes them in `aclose`.

    max_concurrent: requests under way at once; others wait their turn. None: no limit.
    requests_per_minute: how many requests begin in a minute, evenly spread. None: no limit.
    timeout_s: the longest that a request may take from when it is sent. None: the caller limits it.
    connect_timeout_s: the longest that opening a connection may take.
    retries: how often `ask` repeats a request that did not reach the server, or failed there (HTTP 5xx and 429).
        The waits between double up to 8 s, or are as long as Retry-After says. The default spans some 90 s, enough to
        restart a server.
    connections: those that several clients share; their owner closes them.
    """

    key_hint = "pass the api_key that the server was started with"
    """Advice for HTTP 401 and 403."""
    path_hint = ""
    """Advice for HTTP 404."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        max_concurrent: int | None = 64,
        requests_per_minute: float | None = None,
        timeout_s: float | None = 120.0,
        connect_timeout_s: float | None = None,
        retries: int = 20,
        connections: Connections | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"url is {url!r}; it must begin with http:// or https://, as in http://127.0.0.1:30000")
        if (
            (max_concurrent is not None and max_concurrent < 1)
            or (timeout_s is not None and timeout_s <= 0)
            or retries < 0
        ):
            raise ConfigError(
                f"max_concurrent is {max_concurrent}, timeout_s {timeout_s} and retries {retries}; they must be at "
                "least 1, above 0 and at least 0"
            )
        if requests_per_minute is not None and not requests_per_minute > 0:
            raise ConfigError(f"requests_per_minute is {requests_per_minute}; it must be above 0, or None for no limit")
        self._base = url.rstrip("/")
        self.url = str(URL(self._base).with_user(None)).rstrip("/")
        """The URL for messages, without a password."""
        self._api_key = api_key
        self._heads: dict[tuple[str, str], tuple[ServerAddress, bytes]] = {}
        """The heads of JSON requests, by method and URL."""
        self._max_concurrent = max_concurrent
        self._gap_s = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._retries = retries
        self._shared = connections
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _InLoop] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out objects of the event loop: a copy in another process opens its own connections."""
        return {name: value for name, value in vars(self).items() if not isinstance(value, WeakKeyDictionary)}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._loops = WeakKeyDictionary()

    async def aclose(self) -> None:
        """Close this event loop's connections, unless they are shared. Idempotent; a later call opens others."""
        kept = self._loops.pop(asyncio.get_running_loop(), None)
        if kept is not None and kept.connections is not self._shared:
            await kept.connections.aclose()

    async def ask(self, path: str, payload: Mapping[str, Any] | None = None, *, max_retries: int | None = None) -> Any:
        """GET, or POST a payload; returns JSON. Raises ServerError, RequestTimeoutError and `error_of`'s errors."""
        wait_s, retries = _FIRST_WAIT_S, self._retries if max_retries is None else min(self._retries, max_retries)
        for left in range(retries, -1, -1):
            try:
                return await self._ask_once(path, payload)
            except ServerFailedError as error:
                if not retries:
                    raise
                if not left:
                    raise ServerFailedError(f"{error} (asked {retries + 1} times)") from error
                asked_s = min(error.retry_after_s, _LONGEST_ASKED_WAIT_S)
            await asyncio.sleep(max(wait_s * random.uniform(0.5, 1.0), asked_s))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        raise AssertionError("unreachable")

    async def _ask_once(self, path: str, payload: Mapping[str, Any] | None) -> Any:
        return (await self.call("GET" if payload is None else "POST", path, payload)).json()

    async def call(self, method: str, path: str, payload: Mapping[str, Any] | None = None) -> Reply:
        """One request with a JSON body, without retries. Raises as `ask` does."""
        url = self._base + path
        if (head := self._heads.get((method, url))) is None:
            head = self._heads[method, url] = self._head(method, path, _JSON)
        reply = await self._send(method, path, b"" if payload is None else encoded(payload), head)
        if reply.status != 200:
            raise self.error_of(reply)
        return reply

    async def send(self, method: str, path: str, body: Body = b"", headers: Mapping[str, str] | None = None) -> Reply:
        """One request; returns the response whatever its status. Raises ServerFailedError and RequestTimeoutError."""
        return await self._send(method, path, body, self._head(method, path, headers or {}))

    def _head(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[ServerAddress, bytes]:
        url = URL(self._base + path)
        return ServerAddress.of(url), request_head(method, url, headers, self._api_key)

    async def _send(self, method: str, path: str, body: Body, head: tuple[ServerAddress, bytes]) -> Reply:
        kept, limit_s = self._in_loop(), self._timeout_s
        async with kept.places:
            if self._gap_s:
                await self._turn(kept)
            asked = kept.connections.request(method, head, body, self._connect_timeout_s)
            try:
                if limit_s is None:
                    answer = await asked
                else:
                    async with asyncio.timeout(limit_s):
                        answer = await asked
            except TimeoutError:
                raise RequestTimeoutError(
                    f"{self.url}{path} took longer than timeout_s={limit_s:g} s; set it higher for a slow server"
                ) from None
            except OSError as error:
                raise self._unreached(path, error) from error
        return Reply(url=self.url + path, path=path, status=answer.status, headers=answer.headers, body=answer.body)

    def _unreached(self, path: str, error: Exception) -> ServerFailedError:
        reason = str(error) or type(error).__name__
        return ServerFailedError(f"{self.url}{path} could not be reached: {reason}; is its server running?")

    def error_of(self, reply: Reply) -> ArlError:
        """The exception for a failed response, never with the API key; ServerFailedError if a later try may succeed."""
        reason = reply.reason.replace(self._api_key, "(the api_key)") if self._api_key else reply.reason
        message = f"{reply.url} answered HTTP {reply.status}: {reason}"
        match reply.status:
            case 301 | 302 | 303 | 307 | 308:
                return ServerError(f"{message}; it redirects to {reply.header('Location')}, which is to be asked")
            case 401 | 403:
                return ServerError(f"{message}; {self.key_hint}")
            case 404:
                return NoSuchPathError(f"{message}; {self.path_hint}" if self.path_hint else message)
            case status if status >= 500 or status == _BUSY:
                return ServerFailedError(message, _seconds(reply.header("Retry-After"), reply.header("Date")))
            case _:
                return ServerError(message)

    async def _turn(self, kept: _InLoop) -> None:
        now = asyncio.get_running_loop().time()
        begin = max(now, kept.next_at)
        kept.next_at = begin + self._gap_s
        if begin > now:
            await asyncio.sleep(begin - now)

    def _in_loop(self) -> _InLoop:
        loop = asyncio.get_running_loop()
        kept = self._loops.get(loop)
        if kept is None:
            limit = self._max_concurrent
            connections = self._shared or Connections()
            kept = self._loops[loop] = _InLoop(connections, asyncio.Semaphore(limit) if limit else nullcontext())
        return kept


def encoded(payload: Mapping[str, Any]) -> bytes:
    """The payload as JSON."""
    try:
        return orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:  # it takes no integers of more than 64 bits, and no keys but strings
        return json.dumps(payload, separators=(",", ":"), default=_listed).encode()


def _listed(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no value of JSON")


def _decoded(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except ValueError:  # it takes no NaN, and no halves of surrogate pairs
        return json.loads(body)


def _seconds(retry_after: str | None, date: str | None = None) -> float:
    """date: when the server sent this, by its own clock, which a time in Retry-After goes by."""
    try:
        return max(float(retry_after or 0), 0.0)
    except ValueError:
        pass
    try:
        until = parsedate_to_datetime(retry_after or "").timestamp()
        with suppress(ValueError, OverflowError):
            return max(until - parsedate_to_datetime(date or "").timestamp(), 0.0)
        return max(until - time.time(), 0.0)
    except (ValueError, OverflowError):
        return 0.0
