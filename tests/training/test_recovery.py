"""A learner that loses its process computes again what was lost, and tells nobody but the event log."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from random_groups import random_groups

from arl.api.errors import CheckpointError, ConfigError, ProcessLostError, TrainingError
from arl.api.events import Event, TrainerRecovered
from arl.api.settings.engines import TrainConfig
from arl.training import learner_recovery
from arl.training.learner_recovery import RecoveringLearner


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_recovery, "_PAUSE_S", 0.0)


class Process:
    """Stands for a RemoteLearner: its weights are the list of the batches that it was trained on."""

    def __init__(self, world: "World") -> None:
        self._world = world
        world.visit("start")
        self.weights: list[int] = []
        self.prepared: int | None = None
        self.is_away = False
        self.num_ranks = world.num_ranks
        self.ended = ""
        self.engine = self

    @property
    def version(self) -> int:
        return len(self.weights)

    def prepare_flat(self, batch: Any) -> int:
        self._visit("prepare")
        self.prepared = number = batch.groups()[0][0].group_id
        return number

    def train(self, prepared: int) -> str:
        self._visit("train")
        assert prepared == self.prepared
        self.weights.append(prepared)
        self.prepared = None
        self._visit("trained")
        return f"trained {prepared}"

    def load(self, directory: Path) -> None:
        self._visit("load")
        self.weights = json.loads((directory / "weights").read_text())

    def save(self, directory: Path) -> str:
        directory.mkdir(parents=True)
        (directory.parent / f".{directory.name}.half").mkdir()
        self._visit("save")
        (directory.parent / f".{directory.name}.half").rmdir()
        (directory / "weights").write_text(json.dumps(self.weights))
        return "a saving"

    def offload(self) -> None:
        self._visit("offload")
        self.is_away = True

    def onload(self) -> None:
        self._visit("onload")
        self.is_away = False

    def snapshot(self) -> tuple[int, ...]:
        self._visit("snapshot")
        return tuple(self.weights)

    def has_room(self) -> bool:
        self._visit("look")
        return self._world.num_ranks == 4

    def whereabouts(self) -> str:
        return "somewhere"

    def end(self, reason: str) -> None:
        self.ended = reason

    def _visit(self, place: str) -> None:
        if self.ended:
            raise ProcessLostError(self.ended)
        self._world.visit(place)


class World:
    """Where processes start, and end at the places named in `ends`: place -> how often it is passed before."""

    def __init__(self, directory: Path, **ends: list[int]) -> None:
        self.checkpoints = directory / "checkpoints"
        self.ends = ends
        self.error: Callable[[], Exception] = lambda: ProcessLostError("killed\nthe end of its log")
        self.processes: list[Process] = []
        self.events: list[Event] = []
        self.places: list[str] = []
        self.num_ranks = 4
        """There is room for."""

    def visit(self, place: str) -> None:
        self.places.append(place)
        if self.places.count(place) - 1 in self.ends.get(place, []):
            raise self.error()

    def start(self) -> Any:
        self.processes.append(Process(self))
        return self.processes[-1]

    def learner(self, max_recoveries: int = 3) -> RecoveringLearner:
        self.emit = self.events.append
        config = TrainConfig(num_ranks=4, min_ranks=1 if max_recoveries else None, max_recoveries=max_recoveries)
        return RecoveringLearner(self.start, self.checkpoints, config, self)  # type: ignore[arg-type]

    def save(self, learner: RecoveringLearner) -> None:
        """Write a checkpoint aside, and complete it."""
        aside = self.checkpoints / f".writing-{learner.version}"
        learner.save(aside / "engine")
        aside.rename(self.checkpoints / f"version-{learner.version:08d}")


GROUPS = [[replace(random_groups(number)[0], group_id=100 + number)] for number in range(6)]
IDS = [groups[0].group_id for groups in GROUPS]


def train(learner: RecoveringLearner, first: int, stop: int) -> None:
    for number in range(first, stop):
        prepared = learner.prepare(GROUPS[number])
        assert learner.train(prepared) == f"trained {IDS[number]}"
        assert learner.version == number + 1


@pytest.mark.parametrize("place", ["prepare", "train", "trained", "snapshot", "save"])
@pytest.mark.parametrize("is_saved", [False, True])
def test_whenever_a_process_is_lost_the_next_one_holds_the_same_weights(
    place: str, is_saved: bool, tmp_path: Path
) -> None:
    world = World(tmp_path)
    learner = world.learner()
    train(learner, 0, 2)
    if is_saved:
        world.save(learner)
    train(learner, 2, 4)
    world.ends[place] = [world.places.count(place)]
    train(learner, 4, 5)
    assert learner.engine.snapshot() == tuple(IDS[:5])
    world.save(learner)
    assert world.processes[-1].weights == IDS[:5]
    assert len(world.processes) == 2
    assert world.processes[0].ended == "killed\nthe end of its log"
    recovered = world.events[0]
    assert isinstance(recovered, TrainerRecovered)
    version = 5 if place in ("snapshot", "save") else 4
    expected = (version, 2 * is_saved, version - 2 * is_saved, "killed")
    assert (recovered.version, recovered.from_version, recovered.num_batches, recovered.reason) == expected
    assert (len(world.events), learner.num_recoveries) == (1, 1)
    left = [path.name for path in (world.checkpoints / "version-00000005").iterdir()]
    assert left == ["engine"], "a process that was lost left its half of a checkpoint"


def test_batches_are_forgotten_when_a_complete_checkpoint_holds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    learner = world.learner()
    train(learner, 0, 3)
    assert not learner.is_full
    sizes = sorted(batch.num_bytes for batch in learner._kept.values())
    monkeypatch.setattr(learner_recovery, "_MAX_KEPT_BYTES", sum(sizes) - 1)
    assert learner.is_full
    (world.checkpoints / ".writing-2-0").mkdir(parents=True)
    train(learner, 3, 4)
    assert sorted(learner._kept) == [0, 1, 2, 3]
    world.save(learner)
    train(learner, 4, 6)
    assert sorted(learner._kept) == [4, 5]


def test_a_batch_that_ends_every_process_ends_the_run_with_the_first_loss_and_what_was_tried(tmp_path: Path) -> None:
    world = World(tmp_path, train=[2, 5, 8, 11, 12, 13])
    learner = world.learner(max_recoveries=3)
    train(learner, 0, 2)
    prepared = learner.prepare(GROUPS[2])
    with pytest.raises(TrainingError, match=r"(?s)^killed.*train.max_recoveries is 3\), and:(\n- killed[^-]*){3}$"):
        learner.train(prepared)
    assert len(world.processes) == 4
    assert learner.version == 2
    with pytest.raises(TrainingError, match=r"^killed") as raised:
        learner.engine.snapshot()
    assert type(raised.value) is TrainingError, "else one would try again for ever"
    assert len(world.processes) == 4


def test_losses_are_counted_from_the_last_new_batch(tmp_path: Path) -> None:
    world = World(tmp_path, prepare=[1, 4, 8])
    learner = world.learner(max_recoveries=1)
    train(learner, 0, 4)
    assert learner.num_recoveries == 3
    assert world.processes[-1].weights == IDS[:4]


def test_a_start_that_fails_is_a_loss_and_one_that_can_never_succeed_ends_the_run(tmp_path: Path) -> None:
    world = World(tmp_path, train=[1], start=[1, 2])
    learner, killed = world.learner(), world.error
    errors = iter([killed(), OSError("no memory for a process"), killed()])
    world.error = lambda: next(errors)
    train(learner, 0, 3)
    assert learner.num_recoveries == 1
    world.error = killed
    world.ends["train"] = [world.places.count("train")]
    world.ends["start"] = [world.places.count("start")]
    prepared = learner.prepare(GROUPS[3])
    errors = iter([killed(), ConfigError("there is no GPU")])  # the loss, and the next start
    world.error = lambda: next(errors)
    with pytest.raises(TrainingError, match=r"(?s)^killed.*- there is no GPU$"):
        learner.train(prepared)


def test_without_recoveries_the_first_loss_ends_the_run(tmp_path: Path) -> None:
    world = World(tmp_path, train=[1])
    learner = world.learner(max_recoveries=0)
    train(learner, 0, 1)
    with pytest.raises(TrainingError, match=r"^killed\nthe end of its log$"):
        learner.train(learner.prepare(GROUPS[1]))
    assert len(world.processes) == 1
    assert learner._kept == {}


def test_an_error_that_is_no_loss_passes(tmp_path: Path) -> None:
    world = World(tmp_path, train=[1])
    world.error = lambda: TrainingError("the weights are not finite")
    learner = world.learner()
    train(learner, 0, 1)
    with pytest.raises(TrainingError, match="not finite"):
        learner.train(learner.prepare(GROUPS[1]))
    assert (learner.version, len(world.processes)) == (1, 1)


def test_a_checkpoint_that_gives_way_to_a_newer_one_while_it_is_loaded_is_no_damage(tmp_path: Path) -> None:
    world = World(tmp_path)
    learner = world.learner()
    train(learner, 0, 1)
    world.save(learner)
    train(learner, 1, 2)
    load = Process.load

    def load_late(process: Process, directory: Path) -> None:
        if directory.parent.name.endswith("1"):
            (world.checkpoints / "version-00000002" / "engine").mkdir(parents=True)
            (world.checkpoints / "version-00000002" / "engine" / "weights").write_text(json.dumps(IDS[:2]))
            directory.parent.rename(tmp_path / "removed")
            raise CheckpointError("no such file")
        load(process, directory)

    world.ends["prepare"] = [2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Process, "load", load_late)
        train(learner, 2, 3)
    assert world.processes[-1].weights == IDS[:3]


def test_fewer_ranks_train_until_there_is_room_again_after_a_checkpoint(tmp_path: Path) -> None:
    world = World(tmp_path, train=[1])
    learner = world.learner()
    train(learner, 0, 1)
    world.num_ranks = 2
    train(learner, 1, 2)
    world.save(learner)
    train(learner, 2, 4)
    assert world.places.count("look") == 1
    world.num_ranks = 4
    train(learner, 4, 5)
    assert len(world.processes) == 2, "it looks for room after a checkpoint"
    world.save(learner)
    train(learner, 5, 6)
    assert world.processes[-1].weights == IDS[:6]
    recovered = [(r.num_ranks, r.from_version, r.version) for r in world.events if isinstance(r, TrainerRecovered)]
    assert recovered == [(2, 0, 1), (4, 5, 5)]
    assert world.places.count("look") == 2


def test_a_run_that_just_lost_ranks_keeps_the_fewer_until_the_next_checkpoint(tmp_path: Path) -> None:
    world = World(tmp_path)
    learner = world.learner(max_recoveries=1)
    train(learner, 0, 1)
    world.save(learner)
    train(learner, 1, 2)
    world.num_ranks, world.ends["prepare"] = 2, [2]
    prepared = learner.prepare(GROUPS[2])
    world.num_ranks = 4
    learner.train(prepared)
    assert "look" not in world.places
    world.save(learner)
    train(learner, 3, 4)
    assert [process.num_ranks for process in world.processes] == [4, 2, 4]


def test_a_learner_that_could_not_be_brought_to_its_version_is_never_used(tmp_path: Path) -> None:
    world = World(tmp_path)
    learner, killed = world.learner(max_recoveries=1), world.error
    train(learner, 0, 3)
    errors = iter([killed(), RuntimeError("no memory")])
    world.error = lambda: next(errors)
    world.ends |= {"snapshot": [0], "train": [4]}
    with pytest.raises(TrainingError, match=r"(?s)^killed.*- no memory$"):
        learner.engine.snapshot()
    assert world.processes[-1].weights == IDS[:1]
    with pytest.raises(TrainingError, match="no memory"):
        learner.save(tmp_path / "saved")


@pytest.mark.parametrize(("place", "is_away"), [("offload", True), ("snapshot", True), ("onload", False)])
def test_a_process_that_takes_over_between_turns_leaves_the_device_too(
    place: str, is_away: bool, tmp_path: Path
) -> None:
    world = World(tmp_path, **{place: [0]})
    learner = world.learner()
    train(learner, 0, 2)
    learner.offload()
    if place == "snapshot":
        learner.engine.snapshot()
    elif place == "onload":
        learner.onload()
    assert [process.is_away for process in world.processes][-1] == is_away
    assert len(world.processes) == 2
    assert world.processes[-1].weights == IDS[:2]


def test_a_batch_that_could_not_be_prepared_does_not_stand_in_the_way_of_a_recovery(tmp_path: Path) -> None:
    world = World(tmp_path, prepare=[2])
    learner, killed = world.learner(), world.error
    train(learner, 0, 2)
    world.error = lambda: ValueError("no logprobs")
    with pytest.raises(ValueError, match="no logprobs"):
        learner.prepare(GROUPS[2])
    world.error = killed
    world.ends["snapshot"] = [0]
    assert learner.engine.snapshot() == tuple(IDS[:2])
