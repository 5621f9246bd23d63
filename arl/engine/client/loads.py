"""Servers by how many requests they have, so that choosing one costs the same among ten and among a thousand."""

from __future__ import annotations

import heapq
from collections import Counter
from typing import Generic, TypeVar

T = TypeVar("T")

_NUMBERS = 1 << 32


class Loads(Generic[T]):
    """Members with a load each, at least 0, and a number of their own: of two with one load, the lower comes first.

    A heap holds load * _NUMBERS + number of each member. An entry is stale when its member has left, or has another
    load; those at the top are dropped, and all when they are the greater part.
    """

    def __init__(self) -> None:
        self.total = 0
        """The sum of all loads."""
        self._members: dict[int, tuple[int, T]] = {}
        """Number -> (load, member)."""
        self._heap: list[int] = []

    def __len__(self) -> int:
        return len(self._members)

    def put(self, number: int, load: int, member: T) -> None:
        """Let the member have this load from now on."""
        before, _ = self._members.get(number, (None, member))
        if before == load:
            return
        self.total += load - (before or 0)
        self._members[number] = load, member
        heapq.heappush(self._heap, load * _NUMBERS + number)
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [load * _NUMBERS + number for number, (load, _) in self._members.items()]
            heapq.heapify(self._heap)

    def remove(self, number: int) -> None:
        if (known := self._members.pop(number, None)) is not None:
            self.total -= known[0]

    def least(self, avoid: T | None = None) -> T | None:
        """A member with the smallest load; `avoid` only if there is no other."""
        member = self._top()
        if member is None or member is not avoid:
            return member
        number = self._heap[0] % _NUMBERS
        load, _ = self._members.pop(number)
        other = self._top()
        self._members[number] = load, member
        heapq.heappush(self._heap, load * _NUMBERS + number)
        return member if other is None else other

    def _top(self) -> T | None:
        while self._heap:
            load, number = divmod(self._heap[0], _NUMBERS)
            if (known := self._members.get(number)) is not None and known[0] == load:
                return known[1]
            heapq.heappop(self._heap)
        return None


class Versions:
    """The versions of the weights that servers hold, each counted once for each server."""

    def __init__(self) -> None:
        self._counted: dict[int, int] = {}
        """A server's number -> the version that it is counted under."""
        self._counts: Counter[int] = Counter()

    def __len__(self) -> int:
        """How many servers are counted."""
        return len(self._counted)

    @property
    def oldest(self) -> int | None:
        return min(self._counts, default=None)

    def put(self, number: int, version: int | None) -> None:
        """Count the server under this version alone, or under none."""
        if (before := self._counted.get(number)) == version:
            return
        if before is not None:
            del self._counted[number]
            self._counts[before] -= 1
            if not self._counts[before]:
                del self._counts[before]
        if version is not None:
            self._counted[number] = version
            self._counts[version] += 1
