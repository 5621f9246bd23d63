"""What iterations of a chat template's loop depend on, what they do, and when they would do the same again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from jinja2 import Undefined

_FAR = 1 << 62
"""Beyond every integer that a template compares."""

Place = tuple[str, str]
"""An attribute of a namespace: the names of the two."""


@dataclass(frozen=True, slots=True)
class Is:
    """What a place has to hold: this value. A range allows each of its integers."""

    value: Any


@dataclass(slots=True, kw_only=True)
class Iterations:
    """Successive iterations: where they lie, on what they depend, and what they do."""

    start: int
    """The first one's message."""
    stop: int
    """The message after the last one's, in the order of the loop."""
    begin: int
    """Where their text begins in the rendering."""
    end: int
    needs: dict[Place, Is | range] = field(default_factory=dict[Place, "Is | range"])
    writes: dict[Place, Any] = field(default_factory=dict[Place, Any])

    def takes(self, later: Iterations) -> bool:
        """Add the iterations that follow, unless these could be skipped more often alone.

        In a loop that begins with new messages, later iterations do not depend on how their needs came about. In all,
        bounds from above (what is after the last query) are met less long than others.
        """
        if self.stop < self.start and self.writes.keys() & later.needs.keys():
            return False
        more = {place: need for place, need in later.needs.items() if place not in self.writes}
        for place, need in more.items():
            mine = self.needs.get(place, need)
            if _is_bounded(mine) != _is_bounded(need):
                return False
            more[place] = both(mine, need)
        self.needs |= more
        self.writes |= later.writes
        self.stop, self.end = later.stop, later.end
        return True


def _is_bounded(need: Is | range) -> bool:
    return isinstance(need, Is) or need.stop < _FAR


def both(one: Is | range, other: Is | range) -> Is | range:
    """A need that meets both. The same value has met them, so an exact one is that value."""
    if isinstance(one, Is) or isinstance(other, Is):
        return one if isinstance(one, Is) else other
    return range(max(one.start, other.start), min(one.stop, other.stop))


def is_met(need: Is | range, value: Any) -> bool:
    return same(need.value, value) if isinstance(need, Is) else type(value) is int and value in need


@dataclass(frozen=True, slots=True)
class Part:
    """Which messages a list has: those from an offset on, perhaps reversed. Equal also when messages have followed."""

    offset: int
    is_reversed: bool


def is_plain(value: Any) -> bool:
    """Whether it is made of JSON's types, which nothing changes while a template runs, or undefined."""
    if isinstance(value, dict | list | tuple):
        parts = cast("Iterable[Any]", value.values() if isinstance(value, dict) else value)
        return all(map(is_plain, parts))
    return value is None or isinstance(value, str | int | float | Undefined)


def same(one: Any, other: Any) -> bool:
    """Whether no template can tell them apart. 1, 1.0 and True are equal and not the same."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(cast("list[Any]", one)) == len(other) and all(map(same, cast("list[Any]", one), other))
    if isinstance(one, dict):
        items = cast("dict[Any, Any]", one)
        return same([*items], [*other]) and same([*items.values()], [*other.values()])
    if isinstance(one, Undefined):
        return one._undefined_name == other._undefined_name
    return isinstance(one, str | int | float | Part) and one == other


def alike(outcome: Callable[[int], bool], value: int, other: int) -> range:
    """The integers around the value that compare with the other as it does."""
    below, at, above = outcome(other - 1), outcome(other), outcome(other + 1)
    if value == other:
        return range(-_FAR if below == at else other, _FAR if above == at else other + 1)
    if value < other:
        return range(-_FAR, other + (at == below))
    return range(other + (at != above), _FAR)
