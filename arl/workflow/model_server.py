"""A model behind a URL, asked by many episodes at once: few connections, bounded, patient with failures.

The server speaks SGLang's protocol: stock SGLang, or the embedded server. arl.workflow.scoring says what it is asked.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

import aiohttp

from arl.api.errors import ArlError, ConfigError, ModelError, RequestTimeoutError, ServerError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE = "Agent 12345 said:\n\t'déjà vu' def f(x): return x**2  # 你好 🙂"
"""Text that few two tokenizers take apart in the same way."""
_BUSY = 429
_FIRST_WAIT_S = 0.25
_LONGEST_WAIT_S = 8.0
_GREETING_RETRIES = 4
"""At the start a server that does not answer is more likely a wrong address than one that is being started again."""


class NoSuchPathError(ServerError):
    """The server has no such path."""


class _FailedError(ServerError):
    """The server could not be reached, or failed: it may answer when it is asked again."""


@dataclass(slots=True)
class _InLoop:
    """What belongs to one event loop. places: requests that may be under way. greeting: held by who checks first.

    failure: how the last check failed, failures: how many did.
    """

    session: aiohttp.ClientSession
    places: asyncio.Semaphore
    greeting: asyncio.Lock = field(default_factory=asyncio.Lock)
    failure: ArlError | None = None
    failures: int = 0


class ModelServer:
    """The calls to one server. Connections are opened when they are first needed, kept, and closed by `aclose`.

    `async with` sees that the server is there and is what it should be, before anything depends on it, and closes the
    connections at the end; without it, the first call sees to that.

    tokenizer: what token ids are made by, to see that the server's model knows them; it may be left out for a server
    that tells the size of its vocabulary (the embedded one); that its tokens are the same is then taken on trust.
    max_concurrent: requests under way at once; others wait their turn. timeout_s: the longest that one of them may
    take, from when it is sent. retries: how often one that could not be sent, or that the server failed at (HTTP 5xx
    and 429), is sent again, after waits that double up to 8 s: by default for some 90 s in all, in which a server can
    be started again. The first check gives up after a few seconds.
    """

    def __init__(
        self,
        url: str,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        api_key: str | None = None,
        max_concurrent: int = 64,
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
        self.url = url.rstrip("/")
        self._tokenizer = tokenizer
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._max_concurrent = max_concurrent
        self._timeout_s = timeout_s
        self._retries = retries
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _InLoop] = WeakKeyDictionary()
        self._info: Mapping[str, Any] | None = None
        self._vocab_size = 0

    async def __aenter__(self) -> Self:
        """Raises ServerError where the server does not answer, ModelError where it has another model than it should."""
        try:
            await self.info()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close this event loop's connections. Idempotent; a later call opens others."""
        kept = self._loops.pop(asyncio.get_running_loop(), None)
        if kept is not None:
            await kept.session.close()

    async def info(self) -> Mapping[str, Any]:
        """What the server says of its model, asked once. Raises ServerError, and ModelError where the model is of the
        wrong kind or its vocabulary is not the tokenizer's.

        Stock SGLang does not tell its vocabulary's size, and a token outside ends its process.
        """
        if self._info is not None:
            return self._info
        kept = self._in_loop()
        failures = kept.failures
        async with kept.greeting:
            if self._info is not None:
                return self._info
            if kept.failure and kept.failures > failures:  # while this one waited: the next would not fare better
                raise type(kept.failure)(str(kept.failure)) from kept.failure
            try:
                self._info = await self._greet()
            except ArlError as error:
                kept.failure, kept.failures = error, kept.failures + 1
                raise
            return self._info

    async def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Raise ModelError for a token that the server's model does not have."""
        await self.info()
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            raise ModelError(
                f"token {max(token_ids)} or {min(token_ids)} is none of the {self._vocab_size} that {self.url} knows"
            )

    async def ask(self, path: str, payload: Mapping[str, Any] | None = None, *, max_retries: int | None = None) -> Any:
        """POST the payload, or GET without one; the JSON that comes back. Raises ServerError, RequestTimeoutError."""
        wait_s, retries = _FIRST_WAIT_S, self._retries if max_retries is None else min(self._retries, max_retries)
        for left in range(retries, -1, -1):
            try:
                return await self._ask_once(path, payload)
            except _FailedError as error:
                if not left:
                    raise ServerError(f"{error} (asked {retries + 1} times)") from error
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        raise AssertionError("unreachable")

    async def _ask_once(self, path: str, payload: Mapping[str, Any] | None) -> Any:
        kept, url = self._in_loop(), f"{self.url}{path}"
        method = "GET" if payload is None else "POST"
        async with kept.places:
            try:
                async with asyncio.timeout(self._timeout_s), kept.session.request(method, url, json=payload) as answer:
                    status, raw = answer.status, await answer.read()
            except TimeoutError:
                raise RequestTimeoutError(f"{url} did not answer within timeout_s = {self._timeout_s:g} s") from None
            except (aiohttp.ClientError, OSError) as error:
                raise _FailedError(
                    f"{url} could not be reached: {str(error) or type(error).__name__}; is its server running?"
                ) from error
        if status != 200:
            raise _refusal(url, status, raw)
        try:
            return json.loads(raw)
        except ValueError as error:
            raise ServerError(f"{url} answered what is not JSON: {raw[:200]!r}") from error

    def _in_loop(self) -> _InLoop:
        loop = asyncio.get_running_loop()
        kept = self._loops.get(loop)
        if kept is None:
            session = aiohttp.ClientSession(
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=None),
                connector=aiohttp.TCPConnector(limit=self._max_concurrent),
            )
            kept = self._loops[loop] = _InLoop(session, asyncio.Semaphore(self._max_concurrent))
        return kept

    async def _greet(self) -> Mapping[str, Any]:
        try:
            info = await self.ask("/model_info", max_retries=_GREETING_RETRIES)
        except NoSuchPathError:
            info = await self.ask("/get_model_info", max_retries=_GREETING_RETRIES)
        if not isinstance(info, dict):
            raise ServerError(f"{self.url} answers, but not as an SGLang server does: /model_info is {info!r}")
        self._check_kind(info)
        self._vocab_size = await self._check_vocabulary(info.get("vocab_size"))
        return info

    def _check_kind(self, info: Mapping[str, Any]) -> None:
        """Raise ModelError for a model that cannot be asked what this one is asked."""

    async def _check_vocabulary(self, told: int | None) -> int:
        """How many tokens may be asked about."""
        tokenizer: Any = self._tokenizer
        if tokenizer is None:
            if told is None:
                raise ModelError(
                    f"{self.url} does not tell how many tokens its model has, and stock SGLang dies of one that it "
                    "does not have; pass the tokenizer that the tokens are made by"
                )
            return told
        probe = " ".join([_PROBE, *tokenizer.get_added_vocab()])
        try:
            answer = await self.ask("/tokenize", {"prompt": probe, "add_special_tokens": False})
        except NoSuchPathError as error:
            raise ModelError(
                f"{self.url} has no /tokenize, by which to see whether its tokens are those of the tokenizer given"
            ) from error
        if answer.get("tokens") != tokenizer.encode(probe, add_special_tokens=False):
            raise ModelError(
                f"the model at {self.url} has other tokens than the tokenizer given, and what one makes means nothing "
                "to the other; use a model of the same family"
            )
        return len(tokenizer) if told is None else told


def _refusal(url: str, status: int, raw: bytes) -> ServerError:
    said = raw.decode(errors="replace").strip()
    try:
        error = json.loads(said)
        error = error.get("error", error)
        said = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        pass
    message = f"{url} answered with HTTP {status}: {said[:500] or '(nothing)'}"
    if status in (401, 403):
        message += "; pass the api_key that the server was started with"
    if status == 404:
        return NoSuchPathError(message)
    return _FailedError(message) if status >= 500 or status == _BUSY else ServerError(message)
