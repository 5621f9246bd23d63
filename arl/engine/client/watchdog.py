"""Watches over the servers of a pool, so that none is lost silently.

| task | does | waits for |
|---|---|---|
| listen | asks servers in service for a sign of life; fences a silent one, whose requests go elsewhere | the clock |
| hold_floor | ends the run when fewer than engine.min_servers have served for too long | a server's change |

The log tells when a server is fenced, and why, and when it serves again: for each server one fence a minute, and
reminders after 1, 2, 4, ... minutes; for all of them _MAX_LINES a minute, and one line more that counts the others.
A server of arl's own that stays fenced without a proper answer is started again.

**Slow requests.** If a connection is dropped silently, or a server loses a request, the episode would wait until
engine.request_timeout_s. So a request that takes twice as long as the longest of the recent ones is aborted, once. A
server that works on it returns its tokens, and the client continues them, as after a pause: no token is sampled twice.
If the server returns nothing, the request goes elsewhere. A paused server can do neither. A request whose server was
paused, however often, therefore gets as long again once it serves. A request with a seed has no limit: if another
server continued it, its last bits could differ.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from arl.api.errors import ServerError
from arl.api.settings.engines import ClientConfig
from arl.engine.client.server_pool import Attempt, Server, ServerPool, ServerState
from arl.engine.client.server_processes import ServerProcesses

_LISTEN_EVERY_S = 5.0
"""A server is asked for a sign of life when it has answered nothing for this long."""
_PARTS = 20
"""In each such time it is looked as often whose turn it is, so that not all servers are asked at once."""
_SILENCE_S = 30.0
"""A server that has not answered for this long is fenced."""
_HUNG_S = 60.0
"""A server of arl's own that stays fenced for this long without a proper answer is killed, and started again."""
_GRACE_S = 1.0
"""If an update waits for the same servers, it gives up this much earlier than the floor, and names its version."""
_QUIET_S = 60.0
"""The log tells of at most one fence of each server in this time."""
_MAX_LINES = 20
"""How many servers it names in this time."""

Blame = Callable[[Server, str], None]
"""Called with a server and the reason."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Absence:
    """A server's time behind its fence. Times are the event loop's."""

    since: float
    is_told: bool = False
    next_line: float = 0.0
    silent_since: float | None = None
    """When it first failed to answer, since it last answered or was started again."""


class ServerWatch:
    """Counts and reports what happens to servers. `processes`: those that arl started itself."""

    def __init__(self, pool: ServerPool, config: ClientConfig, processes: ServerProcesses | None) -> None:
        self.num_failed_requests = 0
        self._pool = pool
        self._config = config
        self._processes = processes
        self._absences: dict[Server, _Absence] = {}
        self._last_lines: dict[Server, float] = {}
        self._recent_lines: deque[float] = deque(maxlen=_MAX_LINES)
        self._next_count = 0.0
        """When the log may count again those that it does not name."""
        self._asked: dict[Server, float] = {}
        self._asking: set[Server] = set()
        self._num_fences = 0

    def counters(self) -> dict[str, float]:
        """Metrics; the totals count since this process began."""
        numbers: dict[str, float] = {
            "servers/serving": len(self._pool.in_service),
            "servers/fenced": len(self._absences),
            "servers/fences": self._num_fences,
            "servers/failed_requests": self.num_failed_requests,
        }
        if self._pool.num_generated is not None:
            numbers["servers/generated_tokens"] = self._pool.num_generated
        return numbers if self._processes is None else {**numbers, "servers/restarts": self._processes.num_restarts}

    def note_fence(self, server: Server) -> None:
        now = _now()
        self._num_fences += 1
        self._absences[server] = _Absence(since=now, next_line=self._last_lines.get(server, -_QUIET_S) + _QUIET_S)
        self._tell(server, now)

    def note_probe(self, server: Server, *, is_silent: bool) -> None:
        """A probe did not bring it back. is_silent: it gave no proper answer."""
        if (absence := self._absences.get(server)) is None:
            return
        now = _now()
        self._tell(server, now)
        absence.silent_since = (absence.silent_since or now) if is_silent else None
        if absence.silent_since is None or now - absence.silent_since < _HUNG_S or self._processes is None:
            return
        if self._processes.restart(server.address, server.why, now - absence.since):
            absence.silent_since = None

    def note_return(self, server: Server) -> None:
        absence = self._absences.pop(server, None)
        if absence is not None and absence.is_told:
            logger.warning("%s serves again after %.3g s", server.address, _now() - absence.since)

    def forget(self, server: Server) -> None:
        self._absences.pop(server, None)
        self._last_lines.pop(server, None)
        self._asked.pop(server, None)

    async def listen(self, fence: Blame, suspect: Blame) -> None:
        """Ask servers in service for signs of life, for ever, each by itself: one that is slow keeps no other waiting.

        fence, suspect: called for those without one.
        """

        async def ask(server: Server) -> None:
            self._asked[server] = _now()
            self._asking.add(server)
            try:
                for _ in range(2):  # one connection may have been dropped silently, though the server is well
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_SILENCE_S / 2):
                            return await server.client.check_alive()
                reason = f"{server.address} gives no sign of life"
                fence(server, reason)
                self._pool.lose_attempts(server, reason)
            except ServerError as error:
                suspect(server, str(error))
            finally:
                self._asking.discard(server)

        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(_LISTEN_EVERY_S / _PARTS)
                for server in self._due(_now()):
                    group.create_task(ask(server))

    def _due(self, now: float) -> list[Server]:
        """The servers in service that gave no sign of life for a while. Their first turns are spread over time."""
        due = list[Server]()
        for server in self._pool.servers:
            if server.is_in_service and server not in self._asking:
                first = now - _LISTEN_EVERY_S * (server.number % _PARTS) / _PARTS
                heard = max(self._asked.setdefault(server, first), server.heard_at)
                if heard + _LISTEN_EVERY_S <= now:
                    due.append(server)
        return due

    async def hold_floor(self) -> None:
        """Raises ServerError when too few servers have served for absence_timeout_s."""
        least, longest_s = self._config.min_servers, self._config.absence_timeout_s
        while True:
            while len(self._pool.in_service) >= least:
                await self._pool.changed()
            try:
                async with asyncio.timeout(longest_s + _GRACE_S):
                    while len(self._pool.in_service) < least:
                        await self._pool.changed()
            except TimeoutError:
                if self._pool.is_asleep:  # none of those that are missing may come back yet
                    continue
                serve = f"{len(self._pool.in_service)} of {len(self._pool.servers)} servers serve"
                raise ServerError(
                    f"{serve}, fewer than engine.min_servers={least}, for {longest_s:g} s: {self._pool.report()}"
                ) from None

    def _tell(self, server: Server, now: float) -> None:
        absence = self._absences[server]
        if now < absence.next_line:
            return
        if len(self._recent_lines) == _MAX_LINES and now - self._recent_lines[0] < _QUIET_S:
            absence.next_line = now + _QUIET_S
            if now >= self._next_count:
                self._next_count = now + _QUIET_S
                logger.warning("%d servers are fenced now; not all are named here", len(self._absences))
            return
        self._recent_lines.append(now)
        if absence.is_told:
            logger.warning("%s has been fenced for %.0f s: %s", server.address, now - absence.since, server.why)
        else:
            logger.warning("%s is fenced, and gets no requests until it has recovered: %s", server.address, server.why)
        absence.is_told, self._last_lines[server] = True, now
        absence.next_line = now + max(_QUIET_S, now - absence.since)


_NUM_RECENT, _ENOUGH = 256, 32
"""The longest of the last _NUM_RECENT answers counts. With fewer than _ENOUGH, no request is too long."""
_LEAST_S = 1.0
_RETURN_S = 1.0
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
        took_s = _now() - attempt.sent_at
        self._recent_s.append(took_s)
        self._longest_s = max(self._longest_s, took_s)

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self._longest_s = max(self._recent_s, default=0.0)
            now = _now()
            for server in self._pool.servers:
                for attempt in [attempt for attempt in server.attempts if attempt.due <= now]:
                    self._end(server, attempt, now)

    def _end(self, server: Server, attempt: Attempt, now: float) -> None:
        """Cut an attempt that takes too long; lose one that its server does not return either."""
        is_serving = server.state is ServerState.SERVING
        if attempt.is_cut and server.is_paused:  # it cannot return the request
            attempt.due = now + _RETURN_S
        elif attempt.is_cut:
            attempt.due = math.inf
            attempt.lose(f"{server.address} neither answered a request nor returned it when told to")
        elif not is_serving or (server.pauses != attempt.pauses and not attempt.is_late):
            # A paused server cannot end the request. Once it serves, the request gets as long again.
            attempt.due, attempt.is_late = now + attempt.limit_s, attempt.is_late or is_serving
        else:
            attempt.due, attempt.is_cut = now + _RETURN_S, True
            self._abort(server, attempt.rid)


def _now() -> float:
    return asyncio.get_running_loop().time()
