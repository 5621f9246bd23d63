"""Which weights each server holds, and the states that a server goes through.

`ServerPool` is the only writer of a `Server`; every other class asks it, by these calls.

| from | call | to | wakes |
|---|---|---|---|
| (not in the pool) | `join` | joining | |
| joining | `admit`: it holds the current weights | serving | requests without a server |
| serving, draining | `pause` | paused | |
| paused | `sleep`: it has let go of its memory | asleep | |
| asleep | `wake` | paused | |
| paused | `begin_load`: from here on its weights have no version | loading | |
| loading | `end_load` | paused | |
| paused | `resume` | serving | requests without a server |
| any in service | `fence`: it failed, or missed an update | fenced | requests that wait for it |
| fenced | `admit`: its probe has brought it up to date | serving | requests and updates without a server |
| serving | `leave`: it ends what it runs and gets nothing new | draining | the removal |
| draining | `stay`: its removal was given up | serving | requests without a server |
| any | `drop` | gone | other removals of it |

A server that was told to leave in another state drains from where it would serve. Joining, fenced and gone servers are
out of service, all others in service. Those that are out keep their state while a task pauses, loads and resumes them
to bring them up to date. `turn_to` changes a server's weights (to an adapter loaded beside what runs) and not its
state. A load or a sleep that is begun, ended or disturbed out of turn raises RuntimeError; any other call leaves the
state as it is.

All methods belong to one event loop. A wake ends the wait `changed`, and calls `on_change`.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from arl.api.events import (
    NOWHERE,
    Events,
    ServerFenced,
    ServerJoined,
    ServerLeft,
    ServerLoaded,
    ServerPaused,
    ServerResumed,
    ServerReturned,
    ServerSlept,
    ServerWoke,
    ServerWorked,
)
from arl.api.types import new_id
from arl.engine.client.server_client import Answer, Greeting, Holding, ServerClient
from arl.runtime.clocks import AwakeClock


class ServerState(StrEnum):
    JOINING = "joining"
    SERVING = "serving"
    PAUSED = "paused"
    ASLEEP = "asleep"
    LOADING = "loading"
    FENCED = "fenced"
    DRAINING = "draining"
    GONE = "gone"


_JOINING, _SERVING, _PAUSED, _ASLEEP, _LOADING, _FENCED, _DRAINING, _GONE = ServerState
_IN_SERVICE = frozenset((_SERVING, _PAUSED, _ASLEEP, _LOADING, _DRAINING))

_MAX_REPORTED = 20
_MAX_DIGITS = 19

_MOVES: Mapping[str, Mapping[ServerState, ServerState]] = {
    "admit": {_JOINING: _SERVING, _FENCED: _SERVING},
    "pause": {_SERVING: _PAUSED, _DRAINING: _PAUSED},
    "sleep": {_PAUSED: _ASLEEP},
    "wake": {_ASLEEP: _PAUSED},
    "begin_load": {_PAUSED: _LOADING},
    "end_load": {_LOADING: _PAUSED},
    "turn_to": {},
    "resume": {_PAUSED: _SERVING},
    "fence": dict.fromkeys(_IN_SERVICE, _FENCED),
    "leave": {_SERVING: _DRAINING},
    "stay": {_DRAINING: _SERVING},
    "drop": dict.fromkeys(ServerState, _GONE),
}
"""The states that each call changes, and to what."""

_ILLEGAL: Mapping[str, frozenset[ServerState]] = {
    "begin_load": _IN_SERVICE - {_PAUSED},
    "end_load": _IN_SERVICE - {_LOADING},
    "sleep": _IN_SERVICE - {_PAUSED},
    "wake": _IN_SERVICE - {_ASLEEP},
    **dict.fromkeys(("admit", "pause", "turn_to", "resume"), frozenset((_ASLEEP, _LOADING))),
}
"""The states in which a call is a bug."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldWeights:
    """The weights that a server holds, as far as this engine knows."""

    version: int
    adapter: str | None = None
    """The adapter that makes them this version; None if the server's own weights do."""
    is_ours: bool = False
    """This engine loaded them."""
    is_whole: bool = True
    """The last load, if any, was complete. Otherwise the weights have no version."""
    load_number: int = 0
    """The number, among all loads of the pool, of the load that gave the server these weights."""


@dataclass(slots=True, eq=False, kw_only=True)
class Attempt:
    """One call of generate in flight, and what was true of its server when it was sent."""

    rid: str
    weights: HeldWeights
    initial_label: str
    """The server's label for weights that came from elsewhere."""
    num_late: int
    """Most tokens that an update may label too new (Greeting.num_late)."""
    pauses: int
    """How often the server had been paused."""
    sent_at: float
    scope: asyncio.Timeout
    """The call's timeout, which `lose` ends early."""
    lost: str | None = None
    limit_s: float = math.inf
    """How long it may take. Only Patience writes this and the fields below."""
    due: float = math.inf
    """When it takes too long, by the event loop's time."""
    is_late: bool = False
    """It got a second limit because its server had been paused. That limit counts."""
    is_cut: bool = False
    """It took too long, and the server was told to return what it has."""

    def lose(self, reason: str) -> None:
        """End the call; its caller sends it elsewhere."""
        if self.lost is None and not self.scope.expired():
            self.lost = reason
            self.scope.reschedule(_now())

    def foreign_label(self, answer: Answer, newest: int) -> str | None:
        """A label which shows that the server was restarted, or given weights, by somebody else; None without one.

        newest: the newest version that this engine has begun to send to any server.
        """
        held = self.weights
        for label in [label for label, _, _ in answer.spans] or [answer.label] * bool(answer.label):
            is_first = label == self.initial_label and (held.adapter is not None or not held.is_ours)
            version = None if held.adapter is not None else version_of(label)
            if not is_first and (version is None or not held.version <= version <= newest):
                return label
        return None

    def versions(self, answer: Answer) -> list[int]:
        """The policy version of each of the answer's tokens; where that is uncertain, the oldest that it can be."""
        held = self.weights
        versions = [held.version] * len(answer.output_ids)
        for label, start, stop in answer.spans:
            is_first = not held.is_ours and label == self.initial_label
            version = None if is_first else version_of(label)
            end = min(stop, len(versions))
            versions[start:end] = [held.version if version is None else version] * (end - start)
        before = current = held.version
        since = 0
        for index, version in enumerate(versions if self.num_late else ()):
            if version != current:
                before, current, since = current, version, index
            if index - since < self.num_late:
                versions[index] = before
        return versions


def version_of(label: str) -> int | None:
    """The version that a server's label stands for; None if it is not a version."""
    return int(label) if label.isdecimal() and len(label) < _MAX_DIGITS else None


@dataclass(slots=True, eq=False)
class Server:
    """One server. `ServerPool` alone changes its state and its weights."""

    client: ServerClient
    weights: HeldWeights
    number: int = 0
    """Among all that ever joined the pool."""
    state: ServerState = _JOINING
    greeting: Greeting | None = None
    since: float = 0.0
    reason: str = ""
    probed: str = ""
    """Why its last probe did not bring it back."""
    is_leaving: bool = False
    """It gets no new requests and will be dropped."""
    num_failures: int = 0
    backoff_s: float = 0.0
    pauses: int = 0
    """How often it was paused so far."""
    loading_since: float = 0.0
    """When its last load began, and below when it was last fenced, by the event loop's clock."""
    fenced_at: float = 0.0
    adapters: list[str] = field(default_factory=list[str])
    """All adapters that this engine began to load and did not unload, the newest last; some may not be there."""
    heard_at: float = -math.inf
    num_coming: int = 0
    """Requests that left the line for it, but are not sent yet."""
    attempts: set[Attempt] = field(default_factory=set[Attempt])
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the task that pauses, loads and resumes it."""

    @property
    def address(self) -> str:
        return self.client.address

    @property
    def load(self) -> int:
        return len(self.attempts) + self.num_coming

    @property
    def version(self) -> int:
        return self.weights.version

    @property
    def initial_label(self) -> str:
        """The server's label for the weights that it started with."""
        return self.greeting.label if self.greeting else "default"

    @property
    def is_in_service(self) -> bool:
        """It answers requests now, or will as soon as it is resumed."""
        return self.state in _IN_SERVICE

    @property
    def is_paused(self) -> bool:
        """It ends no request until it is resumed."""
        return self.state in (_PAUSED, _ASLEEP, _LOADING)

    @property
    def why(self) -> str:
        """Why it is out of service, and stays so."""
        return f"{self.reason}; now: {self.probed}" if self.probed and self.probed != self.reason else self.reason

    def holds(self, version: int, told: Holding) -> bool:
        """Whether it holds this version. Its label proves nothing: a broken load or another run may have set it."""
        return self.weights.is_whole and self.version == version and self.keeps(told)

    def keeps(self, told: Holding) -> bool:
        """Whether it reports the weights that this engine gave it. If not, it was restarted, or given others."""
        if self.weights.adapter is None:
            return self.weights.is_ours and told.label == str(self.version)
        return told.label == self.initial_label and self.weights.adapter in told.adapters


@dataclass(slots=True, eq=False)
class Expectation:
    """Servers that were taken out together, and will serve again soon: they are paused, or about to be."""

    servers: frozenset[Server]
    is_outage: bool
    """All servers were fenced instead; some may not come back."""
    began: float = math.inf


class ServerPool:
    """The servers, the requests that they run, and the version that all of those in service hold."""

    def __init__(self, version: int, events: Events = NOWHERE) -> None:
        self._events = events
        self.num_generated: int | None = None
        """Tokens that servers say they have generated, since the first time that each told; None before any did."""
        self._told: dict[str, int] = {}
        """Address -> the tokens generated since that server's process began."""
        self.is_held = False
        """All generation is paused: no server gets requests, not even one that serves."""
        self.clock = AwakeClock()
        """By which requests have deadlines."""
        self.is_asleep = False
        """The trainer has the devices: no server takes memory or serves until the next update."""
        self.newest_sent = version
        """The newest version that any server was told to load. A token of a newer version is not from this engine."""
        self.servers: list[Server] = []
        self.expectation = Expectation(frozenset(), is_outage=False)
        self._ready: list[Server] | None = None
        self._expected: list[Server] | None = None
        """Looked up once after each change; None until then."""
        self.num_changes = 0
        """Counts changes of states and versions: while it is the same, so are they."""
        self._numbers = itertools.count()
        self.on_change: Callable[[], None] = lambda: None
        """Called whenever a server changes its state, and whenever a request ends."""
        self._num_loads = 0
        self._version = version
        self._run = new_id()[:12]
        self._changed = asyncio.Event()

    @property
    def version(self) -> int:
        """The newest version that every server in service holds. While none is in service, it stays as it was."""
        return self._version

    @property
    def ready(self) -> list[Server]:
        if self._ready is None:
            self._ready = [server for server in self.servers if server.state is _SERVING]
        return self._ready

    @property
    def expected(self) -> list[Server]:
        """The servers that are out, but will serve soon."""
        if self._expected is None:
            soon, is_outage = self.expectation.servers, self.expectation.is_outage
            out = [one for one in self.servers if (one.state is _FENCED if is_outage else one.is_paused)]
            self._expected = [one for one in out if one in soon and not one.is_leaving]
        return self._expected

    @property
    def in_service(self) -> list[Server]:
        return [server for server in self.servers if server.state in _IN_SERVICE]

    def at(self, address: str) -> Server | None:
        return next((server for server in self.servers if server.address == address), None)

    def report(self) -> str:
        """For errors: the servers that are out of service, and why; only the first ones if there are many."""
        out = [f"{s.address} is {s.state} ({s.why})" for s in self.servers if not s.is_in_service]
        more = [f"{len(out) - _MAX_REPORTED} more are not named here"] if len(out) > _MAX_REPORTED else []
        return "; ".join([*out[:_MAX_REPORTED], *more]) or "every server serves"

    async def changed(self) -> None:
        await self._changed.wait()

    def wake_all(self) -> None:
        """Let every waiting task look again."""
        self._changed.set()
        self._changed = asyncio.Event()
        self.on_change()

    # Requests

    def cache_key(self, server: Server) -> str:
        """A name for the weights that the server holds. No other load, and no other run, has the same."""
        return f"{self._run}.{server.weights.load_number}"

    def begin(self, server: Server, rid: str, scope: asyncio.Timeout) -> Attempt:
        """A call that is about to be sent; the sender calls `end`."""
        attempt = Attempt(
            rid=rid,
            weights=server.weights,
            initial_label=server.initial_label,
            num_late=server.greeting.num_late if server.greeting else 0,
            pauses=server.pauses,
            sent_at=_now(),
            scope=scope,
        )
        server.attempts.add(attempt)
        return attempt

    def end(self, server: Server, attempt: Attempt) -> None:
        server.attempts.discard(attempt)
        self.on_change()
        if server.is_leaving and not server.attempts:
            self.wake_all()

    def lose_attempts(self, server: Server, reason: str) -> None:
        """End the requests in flight on a server that will not answer them; their callers send them elsewhere."""
        for attempt in server.attempts:
            self.clock.ended(attempt.scope)
            attempt.lose(reason)

    # Transitions

    def join(self, client: ServerClient) -> Server:
        weights, number = HeldWeights(version=self._version), next(self._numbers)
        server = Server(client, weights, number=number, since=_now(), reason="it is being added")
        self.servers.append(server)
        self._note_change()
        self._events.emit(ServerJoined(server=server.address))
        return server

    def admit(self, server: Server) -> None:
        if server.state is _FENCED:
            self._events.emit(ServerReturned(server=server.address, out_s=_now() - server.fenced_at))
        self._move(server, "admit")

    def pause(self, server: Server) -> None:
        self._move(server, "pause")
        self._events.emit(ServerPaused(server=server.address))
        server.pauses += 1
        if server in self.expectation.servers:
            self.expectation.began = min(self.expectation.began, _now())

    def note_work(self, worked: ServerWorked) -> None:
        """Embedded servers tell this whenever they are paused. One that tells fewer tokens than before is a new
        process: what the old one generated after its last pause is not known.
        """
        told = sum(int(sums.decoded + sums.begun) for sums in worked.iterations)
        before = self._told.get(worked.server, told)
        self.num_generated = (self.num_generated or 0) + (told - before if told >= before else told)
        self._told[worked.server] = told
        self._events.emit(worked)

    def expect(self, servers: Iterable[Server], *, is_outage: bool = False) -> None:
        """Note that these servers are about to be paused and resumed together. Forgets those of the last time."""
        self.expectation = Expectation(frozenset(servers), is_outage=is_outage)
        self._note_change()

    def fall_asleep(self) -> None:
        """From now on servers sleep, each as it is told to."""
        self.is_asleep = True
        self.clock.stop()

    def sleep(self, server: Server, seconds: float) -> None:
        self._move(server, "sleep")
        self._events.emit(ServerSlept(server=server.address, seconds=seconds))

    def wake(self, server: Server, seconds: float) -> None:
        self._move(server, "wake")
        self._events.emit(ServerWoke(server=server.address, seconds=seconds))

    def wake_up(self) -> None:
        """From now on servers may wake, each as it is told to."""
        self.is_asleep = False
        self.clock.go()
        self.wake_all()

    def begin_load(self, server: Server) -> None:
        self._move(server, "begin_load")
        self._num_loads += 1
        server.weights = replace(server.weights, is_whole=False, load_number=self._num_loads)
        server.loading_since = _now()

    def end_load(self, server: Server, version: int) -> None:
        self._move(server, "end_load")
        self._give(server, version, None, server.weights.load_number)
        seconds = _now() - server.loading_since
        self._events.emit(ServerLoaded(server=server.address, version=version, seconds=seconds))

    def turn_to(self, server: Server, version: int, adapter: str) -> None:
        """Let requests name this adapter, which the server has, from now on. No request sees half of the change."""
        self._move(server, "turn_to")
        self._num_loads += 1
        self._give(server, version, adapter, self._num_loads)
        self._events.emit(ServerLoaded(server=server.address, version=version, seconds=0.0))

    def resume(self, server: Server) -> None:
        self._move(server, "resume")
        self._events.emit(ServerResumed(server=server.address))

    def fence(self, server: Server, reason: str) -> bool:
        """Give it no more requests. False if it was out of service before."""
        was_in_service = server.is_in_service
        if was_in_service:
            server.reason, server.probed, server.fenced_at = reason, "", _now()
            self._events.emit(ServerFenced(server=server.address, reason=reason))
        self._move(server, "fence")
        if was_in_service and not self.in_service:  # failed together, as with a network: may return together
            self.expect(self.servers, is_outage=True)
        return was_in_service

    def leave(self, server: Server) -> None:
        server.is_leaving = True
        self._move(server, "leave")
        self._note_change()

    def stay(self, server: Server) -> None:
        server.is_leaving = False
        self._move(server, "stay")
        self._note_change()

    def drop(self, server: Server) -> None:
        if server in self.servers:
            self.servers.remove(server)
            self._events.emit(ServerLeft(server=server.address))
        self._move(server, "drop")

    def note_answer(self, server: Server) -> None:
        server.num_failures, server.backoff_s, server.heard_at = 0, 0.0, _now()

    def _move(self, server: Server, call: str) -> None:
        before = server.state
        if before in _ILLEGAL.get(call, ()):
            raise RuntimeError(f"{server.address} is {before}: {call} is out of turn")
        after = _MOVES[call].get(before, before)
        server.state = _DRAINING if after is _SERVING and server.is_leaving else after
        if server.state is before:
            return
        server.since = _now()
        self._note_change()
        if not server.is_paused:
            self.wake_all()

    def _give(self, server: Server, version: int, adapter: str | None, load_number: int) -> None:
        server.weights = HeldWeights(version=version, adapter=adapter, is_ours=True, load_number=load_number)
        self._note_change()

    def _note_change(self) -> None:
        """Called at each change of a server, but for its requests. The version outlasts the fencing of the last one."""
        self.num_changes += 1
        self._ready = self._expected = None
        self._version = min((server.weights.version for server in self.in_service), default=self._version)


def _now() -> float:
    return asyncio.get_running_loop().time()
