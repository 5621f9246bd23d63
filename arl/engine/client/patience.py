"""How long an answer may take before its server is told to return what it has.

A connection that is dropped without a word, or a server that loses a request, would hold its episode up until
engine.request_timeout_s. So a request that takes twice as long as the longest of the last ones is aborted, once: a
server that works on it returns its tokens, and the client continues them, as after a pause; nothing is sampled anew. Of
a server that does not return them either, nothing is waited for, and the request goes elsewhere. A paused server can
do neither: where it was paused, the request gets as long again, however often that was.

A request with a seed is left alone: continued elsewhere, its last bits could differ.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from arl.engine.client.continuation import Attempt
from arl.engine.client.server_pool import Server, ServerState

_NUM_RECENT, _ENOUGH = 256, 32
"""Of so many answers the longest counts; with fewer than _ENOUGH, no request is too long."""
_LEAST_S = 1.0
_GRACE_S = 1.0
"""How long a server may take to return what it has."""


class Patience:
    """Limits the requests of one engine. abort: tells a server, in the background, that a request shall end."""

    def __init__(self, abort: Callable[[Server, str], None]) -> None:
        self._abort = abort
        self._recent_s: deque[float] = deque(maxlen=_NUM_RECENT)

    @contextmanager
    def limit(self, server: Server, attempt: Attempt, *, may_cut: bool) -> Iterator[None]:
        """Within the block the attempt is under way. It may be cut, or lost, if `may_cut`."""
        loop = asyncio.get_running_loop()
        timers: list[asyncio.TimerHandle] = []
        limit_s = max(_LEAST_S, 2 * max(self._recent_s, default=0.0))

        def cut(is_late: bool) -> None:
            is_serving = server.state is ServerState.SERVING
            if not is_serving or (server.pauses != attempt.pauses and not is_late):
                # A paused server cannot end it. Once it serves, the request gets as long again.
                timers.append(loop.call_later(limit_s, cut, is_late or is_serving))
                return
            attempt.is_cut = True
            self._abort(server, attempt.rid)
            timers.append(loop.call_later(_GRACE_S, give_up))

        def give_up() -> None:
            if server.is_paused:  # nor return it
                timers.append(loop.call_later(_GRACE_S, give_up))
            else:
                attempt.lose(f"{server.address} neither answered a request nor returned it when told to")

        if may_cut and len(self._recent_s) >= _ENOUGH:
            timers.append(loop.call_later(limit_s, cut, False))
        try:
            yield
            self._recent_s.append(loop.time() - attempt.sent_at)
        finally:
            for timer in timers:
                timer.cancel()
