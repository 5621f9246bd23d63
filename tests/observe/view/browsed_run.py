"""A run for a browser to look at: it trains when it is told to, with tokens, failures, branches and hostile text."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from made_run import TOKENIZER, began, episode, step, tokens_of
from msgspec import structs

from arl.api.events import EpisodeBegan, EpisodeEnded, GroupAdmitted, GroupEnded, KeptTokens
from arl.api.settings.run import EventsConfig
from arl.api.types import Trajectory, TurnSpan
from arl.observe.events.writer import EventLog

GROUPS, MEMBERS = 4, 4
"""Of a step."""
STEP_S = 8.0
HOSTILE = 'It is <img src=x onerror="window.hacked = 1"><b>42</b>\x1b[31m\u202e \n\tso'
"""What the episode of this name says."""
HOSTILE_EPISODE, BRANCHED, LONG = "1.1", "1.2", "2.0"
TRAINED = ("proximal_logprobs", "current_logprobs", "advantages", "weights", "entropy")


class BrowsedRun:
    """`train(n)` adds n steps of GROUPS groups of MEMBERS episodes; the last episode of each odd group fails."""

    def __init__(self, run_dir: Path, log: EventLog, settings: dict[str, Any], tasks: Sequence[str] = ()) -> None:
        """tasks: their names; groups are theirs in turns."""
        self._tasks = tasks
        self.run_dir = run_dir
        self.version = 0
        self._began = time.time() - 100
        self._log = log
        self._rng = np.random.default_rng(0)
        (run_dir / "events").mkdir(parents=True)
        TOKENIZER.save(str(run_dir / "events" / "tokenizer.json"))
        log.emit(structs.replace(began(t=self._began, **settings), tasks=[*tasks]))
        self._write("evaluations.jsonl", {"version": 0, "reward": 0.25})

    @property
    def num_episodes(self) -> int:
        return self.version * GROUPS * MEMBERS

    @property
    def num_failed(self) -> int:
        return self.version * GROUPS // 2

    def flush(self) -> bool:
        """Whether what was logged is on the disk."""
        return self._log.flush()

    def begin(self, episode: str) -> None:
        """Of the next step; it has not ended."""
        self._log.emit(EpisodeBegan(t=self._began, episode=episode))

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            start = self._began + self.version * STEP_S
            groups = [self.version * GROUPS + k for k in range(GROUPS)]
            rows = [row for group in groups for row in self._group(group, start)]
            count = sum(one.num_trained_tokens for _, _, one in rows)
            trained = {name: self._rng.normal(size=count).astype(np.float32) for name in TRAINED}
            trained["clipped"] = (trained["entropy"] > 1).astype(np.float32)
            self._log.keep(KeptTokens(rows=rows, trained=trained))
            self.version += 1
            for record in step(self.version, groups, start + STEP_S - 2):
                self._log.emit(record)
            self._report()

    def _group(self, group: int, start: float) -> Iterator[tuple[str, int, Trajectory]]:
        example = {"question": f"What is {group} + 1?", "answer": str(group + 1)}
        self._log.emit(
            GroupAdmitted(
                t=start,
                group=group,
                epoch=0,
                row=group % 10,
                stamp=self.version,
                example=example,
                task=self._tasks[group % len(self._tasks)] if self._tasks else "",
            )
        )
        for member in range(MEMBERS):
            name, at = f"{group}.{member}", start + member / 10
            if group % 2 and member == MEMBERS - 1:
                why = f"no <i>tool</i> {group}"
                self._log.emit(EpisodeBegan(t=at, episode=name))
                self._log.emit(
                    EpisodeEnded(t=at + 1, episode=name, how="failed", began=at, error="ToolError", message=why)
                )
                continue
            parts = [self._trajectory(name, k, example) for k in range(3 if name == BRANCHED else 1)]
            for record in episode(name, at, parts):
                self._log.emit(record)
            yield from ((name, k, part) for k, part in enumerate(parts))
        self._log.emit(GroupEnded(t=start + 5, group=group, outcome="kept"))

    def _trajectory(self, name: str, number: int, example: dict[str, str]) -> Trajectory:
        asked = example["question"] * (300 if name == LONG else 1)
        said = HOSTILE if name == HOSTILE_EPISODE else f"Branch {number} says {example['answer']}"
        texts = [tokens_of(text) for text in (asked, "<add>", "result", said)]
        ends = np.cumsum([len(ids) for ids in texts])
        mask = np.zeros(ends[-1], bool)
        mask[ends[0] : ends[1]] = mask[ends[2] :] = True
        versions = np.where(mask, self.version, -1)
        versions[ends[0] : ends[1]] = max(self.version - 1, 0)
        reward = float(int(name.partition(".")[2]) % 2)
        return Trajectory(
            token_ids=np.concatenate(texts),
            loss_mask=mask,
            behavior_logprobs=np.where(mask, -self._rng.random(len(mask)), 0),
            versions=versions,
            reward=reward,
            rewards={"is_right": reward},
            turns=(TurnSpan(start=int(ends[0]), stop=int(ends[1])), TurnSpan(start=int(ends[2]), stop=int(ends[3]))),
        )

    def _report(self) -> None:
        row = {"version": self.version, "time_s": self.version * STEP_S, "reward": self.version / 40, "loss": -0.1}
        row |= {"time/wait_s": 1.0, "time/train_s": 3.0, "staleness/mean": 0.5, "staleness/max": 1, "my/metric": 7.0}
        row |= {"samples_per_s": 3.2, "entropy": 0.5, "behavior_kl_proximal": 1e-4, "effective_sample_size": 0.98}
        self._write("metrics.jsonl", row | {"clip_fraction": 0.02, "length/tokens": 60.0})
        if self.version % 4 == 0:
            self._write("evaluations.jsonl", {"version": self.version, "reward": self.version / 50})

    def _write(self, name: str, row: dict[str, Any]) -> None:
        with (self.run_dir / name).open("a") as file:
            file.write(json.dumps(row) + "\n")


@contextmanager
def browsed_run(run_dir: Path, *, tasks: Sequence[str] = (), **settings: Any) -> Iterator[BrowsedRun]:
    log = EventLog(run_dir, EventsConfig())
    settings = {"steps": 40, "rollout": {"max_staleness": 2, "group_size": MEMBERS}, **settings}
    run = BrowsedRun(run_dir, log, settings, tasks)
    with log.open():
        yield run
