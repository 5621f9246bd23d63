"""Groups of earlier batches beside new ones: what is trained, what is booked, and what a resume knows of it."""

import asyncio
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from one_turn import OneTurn
from training.trainer_run import running, trained_examples

import arl.run.launch
from arl.api.engine import Sampler, UpdateStats, WeightUpdate
from arl.api.fakes import ScriptedEngine, ScriptedTrainEngine
from arl.api.types import Example, ModelRequest, Trajectory
from arl.observe.events.run_record import read_run
from arl.rollout.buffer import Replay
from arl.rollout.ledger import GroupOutcome
from arl.training.metrics_log import read_jsonl


class Hesitant(ScriptedEngine):
    """Answers the four requests of a batch when the weights of the batch before are served, so that tokens are new."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self._asked = 0
        self._first: int | None = None
        self._served = defaultdict[int, asyncio.Event](asyncio.Event)

    async def _answer(self, request: ModelRequest) -> tuple[int, ...]:
        batch, self._asked = self._asked // 4, self._asked + 1
        await self._served[(self._first or 0) + batch].wait()
        return (7, 8, 9)

    async def update_weights(self, update: WeightUpdate) -> UpdateStats:
        stats = await super().update_weights(update)
        self._first = update.version if self._first is None else self._first
        for version in range(self._first, update.version + 1):
            self._served[version].set()
        return stats


@pytest.fixture(autouse=True)
def all_are_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are replayed whatever their rewards."""
    monkeypatch.setattr(arl.run.launch, "Replay", partial(Replay, min_reward=-1.0))


REPLAY: dict[str, Any] = {
    "rollout": {"max_staleness": 3, "max_concurrent_episodes": 2, "replay_groups": 3},
    "log": {"console": False},
}


def expected_replay(run_dir: Path, version: int) -> list[list[int]]:
    """By the logs of what was new: [group, example] of those whose oldest token is newest when `version` is trained."""
    oldest: dict[tuple[int, int], int] = {}
    for episode in read_run(run_dir).episodes:
        group, sampled = episode.group, episode.oldest
        if group and group.step and sampled is not None and group.step <= version and version - sampled <= 3:
            key = (group.group, group.row)
            oldest[key] = min(sampled, oldest.get(key, sampled))
    return [[*key] for key in sorted(oldest, key=lambda key: (oldest[key], key[0]), reverse=True)[:3]]


async def test_groups_of_earlier_batches_are_trained_again_and_booked_once_also_over_a_resume(tmp_path: Path) -> None:
    """They count in a step's staleness, and not in its reward."""
    engines = ScriptedTrainEngine(), ScriptedTrainEngine()
    async with running(tmp_path, engines[0], steps=5, engine=Hesitant(), **REPLAY) as trainer:
        steps = [step async for step in trainer]
    async with running(tmp_path, engines[1], steps=10, engine=Hesitant(), **REPLAY) as trainer:
        steps += [step async for step in trainer]
        ledger, summary = trainer.rollout.ledger, trainer.summary()
    batches = [batch for engine in engines for batch in trained_examples(engine)]
    replayed = [batch[4::2] for batch in batches]
    assert replayed == [[example for _, example in expected_replay(tmp_path, version)] for version in range(10)]
    assert [step.metrics["replayed_groups"] for step in steps] == [len(batch) for batch in replayed]
    groups = read_run(tmp_path).groups
    told = [sorted(group.row for group in groups if version + 1 in group.replayed) for version in range(10)]
    assert told == [sorted(batch) for batch in replayed]
    assert replayed[5], "the batch after the resume has none: this says nothing about the checkpoint"
    assert [(step.reward, step.num_episodes) for step in steps] == [(sum(batch[:4]) / 4, 4) for batch in batches]
    sequences = [[s for part in batch for s in part] for engine in engines for batch in engine.batches]
    oldest = [min(int(s.versions[s.loss_mask].min()) for s in batch) for batch in sequences]
    assert [step.max_staleness_seen for step in steps] == [version - o for version, o in enumerate(oldest)]
    assert max(step.max_staleness_seen for step in steps) == summary["max_staleness_seen"] <= 3
    assert len(ledger.outcomes(0)[GroupOutcome.TRAINED]) == 20
    assert summary["episodes_trained"] == 40
    assert [row["version"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(1, 11))


class Ranked(OneTurn):
    """Episodes are good, middling and bad by turns."""

    num_begun = 0

    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory:
        number, self.num_begun = self.num_begun, self.num_begun + 1
        return replace(await super().arun_episode(engine, data), reward=1 - number % 3 / 2)


async def test_episodes_that_dpo_does_not_compare_are_booked_as_masked_in_new_groups_and_replayed_ones(
    tmp_path: Path,
) -> None:
    rollout = {"group_size": 3, "max_staleness": 3, "replay_groups": 1}
    engine, algorithm = ScriptedTrainEngine(), {"preset": "online_dpo"}
    async with running(tmp_path, engine, workflow=Ranked(), algorithm=algorithm, rollout=rollout) as trainer:
        steps = [step async for step in trainer]
        counted = trainer.rollout.tokens.counted()
    num_new = 2 * 3
    rows = [[int(s.loss_mask.sum()) for part in batch for s in part] for batch in engine.batches]
    assert all(sorted(row[:num_new]) == [0, 0, 3, 3, 3, 3] for row in rows)
    told = {fate: (counted.fates[fate].tokens, counted.fates[fate].episodes) for fate in ("trained", "masked")}
    assert told == {"trained": (len(rows) * 12, len(rows) * 4), "masked": (len(rows) * 6, len(rows) * 2)}
    assert counted.trained_again == sum(sum(row[num_new:]) for row in rows) > 0
    assert [step.metrics["length/trained_tokens"] for step in steps] == [2.0] * 4
    assert [step.metrics["length/winning_tokens"] for step in steps] == [3.0] * 4
