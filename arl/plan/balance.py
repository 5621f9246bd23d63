"""Which simulated server gets a request: the rules of arl/engine/client/line.py, with less work for each request.

The least busy serving server; of equals, the first. A session stays with its server and weights, unless that server is
crowded. While servers that were paused together are expected back, no other gets more than its share. Here servers are
numbers, and nobody waits for connections. `tests/plan/test_balance.py` compares the two.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from heapq import heappop, heappush

_MAX_SESSIONS = 65_536
_CROWD = 8


class Balance:
    """Servers by number, from 0, in the order of the pool."""

    def __init__(self, num_servers: int) -> None:
        self.loads = [0] * num_servers
        """Requests that each has."""
        self._serves = [True] * num_servers
        self._load_numbers = [0] * num_servers
        """Of the load that gave each server its weights."""
        self._num_loads = 0
        self._num_serving = num_servers
        self._heap = [(0, server) for server in range(num_servers)]
        """(load, server). An entry that is no longer true is skipped."""
        self._expected: set[int] = set()
        self._total = 0
        """Requests of all serving and expected servers."""
        self._sessions: OrderedDict[str, tuple[int, int]] = OrderedDict()

    @property
    def num_serving(self) -> int:
        return self._num_serving

    def choose(self, session: str | None, num_waiting: int = 0) -> tuple[int, bool] | None:
        """The server for a request, and whether it has the session's prefix; None if the request waits in line.

        num_waiting: the requests in line.
        """
        best = self._least_busy()
        if best is None:
            return None
        bound = self._bound_to(session)
        if bound is not None and self.loads[bound] <= 2 * self.loads[best] + _CROWD:
            return bound, True
        if self._expected and self.loads[best] >= self._share(num_waiting):
            return None
        if session is not None:
            self._sessions[session] = best, self._load_numbers[best]
            if len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return best, False

    def _bound_to(self, session: str | None) -> int | None:
        binding = None if session is None else self._sessions.get(session)
        if session is None or binding is None:
            return None
        server, load_number = binding
        if not self._serves[server] or self._load_numbers[server] != load_number:
            return None
        self._sessions.move_to_end(session)
        return server

    def begin(self, server: int) -> None:
        """A request is sent there."""
        self._change(server, 1)

    def end(self, server: int) -> None:
        self._change(server, -1)

    def pause(self, server: int, *, together: bool) -> None:
        """together: with others, so that each gets its share when they come back."""
        self._serves[server] = False
        self._num_serving -= 1
        if together:
            self._expected.add(server)

    def resume(self, server: int, *, has_new_weights: bool) -> None:
        self._serves[server] = True
        self._num_serving += 1
        self._expected.discard(server)
        if has_new_weights:
            self._num_loads += 1
            self._load_numbers[server] = self._num_loads
        heappush(self._heap, (self.loads[server], server))

    def _change(self, server: int, by: int) -> None:
        self._total += by
        self.loads[server] += by
        heappush(self._heap, (self.loads[server], server))
        if len(self._heap) > 8 * len(self.loads) + 64:
            self._heap = sorted((self.loads[i], i) for i, serves in enumerate(self._serves) if serves)

    def _least_busy(self) -> int | None:
        heap = self._heap
        while heap:
            load, server = heap[0]
            if self._serves[server] and self.loads[server] == load:
                return server
            heappop(heap)
        return None

    def _share(self, num_waiting: int) -> int:
        """See Line: as long as others are expected. (Line gives that up after the first one's pause, or a second.)"""
        return math.ceil((max(num_waiting, 1) + self._total) / (self._num_serving + len(self._expected)))
