"""What a reader makes of a run: in slices, with what changed, and over several lives and clocks."""

import asyncio
import copy
import random
import time
from contextlib import ExitStack
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
    RunEnded,
    ToolEnded,
    _Clock,
)
from arl.api.settings.run import EventsConfig
from arl.observe.events.run_record import RunRecord, read_run
from arl.observe.events.writer import EventLog
from arl.rollout.episode_events import EpisodeReport


def began(version: int = 0, waiting: list[int] | None = None, t: float = 0.0) -> RunBegan:
    return RunBegan(
        version=version, waiting=waiting or [], arl="0", host="a", pid=1, workflow="W", num_examples=1, settings={}, t=t
    )


def finished(name: str, t: float = 0.0, reward: float = 1.0) -> EpisodeEnded:
    return EpisodeEnded(episode=name, how="finished", began=t, reward=reward, t=t)


def write(run_dir: Path, *records: Event) -> None:
    """One life."""
    log = EventLog(run_dir, EventsConfig())
    with log.open():
        for record in records:
            log.emit(record)


def admitted(number: int, **example: str) -> GroupAdmitted:
    return GroupAdmitted(group=number, epoch=0, row=number, stamp=0, example=example)


def test_an_episode_has_the_example_of_its_group_or_its_own_which_all_evaluations_share(tmp_path: Path):
    held_out = [EpisodeBegan(episode=f"e{n}.0", example={"question": q}) for n, q in enumerate(("b", "b", "c"))]
    write(tmp_path, began(), admitted(0, question="a"), EpisodeBegan(episode="0.0"), *held_out)
    of_group, first, second, other = (episode.example for episode in read_run(tmp_path).episodes)
    assert [of_group, first, other] == [{"question": "a"}, {"question": "b"}, {"question": "c"}]
    assert first is second


def test_a_reader_takes_a_log_in_slices_and_says_how_much_is_left(tmp_path: Path) -> None:
    for life in range(3):
        write(tmp_path, began(), admitted(life))
    run = RunRecord(tmp_path)
    left: list[int] = []
    while run.update(most=1):
        left.append(run.files.num_bytes_waiting)
    assert left == sorted(left, reverse=True)
    assert left[0] > 0
    assert left[-1] == 0
    assert [group.group for group in run.groups] == [0, 1, 2]


def test_a_reader_says_which_episodes_changed(tmp_path: Path) -> None:
    write(tmp_path, began(), admitted(0), EpisodeBegan(episode="0.0"), EpisodeBegan(episode="0.1"))
    run = read_run(tmp_path)
    assert run.take_changed() == {0, 1}
    assert run.take_changed() == set()
    write(tmp_path, BatchTrained(version=1, groups=[0], seconds=1.0))
    run.update()
    assert run.take_changed() == {0, 1}
    assert run.episodes[0].step == 1


def test_two_lives_that_write_at_once_keep_their_episodes_apart(tmp_path: Path) -> None:
    with ExitStack() as opened:
        logs = [opened.enter_context(EventLog(tmp_path, EventsConfig()).open()) for _ in range(2)]
        for log in logs:
            log.emit(began())
            log.emit(admitted(0))
            log.emit(EpisodeBegan(episode="0.0"))
        for reward, log in enumerate(logs):
            log.emit(finished("0.0", reward=float(reward)))
    run = read_run(tmp_path)
    assert sorted(e.life for e in run.episodes) == [1, 2]
    assert {e.reward for e in run.episodes} == {0.0, 1.0}
    assert all(run.episode(e.life, "0.0") is e and run.group(e.life, 0) is e.group for e in run.episodes)


@pytest.mark.parametrize(
    ("error", "how"),
    [(asyncio.CancelledError, "interrupted"), (KeyboardInterrupt, "interrupted"), (ValueError, "ValueError")],
)
def test_a_life_says_how_it_ended(tmp_path: Path, error: type[BaseException], how: str) -> None:
    with pytest.raises(error), EventLog(tmp_path, EventsConfig()).open():
        raise error
    ended = [record for _, record in read_run(tmp_path).system if isinstance(record, RunEnded)]
    assert [record.how for record in ended] == [how]


def test_half_a_character_in_an_example_costs_no_record(tmp_path: Path) -> None:
    write(tmp_path, began(), admitted(0, question="half \ud83d of it"), admitted(1, question="whole"))
    run = read_run(tmp_path)
    assert run.problems == []
    assert [group.example["question"] for group in run.groups] == ["half ? of it", "whole"]


def test_lines_of_metrics_that_are_damaged_are_counted_but_not_one_that_is_being_written(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"version": 1}\n{"versi\n{"version": 2}\n\n[]\n{"version": 3}\n{"ver')
    run = read_run(tmp_path)
    assert [row["version"] for row in run.steps] == [1, 2, 3]
    assert run.problems == [f"damaged lines of {metrics} are left out: 2"]
    metrics.write_text('{"version": 1}\n{"ver')
    assert run.problems == []
    assert [row["version"] for row in run.steps] == [1]


def test_metrics_that_may_not_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "evaluations.jsonl").mkdir()
    run = read_run(tmp_path)
    assert run.evaluations == []
    assert run.problems == [f"{tmp_path / 'evaluations.jsonl'} cannot be read: Is a directory"]


def test_what_ran_when_a_life_ended_is_lost_held_out_episodes_and_late_ones_too(tmp_path: Path) -> None:
    trained = BatchTrained(version=1, groups=[0], seconds=1.0)
    names = ("0.0", "0.1", "e1.0", "e1.1")
    write(tmp_path, began(), admitted(0), *(EpisodeBegan(episode=name) for name in names), trained)
    write(tmp_path, began(version=1), EpisodeBegan(episode="e1.0"))
    run = read_run(tmp_path)
    assert {run.episode(1, name).how for name in names} == {"lost"}
    assert run.episode(2, "e1.0").how == "running"
    assert not run.episode(1, "0.0").is_undone


# Clocks

HOUR = 3600.0


def test_an_episode_has_all_its_calls_though_the_clock_is_set_back_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    right = time.time
    with EventLog(tmp_path, EventsConfig()).open() as log:
        report = EpisodeReport(log, "0.0")
        report.begin()
        log.emit(ToolEnded(episode="0.0", tool="before", seconds=0.1))
        monkeypatch.setattr(time, "time", lambda: right() - HOUR)
        log.emit(ToolEnded(episode="0.0", tool="after", seconds=0.1))
        report.end((), None, 1, None)
    run = read_run(tmp_path)
    (episode,) = run.episodes
    assert [call.tool for call in run.calls_of(episode) if isinstance(call, ToolEnded)] == ["before", "after"]
    assert episode.ended is not None
    assert 0.0 <= episode.ended - episode.began < HOUR


def test_the_times_of_records_follow_a_clock_that_is_set_forward(monkeypatch: pytest.MonkeyPatch):
    """As after the sleep of a machine, whose monotonic clock stands still meanwhile."""
    right, clock = time.time, _Clock()
    first = clock()
    assert first == pytest.approx(right(), abs=60.0)
    monkeypatch.setattr(time, "time", lambda: right() + HOUR)
    later = clock()
    assert later - first >= HOUR
    monkeypatch.setattr(time, "time", right)
    assert clock() >= later


# Lives: the reader against the history that led to the weights


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
