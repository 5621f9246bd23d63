"""A run that is looked at: its record, and the one thread that reads on and answers questions about it.

Among the answers: one group, and one episode, its calls, and its tokens in a window.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeVar, TypeVarTuple

import msgspec
import numpy as np

from arl.api.errors import RunFileError
from arl.api.events import AttemptFailed
from arl.api.tracking import expected_column
from arl.observe.events.records import EpisodeRecord, LoggedImage, TokenRecord
from arl.observe.events.run_record import RunRecord
from arl.observe.view.episode_table import EpisodeTable, Row, whole
from arl.observe.view.health import health
from arl.observe.view.texts import Texts, TextSearch, find_texts

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
ArgsT = TypeVarTuple("ArgsT")

_SLICE = 3000
"""Records read at a time; questions are answered in between."""
_SCAN_S = 0.1
"""Time to search at once."""
_FRESH_S = 0.9
_MOST_SEARCHES = 4
_WINDOW = 4000
_MOST_TOKENS = 20_000
_MOST_SAME = 200
_MOST_EARLIER = 100
"""Trajectories that a later one may have branched from."""
_OWN = ("token_ids", "loss_mask", "versions", "behavior_logprobs")


class Ending(NamedTuple):
    """How a run ended, or that it goes on."""

    how: str
    why: str
    what_next: str
    steps: int | None = None
    """Batches to train, if files beside the event log say so."""


EndingOf = Callable[[Path], Ending | None]


class ViewedRun:
    """Everything but `ask`, `read_on`, `follow` and `close` runs on the run's own thread, within `ask`."""

    def __init__(self, run_dir: Path, ending_of: EndingOf) -> None:
        self.run_dir = run_dir
        self.run = RunRecord(run_dir)
        self.table = EpisodeTable(self.run)
        self._ending_of = ending_of
        self._texts: Texts | None = None
        self._searches: dict[str, TextSearch] = {}
        self._unreadable = self._problem = ""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="arl-view")
        self._read_at = -_FRESH_S
        self._has_work = asyncio.Event()
        self._has_work.set()

    async def ask(self, function: Callable[[*ArgsT], ResultT], *args: *ArgsT) -> ResultT:
        """Call it on the run's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def read_on(self) -> None:
        """Read what the run has written since the last time, unless that was a moment ago."""
        now = time.monotonic()
        if now - self._read_at >= _FRESH_S and not self._has_work.is_set():
            self._read_at = now
            if await self.ask(self._work):
                self._has_work.set()

    async def follow(self) -> None:
        """Loads the run, and searches, in slices. Waits for read_on and find."""
        while True:
            await self._has_work.wait()
            await self.load()
            self._has_work.clear()

    async def load(self) -> None:
        """Read all that is there now."""
        while await self.ask(self._work):
            pass

    async def find(self, wanted: Mapping[str, str]) -> Row:
        """A page of the table; see EpisodeTable.find. A search for text goes on in the background."""
        found = await self.ask(self._find, wanted)
        if (searched := found["searched"]) and searched["done"] < searched["total"]:
            self._has_work.set()
        return found

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def texts(self) -> Texts:
        if self._texts is None or not self._texts.is_known:  # a run may write its tokenizer later
            self._texts = find_texts(self.run_dir, self.run.settings)
        return self._texts

    def tick(self) -> Row:
        """What a stream tells: equal ticks mean that nothing has come."""
        rows, files, ending = self.run.steps, self.run.files, self._ending_of(self.run_dir)
        is_live = ending is not None and ending.how == "running"
        return {
            "version": rows[-1]["version"] if rows else 0,
            "num_episodes": len(self.run.episodes),
            "num_running": int(self.table.having("how", "running").sum()) if is_live else 0,
            "loading": {"done": files.num_bytes_read, "total": files.num_bytes_read + files.num_bytes_waiting},
            "is_live": is_live,
        }

    @property
    def measure(self) -> str:
        """What its rows say of the model: `reward`, or the `loss` of fine-tuning, which has no episodes."""
        row = next(chain(self.run.steps, self.run.evaluations), {})
        return "loss" if "loss" in row and "reward" not in row else "reward"

    def about(self) -> Row:
        run, steps = self.run, self.run.settings.get("steps")
        how, why, what_next, known_steps = self._ending_of(self.run_dir) or Ending("unknown", "", "")
        steps = known_steps if steps is None else steps
        return {
            "name": self.run_dir.resolve().name,
            "dir": str(self.run_dir),
            "how": how,
            "why": why,
            "next": what_next,
            **self.tick(),
            "steps": steps if isinstance(steps, int) else None,
            "num_groups": len(run.groups),
            "has_events": run.files.directory.is_dir(),
            "has_text": self.texts.is_known,
            "problems": self.problems(),
            "lives": [
                {
                    "life": life,
                    **{n: getattr(began, n) for n in ("t", "host", "pid", "version", "arl", "workflow", "tasks")},
                }
                for life, began in sorted(run.lives.items())
            ],
            "began": min((began.t for began in run.lives.values()), default=None),
            "last": run.last,
            "settings": run.settings,
        }

    def steps(self, since: float | None) -> Row:
        rows = [row for row in self.run.steps if since is None or row["version"] > since]
        names = list(dict.fromkeys(name for row in rows for name in row if name != "remark"))
        columns = {
            name: [value if isinstance(value := row.get(name), int | float) else None for row in rows] for name in names
        }
        return {"names": names, "columns": columns, "evaluations": self.run.evaluations}

    def staleness(self) -> Row:
        rollout = self.run.settings.get("rollout")
        bound = rollout.get("max_staleness") if isinstance(rollout, dict) else None
        return {**self.table.staleness(), "bound": bound}

    def health(self) -> Row:
        return health(self.run, self.now() if self.tick()["is_live"] else None)

    def now(self) -> float:
        """The time. A run on another machine may have written something in this one's future."""
        return max(time.time(), self.run.last or 0.0)

    def group(self, life: int, number: int) -> Row:
        """A group, and its episodes with their answers. Raises RunFileError if there is none."""
        group = self.run.group(life, number)
        about = {field.name: getattr(group, field.name) for field in fields(group)}
        episodes = [{**self.table.row(e), "answer": self.answer(e, _MOST_TOKENS) or ""} for e in group.episodes]
        return {**about, "expected": expected_column(group.example), "episodes": episodes}

    def answer(self, episode: EpisodeRecord, most: int | None = None) -> str | None:
        """The text of its last turn, or of so many tokens of it. None if its tokens are not kept."""
        with suppress(RunFileError):
            if tokens := [one for one in self.run.tokens(episode) if one.row.turns]:
                start, stop, _ = tokens[-1].row.turns[-1]
                return self.texts.said(tokens[-1].columns["token_ids"][start:stop][:most].tolist())
        return None

    def episode(self, life: int, name: str, wanted: Mapping[str, str]) -> Row:
        """An episode, its calls, and its tokens in a window. Raises RunFileError if there is none."""
        episode = self.run.episode(life, name)
        start = whole(wanted, "start", 0)
        stop = min(whole(wanted, "stop", start + _WINDOW), start + _MOST_TOKENS)
        only = int(text) if (text := wanted.get("trajectory", "")).lstrip("-").isdecimal() else None
        problem, tokens = "", list[TokenRecord]()
        try:
            tokens = self.run.tokens(episode)
            if not tokens and episode.trajectories and episode.ended is not None:
                problem = "The tokens of this episode were not kept: see the settings log.events."
            elif not tokens and episode.ended is not None:
                problem = "This episode returned no trajectory, and nothing that it saw before was kept."
        except RunFileError as error:
            problem = str(error)
        siblings = episode.group.episodes if episode.group else []
        calls = [
            {"event": type(call).__name__, "began": call.t - getattr(call, "seconds", 0.0)} | _all_fields(call)
            for call in self.run.calls_of(episode)
        ]
        return {
            **self.table.row(episode),
            "example": episode.example,
            "expected": expected_column(episode.example),
            "siblings": [{"life": e.life, "episode": e.episode, "how": e.how, "reward": e.reward} for e in siblings],
            "failed_attempts": [
                _all_fields(record)
                for life, record in self.run.system
                if life == episode.life and isinstance(record, AttemptFailed) and record.episode == episode.episode
            ],
            "calls": calls,
            "problem": problem,
            "parts": list(map(_all_fields, episode.trajectories)),
            "trajectories": [self._window(one, start, stop if only in (None, one.row.number) else 0) for one in tokens],
            "branches": _branches(tokens),
            "same_example": self._same_example(episode),
        }

    def _window(self, tokens: TokenRecord, start: int, stop: int) -> Row:
        row, columns = tokens.row, tokens.columns
        stop = min(stop, row.tokens)
        start = min(start, stop)
        token_ids = columns["token_ids"].tolist()
        own = ("number", "role", "reward", "rewards", "metrics", "temperature", "is_truncated", "turns")
        return {
            **{name: getattr(row, name) for name in own},
            "num_tokens": row.tokens,
            "start": start,
            "stop": stop,
            "images": [_of_image(one) for one in tokens.images if one.start < stop and one.stop > start],
            "pieces": self.texts.pieces(token_ids, start, stop),
            "token_ids": token_ids[start:stop],
            "loss_mask": columns["loss_mask"][start:stop].astype(int).tolist(),
            "versions": columns["versions"][start:stop].tolist(),
            "behavior_logprobs": _short(columns["behavior_logprobs"][start:stop]),
            "columns": {name: _short(column[start:stop]) for name, column in columns.items() if name not in _OWN},
        }

    def _same_example(self, episode: EpisodeRecord) -> list[Row]:
        """The newest of other groups, or of other evaluations."""
        table, row = self.table, self.table.row(episode)
        if row["row"] is None:
            return []
        in_group = (table.column("life") == episode.life) & (table.column("group") == row["group"])
        of_kind = table.having("kind", row["kind"]) & table.having("task", row["task"])
        found = np.flatnonzero(of_kind & (table.column("row") == row["row"]) & ~in_group)
        others = [table.row(self.run.episodes[index]) for index in found[found != episode.index][-_MOST_SAME:]]
        return [{name: o[name] for name in ("life", "episode", "step", "reward", "evaluation", "how")} for o in others]

    def _work(self) -> bool:
        """Read or search a little; returns whether there is more to do."""
        try:
            self.run.update(_SLICE)
            self.table.refresh()
            self._unreadable = ""
        except OSError as error:
            self._unreadable = f"{self.run_dir} cannot be read: {error}"
            return False
        except Exception as error:
            log.warning("a record of %s cannot be read", self.run_dir, exc_info=True)
            self._problem = f"A record in {self.run_dir} cannot be read, and is left out: {error!r}"
        if self.run.files.num_bytes_waiting:
            return True
        newest = next(reversed(self._searches.values()), None)
        return newest is not None and newest.scan(_SCAN_S)

    def _find(self, wanted: Mapping[str, str]) -> Row:
        text = wanted.get("text", "")
        if not text:
            return {**self.table.find(wanted), "searched": None}
        search = self._searches.pop(text, None) or TextSearch(self.run, self.texts, text)
        self._searches[text] = search
        while len(self._searches) > _MOST_SEARCHES:
            del self._searches[next(iter(self._searches))]
        search.scan(_SCAN_S)
        found = self.table.find(wanted, np.fromiter(search.found, np.int64))
        return {**found, "searched": search.progress}

    def problems(self) -> list[str]:
        """Sentences that say what could not be read."""
        problems = [*self.run.problems, *filter(None, (self._unreadable, self._problem))]
        directory = self.run.files.directory
        if os.path.isdir(directory) or self.measure == "loss":
            return problems
        if self.run.system or self.run.episodes:
            problems.append(
                f"{directory} is gone: what was read of it before is shown, without tokens, turns and calls."
            )
        elif not self.run.steps and not self.tick()["is_live"]:
            problems.append(f"{self.run_dir} has no event log: no process of it came so far.")
        elif self.run.steps:  # else it may yet come
            problems.append(
                f"{self.run_dir} has no event log: its steps and evaluations are shown, its episodes cannot be. An "
                "older arl wrote none, and log.events: null turns it off."
            )
        return problems


def run_dirs(given: list[Path]) -> list[Path]:
    """Those given; of a directory that holds runs, these. Raises RunFileError for one without a run."""
    found: list[Path] = []
    for path in given:
        inner: list[Path] = []
        what = "holds no run"
        try:
            inner = [path] if is_run(path) else sorted(filter(is_run, path.iterdir()))
        except FileNotFoundError:
            what = "does not exist"
        except NotADirectoryError:
            what = "is not a directory"
        except OSError as error:
            raise RunFileError(f"{path} cannot be read: {error.strerror or error}") from error
        if not inner:
            raise RunFileError(f"{path} {what}; name the run_dir of a run, or a directory with several")
        found += inner
    return list(dict.fromkeys(found))


def is_run(path: Path) -> bool:
    """False for a directory that cannot be read, too."""
    names = ("events", "metrics.jsonl", "evaluations.jsonl", "run.lock")
    return os.path.isdir(path) and any(os.path.exists(path / name) for name in names)


def _all_fields(record: msgspec.Struct) -> Row:
    """With those, too, that have their default."""
    return {name: getattr(record, name) for name in record.__struct_fields__}


def _of_image(image: LoggedImage) -> Row:
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
            at, first = max(((_num_common(one, second), one.row) for one in earlier), key=lambda pair: pair[0])
            found.append({"role": first.role, "first": first.number, "second": second.row.number, "differs_at": at})
    return found


def _num_common(a: TokenRecord, b: TokenRecord) -> int:
    length = min(a.row.tokens, b.row.tokens)
    differ = np.flatnonzero(a.columns["token_ids"][:length] != b.columns["token_ids"][:length])
    same = int(differ[0]) if len(differ) else length
    images = zip(a.images, b.images, strict=False)
    return min(same, next((min(x.start, y.start) for x, y in images if _of_image(x) != _of_image(y)), same))
