"""Runs of several tasks, over the official fakes: each task's agent, groups, numbers and evaluations."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import datasets
import pytest
from free_port import free_port
from one_turn import OneTurn
from prometheus_client.parser import text_string_to_metric_families
from scripted_launch import small, use_fakes

import arl
from arl.api.engine import Sampler
from arl.api.errors import CheckpointError, ConfigError, CurriculumError, DatasetError
from arl.api.fakes import ScriptedEngine, ScriptedTrainEngine
from arl.api.settings.run import Config
from arl.api.types import Evaluation, Example, StepStats, Trajectory
from arl.observe.events.run_record import read_run
from arl.observe.view.episode_table import EpisodeTable
from arl.run.experiment import Setup
from arl.run.launch import launch
from arl.training.batch_codec import flatten, restore


class Entered(OneTurn):
    """Knows whether it is open; its episodes need it to be."""

    is_open = False

    async def __aenter__(self) -> "Entered":
        assert not self.is_open
        self.is_open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self.is_open = False

    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory:
        assert self.is_open
        return await super().arun_episode(engine, data)


class Failing(OneTurn):
    """Odd examples are useless."""

    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory | None:
        return None if data["number"] % 2 else await super().arun_episode(engine, data)


LOW = [{"number": n} for n in range(10)]
HIGH = [{"number": n} for n in range(100, 120)]


def two_tasks(**changes: Any) -> list[arl.Task]:
    low = arl.Task(name="low", workflow=Entered(), dataset=LOW, weight=3.0, eval_dataset=LOW[:2])
    named = {"near": HIGH[:1], "far": HIGH[18:]}
    high = {"workflow": Failing(), "dataset": HIGH, "group_size": 3, "eval_dataset": named}
    return [low, arl.Task(name="high", **{**high, **changes})]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(
        monkeypatch,
        lambda: ScriptedEngine(lambda request: (7, 8, 9)),
        load=lambda *_, **__: ScriptedTrainEngine(),
    )


async def run(
    config: Config, tasks: Sequence[arl.Task], *, evaluate: bool = False, **given: Any
) -> tuple[list[StepStats], Evaluation | None]:
    async with launch(config, tasks=tasks, **given) as trainer:
        steps = [step async for step in trainer]
        return steps, await trainer.evaluate() if evaluate else None


SYNCHRONOUS = {"batch_size": 4, "max_staleness": 0}


async def test_each_task_has_its_agent_its_group_size_and_its_numbers(tmp_path: Path, fakes: None) -> None:
    tasks = two_tasks()
    steps, _ = await run(small(tmp_path, steps=6, rollout=SYNCHRONOUS), tasks)
    groups = [group for group in read_run(tmp_path).groups if group.step]
    assert {(group.task, len(group.episodes)) for group in groups} == {("low", 2), ("high", 3)}
    assert all((group.example["number"] >= 100) == (group.task == "high") for group in groups)
    assert all(group.example == {"low": LOW, "high": HIGH}[group.task][group.row] for group in groups)
    last = next(step.metrics for step in reversed(steps) if "task/high/share" in step.metrics)
    assert last["task/low/share"] + last["task/high/share"] == 1
    assert 0 <= last["task/low/reward"] < 10 <= 100 <= last["task/high/reward"]
    assert last["task/high/groups_rejected"] >= 1, "its odd examples are rejected"
    assert last["task/low/groups"] == pytest.approx(3 * last["task/high/groups"], abs=3)
    assert not isinstance(tasks[0].workflow, Entered) or not tasks[0].workflow.is_open


async def test_prometheus_gets_the_numbers_of_tasks_with_their_names_as_a_label(tmp_path: Path, fakes: None) -> None:
    address = f"127.0.0.1:{free_port()}"
    config = small(tmp_path, rollout=SYNCHRONOUS, log={"metrics_address": address})
    async with launch(config, tasks=[task('ünï "x"'), task("b")]) as trainer:
        step = await anext(trainer)
        async with aiohttp.ClientSession() as session, session.get(f"http://{address}/metrics") as answer:
            text = await answer.text()
    seen = {
        (s.name, s.labels.get("task")): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }
    for name in ("b", 'ünï "x"'):
        assert seen["arl_task_share", name] == step.metrics[f"task/{name}/share"] == 0.5
        assert seen["arl_task_groups", name] >= 2


async def test_each_task_is_evaluated_with_its_agent_and_reported_by_its_name(tmp_path: Path, fakes: None) -> None:
    _, evaluation = await run(small(tmp_path, rollout=SYNCHRONOUS), two_tasks(), evaluate=True)
    assert evaluation is not None
    assert evaluation.by_name is not None
    rewards = {name: part.reward for name, part in evaluation.by_name.items()}
    assert rewards == {"low": 0.5, "high/near": 100.0, "high/far": (118 + 0) / 2}
    assert evaluation.reward == pytest.approx(sum(rewards.values()) / 3)
    held_out = [episode for episode in read_run(tmp_path).episodes if episode.group is None]
    assert Counter(episode.task for episode in held_out) == {"low": 2, "high": 3}


async def test_worker_processes_have_every_tasks_agent(tmp_path: Path, fakes: None) -> None:
    tasks = [
        arl.Task(name="one", workflow=Numbers(), dataset=LOW),
        arl.Task(name="two", workflow=Evens(), dataset=HIGH),
    ]
    await run(small(tmp_path, rollout={**SYNCHRONOUS, "num_workers": 1, "shuffle": False}), tasks)
    episodes = read_run(tmp_path).episodes
    assert {episode.how for episode in episodes if episode.task == "one"} <= {"finished", "stopped"}
    assert "rejected" in {episode.how for episode in episodes if episode.task == "two"}


class Numbers(OneTurn):
    def __init__(self) -> None: ...

    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory:
        self._changes = lambda _: {}
        return await super().arun_episode(engine, data)


class Evens(Numbers):
    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory | None:
        return None if data["number"] % 2 else await super().arun_episode(engine, data)


async def test_a_group_keeps_its_task_on_its_way_and_arl_view_finds_its_episodes(tmp_path: Path, fakes: None) -> None:
    async with launch(small(tmp_path, rollout={"max_staleness": 4}), tasks=two_tasks()) as trainer:
        assert [step.version async for step in trainer] == [1, 2]
        waiting = trainer.buffer.untrained(trainer.version)
    assert {group.task for group in waiting} <= {"low", "high"}
    assert restore(*flatten(waiting)) == waiting
    table = EpisodeTable(record := read_run(tmp_path))
    table.refresh()
    found = table.find({"task": "high", "limit": "1000"})["rows"]
    assert {row["task"] for row in found} == {"high"}
    assert len(found) == sum(episode.task == "high" for episode in record.episodes)
    assert record.lives[1].tasks == ["low", "high"]
    assert set(record.to_arrow("episodes").column("task").to_pylist()) == {"low", "high"}


async def test_a_run_goes_on_with_its_tasks_and_the_same_order_of_examples(tmp_path: Path, fakes: None) -> None:
    """As one that never stopped; and only with tasks and examples that are the same."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    await run(small(whole, steps=6, rollout=SYNCHRONOUS), two_tasks())
    await run(small(halves, steps=3, rollout=SYNCHRONOUS), two_tasks())
    changed = [{"number": 7 if n == 3 else n} for n in range(10)]
    for others, message in (
        (two_tasks()[1:], "written with 'low', 'high', this run has 'high'"),
        ([arl.Task(name="low", workflow=OneTurn(), dataset=changed), *two_tasks()[1:]], "'low': .* example 3 is ano"),
        (two_tasks(dataset=HIGH[:19]), "task 'high': .* with num_examples 20, this run has 19"),
    ):
        with pytest.raises(CheckpointError, match=message):
            await run(small(halves, steps=6, rollout=SYNCHRONOUS), others)
    await run(small(halves, steps=6, rollout=SYNCHRONOUS), two_tasks())
    trained = [
        [(group.task, group.epoch, group.row, group.group) for group in read_run(run_dir).groups if group.step]
        for run_dir in (whole, halves)
    ]
    assert sorted(trained[1], key=lambda one: one[-1]) == trained[0]


PASS_AT_4 = {"algorithm": {"preset": "pass_at_k"}, "rollout": {"group_size": 8}}


def task(name: Any = "a", **changes: Any) -> arl.Task:
    return arl.Task(name=name, **{"workflow": OneTurn(), "dataset": LOW, **changes})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: {"tasks": [task(), task()]}, "2 tasks are named 'a'; each needs a name of its own"),
        (lambda: {"tasks": []}, "tasks is empty"),
        (lambda: {"tasks": task()}, "tasks is a Task; give a list of arl.Task"),
        (lambda: {"tasks": [{"name": "a"}]}, "tasks has a dict; it must be a list of arl.Task"),
        (lambda: {"tasks": [task("a/b")]}, "a task is named 'a/b'; a name is a text without '/'"),
        (lambda: {"tasks": [task(weight=0), task("b", weight=0)]}, r"the weights of all tasks \('a', 'b'\) are 0"),
        (lambda: {"tasks": [task(weight=-1)]}, "the weight of task 'a' is -1; give a finite number"),
        (lambda: {"tasks": [task(group_size=0)]}, "group_size of task 'a' is 0; give a whole number from 1"),
        (lambda: {"tasks": [task(workflow=OneTurn)]}, "task 'a': workflow is the class OneTurn"),
        (lambda: {"tasks": [task()], "dataset": LOW}, "tasks were given, and dataset too"),
        (lambda: {"dataset": LOW, "workflow": OneTurn(), "task_curriculum": dict}, "there are none; give tasks"),
        (dict, "there is nothing to train on; give a workflow and a dataset, or tasks"),
    ],
)
def test_wrong_tasks_are_refused_with_what_is_wrong(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Setup(model="none", **make())


@pytest.mark.parametrize(
    ("tasks", "settings", "error", "message"),
    [
        ([task(dataset=[])], {}, DatasetError, "task 'a': dataset is empty"),
        ([task(group_size=1)], {}, ConfigError, "group_size of task 'a' is 1, but algorithm.preset=.* compares"),
        ([task(group_size=2)], PASS_AT_4, ConfigError, "k is 4; .* below group_size of"),
    ],
)
async def test_what_cannot_be_trained_is_refused_before_anything_starts(
    tmp_path: Path, tasks: Any, settings: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        async with launch(small(tmp_path, **settings), tasks=tasks):
            pass


async def test_a_curriculum_over_tasks_that_fails_ends_the_run_by_name(tmp_path: Path, fakes: None) -> None:
    with pytest.raises(CurriculumError, match="named the task 'middle'; the tasks are 'low', 'high'"):
        await run(small(tmp_path), two_tasks(), task_curriculum=lambda *_: {"middle": 1.0})


async def test_a_stream_is_trained_in_its_order_beside_rows_by_index_and_goes_on_at_its_row(
    tmp_path: Path, fakes: None
) -> None:
    def tasks() -> list[arl.Task]:
        stream = datasets.Dataset.from_list(HIGH).to_iterable_dataset()
        return [arl.Task(name="rows", workflow=OneTurn(), dataset=LOW), task("stream", dataset=stream)]

    await run(small(tmp_path, steps=3, rollout=SYNCHRONOUS), tasks())
    await run(small(tmp_path, steps=8, rollout=SYNCHRONOUS), tasks())
    groups = [group for group in read_run(tmp_path).groups if group.step and group.task == "stream"]
    assert len(groups) == 16
    assert [group.row for group in sorted(groups, key=lambda group: group.group)] == list(range(16))
    assert all(group.example["number"] == 100 + group.row for group in groups)
