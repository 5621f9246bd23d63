"""One group, and one episode: its calls, and its tokens in a window."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec
import numpy as np

from arl.api.errors import RunFileError
from arl.api.events import AttemptFailed, Event
from arl.api.tracking import expected_column
from arl.observe.events.records import EpisodeRecord, LoggedImage, TokenRecord
from arl.observe.events.run_record import RunRecord
from arl.observe.view.episode_table import EpisodeTable, Row
from arl.observe.view.texts import Texts

WINDOW = 4000
MOST_TOKENS = 20_000
_MOST_SAME = 200
_MOST_EARLIER = 100
"""Trajectories that a later one may have branched from."""
_OWN = ("token_ids", "loss_mask", "versions", "behavior_logprobs")


def group_details(run: RunRecord, table: EpisodeTable, texts: Texts, life: int, number: int) -> Row:
    """Raises RunFileError if there is no such group."""
    group = run.group(life, number)
    about = {field.name: getattr(group, field.name) for field in fields(group)}
    about["expected"] = expected_column(group.example)
    return {**about, "episodes": [{**table.row(e), "answer": _answer(run, texts, e)} for e in group.episodes]}


def episode_details(
    run: RunRecord, table: EpisodeTable, texts: Texts, episode: EpisodeRecord, window: tuple[int, int, int | None]
) -> Row:
    """window: start, stop, and the trajectory that it cuts, or None for all of them."""
    problem, tokens = "", list[TokenRecord]()
    try:
        tokens = run.tokens(episode)
        if not tokens:
            problem = _why_none(episode)
    except RunFileError as error:
        problem = str(error)
    siblings = episode.group.episodes if episode.group else []
    return {
        **table.row(episode),
        "example": episode.example,
        "expected": expected_column(episode.example),
        "siblings": [
            {"life": e.life, "episode": e.episode, "how": e.how, "reward": e.reward, "tokens": e.num_tokens}
            for e in siblings
        ],
        "failed_attempts": [
            fields_of(record, "t", "attempt", "error", "message", "runs_again")
            for life, record in run.system
            if life == episode.life and isinstance(record, AttemptFailed) and record.episode == episode.episode
        ],
        "calls": [call_fields(call) for call in run.calls_of(episode)],
        "problem": problem,
        "parts": [fields_of(part, *part.__struct_fields__) for part in episode.trajectories],
        "trajectories": [_window(one, texts, window) for one in tokens],
        "branches": _branches(tokens),
        "same_example": _same_example(run, table, episode),
    }


def call_fields(call: Event) -> Row:
    seconds = getattr(call, "seconds", 0.0)
    return {"event": type(call).__name__, "began": call.t - seconds, **fields_of(call, *call.__struct_fields__)}


def fields_of(record: msgspec.Struct, *names: str) -> Row:
    """With those fields, too, that have their default."""
    return {name: getattr(record, name) for name in names}


def _why_none(episode: EpisodeRecord) -> str:
    if episode.ended is None:
        return ""
    if episode.trajectories:
        return "The tokens of this episode were not kept: see the settings log.events."
    return "This episode returned no trajectory, and nothing that it saw before was kept."


def _answer(run: RunRecord, texts: Texts, episode: EpisodeRecord) -> str:
    try:
        tokens = [one for one in run.tokens(episode) if one.row.turns]
    except RunFileError:
        return ""
    if not tokens:
        return ""
    start, stop, _ = tokens[-1].row.turns[-1]
    return texts.whole(tokens[-1].columns["token_ids"][start : min(stop, start + MOST_TOKENS)].tolist())


def _window(tokens: TokenRecord, texts: Texts, window: tuple[int, int, int | None]) -> Row:
    row, columns = tokens.row, tokens.columns
    start, stop, only = window
    stop = min(stop, row.tokens) if only in (None, row.number) else 0
    start = min(start, stop)
    token_ids = columns["token_ids"].tolist()
    return {
        **fields_of(row, "number", "role", "reward", "rewards", "metrics", "temperature", "is_truncated", "turns"),
        "num_tokens": row.tokens,
        "start": start,
        "stop": stop,
        "images": [_fields(one) for one in tokens.images if one.start < stop and one.stop > start],
        "pieces": texts.pieces(token_ids, start, stop),
        "token_ids": token_ids[start:stop],
        "loss_mask": columns["loss_mask"][start:stop].astype(int).tolist(),
        "versions": columns["versions"][start:stop].tolist(),
        "behavior_logprobs": _short(columns["behavior_logprobs"][start:stop]),
        "columns": {name: _short(column[start:stop]) for name, column in columns.items() if name not in _OWN},
    }


def _fields(image: LoggedImage) -> Row:
    return {name: getattr(image, name) for name in ("digest", "width", "height", "start", "stop")}


def _short(values: np.ndarray) -> list[float]:
    """Six digits: float32 has no more."""
    return [float(f"{value:.6g}") for value in values.tolist()]


def _branches(tokens: list[TokenRecord]) -> list[Row]:
    """Where each trajectory leaves the earlier one of its role with which it has the most tokens in common."""
    found: list[Row] = []
    for place, second in enumerate(tokens):
        earlier = [one for one in tokens[:place][-_MOST_EARLIER:] if one.row.role == second.row.role]
        if earlier:
            common = [_num_common(one, second) for one in earlier]
            first = earlier[int(np.argmax(common))].row
            found.append(
                {"role": first.role, "first": first.number, "second": second.row.number, "differs_at": max(common)}
            )
    return found


def _num_common(a: TokenRecord, b: TokenRecord) -> int:
    length = min(a.row.tokens, b.row.tokens)
    differ = np.flatnonzero(a.columns["token_ids"][:length] != b.columns["token_ids"][:length])
    same = int(differ[0]) if len(differ) else length
    others = (min(x.start, y.start) for x, y in zip(a.images, b.images, strict=False) if _fields(x) != _fields(y))
    return min(same, next(others, same))


def _same_example(run: RunRecord, table: EpisodeTable, episode: EpisodeRecord) -> list[dict[str, Any]]:
    """The newest of other groups, or of other evaluations."""
    row = table.row(episode)
    if row["row"] is None:
        return []
    in_group = (table.column("life") == episode.life) & (table.column("group") == row["group"])
    of_kind = table.having("kind", row["kind"]) & table.having("task", row["task"])
    same = of_kind & (table.column("row") == row["row"]) & ~in_group
    found = np.flatnonzero(same)
    others = [table.row(run.episodes[index]) for index in found[found != episode.index][-_MOST_SAME:]]
    return [{name: o[name] for name in ("life", "episode", "step", "reward", "evaluation", "how")} for o in others]
