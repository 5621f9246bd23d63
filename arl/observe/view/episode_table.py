"""The episodes of a run as rows and columns: each row is what the page's table shows of one episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from arl.api.events import EvaluationEnded
from arl.observe.events.records import EpisodeRecord
from arl.observe.events.run_record import RunRecord
from arl.observe.health.digest import mean
from arl.runtime.http.bodies import RequestError

Row = dict[str, Any]

NUMBERS = (
    "life", "group", "evaluation", "step", "epoch", "row", "reward", "began", "seconds", "tokens", "trained", "turns",
    "oldest", "newest", "staleness", "branches", "attempts", "is_undone", "advantage", "weight", "clipped", "entropy",
    "has_tokens", "trajectories",
)  # fmt: skip
TEXTS = ("episode", "kind", "task", "how", "outcome", "reason", "error")
_RANGES = ("step", "reward", "tokens", "staleness")
_EQUAL = {"example": "row", "group": "group", "life": "life", "evaluation": "evaluation", "undone": "is_undone"}
"""Parameter -> column."""
_AMONG = ("how", "outcome", "reason", "error", "kind")
MOST_ROWS = 1000
_STALEST = 1000
_HIGHEST = 2.0**53


def evaluated_of(name: str) -> tuple[int, int] | None:
    """(evaluation, index of the example) of an episode `eN.INDEX`; None for one of training."""
    evaluation, _, index = name.partition(".")
    if evaluation[:1] == "e" and evaluation[1:].isdecimal() and index.isdecimal():
        return int(evaluation[1:]), int(index)
    return None


def row_of(episode: EpisodeRecord, versions: Mapping[tuple[int, int], int]) -> Row:
    """versions: (life, evaluation) -> version."""
    group, parts, trained = episode.group, episode.trajectories, episode.trained
    evaluation, index = evaluated_of(episode.episode) or (None, None)
    roles = list(dict.fromkeys(part.role for part in parts))
    names = dict.fromkeys(name for part in parts for name in part.rewards)
    return {
        "life": episode.life,
        "episode": episode.episode,
        "kind": "training" if evaluation is None else "evaluation",
        "task": episode.task,
        "group": group.group if group else None,
        "evaluation": evaluation,
        "step": episode.step if evaluation is None else versions.get((episode.life, evaluation)),
        "epoch": group.epoch if group else None,
        "row": group.row if group else index if episode.row is None else episode.row,
        "how": episode.how,
        "outcome": group.outcome if group else "",
        "reason": group.reason if group else "",
        "reward": episode.reward,
        "rewards": {name: mean(part.rewards[name] for part in parts if name in part.rewards) for name in names},
        "began": episode.began,
        "seconds": None if episode.ended is None else episode.ended - episode.began,
        "tokens": episode.num_tokens,
        "trained": sum(part.trained for part in parts),
        "turns": episode.num_turns,
        "oldest": episode.oldest,
        "newest": episode.newest,
        "staleness": episode.staleness,
        "roles": roles,
        "branches": max(len(parts) - len(roles), 0),
        "attempts": episode.attempts,
        "error": episode.error,
        "message": episode.message,
        "is_undone": episode.is_undone,
        "advantage": mean(one.advantage for one in trained) if trained else None,
        "weight": max((one.weight for one in trained), default=None),
        "clipped": mean(one.clipped for one in trained) if trained else None,
        "entropy": mean(one.entropy for one in trained) if trained else None,
        "has_tokens": bool(episode.places),
        "trajectories": len(parts),
    }


class EpisodeTable:
    """Columns over RunRecord.episodes, kept up to date by `refresh`."""

    def __init__(self, run: RunRecord) -> None:
        self._run = run
        self._numbers: dict[str, np.ndarray] = {name: np.full(1024, np.nan) for name in NUMBERS}
        self._codes: dict[str, np.ndarray] = {name: np.zeros(1024, np.int64) for name in (*TEXTS[1:], "roles")}
        self._labels: dict[str, dict[str, int]] = {name: {} for name in self._codes}
        """The code of each text."""
        self.versions: dict[tuple[int, int], int] = {}
        self._num_system = 0

    def refresh(self) -> None:
        changed, new = self._run.take_changed(), self._run.system[self._num_system :]
        self._num_system += len(new)
        ended = {(life, e.number): e.version for life, e in new if isinstance(e, EvaluationEnded)}
        self.versions.update(ended)
        if ended:
            changed |= {e.index for e in self._run.episodes if (e.life, (evaluated_of(e.episode) or (-1,))[0]) in ended}
        self._grow(len(self._run.episodes))
        for index in changed:
            row = row_of(self._run.episodes[index], self.versions)
            for name, column in self._numbers.items():
                value = row[name]
                column[index] = np.nan if value is None else value
            for name, column in self._codes.items():
                text = "\n".join(row["roles"]) if name == "roles" else row[name]
                column[index] = self._labels[name].setdefault(text, len(self._labels[name]))

    def column(self, name: str) -> np.ndarray:
        """Numbers, nan where an episode has none."""
        return self._numbers[name][: len(self._run.episodes)]

    def having(self, name: str, text: str) -> np.ndarray:
        """Whether each episode has this text in this column."""
        return self._codes[name][: len(self._run.episodes)] == self._labels[name].get(text, -1)

    def row(self, episode: EpisodeRecord) -> Row:
        return row_of(episode, self.versions)

    def find(self, wanted: Mapping[str, str], among: np.ndarray | None = None) -> Row:
        """The rows that match the parameters of a request, sorted and cut; docs/viewing.md lists them.

        among: indices to look at; None for all. Raises RequestError for a parameter that cannot be read.
        """
        total = len(self._run.episodes)
        mask = np.ones(total, bool) if among is None else np.isin(np.arange(total), among)
        for condition in self._conditions(wanted):
            mask &= condition
        indices = self._sorted(np.flatnonzero(mask), wanted)
        start, limit = whole(wanted, "offset", 0), min(whole(wanted, "limit", 100), MOST_ROWS)
        rows = [self.row(self._run.episodes[index]) for index in indices[start : start + limit]]
        return {"total": total, "matched": len(indices), "rows": rows}

    def staleness(self) -> Row:
        """Trained tokens by step and by the staleness of their trajectory's oldest token."""
        step, stale, trained = (self.column(name) for name in ("step", "staleness", "trained"))
        valid = self.having("kind", "training") & ~np.isnan(step) & ~np.isnan(stale) & (self.column("is_undone") == 0)
        steps, at = np.unique(np.clip(step[valid], 0, _HIGHEST).astype(int), return_inverse=True)
        values = np.clip(stale[valid], 0, _STALEST).astype(int)
        counts = np.zeros((len(steps), int(values.max(initial=0)) + 1), np.int64)
        np.add.at(counts, (at, values), np.clip(trained[valid], 0, _HIGHEST).astype(np.int64))
        return {"steps": steps.tolist(), "staleness": list(range(counts.shape[1])), "tokens": counts.tolist()}

    def _conditions(self, wanted: Mapping[str, str]) -> list[np.ndarray]:
        found: list[np.ndarray] = []
        for name in _RANGES:
            for end, holds in (("from", np.greater_equal), ("to", np.less_equal)):
                if (bound := number(wanted, f"{name}_{end}")) is not None:
                    found.append(holds(self.column(name), bound))
        found += [
            self.column(column) == bound
            for name, column in _EQUAL.items()
            if (bound := number(wanted, name)) is not None
        ]
        for name in _AMONG:
            if texts := wanted.get(name):
                found.append(np.any([self.having(name, text) for text in texts.split(",")], axis=0))
        if task := wanted.get("task"):
            found.append(self.having("task", task))
        if role := wanted.get("role"):
            codes = [code for text, code in self._labels["roles"].items() if role in text.split("\n")]
            found.append(np.isin(self._codes["roles"][: len(self._run.episodes)], codes))
        if workflow := wanted.get("workflow"):
            lives = [life for life, began in self._run.lives.items() if began.workflow == workflow]
            found.append(np.isin(self.column("life"), lives))
        return found

    def _sorted(self, indices: np.ndarray, wanted: Mapping[str, str]) -> np.ndarray:
        """Stable; episodes without the value come last, whatever the direction."""
        name, sign = wanted.get("sort") or "began", -1 if wanted.get("descending", "1") != "0" else 1
        if name in self._numbers:
            keys = self.column(name)[indices]
        elif name in self._codes:
            labels = list(self._labels[name])
            ranks = np.argsort(sorted(range(len(labels)), key=labels.__getitem__))
            keys = ranks[self._codes[name][indices]].astype(float) if len(indices) else np.zeros(0)
        elif name == "episode":
            keys = indices.astype(float)
        else:
            raise RequestError(f"sort is {name}; it must be one of {', '.join((*NUMBERS, *TEXTS))}")
        return indices[np.argsort(sign * keys, kind="stable")]

    def _grow(self, size: int) -> None:
        for columns, empty in ((self._numbers, np.nan), (self._codes, 0)):
            for name, column in columns.items():
                if size > len(column):
                    more = np.full(max(size, 2 * len(column)) - len(column), empty, column.dtype)
                    columns[name] = np.concatenate([column, more])


def number(wanted: Mapping[str, str], name: str) -> float | None:
    """A parameter of a request. Raises RequestError for one that is not a number."""
    text = wanted.get(name)
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise RequestError(f"{name} is {text}; it must be a number") from None


def whole(wanted: Mapping[str, str], name: str, default: int) -> int:
    """A parameter that counts. Raises RequestError for one that does not."""
    text = wanted.get(name)
    if not text:
        return default
    if not text.isdecimal() or len(text) > 15:
        raise RequestError(f"{name} is {text}; it must be a whole number from 0")
    return int(text)
