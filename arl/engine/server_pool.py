"""Which server gets the next request, and which weights each server holds.

A server is in one of three states:

    serving --pause--> paused --resume--> serving
       |                  |
       +------fence-------+--> fenced --admit--> serving      (it failed, or missed an update; a probe brings it back)

Requests go to serving servers. All methods are synchronous and belong to one event loop; `changed` wakes who waits.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal

from arl.engine.server_client import Answer, ServerClient

State = Literal["serving", "paused", "fenced"]

_MAX_SESSIONS = 65_536


@dataclass(slots=True, eq=False, kw_only=True)
class Attempt:
    """One /generate call in flight, and what was true of its server when it was sent.

    version: of the server's weights. was_updated: the weights came from this engine. pauses: how many there had been.
    `scope` is the call's timeout, which `lose` ends early; `lost` says why.
    """

    rid: str
    version: int
    was_updated: bool
    initial_label: str
    pauses: int
    scope: asyncio.Timeout
    lost: str | None = None

    def lose(self, reason: str) -> None:
        """End the call; its caller sends it elsewhere."""
        if self.lost is None and not self.scope.expired():
            self.lost = reason
            self.scope.reschedule(asyncio.get_running_loop().time())

    def versions(self, answer: Answer) -> list[int]:
        """The policy version of each of the answer's tokens."""
        versions = [self.version] * len(answer.output_ids)
        for span in answer.spans:
            end = min(span.end, len(versions))
            versions[span.start : end] = [self._version_of(span.label)] * (end - span.start)
        return versions

    def _version_of(self, label: str) -> int:
        is_first = not self.was_updated and label == self.initial_label
        return int(label) if label.isdecimal() and not is_first else self.version


@dataclass(slots=True, eq=False)
class Server:
    """A server's state. version: of the weights it holds. is_updated: they came from this engine.

    initial_label: what the server called the weights that it started with. reason: why it is fenced. pauses: how
    often it was paused so far. attempts: the calls in flight.
    """

    client: ServerClient
    version: int
    is_updated: bool = False
    initial_label: str = "default"
    state: State = "serving"
    reason: str = ""
    pauses: int = 0
    attempts: set[Attempt] = field(default_factory=set)

    def begin(self, rid: str, scope: asyncio.Timeout) -> Attempt:
        """A call that is about to be sent; whoever sends it removes it from `attempts`."""
        attempt = Attempt(
            rid=rid,
            version=self.version,
            was_updated=self.is_updated,
            initial_label=self.initial_label,
            pauses=self.pauses,
            scope=scope,
        )
        self.attempts.add(attempt)
        return attempt

    @property
    def address(self) -> str:
        return self.client.address


class ServerPool:
    """The servers, the sessions that are bound to them, and the version that all of those serving hold."""

    def __init__(self, servers: list[Server], version: int) -> None:
        self.servers = servers
        self._version = version
        self._sessions: OrderedDict[str, Server] = OrderedDict()
        self._changed = asyncio.Event()

    @property
    def version(self) -> int:
        """The newest version that every serving server holds; while none serves, what it was before."""
        self._version = min((server.version for server in self.serving), default=self._version)
        return self._version

    @property
    def serving(self) -> list[Server]:
        """The servers that get requests now, or will as soon as they are resumed."""
        return [server for server in self.servers if server.state != "fenced"]

    def choose(self, session_id: str | None) -> Server | None:
        """The session's server, else the one with the fewest requests; None if the caller has to wait for a change."""
        server = self._bound_to(session_id)
        if server is None:
            ready = [server for server in self.servers if server.state == "serving"]
            if not ready:
                return None
            server = min(ready, key=lambda s: len(s.attempts))
            if session_id is not None:
                self._bind(session_id, server)
        return server if server.state == "serving" else None

    def pause(self, server: Server) -> None:
        if server.state == "serving":
            server.state = "paused"
        server.pauses += 1

    def resume(self, server: Server) -> None:
        if server.state == "paused":
            server.state = "serving"
            self._notify()

    def admit(self, server: Server, version: int) -> None:
        """The server holds `version` and may serve."""
        server.version = version
        if server.state == "fenced":
            server.state, server.reason = "serving", ""
        self._notify()

    def fence(self, server: Server, reason: str) -> bool:
        """Give it no more requests. False if it was fenced before."""
        if server.state == "fenced":
            return False
        server.state, server.reason = "fenced", reason
        self._notify()
        return True

    def lose_attempts(self, server: Server, reason: str) -> None:
        """End the requests in flight on a server that will not answer them; their callers send them elsewhere."""
        for attempt in list(server.attempts):
            attempt.lose(reason)

    def report(self) -> str:
        """Which servers do not serve, and why: for errors."""
        out = [f"{s.address} is fenced ({s.reason})" for s in self.servers if s.state == "fenced"]
        return "; ".join(out) or "every server serves"

    async def changed(self) -> None:
        """Wait until a server changes its state."""
        await self._changed.wait()

    def wake_all(self) -> None:
        """Let everyone who waits look again (the engine was resumed or closed)."""
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _bound_to(self, session_id: str | None) -> Server | None:
        if session_id is None or (server := self._sessions.get(session_id)) is None:
            return None
        if server.state == "fenced":
            del self._sessions[session_id]
            return None
        self._sessions.move_to_end(session_id)
        return server

    def _bind(self, session_id: str, server: Server) -> None:
        self._sessions[session_id] = server
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
