"""Servers that share one process group with the trainer, so that one broadcast serves all of them.

    expect     servers --> teams of servers_per_group; a team whose servers are all there stays as it is
    prepare    all have come --> rank 0 opens a group, and all join it
    load       all have come, paused --> all begin --> for each bucket one broadcast, which each receives --> end

Whatever fails in a team, or takes too long, breaks it for good: nobody can tell who was at fault from an error of a
collective. Each server of a broken team leaves its group, and gets the same update through a group of its own. One that
does not answer is at fault. Servers come into another team once they have loaded an update by themselves, and those at
fault only after several.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from arl.api.engine import WeightGroup, WeightServer
from arl.engine.weights.disk import look_at

MEETING_S = 5.0
"""The longest that servers of a team may take to join their group."""
PATIENCE_S = 2.0
"""The longest that a team waits for one that has not come, has not begun, or does not leave."""
_FIRST_S, _TIMES = 60.0, 10.0
"""The longest bucket of a team: at first, and as a multiple of its longest so far, for as many bytes."""
_UPDATES_ALONE = 8

ResultT = TypeVar("ResultT")


class BrokenTeamError(Exception):
    """A team broke up; each of its servers is on its own."""


@dataclass(eq=False)
class ServerTeam:
    members: tuple[str, ...]
    """Addresses; their ranks follow each other in this order."""
    places: dict[str, WeightGroup] = field(default_factory=dict[str, WeightGroup])
    """The group, as each member that has joined it sees it."""
    group: str | None = None
    """The name of the group, once it was opened."""
    slowest_s: float = 0.0
    """The longest that a bucket took."""
    largest: int = 0
    """The bytes of the largest bucket so far."""
    broken: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = ""

    def limit_s(self, num_bytes: int) -> float:
        """How long a bucket of so many bytes may take."""
        if not self.largest:
            return _FIRST_S
        growth = max(1.0, num_bytes / self.largest)
        return min(max(PATIENCE_S, _TIMES * self.slowest_s * growth), _FIRST_S)

    def note_bucket(self, num_bytes: int, seconds: float) -> None:
        self.slowest_s, self.largest = max(self.slowest_s, seconds), max(self.largest, num_bytes)


class Teams:
    """Which servers are in a team, and which are better alone."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._of: dict[str, ServerTeam] = {}
        self._alone: Counter[str] = Counter()
        """How many more updates a server has to load by itself."""

    @property
    def all(self) -> list[ServerTeam]:
        return list(dict.fromkeys(self._of.values()))

    @property
    def groups(self) -> list[str]:
        """Names of the groups that were opened and not left."""
        return [team.group for team in self.all if team.group is not None and not team.broken.is_set()]

    def arrange(self, turns: Iterable[Sequence[str]]) -> list[ServerTeam]:
        """Make teams of servers that load at the same time; returns those that are no more."""
        old, kept = self.all, dict[str, ServerTeam]()
        for turn in turns:
            kept |= self._arranged(turn, [team for team in old if {*turn}.issuperset(team.members)])
        self._of = kept
        return [team for team in old if team not in self.all and not team.broken.is_set()]

    def _arranged(self, turn: Sequence[str], whole: Sequence[ServerTeam]) -> dict[str, ServerTeam]:
        made = {address: team for team in whole if not team.broken.is_set() for address in team.members}
        free = [address for address in turn if address not in made and not self._alone[address]]
        small = [address for address, team in made.items() if len(team.members) < self._size]
        if free or len({made[address] for address in small}) > 1:  # fewer teams may do
            free = [address for address in turn if address in free or address in small]
            for address in small:
                del made[address]
        for start in range(0, len(free), self._size):
            if len(members := free[start : start + self._size]) > 1:
                made |= dict.fromkeys(members, ServerTeam(tuple(members)))
        return made

    def break_up(self, team: ServerTeam, reason: str) -> None:
        team.reason = reason
        team.broken.set()
        for address in team.members:
            self._alone[address] = max(1, self._alone[address])

    def blame(self, address: str) -> None:
        self._alone[address] = _UPDATES_ALONE

    def note_load(self, address: str) -> None:
        """The server has loaded an update by itself."""
        if self._alone[address] > 0:
            self._alone[address] -= 1


class Together:
    """One update of a team."""

    def __init__(self, team: ServerTeam) -> None:
        self.team = team
        self._come: dict[str, dict[str, WeightServer]] = {}
        self._all_here: dict[str, asyncio.Event] = {}
        self._shared: dict[Hashable, asyncio.Future[Any]] = {}

    async def come(self, where: str, server: WeightServer) -> None:
        """Wait until all members have come to this point. Raises BrokenTeamError."""
        here, all_here = self._come.setdefault(where, {}), self._all_here.setdefault(where, asyncio.Event())
        here[server.address] = server
        if len(here) == len(self.team.members):
            all_here.set()
        await self.step(all_here.wait(), PATIENCE_S, f"waiting for the others of {', '.join(here)}")

    def servers(self, where: str) -> list[WeightServer]:
        """The servers that reached this place, in the order of their ranks."""
        return [self._come[where][address] for address in self.team.members]

    def once(self, what: Hashable, begin: Callable[[], asyncio.Future[ResultT]]) -> asyncio.Future[ResultT]:
        """The future that the first member begins, shared by all members."""
        if what not in self._shared:
            self._shared[what] = begin()
            self._shared[what].add_done_callback(look_at)
        return asyncio.shield(self._shared[what])

    async def step(self, work: Coroutine[Any, Any, ResultT], limit_s: float, what: str) -> ResultT:
        """Do a member's work, unless the team breaks meanwhile. Raises BrokenTeamError, also if it takes longer."""
        working = asyncio.ensure_future(work)
        breaking = asyncio.ensure_future(self.team.broken.wait())
        try:
            await asyncio.wait({working, breaking}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise BrokenTeamError(self.team.reason or f"{what} took longer than {limit_s:.2g} s")
        finally:
            for task in (working, breaking):
                task.cancel()
                task.add_done_callback(look_at)
