"""Renders a growing history for the cost of what is new, with the text that a whole rendering has.

A chat template is a program that loops over the messages. Here it runs with these loops watched. An iteration depends
on its message, on the variables at the loop's begin, and on what it reads of namespaces, of `loop` and of other
messages; what it does is its text and what it writes into namespaces. When messages have been appended, each loop skips
the stretches of iterations for which all of that is as before: they would do the same again. It takes their text from
the last rendering and writes what they wrote. All other iterations run.

An iteration that read something which appended messages change (`loop.last` where it is true, `loop.length`,
`messages[-1]`) runs each time. What a template reads of a namespace is kept as a value; as bounds, if it was compared
(`loop.index0 > ns.last_query`), since the outcome is the same within them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from jinja2 import Template, Undefined
from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

from arl.workflow.rendering.stretches import Is, Iterations, Part, Place, alike, both, is_met, is_plain, same
from arl.workflow.rendering.watching import COMPARE, END, FROM_END, ITEMS

COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "lteq": operator.le, "gt": operator.gt, "gteq": operator.ge
}  # fmt: skip
CLOCK = "strftime_now"
"""A function of templates whose results change with time."""
_MISSING = object()


class _MessageList(list[Any]):
    """The messages, or a part of them: a list that tells the rendering what a template reads of it."""

    def __init__(self, rendering: Rendering, messages: Sequence[Any], part: Part) -> None:
        super().__init__(messages)
        self.rendering, self.part = rendering, part

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return self._slice(at)
        if self.part.is_reversed or type(at) is not int or not 0 <= at < list.__len__(self):
            self.rendering.unsettle()
        return list.__getitem__(self, at)

    def _slice(self, at: slice) -> list[Any]:
        self.rendering.unsettle()
        taken, offset = list.__getitem__(self, at), self.part.offset
        if self.part.is_reversed or at.stop is not None:
            return taken
        if at.step in (None, 1) and (at.start is None or at.start >= 0):
            return _MessageList(self.rendering, taken, Part(offset + min(at.start or 0, list.__len__(self)), False))
        is_all = at.start is None and at.step == -1
        return _MessageList(self.rendering, taken, Part(offset, True)) if is_all else taken

    def __radd__(self, before: list[Any]) -> list[Any]:
        return before + list(self)


def _whole(name: str) -> Callable[..., Any]:
    method = getattr(list, name)

    def read(self: _MessageList, *args: Any) -> Any:
        self.rendering.unsettle()
        return method(self, *args)

    return read


_READING = "iter reversed len contains eq ne lt le gt ge add mul rmul repr"
for _name in (*(f"__{name}__" for name in _READING.split()), "index", "count", "copy"):
    setattr(_MessageList, _name, _whole(_name))


class _Namespace(Namespace):
    """A template's namespace() that tells the rendering what a template reads and writes of it."""

    def __init__(self, rendering: Rendering, /, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        object.__setattr__(self, "rendering", rendering)
        object.__setattr__(self, "born", rendering.iteration)

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            object.__getattribute__(self, "rendering").note_read(self, name)
        return super().__getattribute__(name)

    def __repr__(self) -> str:
        object.__getattribute__(self, "rendering").unsettle()
        return super().__repr__()

    def __setitem__(self, name: str, value: Any) -> None:
        object.__getattribute__(self, "rendering").note_write(self, name, value)
        super().__setitem__(name, value)


def _peek(space: Namespace, name: str) -> Any:
    return cast("dict[str, Any]", object.__getattribute__(space, "_Namespace__attrs")).get(name, _MISSING)


class _LoopVariable:
    """`loop` in a watched loop. What messages to come would change unsettles the iteration."""

    def __init__(self, loop: _Loop) -> None:
        self._loop = loop

    def _from_end(self, is_so: bool = True) -> None:
        if self._loop.part.is_reversed == is_so:
            self._loop.is_settled = False

    @property
    def index0(self) -> int:
        self._from_end()
        return abs(self._loop.at - self._loop.first)

    @property
    def index(self) -> int:
        return self.index0 + 1

    @property
    def revindex0(self) -> int:
        self._from_end(False)
        return abs(self._loop.last - self._loop.at)

    @property
    def revindex(self) -> int:
        return self.revindex0 + 1

    @property
    def length(self) -> int:
        self._loop.is_settled = False
        return abs(self._loop.last - self._loop.first) + 1

    @property
    def first(self) -> bool:
        if is_first := self._loop.at == self._loop.first:
            self._from_end()
        return is_first

    @property
    def last(self) -> bool:
        if is_last := self._loop.at == self._loop.last:
            self._from_end(False)
        return is_last

    @property
    def previtem(self) -> Any:
        return Undefined("there is no previous item") if self.first else self._loop.message(-1)

    @property
    def nextitem(self) -> Any:
        return Undefined("there is no next item") if self.last else self._loop.message(1)

    def reverses(self, items: _MessageList) -> bool:
        return self._loop.part == Part(items.part.offset, True) and not items.part.is_reversed


class _Loop:
    """One run of a loop over messages: gives those whose iterations have to run, and skips the others.

    Positions are those of messages in the history, whatever the order of the loop.
    """

    def __init__(
        self, rendering: Rendering, part: Part, spaces: Mapping[str, _Namespace], known: Mapping[int, Iterations]
    ) -> None:
        self.part, self.spaces, self.stretches = part, spaces, dict[int, Iterations]()
        self.names = {id(space): name for name, space in spaces.items()}
        ends = (part.offset, len(rendering.history) - 1)
        self.first, self.last = ends[::-1] if part.is_reversed else ends
        self.at = self.first
        self.iteration: Iterations | None = None
        self.is_settled = True
        self._rendering, self._known = rendering, known
        self._step = -1 if part.is_reversed else 1
        self._grown: Iterations | None = None

    def message(self, away: int) -> Any:
        return self._rendering.history[self.at + away * self._step]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._end_iteration()
        while (stretch := self._known.get(self.at)) and self._would_repeat(stretch):
            self._skip(stretch)
        if self.at == self.last + self._step:
            raise StopIteration
        begin = self._rendering.length
        self.iteration = Iterations(start=self.at, stop=self.at + self._step, begin=begin, end=begin)
        self.is_settled = True
        return self.message(0)

    def _end_iteration(self) -> None:
        done, self.iteration = self.iteration, None
        if done is None:
            return
        self.at, done.end = done.stop, self._rendering.length
        if self.is_settled:
            self._grow(done)
        else:
            self._settle()

    def end(self) -> None:
        """The loop is over. An iteration that ended it with `break` runs again next time."""
        self.iteration = None
        self._settle()

    def _would_repeat(self, stretch: Iterations) -> bool:
        return all(is_met(need, _peek(self.spaces[space], name)) for (space, name), need in stretch.needs.items())

    def _skip(self, stretch: Iterations) -> None:
        begin = self._rendering.length
        self._rendering.repeat(stretch.begin, stretch.end)
        for (space, name), value in stretch.writes.items():
            Namespace.__setitem__(self.spaces[space], name, value)
        self.at = stretch.stop
        end, needs, writes = self._rendering.length, dict(stretch.needs), dict(stretch.writes)
        self._grow(Iterations(start=stretch.start, stop=stretch.stop, begin=begin, end=end, needs=needs, writes=writes))

    def _grow(self, stretch: Iterations) -> None:
        if self._grown is None or not self._grown.takes(stretch):
            self._settle()
            self._grown = stretch

    def _settle(self) -> None:
        if self._grown is not None:
            self.stretches[self._grown.start] = self._grown
        self._grown = None


class Rendering:
    """One rendering by a watched template, and what the next one can skip."""

    def __init__(self, template: Template, history: Sequence[Any], before: Rendering | None) -> None:
        """before: the last rendering, of a history that this one begins with."""
        self._template = template
        self.history = history
        self.text = ""
        self.length = 0
        self._pieces: list[str] = []
        self._before = before
        self._loop: _Loop | None = None
        self.loops: dict[int, tuple[dict[str, Any], Mapping[int, Iterations]]] = {}
        """Loop -> the variables at its begin, and what its iterations did."""

    def run(self, variables: Mapping[str, Any]) -> None:
        template = self._template
        watched = {
            "messages": _MessageList(self, self.history, Part(0, False)),
            "namespace": self._namespace,
            ITEMS: self._items,
            END: self._end,
            COMPARE: self._compare,
            FROM_END: self._from_end,
        }
        if CLOCK in template.globals:
            watched[CLOCK] = self._impure(template.globals[CLOCK])
        for piece in template.root_render_func(template.new_context({**variables, **watched})):
            self._add(piece if piece.isascii() else piece.encode(errors="replace").decode())
        self.text, self._before = "".join(self._pieces), None
        self._pieces.clear()

    def _add(self, piece: str) -> None:
        self._pieces.append(piece)
        self.length += len(piece)

    def repeat(self, begin: int, end: int) -> None:
        assert self._before is not None
        self._add(self._before.text[begin:end])

    @property
    def iteration(self) -> Iterations | None:
        return self._loop.iteration if self._loop else None

    def unsettle(self) -> None:
        """The iteration under way depends on messages to come, or on what cannot be followed."""
        if self._loop:
            self._loop.is_settled = False

    def _namespace(self, /, *args: Any, **attributes: Any) -> _Namespace:
        return _Namespace(self, *args, **attributes)

    def _impure(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.unsettle()
            return function(*args)

        return call

    def _items(self, number: int, items: Any, variables: dict[str, Any]) -> Any:
        """What a loop goes through. variables: those that its iterations may read, besides the template's own."""
        spaces = {name: value for name, value in variables.items() if isinstance(value, _Namespace)}
        if not isinstance(items, _MessageList) or len(set(map(id, spaces.values()))) < len(spaces):
            return items
        parts = {name: value.part for name, value in variables.items() if isinstance(value, _MessageList)}
        begin = {**variables, **dict.fromkeys(spaces), **parts, "": items.part}
        known: Mapping[int, Iterations] = {}
        if self._before and number in self._before.loops:
            then, stretches = self._before.loops[number]
            known = stretches if same(then, begin) else {}
        self._loop = _Loop(self, items.part, spaces, known)
        self.loops[number] = begin, self._loop.stretches
        return self._loop

    def _end(self) -> None:
        if self._loop:
            self._loop.end()
            self._loop = None

    def _place(self, space: _Namespace, name: str) -> Place | None:
        """Where the iteration under way reads or writes; None if that is its own affair, or cannot be followed."""
        if not self._loop or object.__getattribute__(space, "born") is self._loop.iteration:
            return None
        if id(space) in self._loop.names:
            return self._loop.names[id(space)], name
        return self.unsettle()

    def note_read(self, space: _Namespace, name: str, within: range | None = None) -> None:
        place = self._place(space, name)
        if place and self.iteration and place not in self.iteration.writes:
            needs = self.iteration.needs
            need = Is(_peek(space, name)) if within is None else within
            needs[place] = both(needs.get(place, need), need)

    def note_write(self, space: _Namespace, name: str, value: Any) -> None:
        place = self._place(space, name)
        if place and self.iteration:
            self.iteration.writes[place] = value
            if not is_plain(value):  # of the messages' list, to go through it unsettles
                self.unsettle()

    def _compare(self, space: Any, name: str, kind: str, other: Any, is_first: bool) -> Any:
        """A comparison of a namespace's attribute, the first or the second of the two."""
        value = _peek(space, name) if isinstance(space, _Namespace) else None
        compare = COMPARISONS[kind]

        def outcome(value: Any) -> Any:
            return compare(value, other) if is_first else compare(other, value)

        if type(value) is not int or type(other) is not int:
            return outcome(self._template.environment.getattr(space, name))
        self.note_read(space, name, alike(outcome, value, other))
        return outcome(value)

    def _from_end(self, items: Any, loop: Any) -> Any:
        """items | length - 1 - loop.index0, which in a reversed loop is the place of the message, whatever follows."""
        if isinstance(items, _MessageList) and isinstance(loop, _LoopVariable) and loop.reverses(items):
            return loop.revindex0
        environment = self._template.environment
        return environment.filters["length"](items) - 1 - environment.getattr(loop, "index0")


def loop_context(items: Any, *more: Any) -> Any:
    if not isinstance(items, _Loop):
        return LoopContext(items, *more)
    variable = _LoopVariable(items)
    return ((item, variable) for item in items)
