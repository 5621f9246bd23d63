"""A model behind a URL, asked by many episodes at once, after a look at what it is.

The server speaks SGLang's protocol: stock SGLang, or the embedded server. arl.workflow.teachers says what it is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

from arl.api.errors import ArlError, ModelError, NoSuchPathError, ServerError
from arl.web.client import JsonClient

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE = "Agent 12345 said:\n\t'déjà vu' def f(x): return x**2  # 你好 🙂"
"""Text that few two tokenizers take apart in the same way."""
_GREETING_RETRIES = 4
"""At the start a server that does not answer is more likely a wrong address than one that is being started again."""


@dataclass(slots=True)
class _Greeting:
    """The first check, in one event loop. lock: held by who checks. failure: how the last one failed, failures: how
    many did."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    failure: ArlError | None = None
    failures: int = 0


class ModelServer(JsonClient):
    """The calls to one server. Connections are opened when they are first needed, kept, and closed by `aclose`.

    `async with` sees that the server is there and is what it should be, before anything depends on it, and closes the
    connections at the end; without it, the first call sees to that. That check gives up after a few seconds.

    tokenizer: what token ids are made by, to see that the server's model knows them; it may be left out for a server
    that tells the size of its vocabulary (the embedded one); that its tokens are the same is then taken on trust.
    The other settings are JsonClient's.
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
        super().__init__(url, api_key=api_key, max_concurrent=max_concurrent, timeout_s=timeout_s, retries=retries)
        self._tokenizer = tokenizer
        self._greetings: WeakKeyDictionary[asyncio.AbstractEventLoop, _Greeting] = WeakKeyDictionary()
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
        self._greetings.pop(asyncio.get_running_loop(), None)
        await super().aclose()

    async def info(self) -> Mapping[str, Any]:
        """What the server says of its model, asked once. Raises ServerError, and ModelError where the model is of the
        wrong kind or its vocabulary is not the tokenizer's.

        Stock SGLang does not tell its vocabulary's size, and a token outside ends its process.
        """
        if self._info is not None:
            return self._info
        greeting = self._greetings.setdefault(asyncio.get_running_loop(), _Greeting())
        failures = greeting.failures
        async with greeting.lock:
            if self._info is not None:
                return self._info
            if (
                greeting.failure and greeting.failures > failures
            ):  # while this one waited: the next would fare no better
                raise type(greeting.failure)(str(greeting.failure)) from greeting.failure
            try:
                self._info = await self._greet()
            except ArlError as error:
                greeting.failure, greeting.failures = error, greeting.failures + 1
                raise
            return self._info

    async def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Raise ModelError for a token that the server's model does not have."""
        await self.info()
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            raise ModelError(
                f"token {max(token_ids)} or {min(token_ids)} is none of the {self._vocab_size} that {self.url} knows"
            )

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
