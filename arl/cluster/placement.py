"""What runs where: the table at the start of a run, and mistakes that the settings alone show.

settings --> planned.py   --+
nodes    --> node_checks ------------------+--> PlacementTable --> console, event log, --dry-run
servers, mirrors, the trainer's ranks -----+
"""

from __future__ import annotations

import html
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import msgspec

from arl.api.errors import ConfigError
from arl.api.events import Finding, PlacedPart, RunPlaced, SharedPath, gpus_text, ranges_text

_ADVICE = "the same script with --dry-run shows all of the placement, and starts nothing"
_SHOWN_SERVERS = 2
_SHOWN_NODES = 8
"""Machines that a line names one by one."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementTable:
    """What runs where, and what is wrong with it. Its text is the table."""

    parts: Sequence[PlacedPart]
    shared: Sequence[SharedPath] = ()
    findings: Sequence[Finding] = ()

    @property
    def mistakes(self) -> list[str]:
        return [one.text for one in self.findings if one.is_mistake]

    @property
    def warnings(self) -> list[str]:
        return [one.text for one in self.findings if not one.is_mistake]

    @property
    def is_one_machine(self) -> bool:
        return len({part.host for part in self.parts if part.host}) <= 1 and not any(
            part.part in ("ray", "mirror") or (part.part == "server" and not part.host) for part in self.parts
        )

    def record(self) -> RunPlaced:
        return RunPlaced(parts=list(self.parts), shared=list(self.shared), findings=list(self.findings))

    def rows(self) -> dict[str, Any]:
        """For machines."""
        return {
            "parts": msgspec.to_builtins(list(self.parts)),
            "shared": msgspec.to_builtins(list(self.shared)),
            "mistakes": self.mistakes,
            "warnings": self.warnings,
        }

    def tell(self, show: Callable[..., None]) -> None:
        """Show the table, and log what is wrong with it. show: Display.tell."""
        show("placement", self.brief(), **self.rows())
        for finding in self.findings:
            logger.log(logging.ERROR if finding.is_mistake else logging.WARNING, "%s", finding.text)

    def brief(self) -> str:
        """One line for a run on one machine; else the table without findings, which the log has."""
        if not self.is_one_machine:
            return "\n".join(self._lines())
        return f"on {self.parts[0].host}: " + ", ".join(_said(parts) for parts in _in_brief(self.parts[1:]))

    def __str__(self) -> str:
        lines = self._lines()
        for title, texts in (("mistakes", self.mistakes), ("warnings", self.warnings)):
            lines += [f"{title}:"] * bool(texts) + [f"  {number}. {text}" for number, text in enumerate(texts, 1)]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """For a notebook."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def _lines(self) -> list[str]:
        rows = [_row(parts) for parts in _alike(self.parts)]
        lines = ["what runs where:", *_aligned(rows)]
        if self.shared:
            lines += ["what must be shared:"]
            lines += _aligned([(path.name, path.path, _seen(path.seen)) for path in self.shared])
        return lines


def check(findings: Sequence[Finding]) -> None:
    """Raises ConfigError with the mistakes that keep a run from starting, if there are any."""
    if texts := [one.text for one in findings if one.is_mistake and one.ends_start]:
        raise ConfigError("\n".join([*texts, _ADVICE]))


# Its text


def _alike(parts: Sequence[PlacedPart]) -> list[list[PlacedPart]]:
    """Neighbours that one line shows: ranks of a role on a host; servers of one host on the same device."""

    def kind(part: PlacedPart) -> tuple[str, ...]:
        role, is_rank, _ = part.name.partition(" rank ")
        if is_rank:
            return part.part, role, part.host, part.address, part.device.partition(" ")[0], part.note
        is_free = part.part == "server" and part.address == "a free port"
        own = part.device if is_free else f"{part.address} {part.pid} {part.name}"
        return part.part, part.host, own

    return [list(run) for _, run in groupby(parts, kind)]


def _row(parts: Sequence[PlacedPart]) -> tuple[str, ...]:
    first = parts[0]
    process = "" if first.pid is None or len(parts) > 1 else f"process {first.pid}"
    return _name(parts), first.host, first.address, _devices(parts), "; ".join(filter(None, (process, first.note)))


def _name(parts: Sequence[PlacedPart]) -> str:
    first, count = parts[0], len(parts)
    role, is_rank, _ = first.name.partition(" rank ")
    if is_rank:
        return f"{role} rank{'s' * (count > 1)} {ranges_text([int(part.name.rpartition(' ')[2]) for part in parts])}"
    if first.part == "server" and count > 1:
        return f"{count} servers"
    return " ".join(filter(None, (first.part, first.name)))


def _devices(parts: Sequence[PlacedPart]) -> str:
    named = dict.fromkeys(part.device for part in parts)
    numbers = [name.removeprefix("GPU ") for name in named]
    return gpus_text([int(one) for one in numbers]) if all(one.isdigit() for one in numbers) else ", ".join(named)


def _in_brief(parts: Sequence[PlacedPart]) -> list[list[PlacedPart]]:
    """Like _alike, but with three or more servers in one line."""
    servers = [part for part in parts if part.part == "server"]
    if len(servers) <= _SHOWN_SERVERS:
        return _alike(parts)
    return [*_alike([part for part in parts if part.part != "server"]), servers]


def _said(parts: Sequence[PlacedPart]) -> str:
    """A part in one phrase, for the line of a run on one machine."""
    first = parts[0]
    if first.part == "workers":
        return first.note
    on = f" on {_devices(parts)}" if first.device else ""
    where = first.address if first.part == "server" and len(parts) == 1 else ""
    more = ", ".join(filter(None, (where, f"process {first.pid}" if first.pid and len(parts) == 1 else "")))
    return f"{_name(parts)}{on}" + (f" ({more})" if more else "")


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width) for row in rows)
    return [f"  {line}".rstrip() for line in lines]


def _seen(seen: dict[str, str]) -> str:
    by_answer: dict[str, list[str]] = {}
    for node, answer in seen.items():
        by_answer.setdefault(answer, []).append(node)
    return "; ".join(f"{answer}: {_listed(nodes)}" for answer, nodes in by_answer.items())


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN_NODES
    return ", ".join(names[:_SHOWN_NODES]) + (f" and {more} more" if more > 0 else "")
