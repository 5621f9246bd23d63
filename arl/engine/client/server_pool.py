"""Which server gets the next request, and which weights each server holds.

A server is in one of three states:

    serving --pause--> paused --resume--> serving
       |                  |
       +------fence-------+--> fenced --admit--> serving      (it failed, or missed an update; a probe brings it back)

Requests go to serving servers, unless they are leaving. With a router in front they go to the router, which chooses
among the servers by itself: what is true of a request is then what is true of all that serve. All methods are
synchronous and belong to one event loop; `changed` wakes who waits.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal

from arl.api.types import new_id
from arl.engine.client.server_client import Answer, Holding, ServerClient

State = Literal["serving", "paused", "fenced"]

_MAX_SESSIONS = 65_536


@dataclass(slots=True, eq=False, kw_only=True)
class Attempt:
    """One /generate call in flight, and what was true of its server when it was sent.

    version: of the server's weights. adapter: what the request has to name for it; None where the server's own weights
    are of that version. was_updated: they came from this engine. initial_labels: what weights that did not are called.
    num_late: most tokens that an update may label too new. pauses: how many there had been. sent_at: the event loop's
    time. `scope` is the call's timeout, which `lose` ends early; `lost` says why.
    """

    rid: str
    version: int
    adapter: str | None
    was_updated: bool
    initial_labels: frozenset[str]
    num_late: int
    pauses: int
    sent_at: float
    scope: asyncio.Timeout
    lost: str | None = None

    def lose(self, reason: str) -> None:
        """End the call; its caller sends it elsewhere."""
        if self.lost is None and not self.scope.expired():
            self.lost = reason
            self.scope.reschedule(asyncio.get_running_loop().time())

    def foreign_label(self, answer: Answer) -> str | None:
        """The answer's label that stands for none of the weights which the server can hold since the request was sent.

        The server was then restarted, or given weights, behind this engine's back.
        """
        labels = [span.label for span in answer.spans] or [answer.label] * bool(answer.label)
        return next((label for label in labels if not self._is_known(label)), None)

    def versions(self, answer: Answer) -> list[int]:
        """The policy version of each of the answer's tokens; where that is uncertain, the oldest that it can be.

        Under an adapter all are of its version: a request keeps it to its end, and the label, which is of the model
        below, is no version.
        """
        versions = [self.version] * len(answer.output_ids)
        for span in answer.spans:
            end = min(span.end, len(versions))
            versions[span.start : end] = [self._version_of(span.label)] * (end - span.start)
        return _held_back(versions, self.version, self.num_late) if self.num_late else versions

    def _is_known(self, label: str) -> bool:
        if self.adapter is not None:
            return label in self.initial_labels
        return not self.was_updated or (label.isdecimal() and int(label) >= self.version)

    def _version_of(self, label: str) -> int:
        is_first = not self.was_updated and label in self.initial_labels
        return int(label) if label.isdecimal() and not is_first else self.version


def _held_back(versions: list[int], sent_under: int, num_late: int) -> list[int]:
    """The first `num_late` tokens of each version are given the version before."""
    out: list[int] = []
    before = current = sent_under
    start = 0
    for index, version in enumerate(versions):
        if version != current:
            before, current, start = current, version, index
        out.append(before if index - start < num_late else version)
    return out


@dataclass(slots=True, eq=False)
class Server:
    """A server's state. version: of the weights it holds. is_updated: they came from this engine.

    adapter: the one that makes them that version, by name; None where the server's own weights do. adapters: all that
    this engine began to load there and did not unload, the newest last; not all of them need be there.
    is_whole: the last load, if any, went through to its end; what the server holds otherwise has no version.
    initial_label: what the server called the weights that it started with. num_late: most tokens of a request that it
    samples under one version and labels with the next (Greeting.num_late). reason: why it is fenced. pauses: how often
    it was paused so far. load_number: of the load that gave it its weights, of all loads of the pool. is_leaving: it
    gets no new requests and will be dropped. attempts: the calls in flight. busy: held by whoever pauses, loads and
    resumes it.
    """

    client: ServerClient
    version: int
    adapter: str | None = None
    adapters: list[str] = field(default_factory=list[str])
    is_updated: bool = False
    is_whole: bool = True
    initial_label: str = "default"
    num_late: int = 0
    state: State = "serving"
    reason: str = ""
    pauses: int = 0
    load_number: int = 0
    is_leaving: bool = False
    attempts: set[Attempt] = field(default_factory=set)
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)

    def holds(self, version: int, told: Holding) -> bool:
        """Whether it holds this version. What it tells alone proves nothing: a load that broke off may have set a
        label, and so may another run have."""
        return self.is_whole and self.version == version and self.keeps(told)

    def keeps(self, told: Holding) -> bool:
        """Whether what it tells is what this engine gave it: otherwise it was started again, or given other weights."""
        if self.adapter is None:
            return self.is_updated and told.label == str(self.version)
        return told.label == self.initial_label and self.adapter in told.adapters

    @property
    def address(self) -> str:
        return self.client.address

    @property
    def takes_requests(self) -> bool:
        return self.state == "serving" and not self.is_leaving


class ServerPool:
    """The servers, the sessions that are bound to them, and the version that all of those serving hold."""

    def __init__(self, version: int) -> None:
        self.servers: list[Server] = []
        self.router: Server | None = None
        self._num_pauses = self._num_loads = 0
        self._version = version
        self._run = new_id()[:12]
        self._sessions: OrderedDict[str, tuple[Server, int]] = OrderedDict()
        self._changed = asyncio.Event()

    @property
    def version(self) -> int:
        """The newest version that every serving server holds; while none serves, what it was before."""
        return self._version

    @property
    def serving(self) -> list[Server]:
        """The servers that answer requests now, or will as soon as they are resumed."""
        return [server for server in self.servers if server.state != "fenced"]

    def at(self, address: str) -> Server | None:
        return next((server for server in self.servers if server.address == address), None)

    def cache_key(self, server: Server) -> str:
        """Names the weights that the server holds, as nobody else, and no other run, names weights it ever held.

        Behind a router: the weights that all servers hold.
        """
        return f"{self._run}.{self._num_loads if server is self.router else server.load_number}"

    def choose(self, session_id: str | None, avoid: Server | None = None) -> Server | None:
        """The session's server, else the one with the fewest requests; None if the caller has to wait for a change.

        A session is bound to a server and its weights, for the sake of the prefixes cached there: once either is gone,
        or while the server is paused, any other is as good. avoid: where the request has just failed; it is chosen if
        there is no other.
        """
        if self.router is not None:
            return self.router if self.serving else None
        server = self._bound_to(session_id)
        if server is None or server is avoid:
            ready = [server for server in self.servers if server.takes_requests]
            server = min(ready, key=lambda s: (s is avoid, len(s.attempts)), default=None)
            if server is not None and session_id is not None:
                self._bind(session_id, server)
        return server

    def begin(self, server: Server, rid: str, scope: asyncio.Timeout) -> Attempt:
        """A call that is about to be sent; whoever sends it says when it has ended."""
        holders = self.serving if server is self.router else [server]
        oldest = min(holders, key=lambda holder: holder.version)
        attempt = Attempt(
            rid=rid,
            version=oldest.version,
            adapter=oldest.adapter,
            was_updated=all(holder.is_updated for holder in holders),
            initial_labels=frozenset(holder.initial_label for holder in holders),
            num_late=max(holder.num_late for holder in holders),
            pauses=self.pauses(server),
            sent_at=asyncio.get_running_loop().time(),
            scope=scope,
        )
        server.attempts.add(attempt)
        return attempt

    def pauses(self, server: Server) -> int:
        """How often the server, or any server behind the router, was paused so far."""
        return self._num_pauses if server is self.router else server.pauses

    def end(self, server: Server, attempt: Attempt) -> None:
        """The call has ended, however it did."""
        server.attempts.discard(attempt)
        if server.is_leaving and not server.attempts:
            self._notify()

    def pause(self, server: Server) -> None:
        if server.state == "serving":
            server.state = "paused"
        server.pauses += 1
        self._num_pauses += 1

    def begin_load(self, server: Server) -> None:
        """From here on the server's weights have no version, until `end_load`."""
        self._num_loads += 1
        server.is_whole, server.load_number = False, self._num_loads

    def end_load(self, server: Server, version: int, adapter: str | None) -> None:
        server.version, server.is_updated, server.is_whole, server.adapter = version, True, True, adapter
        self._note_version()

    def unused_adapters(self, server: Server) -> list[str]:
        """Those that no request will name any more. The newest but one may still be: through a router, behind which
        another server does not hold the newest yet."""
        in_flight = {attempt.adapter for attempt in (self.router or server).attempts}
        return [name for name in server.adapters[:-2] if name not in in_flight]

    def resume(self, server: Server) -> None:
        if server.state == "paused":
            server.state = "serving"
            self._notify()

    def admit(self, server: Server) -> None:
        """The server holds current weights and may serve."""
        if server.state == "fenced":
            server.state, server.reason = "serving", ""
        self._notify()

    def fence(self, server: Server, reason: str) -> bool:
        """Give it no more requests. False if it was fenced before, or is gone."""
        if server.state == "fenced" or server not in self.servers:
            return False
        server.state, server.reason = "fenced", reason
        self._notify()
        return True

    def lose_attempts(self, server: Server, reason: str) -> None:
        """End the requests in flight on a server that will not answer them; their callers send them elsewhere."""
        for attempt in server.attempts:
            attempt.lose(reason)

    def set_leaving(self, server: Server, is_leaving: bool) -> None:
        server.is_leaving = is_leaving
        self._notify()

    def drop(self, server: Server) -> None:
        self.servers.remove(server)
        self._notify()

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

    def _note_version(self) -> None:
        """At each change, whether or not anybody looks: the last server's version outlasts its fencing."""
        self._version = min((server.version for server in self.serving), default=self._version)

    def _notify(self) -> None:
        self._note_version()
        self._changed.set()
        self._changed = asyncio.Event()

    def _bound_to(self, session_id: str | None) -> Server | None:
        if session_id is None or (binding := self._sessions.get(session_id)) is None:
            return None
        server, load_number = binding
        if not server.takes_requests or server.load_number != load_number:
            del self._sessions[session_id]
            return None
        self._sessions.move_to_end(session_id)
        return server

    def _bind(self, session_id: str, server: Server) -> None:
        self._sessions[session_id] = (server, server.load_number)
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
