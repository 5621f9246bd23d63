"""Servers join and leave: those of the start, those added to a run and removed from it, and those of a servers file.

    servers file --a look each second--> the servers that should serve --compared--> add, remove --> ServerPool
                                                                                                        |
                                         run_dir/servers.json <--each second, if anything has changed---+

A server serves once it has been greeted, fits the others and holds the current weights. It leaves without requests.

What the file says counts once it has been still (see WatchedServers). Servers join and leave side by side. A server
that cannot join is tried again, after 1, 2, 4, ... up to 60 s, and at once when the file changes. So is the removal of
one that may not leave yet, as the last. A change that the file asks for no more is given up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from arl.api.errors import ArlError, ConfigError, ServerError, ServerFailedError, TransportError
from arl.api.settings.engines import ClientConfig
from arl.engine.client.health import Upkeep, leave_running
from arl.engine.client.server_client import Greeting, ServerClient, greet
from arl.engine.client.server_pool import Server, ServerPool, ServerState
from arl.engine.client.server_processes import ServerProcesses
from arl.engine.client.servers_file import DRAIN_S, NamedServer, ServerRow, ServersState, WatchedServers
from arl.runtime.threads import offload

_GREETING_PAUSES_S = (0.0, 0.2, 1.0)
"""How long to wait before each greeting of a server at the start."""
_STRAGGLERS_S = 2.0
"""How long the start waits for more servers once enough of them have answered, if it does not need all."""
_HANDOVER_TIMEOUT_S = 3.0
"""How long a leaving server may take to return aborted requests, and to unload its adapters."""
_MAX_TOLD = 8
_LOOK_EVERY_S = 1.0
_TELL_EVERY_S = 5.0
"""How often servers.json is written while only the numbers of requests change."""
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 1.0, 60.0

logger = logging.getLogger(__name__)


class Membership:
    """Adds servers to `pool` and removes them; `upkeep` brings them to the current weights."""

    def __init__(
        self, pool: ServerPool, config: ClientConfig, upkeep: Upkeep, new_client: Callable[[str], ServerClient]
    ) -> None:
        self._pool = pool
        self._config = config
        self._upkeep = upkeep
        self._new_client = new_client

    async def start(self, addresses: Sequence[str], least: int | None = None) -> None:
        """Add the first servers. Raises ServerError naming those that do not answer, or do not fit together.

        least: so many are enough. Those that cannot join yet are left out, with a warning. None: all have to join.
        """
        clients = [self._new_client(address) for address in addresses]
        if least is not None and len(clients) < least:
            raise ServerError(
                f"the run needs {least} servers (engine.min_servers), and its servers file has {len(clients)}"
            )
        answers = await _greeted(clients, len(clients) if least is None else least)
        missing = {client: error for client, error in answers.items() if isinstance(error, ServerError)}
        if missing and least is None:
            raise ServerError(f"no inference server answers at {_told(missing)}. Start it, or correct engine.addresses")
        for client, answer in answers.items():
            if isinstance(answer, Greeting):
                server = self._pool.join(client)
                try:
                    self._upkeep.welcome(server, answer)
                except ServerError as error:
                    self._pool.drop(server)
                    if least is None:
                        raise
                    missing[client] = error
                else:
                    self._pool.admit(server)
        for client in missing:
            await client.aclose()
        if least is not None and missing:
            what = f"{len(missing)} of {len(clients)} servers cannot join: {_told(missing)}"
            if len(self._pool.servers) < least:
                raise ServerError(f"{what}. The run needs {least} of them (engine.min_servers)")
            logger.warning("%s", what)

    async def add(self, address: str) -> None:
        """Bring a new server to the current weights, then let it serve. Raises ServerError, and leaves it out.

        While the others sleep it does, too, and its time limit stands still.
        """
        if self._pool.at(address) is not None:
            raise ConfigError(f"{address} is already one of the servers")
        client, clock = self._new_client(address), self._pool.clock
        server = self._pool.join(client)
        limit = clock.limit(clock.now() + self._config.update_timeout_s)
        try:
            async with limit:
                self._upkeep.welcome(server, await greet(client, sets_going=not self._pool.is_asleep))
                while not await self._upkeep.restore(server):  # newer weights came meanwhile, or all sleep
                    while self._pool.is_asleep:
                        await self._pool.changed()
        except TimeoutError:
            if not limit.expired():
                raise ServerError(f"{address} does not answer") from None
            raise ServerError(
                f"{address} was not ready within {self._config.update_timeout_s:g} s (engine.update_timeout_s)"
            ) from None
        except TransportError as error:
            raise ServerError(f"{address} did not get the current weights: {error}") from error
        finally:
            clock.ended(limit)
            if server.state is ServerState.JOINING:
                self._pool.drop(server)
                if server.pauses or self._pool.is_asleep:
                    await leave_running(server)
                await client.aclose()

    async def remove(self, address: str, drain_timeout_s: float) -> None:
        """Let its requests end, give those that do not end in time to other servers, and drop it."""
        if (server := self._pool.at(address)) is None:
            known = ", ".join(server.address for server in self._pool.servers)
            raise ConfigError(f"{address} is not one of the servers: {known}")
        others = [other for other in self._pool.servers if other is not server and not other.is_leaving]
        if not others or (server.is_in_service and not any(other.is_in_service for other in others)):
            raise ServerError(f"{address} is the last server that serves; add another before removing it")
        if len(others) < self._config.min_servers:
            least = f"engine.min_servers is {self._config.min_servers}"
            raise ServerError(f"{least}, and without {address} there are {len(others)}; add another before")
        self._pool.leave(server)
        try:
            if not await self._drained(server, drain_timeout_s):
                async with asyncio.TaskGroup() as group:
                    for attempt in server.attempts:
                        group.create_task(self._upkeep.abort_now(server, attempt.rid))
                if not await self._drained(server, _HANDOVER_TIMEOUT_S):
                    self._pool.lose_attempts(server, f"{address} was removed")
            with suppress(TimeoutError):
                async with asyncio.timeout(_HANDOVER_TIMEOUT_S):
                    await self._upkeep.updates.unload(server, [*server.adapters])
            while server.state is ServerState.ASLEEP:  # left running, it would take memory that the trainer has
                await self._pool.changed()
        except BaseException:  # mostly a cancellation: the server goes on as before
            self._pool.stay(server)
            raise
        self._upkeep.forget(server)
        is_idle = server.state is ServerState.DRAINING
        self._pool.drop(server)
        try:
            if not is_idle:
                await leave_running(server)
        finally:
            await server.client.aclose()

    async def _drained(self, server: Server, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                while server.attempts:
                    await self._pool.changed()
        except TimeoutError:
            return False
        return True


async def _greeted(clients: Sequence[ServerClient], least: int) -> dict[ServerClient, Greeting | ServerError]:
    """The answers that arrive soon after `least` servers have greeted. The others, if few, do not hold up the start."""
    async with asyncio.TaskGroup() as group:
        calls = {client: group.create_task(_greet(client)) for client in clients}
        waiting, num_greeted = set(calls.values()), 0
        while waiting and num_greeted < least:
            answered, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            num_greeted += sum(isinstance(call.result(), Greeting) for call in answered)
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=_STRAGGLERS_S)
            for call in late:
                call.cancel()
    return {
        client: ServerFailedError(f"{client.address} has not answered yet") if call.cancelled() else call.result()
        for client, call in calls.items()
    }


async def _greet(client: ServerClient) -> Greeting | ServerError:
    """Greets again if a request failed, so that one bad answer among many servers does not stop a run's start."""
    failure = ServerError("")
    for pause_s in _GREETING_PAUSES_S:
        await asyncio.sleep(pause_s)
        try:
            return await greet(client)
        except ServerFailedError as error:
            failure = error
        except ServerError as error:
            return error
    return failure


def _told(missing: Mapping[ServerClient, ServerError]) -> str:
    told = [f"{client.address} ({error})" for client, error in missing.items()]
    more = len(told) - _MAX_TOLD
    return "; ".join(told[:_MAX_TOLD]) + (f"; and {more} more" if more > 0 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterFiles:
    """The files through which servers join and leave a run."""

    run_dir: Path | None
    named: Path | None = None
    """The servers file. None: the servers stay those of the start, or are those of `source`."""
    source: ServerProcesses | None = None
    """Names the servers instead of a file: where arl has started them, on a cluster."""
    is_users: bool = False
    """Somebody else writes it: it has to be there."""
    needs_all: bool = True
    """Each of the first servers has to join at the start; else engine.min_servers of them are enough."""
    mirrors: dict[str, str] | None = None
    """Server -> its mirror, for the transport. The file's are added to it; None if the transport has no mirrors."""


@dataclass(slots=True, eq=False)
class _Failure:
    why: str
    since: float
    """A time of the event loop's clock, like all times here."""
    backoff_s: float
    next_try: float


class Roster:
    """Has `membership` add and remove the servers that the file has more or less than `pool`."""

    def __init__(self, pool: ServerPool, config: ClientConfig, files: RosterFiles, membership: Membership) -> None:
        self._pool = pool
        self._files = files
        self._membership = membership
        self._min_servers = config.min_servers
        self._watched: WatchedServers | ServerProcesses | None = files.source
        self._names = str(files.named or "arl")
        if files.named:
            self._watched = WatchedServers(files.named, is_needed=files.is_users)
        self._changes: dict[str, asyncio.Task[None]] = {}
        self._joining: set[str] = set()
        """Of the changes, those that add a server."""
        self._failures: dict[str, _Failure] = {}
        self._num_failures = 0
        self._problem = self._unwritable = ""
        self._told: tuple[object, float] = (None, 0.0)

    async def run(self) -> None:
        """Look, compare and tell, for ever."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                if self._watched is not None:
                    if await offload(self._watched.look):
                        self._failures.clear()  # what failed before is tried at once
                        if self._files.mirrors is not None:
                            named = (self._watched.named or {}).values()
                            self._files.mirrors.update((one.address, one.mirror) for one in named if one.mirror)
                    if (problem := self._watched.problem) and problem != self._problem:
                        what = "the servers stay as they are until that is mended"
                        logger.warning("%s is not followed: %s; %s", self._files.named, problem, what)
                    self._problem = problem
                    await self._compare(self._watched, tasks)
                await self._write_state()
                await asyncio.sleep(_LOOK_EVERY_S)

    async def _compare(self, watched: WatchedServers | ServerProcesses, tasks: asyncio.TaskGroup) -> None:
        """Begin what the file asks for and has not begun, and give up what it asks for no more."""
        if watched.named is None:
            return
        wanted = {address: one for address, one in watched.named.items() if one.drain_s is None}
        for address, task in [*self._changes.items()]:
            if (address in self._joining) != (address in wanted) and not task.cancelling():
                task.cancel()  # once: a second time would interrupt what it still has to set right
        there = {server.address for server in self._pool.servers}
        joining = [address for address in wanted if address not in there and self._is_due(address)]
        leaving = [address for address in there - wanted.keys() if self._is_due(address)]
        for address in self._failures.keys() - wanted.keys() - there:
            del self._failures[address]
        self._joining.update(joining)
        for address in (*joining, *leaving):
            task = tasks.create_task(self._change(address, watched.named.get(address)))
            task.add_done_callback(partial(self._forget_change, address))
            self._changes[address] = task
            await asyncio.sleep(0)  # hundreds that begin in one turn of the event loop would block it

    def _is_due(self, address: str) -> bool:
        failure = self._failures.get(address)
        return address not in self._changes and (failure is None or failure.next_try <= _now())

    def _forget_change(self, address: str, _: object) -> None:
        del self._changes[address]
        self._joining.discard(address)

    async def _change(self, address: str, named: NamedServer | None) -> None:
        """Let the server join, or leave if the file names it no more, or as one that is to leave."""
        try:
            if named is None or named.drain_s is not None:
                await self._membership.remove(address, DRAIN_S if named is None else named.drain_s or 0.0)
                logger.info("%s left: %s does not name it any more", address, self._names)
            elif named.mirror and self._files.mirrors is None:
                raise ConfigError(
                    f"{self._files.named} names a mirror of {address}; only weights.transport=delta has any"
                )
            else:
                await self._membership.add(address)
                logger.info("%s joined: %s names it", address, self._names)
        except ArlError as error:
            self._note_failure(address, str(error))
        else:
            self._failures.pop(address, None)

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
        rows = [
            ServerRow(
                address=server.address,
                state=server.state,
                version=server.version,
                requests=len(server.attempts),
                since=epoch + server.since,
                why="" if server.is_in_service else server.why,
                stays=self._failures[server.address].why if server.address in self._failures else "",
                mirror=(self._files.mirrors or {}).get(server.address),
            )
            for server in self._pool.servers
        ]
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


def _now() -> float:
    return asyncio.get_running_loop().time()
