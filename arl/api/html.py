"""What a notebook shows of trajectories, groups, runs and errors: HTML without scripts, for light pages and dark ones.

All text is escaped, and all sizes are bounded: models wrote most of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from typing import Any, Protocol, TypeGuard

from arl.api.images import ImagePlace, mark_of, num_drawn

MOST_TOKENS = 1500
"""Of one trajectory that is shown alone."""
MOST_SHOWN = 8
"""Trajectories of a group."""
MOST_TOKENS_EACH = 250
"""Of one among several."""
_MOST_POINTS = 300
_MOST_TEXT = 500
_HUES = (210, 30, 130, 280, 60, 340)
"""Of versions, in turn."""
_TEXT_STYLE = (
    "white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace;line-height:1.5;max-height:40em;overflow:auto"
)
_WIDTH, _HEIGHT, _TOP = 280, 100, 18

Point = tuple[float, float]


class DrawnTrajectory(Protocol):
    """A Trajectory, which itself draws with this module. Columns have `tolist`."""

    @property
    def token_ids(self) -> Any: ...
    @property
    def loss_mask(self) -> Any: ...
    @property
    def versions(self) -> Any: ...
    @property
    def behavior_logprobs(self) -> Any: ...
    @property
    def total_reward(self) -> float: ...
    @property
    def rewards(self) -> Mapping[str, float]: ...
    @property
    def role(self) -> str: ...
    @property
    def turns(self) -> Sequence[object]: ...
    @property
    def images(self) -> Sequence[ImagePlace]: ...
    @property
    def is_truncated(self) -> bool: ...
    @property
    def num_trained_tokens(self) -> int: ...
    @property
    def oldest_version(self) -> int | None: ...
    @property
    def newest_version(self) -> int | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTokens:
    """Tokens to be drawn. Columns have length T = number of tokens."""

    token_ids: Sequence[int]
    loss_mask: Sequence[int | bool]
    versions: Sequence[int]
    logprobs: Sequence[float]
    pieces: Sequence[str] | None = None
    """The text of each of the first tokens; None: ids are shown."""
    more: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])
    """Name -> a number for each token, nan where there is none."""
    images: Sequence[ImagePlace] = ()
    """Each is drawn as one mark in the place of its placeholders."""


def trajectory_html(
    trajectory: DrawnTrajectory, pieces: Sequence[str] | None = None, most: int = MOST_TOKENS, name: str = "Trajectory"
) -> str:
    """pieces: the text of each of the first tokens, if it is known."""
    oldest, newest = trajectory.oldest_version, trajectory.newest_version
    facts = {
        "reward": f"{trajectory.total_reward:.4g}",
        **{part: f"{value:.4g}" for part, value in list(trajectory.rewards.items())[:MOST_SHOWN]},
        "role": trajectory.role,
        "tokens": f"{len(trajectory.token_ids)}, {trajectory.num_trained_tokens} trained",
        "turns": str(len(trajectory.turns)),
    }
    if oldest is not None:
        facts["versions"] = str(oldest) if oldest == newest else f"{oldest} to {newest}"
    if trajectory.is_truncated:
        facts["truncated"] = "yes"
    most = num_drawn(trajectory.images, most)
    shown = ShownTokens(
        token_ids=trajectory.token_ids[:most].tolist(),
        loss_mask=trajectory.loss_mask[:most].tolist(),
        versions=trajectory.versions[:most].tolist(),
        logprobs=trajectory.behavior_logprobs[:most].tolist(),
        pieces=pieces,
        images=trajectory.images,
    )
    return f"<div>{line_html(name, facts)}{tokens_html(shown, len(trajectory.token_ids))}</div>"


def several_html(
    title: str,
    facts: Mapping[str, str],
    trajectories: Sequence[DrawnTrajectory],
    pieces: Sequence[Sequence[str]] | None = None,
) -> str:
    """The first trajectories, each in a part that opens."""
    parts = [line_html(title, facts)]
    for i, trajectory in enumerate(trajectories[:MOST_SHOWN]):
        own = trajectory_html(trajectory, pieces[i] if pieces else None, MOST_TOKENS_EACH, trajectory.role)
        head = f"{i}: reward {trajectory.total_reward:.4g}, {len(trajectory.token_ids)} tokens"
        is_open = " open" if i == 0 else ""
        parts.append(f"<details{is_open}><summary>{escape(head)}</summary>{own}</details>")
    if len(trajectories) > MOST_SHOWN:
        parts.append(f'<div style="opacity:.6">and {len(trajectories) - MOST_SHOWN} more trajectories</div>')
    return f"<div>{''.join(parts)}</div>"


def tokens_html(shown: ShownTokens, num_tokens: int) -> str:
    """Trained tokens in the colour of their version; others are pale. num_tokens: with those that are not shown."""
    hidden = {i for image in shown.images for i in range(image.start + 1, image.stop)}
    marks = {image.start: mark_of(image) for image in shown.images}
    spans = [_token(shown, i, marks.get(i)) for i in range(len(shown.token_ids)) if i not in hidden]
    versions = sorted({v for v, on in zip(shown.versions, shown.loss_mask, strict=True) if on})[:20]
    legend = " ".join(f'<span style="background:{_colour(v)}">&nbsp;version {v}&nbsp;</span>' for v in versions)
    rest = num_tokens - len(shown.token_ids)
    return (
        f'<div style="{_TEXT_STYLE}">{"".join(spans)}</div>'
        + (f'<div style="opacity:.6">and {rest} more tokens</div>' if rest > 0 else "")
        + (f"<div>trained: {legend}</div>" if legend else "")
    )


def _token(shown: ShownTokens, i: int, mark: str | None) -> str:
    """mark: of the image that begins here."""
    version, is_trained = shown.versions[i], bool(shown.loss_mask[i])
    said = [f"token {i}", f"id {shown.token_ids[i]}"]
    if version >= 0:
        said += [f"version {version}", f"logprob {shown.logprobs[i]:.4g}"]
    said += [f"{name} {values[i]:.4g}" for name, values in shown.more.items() if math.isfinite(values[i])]
    said.append("trained" if is_trained else "not trained")
    text = mark or (f"{shown.token_ids[i]} " if shown.pieces is None else shown.pieces[i])
    style = f"background:{_colour(version)}" if is_trained else "opacity:.6"
    return f'<span style="{style}" title="{escape(", ".join(said))}">{_visible(text)}</span>'


def _colour(version: int) -> str:
    return f"hsla({_HUES[version % len(_HUES)]},70%,50%,.3)"


def _visible(text: str) -> str:
    """Escaped, with what cannot be seen spelt out."""
    text = text if len(text) <= _MOST_TEXT else text[:_MOST_TEXT] + "…"
    shown = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    return escape(shown).replace("\n", "↵\n")


# Runs


def run_html(
    title: str, facts: Mapping[str, object], rows: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]
) -> str:
    """A run in numbers and curves. rows: of its steps; evaluations: version and reward of each."""
    held_out = _points(evaluations, "reward")
    curves = [
        curve_svg("reward (dots: held out)" if held_out else "reward", [_points(rows, "reward")], held_out),
        curve_svg("staleness: mean, max", [_points(rows, f"staleness/{name}") for name in ("mean", "max")]),
        curve_svg("episodes per second", [_points(rows, "samples_per_s")]),
    ]
    said = {k: f"{v:.4g}" if isinstance(v, float) else str(v) for k, v in facts.items() if v is not None}
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{_visible(value)}</td></tr>" for name, value in said.items())
    table = f'<table style="color:inherit">{cells}</table>'
    return f"<div><b>{_visible(title)}</b>{table}{''.join(curves)}</div>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownWork:
    """How far a piece of work is."""

    name: str
    done: float
    total: float | None
    """None: unknown."""
    said: str


def progress_html(
    columns: Sequence[str], rows: Iterable[Sequence[str]], work: Iterable[ShownWork], curve: str, last: str
) -> str:
    """A table of steps, a bar for each piece of work, a curve of `curve_svg`, and a line of text."""
    head, body = _row("th", columns), "".join(_row("td", row) for row in rows)
    style = "color:inherit;font-variant-numeric:tabular-nums"
    parts = [f'<table style="{style}">{head}{body}</table>'] if body else []
    parts += [f"<div>{_visible(last)}</div>"] if last else []
    for one in work:
        length = "" if one.total is None else f'value="{one.done:g}" max="{one.total:g}"'
        parts.append(f"<div>{_visible(one.name)} <progress {length}></progress> {_visible(one.said)}</div>")
    return f"<div>{''.join(parts)}{curve}</div>"


def _row(tag: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f'<{tag} style="text-align:right">{_visible(cell)}</{tag}>' for cell in cells) + "</tr>"


def _points(rows: Iterable[Mapping[str, Any]], name: str) -> list[Point]:
    pairs = [(row.get("version"), row.get(name)) for row in rows]
    return [(float(x), float(y)) for x, y in pairs if _is_drawn(x) and _is_drawn(y)]


def _is_drawn(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and abs(value) < 1e300


def curve_svg(title: str, lines: Sequence[Sequence[Point]], dots: Sequence[Point] = ()) -> str:
    """Lines over x, the first the strongest, and dots; empty without a point. Both axes are in the unit of the data."""
    drawn, dots = [_thin(line) for line in lines], _thin(dots)
    points = [point for line in (*drawn, dots) for point in line]
    if not points:
        return ""
    xs, ys = zip(*points, strict=True)
    left, right, low, high = min(xs), max(xs), min(ys), max(ys)

    def at(point: Point) -> tuple[float, float]:
        x = (point[0] - left) / ((right - left) or 1.0)
        y = (point[1] - low) / ((high - low) or 1.0) if high > low else 0.5
        return round(4 + x * (_WIDTH - 8), 1), round(_TOP + 4 + (1 - y) * (_HEIGHT - _TOP - 22), 1)

    parts = [f'<text x="4" y="12" fill="currentColor">{escape(title)}</text>']
    ends = f"{low:.3g} to {high:.3g}, steps {left:.0f} to {right:.0f}"
    parts.append(f'<text x="4" y="{_HEIGHT - 3}" fill="currentColor" opacity=".6">{ends}</text>')
    for number, line in enumerate(drawn):
        path = " ".join(f"{x},{y}" for x, y in map(at, line))
        colour = f'fill="none" stroke="#2a7de1" stroke-width="1.5" opacity="{1.0 if number == 0 else 0.5}"'
        parts.append(f'<polyline points="{path}" {colour}/>')
    parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="#e07b00"/>' for x, y in map(at, dots)]
    size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-size="11" font-family="sans-serif">{"".join(parts)}</svg>'
    )


def _thin(line: Sequence[Point]) -> list[Point]:
    """Means of neighbours, where there are more points than pixels."""
    number = min(len(line), _MOST_POINTS)
    cuts = [i * len(line) // number for i in range(number + 1)] if number else []
    parts = [line[a:b] for a, b in pairwise(cuts)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def line_html(title: str, facts: Mapping[str, str]) -> str:
    said = ", ".join(f"{name} {value}" for name, value in facts.items())
    return f"<div><b>{_visible(title)}</b> {_visible(said)}</div>"
