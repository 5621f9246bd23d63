"""A server that is asked in JSON, by many episodes at once: few connections, bounded, patient with failures."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp
from yarl import URL

from arl.api.errors import ConfigError, RequestTimeoutError, ServerError

_BUSY = 429
_FIRST_WAIT_S = 0.25
_LONGEST_WAIT_S = 8.0
_LONGEST_ASKED_WAIT_S = 120.0
"""Of what a server's Retry-After asks for."""


class NoSuchPathError(ServerError):
    """The server has no such path."""


class _FailedError(ServerError):
    """The server could not be reached, or failed: it may answer when it is asked again, retry_after_s from now."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class _InLoop:
    """What belongs to one event loop. places: requests that may be under way. next_at: when the next one may begin."""

    session: aiohttp.ClientSession
    places: asyncio.Semaphore
    next_at: float = 0.0


class JsonServer:
    """The calls to one server. Connections are opened when they are first needed, kept, and closed by `aclose`.

    max_concurrent: requests under way at once; others wait their turn. requests_per_minute: how many begin in a minute,
    evenly spread; unset: any number. timeout_s: the longest that one of them may take, from when it is sent. retries:
    how often one that could not be sent, or that the server failed at (HTTP 5xx and 429), is sent again, after waits
    that double up to 8 s, or as long as its Retry-After says: by default for some 90 s in all, in which a server can be
    started again.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        max_concurrent: int = 64,
        requests_per_minute: float | None = None,
        timeout_s: float = 120.0,
        retries: int = 20,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"url is {url!r}; it must begin with http:// or https://, as in http://127.0.0.1:30000")
        if max_concurrent < 1 or timeout_s <= 0 or retries < 0:
            raise ConfigError(
                f"max_concurrent is {max_concurrent}, timeout_s {timeout_s} and retries {retries}; they must be at "
                "least 1, above 0 and at least 0"
            )
        if requests_per_minute is not None and not requests_per_minute > 0:
            raise ConfigError(f"requests_per_minute is {requests_per_minute}; it must be above 0, or None for no limit")
        self._url = url.rstrip("/")
        self.url = str(URL(self._url).with_user(None)).rstrip("/")  # to be told: a password is for the server alone
        self._api_key = api_key
        self._max_concurrent = max_concurrent
        self._gap_s = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self._timeout_s = timeout_s
        self._retries = retries
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _InLoop] = WeakKeyDictionary()

    async def aclose(self) -> None:
        """Close this event loop's connections. Idempotent; a later call opens others."""
        kept = self._loops.pop(asyncio.get_running_loop(), None)
        if kept is not None:
            await kept.session.close()

    async def ask(self, path: str, payload: Mapping[str, Any] | None = None, *, max_retries: int | None = None) -> Any:
        """POST the payload, or GET without one; the JSON that comes back. Raises ServerError, RequestTimeoutError."""
        wait_s, retries = _FIRST_WAIT_S, self._retries if max_retries is None else min(self._retries, max_retries)
        for left in range(retries, -1, -1):
            try:
                return await self._ask_once(path, payload)
            except _FailedError as error:
                if not left:
                    raise ServerError(f"{error} (asked {retries + 1} times)") from error
                asked_s = min(error.retry_after_s, _LONGEST_ASKED_WAIT_S)
            await asyncio.sleep(max(wait_s * random.uniform(0.5, 1.0), asked_s))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        raise AssertionError("unreachable")

    async def _ask_once(self, path: str, payload: Mapping[str, Any] | None) -> Any:
        kept, url, shown = self._in_loop(), f"{self._url}{path}", f"{self.url}{path}"
        method = "GET" if payload is None else "POST"
        async with kept.places:
            await self._turn(kept)
            try:
                async with asyncio.timeout(self._timeout_s), kept.session.request(method, url, json=payload) as answer:
                    status, headers, raw = answer.status, answer.headers, await answer.read()
            except TimeoutError:
                raise RequestTimeoutError(f"{shown} did not answer within timeout_s = {self._timeout_s:g} s") from None
            except (aiohttp.ClientError, OSError) as error:
                raise _FailedError(
                    f"{shown} could not be reached: {str(error) or type(error).__name__}; is its server running?"
                ) from error
        if status != 200:
            raise self._refusal(shown, status, headers, raw)
        try:
            return json.loads(raw)
        except ValueError as error:
            raise ServerError(f"{shown} answered what is not JSON: {raw[:200]!r}") from error

    async def _turn(self, kept: _InLoop) -> None:
        """Wait until the next request may begin."""
        now = asyncio.get_running_loop().time()
        begin = max(now, kept.next_at)
        kept.next_at = begin + self._gap_s
        if begin > now:
            await asyncio.sleep(begin - now)

    def _in_loop(self) -> _InLoop:
        loop = asyncio.get_running_loop()
        kept = self._loops.get(loop)
        if kept is None:
            session = aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {self._api_key}"} if self._api_key else {},
                timeout=aiohttp.ClientTimeout(total=None),
                connector=aiohttp.TCPConnector(limit=self._max_concurrent),
            )
            kept = self._loops[loop] = _InLoop(session, asyncio.Semaphore(self._max_concurrent))
        return kept

    def _refusal(self, url: str, status: int, headers: Mapping[str, str], raw: bytes) -> ServerError:
        said = raw.decode(errors="replace").strip()
        try:
            error = json.loads(said)
            error = error.get("error", error)
            said = str(error.get("message", error) if isinstance(error, dict) else error)
        except (ValueError, AttributeError):
            pass
        if self._api_key:
            said = said.replace(self._api_key, "(the api_key)")
        message = f"{url} answered with HTTP {status}: {said[:500] or '(nothing)'}"
        if status in (401, 403):
            message += "; pass the api_key that the server was started with"
        if status == 404:
            return NoSuchPathError(message)
        if status >= 500 or status == _BUSY:
            return _FailedError(message, _seconds(headers.get("Retry-After")))
        return ServerError(message)


def _seconds(retry_after: str | None) -> float:
    """What a Retry-After header asks for: a number of seconds, or a date."""
    try:
        return max(float(retry_after or 0), 0.0)
    except ValueError:
        pass
    try:
        return max(parsedate_to_datetime(retry_after or "").timestamp() - time.time(), 0.0)
    except ValueError:
        return 0.0
