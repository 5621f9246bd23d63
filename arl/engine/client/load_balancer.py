"""Which server gets the next request, and who waits for one.

**The line.** A request that no server can take yet waits in line; requests leave it in the order of arrival. The line
moves when a server is resumed or readmitted, when a request ends, and when a hold ends.

**Shares.** When several servers are paused together, the first one resumed would get all waiting requests, and keep
their sessions. So each server gets a share. While others are expected back, a server gets at most the number of
running and waiting requests, divided by the number of servers that serve or are expected. The rest stay in line, for as
long as the first pause took, but at least _HOLD_S. Then any serving server takes them. A failed server is no longer
expected, unless all failed: then requests wait _OUTAGE_HOLD_S for the others. A rolling update holds no requests.

**Sessions** are bound to a server and its weights, because prefixes are cached there. A session moves when either is
gone, while the server is paused, and when the server is crowded: to read a prefix again costs less than to share a
crowded server.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter

from arl.engine.client.server_pool import Server, ServerPool, ServerState

_MAX_SESSIONS = 65_536
_STARTS_PER_TURN = 16
"""Requests that may start in one turn of the event loop: a thousand at once would block it for a second."""
_HOLD_S = 1.0
"""Requests are held for this long, or as long as the first server was paused, if that is longer."""
_OUTAGE_HOLD_S = 2.5
"""Requests are held for this long after an outage of all servers: each is probed every 2 s."""
_CROWD = 8
"""A server is crowded if it has more than twice the requests of the least busy one, and this many more."""

_load = attrgetter("load")


@dataclass(slots=True, eq=False)
class _Waiter:
    session_id: str | None
    avoid: Server | None
    server: asyncio.Future[Server] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Line:
    """Finds servers for the requests of one engine."""

    def __init__(self, pool: ServerPool) -> None:
        self._pool = pool
        self._line: deque[_Waiter] = deque()
        self._num_starts = 0
        self._starters: deque[asyncio.Future[None]] = deque()
        self._sessions: OrderedDict[str, tuple[Server, int]] = OrderedDict()
        self._hold: tuple[object, float] | None = None
        """The expectation for which requests are held, and when the hold ends."""
        self._looks_again = False
        self._error: Exception | None = None
        pool.on_change = self._look_again

    async def find(self, session_id: str | None, deadline: float, avoid: Server | None = None) -> Server:
        """The session's server, else the one with the fewest requests. Raises TimeoutError at the deadline, by
        the pool's clock.

        avoid: the server where the request has just failed; chosen only if there is no other.
        """
        await self._start()
        if self._error is not None:
            raise self._error
        if not self._line and (server := self._choose(session_id, avoid)) is not None:
            return server
        waiter = _Waiter(session_id, avoid)
        self._line.append(waiter)
        limit = self._pool.clock.limit(deadline)
        try:
            async with limit:
                while True:
                    server = await self._turn_of(waiter)
                    if server.state is ServerState.SERVING and not self._pool.is_held:
                        return server
                    waiter.server = asyncio.get_running_loop().create_future()
                    self._line.appendleft(waiter)  # the server was paused, or failed, in the same moment
                    self._look_again()  # others may serve, and nothing else may move the line for long
        finally:
            self._pool.clock.ended(limit)

    async def _start(self) -> None:
        """Wait for a turn of the event loop in which fewer than _STARTS_PER_TURN others start."""
        if self._num_starts == 0:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        if self._num_starts < _STARTS_PER_TURN and not self._starters:
            self._num_starts += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._starters.append(turn)
        await turn  # a caller that gives up leaves a cancelled one behind, which takes no part

    def _begin_turn(self) -> None:
        self._num_starts = 0
        while self._starters and self._num_starts < _STARTS_PER_TURN:
            turn = self._starters.popleft()
            if not turn.done():
                turn.set_result(None)
                self._num_starts += 1
        if self._num_starts:
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def turn_away(self, error: Exception) -> None:
        """Raise this for all requests that wait, and for all later ones."""
        self._error = error
        while self._line:
            waiter = self._line.popleft()
            if not waiter.server.done():
                waiter.server.set_exception(error)

    async def _turn_of(self, waiter: _Waiter) -> Server:
        try:
            return await waiter.server
        finally:
            if waiter.server.cancelled():
                with suppress(ValueError):
                    self._line.remove(waiter)
            elif waiter.server.exception() is None:
                waiter.server.result().num_coming -= 1
            self._look_again()

    def _look_again(self) -> None:
        """Let the line move in the next turn of the event loop."""
        if self._line and not self._looks_again:
            self._looks_again = True
            asyncio.get_running_loop().call_soon(self._move)

    def _move(self) -> None:
        self._looks_again = False
        for _ in range(_STARTS_PER_TURN):
            if not self._line:
                return
            first = self._line[0]
            if not first.server.done():  # if done, its caller has given up
                if (server := self._choose(first.session_id, first.avoid)) is None:
                    return
                server.num_coming += 1
                first.server.set_result(server)
            self._line.popleft()
        self._look_again()

    def _choose(self, session_id: str | None, avoid: Server | None) -> Server | None:
        ready = [] if self._pool.is_held else self._pool.ready
        if not ready:
            return None
        if (best := min(ready, key=_load)) is avoid and len(ready) > 1:
            best = min((server for server in ready if server is not avoid), key=_load)
        if session_id is not None and (binding := self._sessions.get(session_id)) is not None:
            bound, load_number = binding
            if bound.state is ServerState.SERVING and bound.weights.load_number == load_number:
                self._sessions.move_to_end(session_id)
                if bound is not avoid and bound.load <= 2 * best.load + _CROWD:
                    return bound
        if best.load >= self._share():
            return None
        if session_id is not None:
            self._sessions[session_id] = (best, best.weights.load_number)
            if len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return best

    def _share(self) -> float:
        """How many requests each server may have at most; infinite if no other is expected back soon.

        Requests wait although a server serves once per expectation, from the first that serves.
        """
        ready, soon = self._pool.ready, self._pool.expected
        if not soon:
            return math.inf
        loop, expectation = asyncio.get_running_loop(), self._pool.expectation
        if self._hold is None or self._hold[0] is not expectation:
            least_s = _OUTAGE_HOLD_S if expectation.is_outage else _HOLD_S
            until = loop.time() + max(least_s, loop.time() - expectation.began)
            self._hold = expectation, until
            loop.call_at(until, self._look_again)
        if loop.time() >= self._hold[1]:
            return math.inf
        return math.ceil((max(len(self._line), 1) + sum(map(_load, (*ready, *soon)))) / (len(ready) + len(soon)))
