"""A reader that follows a run: in slices, with what changed, and over several lives."""

import asyncio
import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from arl.api.errors import RunFileError
from arl.api.events import (
    BatchTrained,
    CheckpointWritten,
    EpisodeBegan,
    EpisodeEnded,
    Event,
    GroupAdmitted,
    GroupEnded,
    RunBegan,
    RunEnded,
)
from arl.api.settings.run import EventsConfig
from arl.observe.events.run_record import RunRecord, read_run
from arl.observe.events.writer import EventLog


def began(version: int = 0) -> RunBegan:
    return RunBegan(version=version, arl="0", host="here", pid=1, workflow="W", num_examples=1, settings={})


def admitted(number: int, **example: str) -> GroupAdmitted:
    return GroupAdmitted(group=number, epoch=0, row=number, stamp=0, example=example)


def finished(episode: str, reward: float) -> EpisodeEnded:
    return EpisodeEnded(episode=episode, how="finished", began=0.0, reward=reward)


def write(run_dir: Path, *records: Event) -> None:
    """One life."""
    log = EventLog(run_dir, EventsConfig())
    with log.open():
        for record in records:
            log.emit(record)


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
            log.emit(finished("0.0", float(reward)))
    run = read_run(tmp_path)
    assert sorted(e.life for e in run.episodes) == [1, 2]
    assert {e.reward for e in run.episodes} == {0.0, 1.0}
    assert all(run.episode(e.life, "0.0") is e and run.group(e.life, 0) is e.group for e in run.episodes)


def test_a_later_life_trains_a_group_of_an_earlier_one(tmp_path: Path) -> None:
    write(tmp_path, began(), admitted(0), EpisodeBegan(episode="0.0"), GroupEnded(group=0, outcome="kept"))
    write(tmp_path, began(), BatchTrained(version=1, groups=[0], seconds=1.0))
    run = read_run(tmp_path)
    assert run.group(1, 0).step == 1
    assert not run.episode(1, "0.0").is_undone


@pytest.mark.parametrize(("ended", "is_undone"), [(17.0, False), (18.5, True)])
def test_a_group_that_was_rejected_before_the_checkpoint_is_not_undone(
    tmp_path: Path, ended: float, is_undone: bool
) -> None:
    """The state of the checkpoint that is written at 20 was copied at 18."""
    rejected = GroupEnded(group=0, outcome="rejected", reason="equal rewards", t=ended)
    saved = CheckpointWritten(version=3, seconds=2.0, t=20.0)
    write(tmp_path, began(), admitted(0), EpisodeBegan(episode="0.0"), finished("0.0", 1.0), rejected, saved)
    write(tmp_path, began(3))
    assert read_run(tmp_path).episode(1, "0.0").is_undone is is_undone


@pytest.mark.parametrize(
    ("error", "how"),
    [(asyncio.CancelledError, "interrupted"), (KeyboardInterrupt, "interrupted"), (ValueError, "ValueError")],
)
def test_a_life_says_how_it_ended(tmp_path: Path, error: type[BaseException], how: str) -> None:
    with pytest.raises(error), EventLog(tmp_path, EventsConfig()).open():
        raise error
    ended = [record for _, record in read_run(tmp_path).system if isinstance(record, RunEnded)]
    assert [record.how for record in ended] == [how]


def test_a_run_names_itself(tmp_path: Path) -> None:
    write(tmp_path, began(), admitted(0), EpisodeBegan(episode="0.0"))
    assert repr(read_run(tmp_path)) == f"RunRecord({str(tmp_path)!r}, 0 steps, 1 episodes)"


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


def test_metrics_that_may_not_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "evaluations.jsonl").mkdir()
    run = read_run(tmp_path)
    assert run.evaluations == []
    assert run.problems == [f"{tmp_path / 'evaluations.jsonl'} cannot be read: Is a directory"]


def test_metrics_are_read_again_when_their_file_has_changed(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(json.dumps({"version": 1}) + "\n")
    run = read_run(tmp_path)
    assert run.steps == [{"version": 1}]
    with file.open("a") as more:
        more.write(json.dumps({"version": 2}) + "\n" + '{"version": 3, "rew')
    assert run.steps == [{"version": 1}, {"version": 2}]


def test_an_episode_that_is_not_there_is_an_error_with_a_sentence(tmp_path: Path) -> None:
    write(tmp_path, began())
    with pytest.raises(RunFileError, match=r"has no episode 7\.0 in its life 1"):
        read_run(tmp_path).episode(1, "7.0")


def test_what_ran_when_a_life_ended_is_lost_held_out_episodes_and_late_ones_too(tmp_path: Path) -> None:
    trained = BatchTrained(version=1, groups=[0], seconds=1.0)
    names = ("0.0", "0.1", "e1.0", "e1.1")
    write(tmp_path, began(), admitted(0), *(EpisodeBegan(episode=name) for name in names), trained)
    write(tmp_path, began(version=1), EpisodeBegan(episode="e1.0"))
    run = read_run(tmp_path)
    assert {run.episode(1, name).how for name in names} == {"lost"}
    assert run.episode(2, "e1.0").how == "running"
    assert not run.episode(1, "0.0").is_undone
