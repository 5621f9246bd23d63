"""The tree of an update's mirrors, and the route that tells each mirror those below it.

A route stands before a package, for a mirror that has others below it (numbers are little-endian):

    8 bytes    b"arlroute"
    uint64     length of what follows
    JSON       [[address, index of the mirror above it in this list, or -1], ..], those above before those below
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from arl.engine.weights.package import PREAMBLE, DeltaError

ROUTE_MAGIC = b"arlroute"
MAX_ROUTE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Branch:
    """A mirror, and those that get what it gets from it."""

    address: str
    below: tuple[Branch, ...] = ()

    @property
    def addresses(self) -> list[str]:
        """Its own and all below it, those above before those below."""
        return [branch.address for level in self._levels() for branch in level]

    @property
    def height(self) -> int:
        """Levels below it."""
        return sum(1 for _ in self._levels()) - 1

    def _levels(self) -> Iterator[Sequence[Branch]]:
        level: Sequence[Branch] = (self,)
        while level:
            yield level
            level = [below for branch in level for below in branch.below]


def branches(addresses: Sequence[str], fanout: int) -> tuple[Branch, ...]:
    """A tree in which nobody sends to more than `fanout`, the root included; the first addresses are the highest."""
    made: dict[int, Branch] = {}
    for i in reversed(range(len(addresses))):
        first = fanout * (i + 1)
        below = tuple(made[j] for j in range(first, min(first + fanout, len(addresses))))
        made[i] = Branch(addresses[i], below)
    return tuple(made[i] for i in range(min(fanout, len(addresses))))


def route_to_bytes(below: Sequence[Branch]) -> bytes:
    """The route of a mirror with these below it; nothing if there are none."""
    if not below:
        return b""
    rows: list[tuple[str, int]] = []
    left = deque((branch, -1) for branch in below)
    while left:
        branch, above = left.popleft()
        left.extend((next_one, len(rows)) for next_one in branch.below)
        rows.append((branch.address, above))
    body = json.dumps(rows).encode()
    return PREAMBLE.pack(ROUTE_MAGIC, len(body)) + body


def route_of(body: bytes) -> tuple[Branch, ...]:
    """The inverse of route_to_bytes, from the JSON alone. Raises DeltaError."""
    try:
        rows = [(address, above) for address, above in json.loads(body)]
    except (TypeError, ValueError, RecursionError) as error:
        raise DeltaError(f"not a route: {error}") from error
    below: dict[int, list[Branch]] = {i: [] for i in range(-1, len(rows))}
    for i, (address, above) in reversed([*enumerate(rows)]):
        if type(address) is not str or not address.startswith(("http://", "https://")):
            raise DeltaError(f"a route names {address!r}, which is not the address of a mirror")
        if type(above) is not int or not -1 <= above < i:
            raise DeltaError(f"a route puts mirror {i} below {above!r}")
        below[above].append(Branch(address, tuple(reversed(below[i]))))
    if len({address for address, _ in rows}) != len(rows):
        raise DeltaError("a route names a mirror twice")
    return tuple(reversed(below[-1]))
