"""DistributedTransport: tensors go straight from the trainer's memory into the servers', and no file is written.

    prepare (the server generates):  a process group with this server, if there is none that works
    load (the server is paused):     begin, then for each bucket: receive over HTTP | broadcast in a thread, then end

With servers_per_group above 1, servers share a group and load in step (teams.py). A group in which anything failed is
never used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, Protocol, TypeVar, TypeVarTuple, runtime_checkable

from yarl import URL

from arl.api.engine import (
    InferenceEngine,
    Snapshot,
    TensorSpec,
    UpdateStats,
    WeightGroup,
    WeightServer,
    WeightSource,
    WeightUpdate,
)
from arl.api.engine_config import DistributedWeightsConfig
from arl.api.errors import ProcessLostError, ServerError, ServerFailedError, TransportError
from arl.engine.weights.both_sides import begin, both, done
from arl.engine.weights.disk import submitted
from arl.engine.weights.teams import MEETING_S, PATIENCE_S, BrokenTeamError, ServerTeam, Teams, Together
from arl.engine.weights.tensor_ranges import byte_size, ranges
from arl.web.process import is_loopback

_MAX_THREADS = 256
_LEAVING_S = 5.0
"""The longest that closing waits for groups to be left; it takes long only if a rank is stuck."""

ResultT = TypeVar("ResultT")
ArgsT = TypeVarTuple("ArgsT")

logger = logging.getLogger(__name__)


@runtime_checkable
class SendableSnapshot(Snapshot, Protocol):
    """A snapshot whose tensors can also be sent, through process groups that are shared with inference servers.

    Every rank takes a snapshot, but only rank 0 writes and sends. Every call may come from any thread:
    several groups send at once, each of them one range at a time. Groups outlive the snapshot that opened them.
    """

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Every tensor, in the order in which it becomes ready."""
        ...

    @property
    def num_bytes(self) -> int:
        """The size of all tensors, as servers hold them."""
        ...

    @property
    def backend(self) -> str:
        """nccl or gloo, by the trainer's device."""
        ...

    @property
    def sender(self) -> object:
        """What groups belong to, and end with."""
        ...

    def open_group(self, server: str, num_ranks: int, backend: str, address: str | None = None) -> WeightGroup:
        """A group for num_ranks ranks, listening at a free port where the server at this base URL finds it.

        Its name is unique, also among runs.

        address: where servers reach this process; None: where this process reaches the server from. Raises
        TransportError.
        """
        ...

    def join(self, group: WeightGroup) -> None:
        """Wait until all of the servers' ranks have joined. Raises ServerFailedError if they do not in time."""
        ...

    def wait(self) -> None:
        """Wait until all tensors are there, as servers hold them. Raises TransportError."""
        ...

    def send(self, group: str, start: int, stop: int) -> None:
        """Broadcast specs[start:stop], all of one dtype, end to end as one tensor of bytes.

        Raises ServerFailedError if the group is broken and has to be left, TransportError if the weights could not be
        put together, or were released.
        """
        ...

    def leave(self, group: str) -> None:
        """Leave a group, which fails calls that send or join in it. Idempotent."""
        ...


class DistributedTransport:
    """Sends each snapshot to the servers, through a process group for each or for several.

    A bucket has at most bucket_bytes, or one larger tensor. The newest delivered snapshot stays in memory, for servers
    that come back after a failure.
    """

    def __init__(self, config: DistributedWeightsConfig, bucket_bytes: int = 256 << 20) -> None:
        self.address = config.address
        self.bucket_bytes = bucket_bytes
        self.threads = ThreadPoolExecutor(_MAX_THREADS, "arl-send")
        self.groups: dict[str, WeightGroup] = {}
        """Server address -> the group that works, of this server alone."""
        self.broken: defaultdict[str, list[str]] = defaultdict(list)
        """Server address -> names of groups that the server must still be told to leave."""
        self.teams = Teams(config.servers_per_group)
        self._servers_per_group = config.servers_per_group
        self._updates: list[DistributedWeights] = []
        self._sender: object = None

    def snapshot(self, engine: WeightSource) -> DistributedWeights:
        """Copy the weights aside. Raises TransportError if the engine cannot send them."""
        snapshot = engine.snapshot()
        if not isinstance(snapshot, SendableSnapshot):
            raise TransportError(f"{type(engine).__name__} cannot send tensors to servers; use weights.transport=disk")
        update = DistributedWeights(self, snapshot)
        self._updates.append(update)
        return update

    def break_up(self, team: ServerTeam, reason: str, snapshot: SendableSnapshot) -> None:
        """Leave a team's group, which its servers are told when they next prepare, or load by themselves."""
        if team.broken.is_set():
            return
        self.teams.break_up(team, reason)
        if team.group is None:
            return
        for address in team.members:
            self.broken[address].append(team.group)
        with contextlib.suppress(RuntimeError):  # the transport was closed, and has left all groups
            self.threads.submit(snapshot.leave, team.group)

    async def deliver(self, update: WeightUpdate, engine: InferenceEngine) -> UpdateStats:
        """Bring the servers to `update`, then release the snapshots before it.

        Raises TransportError if it cannot be gathered, before any server is touched; no snapshot is released then.
        """
        if isinstance(update, DistributedWeights):
            await update.gathered()
            self._turn_to(update.snapshot.sender)
        try:
            return await engine.update_weights(update)
        finally:
            for old in [old for old in self._updates if old.version < update.version]:
                self.discard(old)

    def _turn_to(self, sender: object) -> None:
        """Groups of another sender ended with it. Else a server would be paused before that shows."""
        if sender is self._sender:
            return
        self._sender = sender
        for address, group in self.groups.items():
            self.broken[address].append(group.name)
        for team in self.teams.all:
            if team.group is not None and not team.broken.is_set():
                for address in team.members:
                    self.broken[address].append(team.group)
            team.broken.set()
        self.groups.clear()
        self.teams = Teams(self._servers_per_group)

    def discard(self, update: WeightUpdate) -> None:
        """Release a snapshot that will not be delivered. Idempotent."""
        if isinstance(update, DistributedWeights):
            update.snapshot.release()
            with contextlib.suppress(ValueError):  # it was released before
                self._updates.remove(update)

    def close(self) -> None:
        """Leave all groups. Idempotent. A call that hangs ends with the train engine."""
        # The sender is the engine's, so one snapshot can leave for all. In threads: a rank that is stuck never answers.
        leaving = [
            self.threads.submit(update.snapshot.leave, name)
            for update in self._updates[-1:]
            for name in [*(group.name for group in self.groups.values()), *self.teams.groups]
        ]
        self.threads.shutdown(wait=False)
        wait(leaving, timeout=_LEAVING_S)
        for update in self._updates:
            update.snapshot.release()
        self._updates.clear()
        self.groups.clear()


class DistributedWeights:
    """A SharedUpdate that is sent to servers while they load it."""

    def __init__(self, transport: DistributedTransport, snapshot: SendableSnapshot) -> None:
        self.snapshot = snapshot
        self.version = snapshot.version
        self.adapter = None
        self.num_bytes = 0
        self._transport = transport
        self._specs = snapshot.specs
        self._buckets = ranges(self._specs, transport.bucket_bytes)
        self._backend = snapshot.backend
        self._met: set[str] = set()
        self.lost = asyncio.Event()
        """Set when a server could not get them, because the process that holds them is lost."""
        self._together: dict[str, Together] = {}
        """The servers that load this update in lockstep with others, until they have loaded it or their team broke."""

    def expect(self, turns: Sequence[Sequence[WeightServer]]) -> None:
        """Servers of the same turn share groups, if their teams are whole."""
        teams = self._transport.teams
        for team in teams.arrange([[server.address for server in turn] for turn in turns]):
            self._transport.break_up(team, "one of its servers is away", self.snapshot)
            for address in team.members:
                teams.note_load(address)  # nothing has failed
        for team in teams.all:
            self._together |= dict.fromkeys(team.members, Together(team))

    async def gathered(self) -> None:
        """Wait until all tensors are there, so that paused servers only wait for sending. Raises TransportError."""
        await self._in_thread(self.snapshot.wait)

    async def prepare(self, server: WeightServer) -> None:
        """Meet the server in a group, unless there is one already."""
        broken = self._transport.broken[server.address]
        for name in list(broken):
            try:
                await server.leave_group(name)
            except ServerFailedError:
                continue  # without an answer it is told again the next time
            except ServerError:
                pass  # it does not know of it
            broken.remove(name)
        if (together := self._together.get(server.address)) is not None:
            try:
                return await self._meet_in_team(together, server)
            except BrokenTeamError:
                self._together.pop(server.address, None)
                await self._leave_team(server)
        await self._meet_alone(server)

    async def load(self, server: WeightServer, *, flush_cache: bool) -> None:
        """Send everything. If this raises, the group was left, and the server may hold a mixture, labelled so."""
        if (together := self._together.pop(server.address, None)) is not None:
            try:
                await self._load_in_step(together, server, flush_cache)
            except BrokenTeamError:
                await self._leave_team(server)
                await self._meet_alone(server)
                await self._load_alone(server, flush_cache)
        else:
            await self._load_alone(server, flush_cache)
        self._transport.teams.note_load(server.address)

    async def _load_alone(self, server: WeightServer, flush_cache: bool) -> None:
        if (group := self._transport.groups.get(server.address)) is None:
            raise ServerFailedError(f"{server.address} no longer shares a group with the trainer")
        try:
            await begin(server)
            for start, stop in self._buckets:
                await self._send(server, group, start, stop, flush_cache)
            await server.end_update()
        except BaseException as error:  # also if cancelled: the group may be in the middle of a broadcast
            self._break(server, group)
            if isinstance(error, ServerError) and server.address not in self._met:
                # A group of an earlier update: the server may have been restarted since, which a new group mends.
                raise ServerFailedError(str(error)) from error
            raise

    async def _send(self, server: WeightServer, group: WeightGroup, start: int, stop: int, flush_cache: bool) -> None:
        sending = self._in_thread(self.snapshot.send, group.name, start, stop)
        await both(sending, self._received(server, group, start, stop, flush_cache))
        self.num_bytes += sum(map(byte_size, self._specs[start:stop]))

    def _received(
        self, server: WeightServer, group: WeightGroup, start: int, stop: int, flush_cache: bool
    ) -> Coroutine[Any, Any, None]:
        is_last = stop == len(self._specs)
        version = self.version if is_last else None
        return server.receive(self._specs[start:stop], group, version=version, flush_cache=flush_cache and is_last)

    # Together with others

    async def _meet_in_team(self, together: Together, server: WeightServer) -> None:
        """Raises BrokenTeamError: the team was broken up."""
        if server.address in (team := together.team).places:
            return
        with self._breaking(team):
            await together.come("prepare", server)
            members = together.servers("prepare")
            group = await together.step(done(together.once("open", lambda: self._open(team, members))), MEETING_S, "")
            ranks_before = sum(one.num_ranks for one in members[: members.index(server)])
            mine = replace(group, rank_offset=1 + ranks_before)
            ours = together.once("join", lambda: self._in_thread(self.snapshot.join, group))
            await together.step(both(ours, server.join_group(mine)), MEETING_S, f"joining of {server.address}")
        team.places[server.address] = mine

    def _open(self, team: ServerTeam, members: Sequence[WeightServer]) -> asyncio.Future[WeightGroup]:
        far = [one for one in members if not is_loopback(URL(one.address).host or "")]
        num_ranks = sum(one.num_ranks for one in members)
        where = ((far or members)[0].address, num_ranks, self._backend, self._transport.address)

        def opened() -> WeightGroup:
            group = self.snapshot.open_group(*where)
            team.group = group.name
            if team.broken.is_set():  # nobody has told of it
                self.snapshot.leave(group.name)
            return group

        return self._in_thread(opened)

    async def _load_in_step(self, together: Together, server: WeightServer, flush_cache: bool) -> None:
        """Raises BrokenTeamError: the team was broken up."""
        team = together.team
        with self._breaking(team):
            if (group := team.places.get(server.address)) is None:
                raise BrokenTeamError(f"{server.address} is not in the group")
            await together.come("load", server)
            await together.step(begin(server), PATIENCE_S, f"beginning on {server.address}")
            await together.come("begun", server)
            for start, stop in self._buckets:
                began, num_bytes = asyncio.get_running_loop().time(), sum(map(byte_size, self._specs[start:stop]))
                sending = together.once(start, lambda start=start, stop=stop: self._send_to_all(group, start, stop))
                receiving = self._received(server, group, start, stop, flush_cache)
                await together.step(both(sending, receiving), team.limit_s(num_bytes), f"a bucket to {server.address}")
                team.note_bucket(num_bytes, asyncio.get_running_loop().time() - began)
            await server.end_update()

    def _send_to_all(self, group: WeightGroup, start: int, stop: int) -> asyncio.Future[None]:
        self.num_bytes += sum(map(byte_size, self._specs[start:stop]))
        return self._in_thread(self.snapshot.send, group.name, start, stop)

    @contextlib.contextmanager
    def _breaking(self, team: ServerTeam) -> Iterator[None]:
        """Whatever fails in the block breaks the team. A server's failure becomes a BrokenTeamError."""
        try:
            yield
        except BaseException as error:  # also if cancelled: the group may be in the middle of a broadcast
            if not team.broken.is_set() and isinstance(error, Exception):
                logger.warning("servers share a group no longer (%s): %s", ", ".join(team.members), error)
            self._transport.break_up(team, str(error) or "one of its servers was given up", self.snapshot)
            if isinstance(error, ServerError):
                raise BrokenTeamError(str(error)) from error
            raise

    async def _leave_team(self, server: WeightServer) -> None:
        """Have the server leave its broken group at once. Raises ServerFailedError if it does not answer."""
        broken, teams = self._transport.broken[server.address], self._transport.teams
        for name in list(broken):
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await server.leave_group(name)
            except (ServerFailedError, TimeoutError) as error:
                teams.blame(server.address)
                raise ServerFailedError(f"{server.address} does not leave a group that broke: {error}") from error
            except ServerError:
                pass  # it does not know of it
            broken.remove(name)

    # Alone

    async def _meet_alone(self, server: WeightServer) -> None:
        if server.address not in self._transport.groups:
            try:
                self._transport.groups[server.address] = await self._meet(server)
            except ProcessLostError:
                self.lost.set()
                raise
            self._met.add(server.address)

    async def _meet(self, server: WeightServer) -> WeightGroup:
        backend = f"{self._backend}_by_id" if server.meets_by_id else self._backend
        where = (server.address, server.num_ranks, backend, self._transport.address)
        opening = submitted(self._transport.threads, self.snapshot.open_group, *where)
        try:
            group = await asyncio.wrap_future(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(self._leave_opened)  # the thread goes on
            raise
        try:
            await both(self._in_thread(self.snapshot.join, group), server.join_group(group))
        except BaseException:  # also if cancelled: the server may wait in a group that is half formed
            self._break(server, group)
            raise
        return group

    def _leave_opened(self, opening: Future[WeightGroup]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            self.snapshot.leave(opening.result().name)

    def _break(self, server: WeightServer, group: WeightGroup) -> None:
        """Leave a group, which ends the server's waiting; the server is told at its next `prepare`."""
        self._transport.groups.pop(server.address, None)
        self._transport.broken[server.address].append(group.name)
        with contextlib.suppress(RuntimeError):  # the transport was closed, and has left all groups
            self._transport.threads.submit(self.snapshot.leave, group.name)

    def _in_thread(self, call: Callable[[*ArgsT], ResultT], *args: *ArgsT) -> asyncio.Future[ResultT]:
        return asyncio.wrap_future(submitted(self._transport.threads, call, *args))
