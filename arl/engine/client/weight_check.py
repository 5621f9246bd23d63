"""Whether servers compute with the weights that they were given: their logprobs of a few tokens against the trainer's.

A server can load new weights in part, and say that it has them all: vLLM on a CPU computes linear layers from copies
that it packed at the start. Then every label is right and every logprob is of a mixture. So each server is asked after
its first load, and again when it holds weights 1, 2, 4, 8, ... versions later: what a layer missed grows as training
goes on.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import numpy as np

from arl.api.engine import WeightProbe
from arl.api.errors import PromptTooLongError, ServerError, ServerFailedError
from arl.engine.client.server_client import Greeting
from arl.engine.client.server_pool import Server, ServerPool

_EXACT_GAP, _ROUNDED_GAP = 0.02, 0.5
"""The largest mean difference at the first check, in nats: where both compute in float32, and elsewhere."""
_GROWTH, _LEAST_GAP = 5.0, 2e-3
"""Later a difference may be this many times the smallest so far, and always this large."""
_TIMEOUT_S = 60.0

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Checked:
    """What is known of a server since it was greeted."""

    greeting: Greeting | None
    due: int
    """The version at which it is checked next."""
    distance: int = 1
    least: float | None = None
    """The smallest difference so far."""


class WeightCheck:
    """Checks servers of `pool` when they are due."""

    def __init__(self, pool: ServerPool) -> None:
        self._pool = pool
        self._checked: dict[Server, _Checked] = {}

    def is_due(self, version: int) -> bool:
        """Whether a server that takes this version is to be checked then."""
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
            async with asyncio.timeout(_TIMEOUT_S):
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
