"""Draws an Overview in a terminal of any size."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from rich.console import Group, RenderableType
from rich.text import Text

from arl.digest import mean
from arl.view.episode_table import Row
from arl.view.overview import Overview

_LABEL = 11
_WIDE = 140
"""From this width on, what is listed stands beside the numbers."""
_MOST_LINES = 20
"""The most lines of one section if the height is not limited."""
_BLOCKS = "▁▂▃▄▅▆▇█"
_PLAIN_BLOCKS = "_.-=+*#@"
_SHADES = {"waiting": "░", "training": "█", "publishing": "▓", "other": "▒"}
_PLAIN_SHADES = {"waiting": ".", "training": "#", "publishing": "+", "other": "-"}
"""They tell the parts of a bar apart where there are no colours."""
_STYLES = {
    "running": "green", "finished": "green", "interrupted": "yellow", "stalled": "red", "failed": "red",
    "killed": "red", "error": "red", "warning": "yellow", "critical": "red", "serving": "green",
    "paused": "yellow", "fenced": "red", "waiting": "yellow", "training": "green", "publishing": "blue", "other": "dim",
}  # fmt: skip


@dataclass(slots=True)
class _Section:
    """A label, and lines beside it. One that is long gives way to the others."""

    label: str
    lines: Sequence[Text]


def screen(shown: Overview, width: int, height: int | None = None, *, ascii_only: bool = False) -> RenderableType:
    """height: None for all there is to say."""
    blocks = _PLAIN_BLOCKS if ascii_only else _BLOCKS
    rest = height and height - 1
    head = _head(shown, width, ascii_only)
    if width < _WIDE:
        return Group(head, *_drawn(_fitting([*_numbers(shown, width, blocks), *_lists(shown, width)], rest), width))
    left, right = width // 2 - 2, width - width // 2 - 1
    numbers = _drawn(_fitting(_numbers(shown, left, blocks), rest), left)
    lists = _drawn(_fitting(_lists(shown, right), rest), right)
    return Group(head, *(_beside(a, left + 2, b) for a, b in zip_longest(numbers, lists, fillvalue=Text())))


def plain(text: str) -> str:
    """One line, without characters that could command a terminal: models write messages, too."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def sparkline(values: Sequence[float], width: int, blocks: str = _BLOCKS) -> str:
    """One character for each value, or for the mean of several; the lowest is the lowest block."""
    if len(values) > width:
        values = [mean(values[i * len(values) // width : (i + 1) * len(values) // width]) for i in range(width)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    span = high - low
    levels = [(value - low) / span if span else 0.5 for value in values]
    return "".join(blocks[min(int(level * len(blocks)), len(blocks) - 1)] for level in levels)


def duration(seconds: float) -> str:
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes % 60:02}:{int(seconds) % 60:02}" if hours else f"{minutes}:{int(seconds) % 60:02}"


def _head(shown: Overview, width: int, ascii_only: bool) -> Text:
    how = shown.ending.how if shown.ending else "no process has it open"
    done = f"step {shown.version}" + (f" of {shown.steps}" if shown.steps else "")
    times = (
        [f"{duration(shown.elapsed_s)} {'so far' if shown.is_live else 'in all'}"]
        if shown.elapsed_s is not None
        else []
    )
    times += [f"{duration(shown.left_s)} left"] if shown.left_s is not None else []
    times += [f"reading the log: {shown.loaded:.0%}"] if shown.loaded < 1 else []
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"{plain(shown.name)[: width // 3]}  ", "bold")
    line.append(f"{how}  ", _STYLES.get(how, ""))
    line.append(f"{done}  ")
    said = ", ".join(times)
    if shown.steps and (room := min(width - len(line.plain) - len(said) - 3, 40)) >= 8:
        full = round(room * min(shown.version / shown.steps, 1.0))
        line.append(("#" if ascii_only else "━") * full, "green").append(
            ("." if ascii_only else "╌") * (room - full), "dim"
        )
        line.append("  ")
    return line.append(said)


def _numbers(shown: Overview, width: int, blocks: str) -> list[_Section]:
    room = width - _LABEL
    found = [
        _Section(shown.measure, [_measured(shown, room, blocks), *_held_out(shown, blocks)]),
        _Section("staleness", _staleness(shown, room, blocks)),
        _Section("time", [*_shares(shown, room, blocks), *([Text(f"now {shown.doing}")] if shown.doing else [])]),
        _Section("speed", [Text(", ".join(f"{_short(value)} {name}" for name, value in shown.speeds.items()))]),
        _Section("running", _running(shown, room)),
        _Section("stalled", [one for line in shown.stalled.splitlines() for one in _wrapped(line, room, "red")]),
        _Section("servers", [_server(server) for server in shown.health.get("servers", ()) if _matters(server, shown)]),
        _Section("disk", _disk(shown.health.get("disk", {}), room)),
        _Section("the end", _end(shown, room)),
    ]
    return [section for section in found if any(line.plain for line in section.lines)]


def _lists(shown: Overview, width: int) -> list[_Section]:
    health, room = shown.health, width - _LABEL
    found = [
        _Section("findings", [
            line
            for one in health.get("findings", ())
            for line in _wrapped(f"{one['text']} {one['advice']}", room, _STYLES.get(one["severity"], ""))
        ]),
        _Section("failures", [
            _counted(one, f"{one['error']}: {one['message']}") for one in _newest(health.get("failures", ()))
        ]),
        _Section("rejected", [
            _counted(one, f"groups {one['outcome']} {one['reason']}") for one in _newest(health.get("rejected", ()))
        ]),
        _Section("warnings", [
            _counted(one, one["text"], _STYLES.get(one["level"], "")) for one in _newest(health.get("warnings", ()))
        ]),
        _Section("restarts", [
            Text(plain(f"{one['name']}: {one['how']}")) for one in _newest(health.get("restarts", ()), "t")
        ]),
        _Section("unreadable", [line for problem in shown.problems for line in _wrapped(problem, room, "yellow")]),
    ]  # fmt: skip
    return [section for section in found if section.lines]


def _newest(rows: Iterable[Row], key: str = "last") -> list[Row]:
    return sorted(rows, key=lambda row: -row[key])


def _counted(row: Row, text: str, style: str = "") -> Text:
    return Text.assemble((f"{row['count']} x ", "bold"), (plain(text), style))


def _measured(shown: Overview, room: int, blocks: str) -> Text:
    if not shown.curve:
        return Text("no step is trained yet", "dim")
    said = f"{shown.curve[-1]:.3f}  "
    ends = f"  {min(shown.curve):.3f} to {max(shown.curve):.3f}"
    curve = sparkline(shown.curve, max(room - len(said) - len(ends), 8), blocks)
    return Text.assemble((said, "bold"), (curve, "green"), (ends, "dim"))


def _held_out(shown: Overview, blocks: str) -> list[Text]:
    if not shown.evaluations:
        return []
    version, last = shown.evaluations[-1]
    choose = min if shown.measure == "loss" else max
    best = choose(shown.evaluations, key=lambda one: one[1])
    said = f"held out {last:.3f} at version {version}" + (
        f", best {best[1]:.3f} at {best[0]}" if round(best[1], 3) != round(last, 3) else ""
    )
    curve = sparkline([one for _, one in shown.evaluations], 16, blocks) if len(shown.evaluations) > 1 else ""
    return [Text.assemble(said, "  ", (curve, "green"))]


def _staleness(shown: Overview, room: int, blocks: str) -> list[Text]:
    known, shares = shown.staleness, shown.stale_shares
    if not known:
        return []
    parts = [f"{name} {_short(known[name])}" for name in ("mean", "max") if name in known]
    said = ", ".join([*parts, *([f"{known['bound']:g} allowed"] if "bound" in known else [])])
    if not shares:
        return [Text(said)]
    begin = f"{said}   oldest token "
    histogram = "  ".join(f"{age}: {share:.0%}" for age, share in enumerate(shares[:30]))
    if len(begin) + len(histogram) > room:
        histogram = f"0 {sparkline(shares[:30], 30, blocks)} {min(len(shares), 30) - 1}"
    return [Text.assemble(begin, histogram)]


def _shares(shown: Overview, room: int, blocks: str) -> list[Text]:
    """Who waits: a bar, and what it means."""
    if not shown.time_shares:
        return []
    line, size = Text(), max(min(room - 58, 30), 8)
    shades = _SHADES if blocks == _BLOCKS else _PLAIN_SHADES
    for name, share in shown.time_shares.items():
        line.append(shades[name] * round(share * size), _STYLES[name])
    for name, share in shown.time_shares.items():
        line.append("  ").append(f"{name} {share:.0%}", _STYLES[name])
    return [line]


def _running(shown: Overview, room: int) -> list[Text]:
    if not shown.is_live:
        return []
    now = shown.running
    parts = [f"{now.episodes} episodes", f"{now.groups} groups; {now.waiting} groups wait to be trained"]
    parts += [f"{now.evaluated} episodes of an evaluation"] if now.evaluated else []
    longest = ", ".join(f"{plain(name)} {duration(seconds)}" for name, seconds in now.longest)
    return [*_wrapped(", ".join(parts), room), *([Text(f"longest: {longest}", "dim")] if longest else [])]


def _matters(server: Row, shown: Overview) -> bool:
    """Of a run that has ended, what its servers last did says little, unless they were not well."""
    return shown.is_live or server["state"] == "fenced"


def _server(server: Row) -> Text:
    version = "" if server["version"] is None else f", version {server['version']}"
    rates = f", {_short(server['turns_per_s'])} turns/s, {_short(server['tokens_per_s'])} tokens/s"
    rates = "" if server["state"] == "fenced" else rates
    fences = f", fenced {server['fences']} x" if server["fences"] else ""
    reason = f": {plain(server['reason'])}" if server["reason"] else ""
    style = _STYLES.get(server["state"], "dim")
    return Text.assemble(f"{plain(server['server'])} ", (server["state"], style), f"{version}{rates}{fences}{reason}")


def _disk(sizes: dict[str, int], room: int) -> list[Text]:
    if not sizes:
        return []
    parts = ", ".join(f"{plain(name)} {_bytes(size)}" for name, size in sorted(sizes.items(), key=lambda one: -one[1]))
    return _wrapped(f"{_bytes(sum(sizes.values()))}: {parts}", room)


def _end(shown: Overview, room: int) -> list[Text]:
    if shown.ending is None or shown.is_live:
        return []
    said = [shown.ending.why, f"next: {shown.ending.what_next}" if shown.ending.what_next else ""]
    return [line for text in said for line in _wrapped(text, room)]


def _wrapped(text: str, room: int, style: str = "") -> list[Text]:
    return [Text(line, style) for line in textwrap.wrap(plain(text), max(room, 20))]


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _bytes(size: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _fitting(sections: Sequence[_Section], height: int | None) -> list[_Section]:
    """With fewer lines of the longest sections if they do not fit; the last ones are left out if need be."""
    sections = list(sections) if height is None else list(sections)[: max(height, 0)]
    sizes = [len(section.lines) if height else min(len(section.lines), _MOST_LINES) for section in sections]
    while height is not None and sum(sizes) > height:
        longest = max(range(len(sizes)), key=lambda i: sizes[i])
        sizes[longest] -= 1
    return [_cut(section, size) for section, size in zip(sections, sizes, strict=True)]


def _cut(section: _Section, size: int) -> _Section:
    if len(section.lines) <= size:
        return section
    if size < 2:
        return _Section(section.label, section.lines[:size])
    more = Text(f"and {len(section.lines) - size + 1} more", "dim")
    return _Section(section.label, [*section.lines[: size - 1], more])


def _drawn(sections: Sequence[_Section], width: int) -> list[Text]:
    """Each line begins with its section's label, or below it."""
    found: list[Text] = []
    for section in sections:
        for i, line in enumerate(section.lines):
            whole = Text.assemble(("" if i else section.label).ljust(_LABEL), line, no_wrap=True)
            whole.truncate(width, overflow="ellipsis")
            whole.stylize("bold", 0, _LABEL)
            found.append(whole)
    return found


def _beside(line: Text, width: int, other: Text) -> Text:
    whole = Text.assemble(line, no_wrap=True)
    whole.truncate(width, pad=True)
    return whole.append_text(other)
