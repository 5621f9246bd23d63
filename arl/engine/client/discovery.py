"""Keeps the servers of a running engine as its servers file names them, and tells of each server in servers.json.

    servers file --a look each second--> the servers that should serve --compared--> add, remove --> ServerPool
                                                                                                        |
                                         run_dir/servers.json <--each second, if anything has changed---+

What the file says counts once it has been still (see WatchedServers). Servers join and leave side by side. A server
that cannot join is tried again, after 1, 2, 4, ... up to 60 s, and at once when the file changes. So is the removal of
one that may not leave yet, as the last. A change that the file asks for no more is given up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from arl.api.errors import ArlError, ConfigError, EngineClosedError
from arl.api.settings.engines import ClientConfig
from arl.engine.client.server_pool import Server, ServerPool
from arl.engine.client.servers_file import DRAIN_S, NamedServer, ServerRow, ServersState, WatchedServers
from arl.runtime.threads import offload

_LOOK_EVERY_S = 1.0
_TELL_EVERY_S = 5.0
"""How often servers.json is written while only the numbers of requests change."""
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 1.0, 60.0

logger = logging.getLogger(__name__)


class NamesServers(Protocol):
    """Says which servers there should be; WatchedServers and ServerProcesses do."""

    @property
    def named(self) -> Mapping[str, NamedServer] | None:
        """By address; None as long as it is not known."""
        ...

    @property
    def settled_ns(self) -> int: ...

    @property
    def problem(self) -> str: ...

    def look(self) -> bool:
        """Whether that has changed since the last look."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterFiles:
    """The files through which servers join and leave a run."""

    run_dir: Path | None
    """Where servers.json is written; None: nowhere."""
    named: Path | None = None
    """The servers file. None: the servers stay those of the start, or are those of `source`."""
    source: NamesServers | None = None
    """Names the servers instead of a file: where arl has started them, on a cluster."""
    is_users: bool = False
    """Somebody else writes it: it has to be there."""
    needs_all: bool = True
    """Each of the first servers has to join at the start; else engine.min_servers of them are enough."""
    mirrors: dict[str, str] | None = None
    """Server -> its mirror, for the transport. The file's are added to it; None if the transport has no mirrors."""


class Removal(Protocol):
    def __call__(self, address: str, *, drain_timeout_s: float) -> Awaitable[None]: ...


@dataclass(slots=True, eq=False)
class _Failure:
    """A server that could not join, or may not leave."""

    why: str
    since: float
    """A time of the event loop's clock, like all times here."""
    backoff_s: float
    next_try: float


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    task: asyncio.Task[None]
    joins: bool


class Roster:
    """add, remove: as in RemoteInferenceEngine; called for the servers that the file has more or less than `pool`."""

    def __init__(
        self,
        pool: ServerPool,
        config: ClientConfig,
        files: RosterFiles,
        add: Callable[[str], Awaitable[None]],
        remove: Removal,
    ) -> None:
        self._pool = pool
        self._files = files
        self._add = add
        self._remove = remove
        self._min_servers = config.min_servers
        self._watched: NamesServers | None = files.source
        self._names = str(files.named or "arl")
        if files.named:
            self._watched = WatchedServers(files.named, is_needed=files.is_users)
        self._changes: dict[str, _Change] = {}
        self._failures: dict[str, _Failure] = {}
        self._num_failures = 0
        self._problem = self._unwritable = ""
        self._told: tuple[object, float] = (None, 0.0)
        """The state of changes when servers.json was last written, and the time."""

    async def run(self) -> None:
        """Look, compare and tell, for ever."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                if self._watched is not None:
                    if await offload(self._watched.look):
                        self._begin_anew(self._watched)
                    if (problem := self._watched.problem) and problem != self._problem:
                        what = "the servers stay as they are until that is mended"
                        logger.warning("%s is not followed: %s; %s", self._files.named, problem, what)
                    self._problem = problem
                    await self._compare(self._watched, tasks)
                await self._write_state()
                await asyncio.sleep(_LOOK_EVERY_S)

    def _begin_anew(self, watched: NamesServers) -> None:
        """The file has changed: what failed before is tried at once."""
        self._failures.clear()
        if self._files.mirrors is not None and watched.named is not None:
            self._files.mirrors.update({one.address: one.mirror for one in watched.named.values() if one.mirror})

    async def _compare(self, watched: NamesServers, tasks: asyncio.TaskGroup) -> None:
        """Begin what the file asks for and has not begun, and give up what it asks for no more."""
        if watched.named is None:
            return
        wanted = {address: one for address, one in watched.named.items() if one.drain_s is None}
        for address, change in [*self._changes.items()]:
            if change.joins != (address in wanted) and not change.task.cancelling():
                change.task.cancel()  # once: a second time would interrupt what it still has to set right
        there = {server.address for server in self._pool.servers}
        joining = [address for address in wanted if address not in there and self._is_due(address)]
        leaving = [address for address in there - wanted.keys() if self._is_due(address)]
        for address in self._failures.keys() - wanted.keys() - there:
            del self._failures[address]
        for address in joining:
            await self._begin(address, self._join(wanted[address]), tasks, joins=True)
        for address in leaving:
            drain_s = one.drain_s if (one := watched.named.get(address)) else None
            drain_s = DRAIN_S if drain_s is None else drain_s
            await self._begin(address, self._leave(address, drain_s), tasks, joins=False)

    def _is_due(self, address: str) -> bool:
        failure = self._failures.get(address)
        return address not in self._changes and (failure is None or failure.next_try <= _now())

    async def _begin(
        self, address: str, change: Coroutine[Any, Any, None], tasks: asyncio.TaskGroup, *, joins: bool
    ) -> None:
        task = tasks.create_task(self._tried(address, change))
        self._changes[address] = _Change(task, joins)
        task.add_done_callback(lambda _: self._changes.pop(address))
        await asyncio.sleep(0)  # hundreds that begin in one turn of the event loop would block it

    async def _tried(self, address: str, change: Coroutine[Any, Any, None]) -> None:
        try:
            await change
        except EngineClosedError:
            return
        except ArlError as error:
            self._note_failure(address, str(error))
        else:
            self._failures.pop(address, None)

    async def _join(self, one: NamedServer) -> None:
        if one.mirror and self._files.mirrors is None:
            raise ConfigError(
                f"{self._files.named} names a mirror of {one.address}; only weights.transport=delta has any"
            )
        await self._add(one.address)
        logger.info("%s joined: %s names it", one.address, self._names)

    async def _leave(self, address: str, drain_timeout_s: float) -> None:
        await self._remove(address, drain_timeout_s=drain_timeout_s)
        logger.info("%s left: %s does not name it any more", address, self._names)

    def _note_failure(self, address: str, why: str) -> None:
        now, failure = _now(), self._failures.get(address)
        self._num_failures += 1
        if failure is None:
            self._failures[address] = _Failure(why, now, _FIRST_BACKOFF_S, now + _FIRST_BACKOFF_S)
            what = "cannot leave yet" if self._pool.at(address) else "cannot join"
            logger.warning("%s %s, and is tried again: %s", address, what, why)
        else:
            failure.backoff_s = min(2 * failure.backoff_s, _MAX_BACKOFF_S)
            failure.why, failure.next_try = why, now + failure.backoff_s

    async def _write_state(self) -> None:
        if (run_dir := self._files.run_dir) is None:
            return
        watched, now = self._watched, _now()
        news = (self._pool.num_changes, self._num_failures, watched and (watched.settled_ns, watched.problem))
        if news == self._told[0] and now - self._told[1] < _TELL_EVERY_S:
            return
        state = self._state()
        try:
            await offload(partial(state.write, run_dir))
        except OSError as error:
            if str(error) != self._unwritable:
                logger.warning("the state of the servers cannot be written: %s", error)
            self._unwritable = str(error)
        else:
            self._unwritable, self._told = "", (news, now)

    def _state(self) -> ServersState:
        watched, epoch = self._watched, time.time() - _now()
        rows = [self._row(server, epoch) for server in self._pool.servers]
        there = {row.address for row in rows}
        rows += [
            ServerRow(address=address, state="absent", since=epoch + failure.since, why=failure.why)
            for address, failure in self._failures.items()
            if address not in there
        ]
        return ServersState(
            at=time.time(),
            file=str(self._files.named.absolute()) if self._files.named else None,
            is_users=self._files.is_users,
            min_servers=self._min_servers,
            settled_ns=watched.settled_ns if watched else 0,
            problem=watched.problem if watched else "",
            servers=tuple(rows),
        )

    def _row(self, server: Server, epoch: float) -> ServerRow:
        failure = self._failures.get(server.address)
        return ServerRow(
            address=server.address,
            state=server.state,
            version=server.version,
            requests=len(server.attempts),
            since=epoch + server.since,
            why="" if server.is_in_service else server.why,
            stays=failure.why if failure else "",
            mirror=(self._files.mirrors or {}).get(server.address),
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
