"""What a reader makes of a run that was continued, against the history that led to its weights."""

import copy
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from arl.api.events import (
    BatchTaken,
    BatchTrained,
    CheckpointWritten,
    EpisodeBegan,
    EpisodeEnded,
    EvaluationEnded,
    Event,
    GroupAdmitted,
    GroupEnded,
    RunBegan,
)
from arl.api.settings.run import EventsConfig
from arl.observe.events.run_record import read_run
from arl.observe.events.writer import EventLog


def began(version: int = 0, waiting: list[int] | None = None, t: float = 0.0) -> RunBegan:
    return RunBegan(
        version=version, waiting=waiting or [], arl="0", host="a", pid=1, workflow="W", num_examples=1, settings={}, t=t
    )


def finished(name: str, t: float = 0.0) -> EpisodeEnded:
    return EpisodeEnded(episode=name, how="finished", began=t, reward=1.0, t=t)


def write(run_dir: Path, *records: Event) -> None:
    """One life."""
    log = EventLog(run_dir, EventsConfig())
    with log.open():
        for record in records:
            log.emit(record)


@dataclass
class State:
    """What a checkpoint holds: group -> the life that ran it, and more."""

    version: int = 0
    trained: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    """Its life, and the version that its training made."""
    fruitless: dict[int, int] = field(default_factory=dict[int, int])
    waiting: dict[int, int] = field(default_factory=dict[int, int])
    pending: list[int] = field(default_factory=list[int])
    replayed: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    num_groups: int = 0


class Life:
    """Does at random what a run does, and writes it down. Its clock is its own."""

    def __init__(self, chance: random.Random, number: int, state: State) -> None:
        self.chance, self.number, self.state = chance, number, copy.deepcopy(state)
        self.t = chance.uniform(1000.0, 2000.0)
        self.records: list[Event] = [began(state.version, [*state.waiting], self.t)]
        self.running: list[int] = []
        self.taken: set[int] = set()
        self.checkpoints: list[State] = []

    def note(self, *records: Event) -> None:
        self.records += records
        self.t += 1.0

    def admit(self) -> None:
        state = self.state
        if state.pending:
            group = state.pending.pop(0)
        else:
            group, state.num_groups = state.num_groups, state.num_groups + 1
        self.running.append(group)
        self.note(
            GroupAdmitted(group=group, epoch=0, row=group, stamp=state.version, t=self.t),
            EpisodeBegan(episode=f"{group}.0", t=self.t),
        )

    def end(self) -> None:
        if self.running:
            group = self.running.pop(self.chance.randrange(len(self.running)))
            outcome = self.chance.choice(["kept", "kept", "rejected", "dropped"])
            (self.state.waiting if outcome == "kept" else self.state.fruitless)[group] = self.number
            self.note(finished(f"{group}.0", self.t), GroupEnded(group=group, outcome=outcome, t=self.t))

    def train(self) -> None:
        state = self.state
        if len(state.waiting) < 2:
            return
        groups = self.chance.sample(sorted(state.waiting), 2)
        replayed = self.chance.sample(sorted(state.trained), min(len(state.trained), 2))
        self.taken |= {*groups}
        self.note(BatchTaken(version=state.version, groups=groups, replayed=replayed, waited_s=0.0, t=self.t))
        if self.chance.random() < 0.2:
            return  # cancelled: they wait again
        self.end()
        state.version += 1
        for group in replayed:
            state.replayed.setdefault(group, []).append(state.version)
        state.trained |= {group: (state.waiting.pop(group), state.version) for group in groups}
        self.note(BatchTrained(version=state.version, groups=groups, seconds=1.0, t=self.t))
        if self.chance.random() < 0.5:
            self.save()

    def save(self) -> None:
        is_told = self.chance.random() < 0.8  # else a kill comes first
        if is_told:
            self.chance.choice([self.admit, self.end])()
        copied, self.t = self.t, self.t + 1.0
        saved = copy.deepcopy(self.state)
        saved.pending += self.running
        self.checkpoints.append(saved)
        if is_told:
            self.end()
            self.note(CheckpointWritten(version=saved.version, seconds=self.t - copied, t=self.t))


@pytest.mark.parametrize("seed", range(60))
def test_after_several_lives_each_group_is_what_the_newest_history_says(tmp_path: Path, seed: int):
    chance, checkpoints, life = random.Random(seed), [State()], None
    for number in range(1, chance.randint(2, 5)):
        state = checkpoints[-1]
        life = Life(chance, number, state)
        for _ in range(chance.randint(0, 40)):
            chance.choice([life.admit, life.end, life.end, life.train])()
        write(tmp_path, *life.records)
        checkpoints += life.checkpoints
        if chance.random() < 0.2 and len(checkpoints) > 1:
            checkpoints.pop()  # somebody deletes the newest
    assert life is not None
    run, state = read_run(tmp_path), life.state
    for group in run.groups:
        own = group.life
        step = next((version for of, version in [state.trained.get(group.group, (0, 0))] if of == own), None)
        is_known = group.life == life.number or own in (
            state.trained.get(group.group, (0, 0))[0],
            state.fruitless.get(group.group),
            state.waiting.get(group.group),
        )
        (episode,) = group.episodes
        about = (group.life, group.group, group.outcome)
        assert group.step == step, about
        assert episode.is_undone is not is_known, about
        assert group.replayed == (state.replayed.get(group.group, []) if step else []), about
        is_taken = step is not None or (is_known and group.group in life.taken)
        assert (group.taken is not None) is is_taken, about
        if not group.outcome:
            assert episode.how == ("running" if group.life == life.number else "lost")


def test_an_evaluation_of_weights_that_the_run_went_back_behind_is_undone(tmp_path: Path):
    ends = [
        EvaluationEnded(number=number, version=version, reward=1.0, num_episodes=1, num_failed=0, seconds=1.0)
        for number, version in ((0, 0), (1, 2), (2, 3))
    ]
    episodes = [
        record for number in range(4) for record in (EpisodeBegan(episode=f"e{number}.0"), finished(f"e{number}.0"))
    ]
    write(tmp_path, began(), *episodes, *ends)
    write(tmp_path, began(2), EpisodeBegan(episode="e0.0"))
    run = read_run(tmp_path)
    undone = {(episode.life, episode.episode) for episode in run.episodes if episode.is_undone}
    assert undone == {(1, "e2.0"), (1, "e3.0")}, "the one of version 3, and the one that did not end"
