"""What the event log says of a run is what happened in it."""

import asyncio
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from one_turn import OneTurn
from trainer_run import run, running

from arl.api import events
from arl.api.engine import Sampler
from arl.api.fakes import ScriptedEngine, ScriptedTrainEngine
from arl.api.types import Example, ModelRequest, Trajectory
from arl.observe.events import writer
from arl.observe.events.run_record import RunRecord, read_run
from arl.training.batch_codec import read_groups
from arl.training.run_dir import saved_versions

SETTINGS: dict[str, Any] = {"rollout": {"max_staleness": 2, "batch_size": 2, "group_size": 3}}


class Troubled(OneTurn):
    """Every fourth example fails at first, every fifth always, and every seventh is of no use."""

    def __init__(self) -> None:
        super().__init__()
        self._attempts = Counter[int]()

    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory:
        trajectory, number = await super().arun_episode(engine, data), data["number"]
        self._attempts[number] += 1
        if number % 5 == 4 or (number % 4 == 3 and self._attempts[number] <= 3):
            raise ValueError(f"no luck with {number}")
        return trajectory if number % 7 else None  # pyright: ignore[reportReturnType]


def of_kind(record: RunRecord, kind: type[Any], life: int = 1) -> list[Any]:
    return [event for n, event in record.system if isinstance(event, kind) and n == life]


async def test_every_batch_is_told_with_its_groups_episodes_and_tokens(tmp_path: Path):
    engine = ScriptedTrainEngine()
    steps = await run(tmp_path, engine, evaluate=True, steps=5, evaluation={"every": 2}, **SETTINGS)
    record = read_run(tmp_path)
    assert record.problems == []
    taken, trained = of_kind(record, events.BatchTaken), of_kind(record, events.BatchTrained)
    assert [batch.version for batch in taken] == [step.version - 1 for step in steps]
    assert [batch.version for batch in trained] == [step.version for step in steps]
    assert [batch.groups for batch in taken] == [batch.groups for batch in trained]
    for step, batch in zip(steps, engine.batches, strict=True):
        episodes = [episode for episode in record.episodes if episode.step == step.version]
        assert len(episodes) == step.num_episodes == 6
        assert max(episode.staleness or 0 for episode in episodes) == step.max_staleness_seen
        assert sum(episode.reward or 0 for episode in episodes) / 6 == step.reward
        tokens = [found for episode in episodes for found in record.tokens(episode)]
        sequences = [sequence for minibatch in batch for sequence in minibatch]
        assert sorted(found.columns["token_ids"].tolist() for found in tokens) == sorted(
            sequence.token_ids.tolist() for sequence in sequences
        )
        groups = {episode.group for episode in episodes if episode.group}
        assert {group.example["number"] for group in groups} == {int(s.token_ids[1]) for s in sequences}
    assert [found.version for found in of_kind(record, events.Published)] == list(range(6))
    evaluations = of_kind(record, events.EvaluationEnded)
    held_out = [episode for episode in record.episodes if episode.group is None]
    assert len(held_out) == 4 * len(evaluations) > 0
    assert {episode.how for episode in held_out} == {"finished"}
    assert (of_kind(record, events.RunBegan)[0].workflow, of_kind(record, events.RunEnded)[0].how) == (
        "OneTurn",
        "finished",
    )
    assert of_kind(record, events.CheckpointWritten)[-1].version == 5


async def test_every_group_and_every_episode_that_began_ends_once_and_says_how(tmp_path: Path):
    settings = {**SETTINGS, "rollout": {**SETTINGS["rollout"], "episode_retries": 1, "max_failure_rate": 1.0}}
    async with running(tmp_path, workflow=Troubled(), steps=6, **settings) as trainer:
        async for _ in trainer:
            pass
        counters = trainer.rollout.counters()
    record, records = read_run(tmp_path), [event for _, event in RunRecord(tmp_path).files.new_records()]
    began = Counter(event.episode for event in records if isinstance(event, events.EpisodeBegan))
    ended = Counter(event.episode for event in records if isinstance(event, events.EpisodeEnded))
    assert began == ended
    assert set(began.values()) == {1}
    hows = Counter(episode.how for episode in record.episodes)
    assert hows["failed"] >= counters["episodes_failed"] > 0
    assert hows["rejected"] > 0
    attempts = of_kind(record, events.AttemptFailed)
    assert sum(event.runs_again for event in attempts) >= counters["episodes_retried"] > 0
    assert {event.error for event in attempts} == {"ValueError"}
    for episode in record.episodes:
        if episode.how in ("failed", "rejected"):
            assert episode.group is not None
            number = episode.group.example["number"]
            assert number % 7 == 0 if episode.how == "rejected" else f"no luck with {number}" == episode.message
            (seen,) = record.tokens(episode)
            assert seen.columns["token_ids"].tolist() == [1, number, 7, 8, 9]
            assert not seen.columns["loss_mask"].any()
    dropped = Counter((group.outcome, group.reason) for group in record.groups if group.outcome not in ("", "kept"))
    assert dropped.keys() == {("dropped", "failed"), ("rejected", "returned_none")}
    turns = Counter(call.episode for call in record.calls(0.0, float("inf")))
    assert all(turns[episode.episode] == episode.attempts for episode in record.episodes if episode.how != "stopped")


async def test_cancelled_episodes_say_whose_fault_it_was(tmp_path: Path):
    """Of the over-sampled episodes of an example, those that hang are overtaken; a group that hangs is a straggler."""
    asked, have_begun = Counter[int](), defaultdict[int, asyncio.Event](asyncio.Event)

    async def answer(request: ModelRequest) -> tuple[int, ...]:
        number = request.input_ids[1]
        asked[number] += 1
        if number == 3 or asked[number] > 2:
            have_begun[number].set()
            await asyncio.Event().wait()
        await have_begun[number].wait()
        return (7, 8, 9)

    rollout = {"batch_size": 2, "group_size": 2, "max_staleness": 1, "extra_episodes": 1, "shuffle": False}
    await run(tmp_path, engine=ScriptedEngine(answer), steps=3, rollout={**rollout, "drop_stragglers_after_s": 1.5})
    record = read_run(tmp_path)
    hows = {
        (group.example["number"], episode.how)
        for group in record.groups
        for episode in group.episodes
        if group.step or group.reason == "straggled"
    }
    assert {how for number, how in hows if number == 3} == {"straggler"}
    assert {how for number, how in hows if number != 3} == {"finished", "overtaken"}


async def test_a_life_that_goes_back_undoes_what_was_trained_after_its_checkpoint(tmp_path: Path):
    """A life that ends without its checkpoint, as a kill ends it, is followed by one that trains its steps again."""
    async with running(tmp_path, steps=5, checkpoint={"every": 2}, **SETTINGS) as trainer:
        async for step in trainer:
            if step.version == 3:
                break
        await trainer.stop()
    for checkpoint in (tmp_path / "checkpoints").glob("version-*3"):
        for path in sorted(checkpoint.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        checkpoint.rmdir()
    await run(tmp_path, steps=5, **SETTINGS)
    record = read_run(tmp_path)
    assert [life.version for life in record.lives.values()] == [0, 2]
    trained = {step: {e.life for e in record.episodes if e.step == step and not e.is_undone} for step in range(1, 6)}
    assert all(trained.values())
    assert all(len([e for e in record.episodes if e.step == step and not e.is_undone]) == 6 for step in trained)
    undone = [episode for episode in record.episodes if episode.is_undone]
    assert {episode.life for episode in undone} == {1}
    assert all(episode.step is None for episode in undone)


def waiting_in(run_dir: Path, version: int) -> set[int]:
    """The groups that wait in a checkpoint to be trained."""
    with (run_dir / "checkpoints" / f"version-{version:08}" / "groups.npz").open("rb") as file:
        return {group.group_id for group in read_groups(file)}


async def test_what_a_checkpoint_counts_on_is_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each batch up to its version, the groups that wait in it, and their tokens."""
    monkeypatch.setattr(writer, "_EVERY_S", 1000.0)
    engine = ScriptedTrainEngine()
    async with running(tmp_path, engine, steps=4, checkpoint={"every": 100}, **SETTINGS) as trainer:
        _ = [await anext(trainer) for _ in range(3)]
        while not trainer.buffer.untrained(3):  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
        await trainer.save()
        record = read_run(tmp_path)
    waiting = waiting_in(tmp_path, 3)
    assert [batch.version for batch in of_kind(record, events.BatchTrained)] == [1, 2, 3]
    for version, batch in enumerate(engine.batches[:3], start=1):
        episodes = [episode for episode in record.episodes if episode.step == version]
        tokens = [found.columns["token_ids"].tolist() for episode in episodes for found in record.tokens(episode)]
        assert sorted(tokens) == sorted(s.token_ids.tolist() for minibatch in batch for s in minibatch)
    assert waiting
    assert {group.group for group in record.groups if group.outcome == "kept" and group.step is None} >= waiting


async def test_groups_that_wait_in_a_checkpoint_are_not_undone_before_the_next_life_trains_them(tmp_path: Path):
    async with running(tmp_path, steps=3, **SETTINGS) as trainer:
        async for _ in trainer:
            pass
    waiting = waiting_in(tmp_path, 3)
    async with running(tmp_path, steps=3, **SETTINGS) as trainer:
        assert trainer.events.flush()
        record = read_run(tmp_path)
    assert waiting
    assert {*record.lives[2].waiting} == waiting
    known = {group.group for group in record.groups if not any(episode.is_undone for episode in group.episodes)}
    assert known == waiting | {group.group for group in record.groups if group.step}


async def test_a_log_that_cannot_be_written_stops_neither_the_run_nor_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(writer, "_PATIENCE_S", 0.0)
    (tmp_path / "events").write_text("a file where the directory belongs")
    assert len(await run(tmp_path, steps=3, checkpoint={"every": 1, "keep": 3}, **SETTINGS)) == 3
    assert max(saved_versions(tmp_path / "checkpoints")) == 3
    assert "cannot be written, and the run goes on without" in caplog.text
