"""How long an answer may take before its server is told to return what it has.

If a connection is dropped silently, or a server loses a request, the episode would wait until
engine.request_timeout_s. So a request that takes twice as long as the longest of the recent ones is aborted, once. A
server that works on it returns its tokens, and the client continues them, as after a pause: no token is sampled twice.
If the server returns nothing, the request goes elsewhere. A paused server can do neither. A request whose server was
paused, however often, therefore gets as long again once it serves.

A request with a seed has no limit: if another server continued it, its last bits could differ.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable

from arl.engine.client.partial_response import Attempt
from arl.engine.client.server_pool import Server, ServerPool, ServerState

_NUM_RECENT, _ENOUGH = 256, 32
"""The longest of the last _NUM_RECENT answers counts. With fewer than _ENOUGH, no request is too long."""
_LEAST_S = 1.0
_GRACE_S = 1.0
"""How long a server may take to return what it has."""
_LOOK_S = 0.25
"""How often it looks for requests that are due. A timer for each would cost more than the rest of a request."""


class Patience:
    """Limits the requests of one engine. abort: tells a server in the background to end a request."""

    def __init__(self, pool: ServerPool, abort: Callable[[Server, str], None]) -> None:
        self._pool = pool
        self._abort = abort
        self._recent_s: deque[float] = deque(maxlen=_NUM_RECENT)
        self._longest_s = 0.0

    def begin(self, attempt: Attempt) -> None:
        """Limit an attempt that is about to be sent, and may be cut."""
        if len(self._recent_s) >= _ENOUGH:
            attempt.limit_s = max(_LEAST_S, 2 * self._longest_s)
            attempt.due = attempt.sent_at + attempt.limit_s

    def answered(self, attempt: Attempt) -> None:
        took_s = asyncio.get_running_loop().time() - attempt.sent_at
        self._recent_s.append(took_s)
        self._longest_s = max(self._longest_s, took_s)

    async def watch(self) -> None:
        """Look for attempts that are due, for ever."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self._longest_s = max(self._recent_s, default=0.0)
            now = asyncio.get_running_loop().time()
            for server in self._pool.servers:
                for attempt in [attempt for attempt in server.attempts if attempt.due <= now]:
                    self._end(server, attempt, now)

    def _end(self, server: Server, attempt: Attempt, now: float) -> None:
        """Cut an attempt that takes too long; lose one that its server does not return either."""
        is_serving = server.state is ServerState.SERVING
        if attempt.is_cut and server.is_paused:  # it cannot return the request
            attempt.due = now + _GRACE_S
        elif attempt.is_cut:
            attempt.due = math.inf
            attempt.lose(f"{server.address} neither answered a request nor returned it when told to")
        elif not is_serving or (server.pauses != attempt.pauses and not attempt.is_late):
            # A paused server cannot end the request. Once it serves, the request gets as long again.
            attempt.due, attempt.is_late = now + attempt.limit_s, attempt.is_late or is_serving
        else:
            attempt.due, attempt.is_cut = now + _GRACE_S, True
            self._abort(server, attempt.rid)
