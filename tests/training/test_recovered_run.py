"""A run whose trainer's process is lost: what was under way is made again, and nobody notices."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from recovery.invariants import check_ledger, newest_checkpoint, trained_batches
from trainer_run import EXAMPLES, DirectTransport, run, running, trained_examples

from arl.api.engine import InferenceEngine, UpdateStats, WeightServer, WeightUpdate
from arl.api.errors import CheckpointError, ProcessLostError, TrainingError
from arl.api.events import CheckpointWritten, TrainerRecovered
from arl.api.fakes import ScriptedTrainEngine
from arl.api.train_engine import Saving, TrainEngine, TrainSequence
from arl.observe.events.run_record import RunRecord, read_run
from arl.training import learner_recovery
from arl.training.metrics_log import read_jsonl
from arl.training.run_dir import saved_versions


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_recovery, "_PAUSE_S", 0.0)


@dataclass
class Machine:
    """Where train engines run. `losses` are the places and versions at which one is lost, once each."""

    losses: list[tuple[str, int]]
    engines: list["Losing"] = field(default_factory=list["Losing"])

    def load(self, *args: object, **options: object) -> "Losing":
        self.engines.append(Losing(self))
        return self.engines[-1]

    def visit(self, place: str, version: int) -> None:
        if (place, version) in self.losses:
            self.losses.remove((place, version))
            raise ProcessLostError(f"killed at {place}")


class Losing(ScriptedTrainEngine):
    def __init__(self, machine: Machine) -> None:
        def on_train(minibatches: Sequence[Sequence[TrainSequence]]) -> None:
            machine.visit("train", self.version)

        super().__init__(on_train)
        self.machine = machine

    def save(self, directory: Path) -> Saving:
        self.machine.visit("save", self.version)
        return LosingSaving(self, super().save(directory), self.version)


@dataclass
class LosingSaving:
    engine: Losing
    saving: Saving
    version: int

    def wait(self) -> None:
        self.engine.machine.visit("write", self.version)
        self.saving.wait()


def trained_rows(run_dir: Path) -> list[list[int]]:
    record = RunRecord(run_dir)
    record.update()
    return [sorted(group.row for group in batch) for batch in trained_batches(record)]


async def test_batches_count_once_however_often_they_are_trained_again(tmp_path: Path) -> None:
    machine = Machine([("train", 3), ("train", 4)])
    steps = await run(tmp_path, load=machine.load, steps=6, checkpoint={"every": 2})
    assert [step.version for step in steps] == [1, 2, 3, 4, 5, 6]
    assert [row["version"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    rows = trained_rows(tmp_path)
    check_ledger(newest_checkpoint(tmp_path)[1], rows, len(EXAMPLES))
    first, second, third = machine.engines
    assert [sorted(set(batch)) for batch in trained_examples(first)] == rows[:3]
    for later in (second, third):
        from_version = later.version - len(later.batches)
        assert [sorted(set(batch)) for batch in trained_examples(later)] == rows[from_version : later.version]
    recovered = [record for _, record in read_run(tmp_path).system if isinstance(record, TrainerRecovered)]
    assert [(record.version, record.reason) for record in recovered] == [(3, "killed at train"), (4, "killed at train")]


async def test_weights_that_are_lost_on_their_way_are_taken_again_at_once(tmp_path: Path) -> None:
    losses = [2, 2, 2, 2]  # more often in a row than a delivery may fail by itself

    async def lose(update: WeightUpdate) -> None:
        if update.version in losses:
            losses.remove(update.version)
            raise ProcessLostError("killed")

    transport = DirectTransport(lose)
    await run(tmp_path, None, transport, steps=3, rollout={"max_staleness": 0})
    assert transport.delivered == [0, 1, 2, 3]
    assert transport.discarded == [2, 2, 2, 2]


class HeldTransport(DirectTransport):
    """Its updates are held by the trainer's process, as those of `distributed` are."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[Held] = []
        self.again = asyncio.Event()

    def snapshot(self, engine: TrainEngine) -> WeightUpdate:
        self.taken.append(Held(engine.version))
        return self.taken[-1]

    async def deliver(self, update: WeightUpdate, engine: InferenceEngine) -> UpdateStats:
        if update.version in self.delivered:
            self.again.set()
        return await super().deliver(update, engine)


class Held:
    adapter, num_bytes = None, 0

    def __init__(self, version: int) -> None:
        self.version, self.lost = version, asyncio.Event()

    async def prepare(self, server: WeightServer) -> None: ...

    async def load(self, server: WeightServer, *, flush_cache: bool) -> None: ...


async def test_published_weights_that_a_server_can_no_longer_get_are_published_once_more(tmp_path: Path) -> None:
    transport = HeldTransport()
    async with running(tmp_path, transport=transport, steps=3, rollout={"max_staleness": 0}) as trainer:
        async for step in trainer:
            if step.version == 2:
                transport.taken[-1].lost.set()
                await transport.again.wait()
    assert transport.delivered == [0, 1, 2, 2, 3]


async def test_a_checkpoint_that_is_lost_follows_the_next_step(tmp_path: Path) -> None:
    machine = Machine([("write", 2)])
    checkpoint = {"every": 2, "every_s": None, "keep": 9}
    async with running(tmp_path, load=machine.load, steps=5, checkpoint=checkpoint) as trainer:
        async for step in trainer:
            if step.version == 2:
                await trainer._saver.finished()
    assert sorted(saved_versions(tmp_path / "checkpoints")) == [3, 4, 5]
    assert [path.name for path in (tmp_path / "checkpoints").glob(".*")] == []
    records = [record for _, record in read_run(tmp_path).system if isinstance(record, CheckpointWritten)]
    assert [record.version for record in records if "killed at write" in record.error] == [2]


@pytest.mark.parametrize("place", ["save", "write"])
async def test_a_save_that_somebody_waits_for_is_made_again_until_it_is_written(tmp_path: Path, place: str) -> None:
    machine = Machine([(place, 2), (place, 4), (place, 4)])
    async with running(tmp_path, load=machine.load, checkpoint={"every_s": None}) as trainer:
        async for step in trainer:
            if step.version == 2:
                await trainer.save()
                assert saved_versions(tmp_path / "checkpoints") == [2]
    assert max(saved_versions(tmp_path / "checkpoints")) == 4


async def test_a_run_that_loses_every_process_ends_with_the_first_loss(tmp_path: Path) -> None:
    machine = Machine([("train", 2)] * 9)
    with pytest.raises(TrainingError, match=r"^killed at train\nOther processes were tried") as raised:
        await run(tmp_path, load=machine.load, checkpoint={"every": 1})
    assert not isinstance(raised.value, ProcessLostError | CheckpointError)
    assert len(machine.engines) == 4
    assert newest_checkpoint(tmp_path)[0] == 2
