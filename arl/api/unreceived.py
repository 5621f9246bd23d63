"""Unreceived: what servers generated for one engine's requests, and no response brought."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any


class Loss(StrEnum):
    """Why a generated token is in no response."""

    CANCELLED = "cancelled"
    """Its request was cancelled: the episode was cut, or failed meanwhile, or ran when a start of the run ended."""
    FAILED = "failed"
    """Its request timed out, or failed too often."""
    DISCARDED = "discarded"
    """arl threw its answer away: it was impossible, of other weights, or could not be continued."""
    LOST = "lost"
    """Its server was taken for lost while it ran the request, and answered after all."""


class Unreceived:
    """Counts tokens by why no response brought them. The engine writes, and token ledgers read. Of one event loop."""

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()
        """By Loss."""
        self.lost_requests = 0
        """Requests of which no answer came, as when their server died. How many tokens they had is not known."""
        self.num_in_flight = 0
        """Requests that servers have now, and those with tokens that wait for a server to go on. Their tokens are
        counted when they end."""
        self._ended = asyncio.Event()

    def begin(self) -> None:
        """A request is sent."""
        self.num_in_flight += 1

    def end(self, loss: Loss, tokens: int | None) -> None:
        """A request ended on its server. tokens: those that no response will bring; None if nobody knows."""
        self.num_in_flight -= 1
        self._ended.set()
        if tokens is None:
            self.lost_requests += 1
        else:
            self.add(loss, tokens)

    @contextmanager
    def waiting(self, tokens: int) -> Generator[None]:
        """Within the block, a request with so many tokens waits for a server."""
        self.num_in_flight += bool(tokens)
        try:
            yield
        finally:
            self.num_in_flight -= bool(tokens)
            self._ended.set()

    def add(self, loss: Loss, tokens: int) -> None:
        if tokens:
            self.tokens[loss.value] += tokens

    async def settled(self, limit_s: float) -> None:
        """Wait until servers have ended all requests, but not for longer than this."""
        try:
            async with asyncio.timeout(limit_s):
                while self.num_in_flight:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            pass

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": dict(self.tokens), "lost_requests": self.lost_requests}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the numbers of earlier starts. Of two such states, the larger numbers count."""
        self.tokens |= Counter(state["tokens"])
        self.lost_requests = max(self.lost_requests, state["lost_requests"])
