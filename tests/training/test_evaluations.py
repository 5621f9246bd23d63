"""Which suites an evaluation plays, on which weights, and which model is kept: over the official fakes."""

import asyncio
import errno
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import pytest
from records import trajectory
from training.trainer_run import DirectTransport, running

from arl.api.engine import Sampler
from arl.api.errors import ConfigError
from arl.api.fakes import ScriptedEngine
from arl.api.settings.run import Config, EvaluationConfig, LogConfig
from arl.api.types import Evaluation, Example, ModelRequest, SamplingParams, Trajectory
from arl.api.workflow import RolloutWorkflow
from arl.rollout.episode import EpisodeRunner
from arl.runtime.threads import TrainThread
from arl.training.evaluation_loop import BestModel, Evaluations
from arl.training.evaluator import Evaluator
from arl.training.metrics_log import RunLog, read_jsonl

ROWS = [{"reward": reward} for reward in (0.0, 1.0, 0.5, 0.5, 0.25)]
PLACES = {"often": range(2), "seldom": range(2, 4), "hard": range(4, 5)}
SUITES: Any = {"seldom": {"every": 20}, "hard": {"every": 10, "episodes_per_example": 3}}


class Rewards(RolloutWorkflow):
    """The example's reward. One of its two tokens is of version 1, whatever the engine's."""

    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory:
        asked = ModelRequest(input_ids=(1,), sampling=SamplingParams(max_new_tokens=1))
        response = await engine.agenerate(asked)
        return trajectory((*response.output_versions, 1), data["reward"])


def evaluator(engine: ScriptedEngine, *, seed: int | None = None, **changes: Any) -> Evaluator:
    config = EvaluationConfig(**{"every": 5, "suites": SUITES, **changes})
    runner = EpisodeRunner(workflow=Rewards(), timeout_s=5.0)
    return Evaluator(engine, runner, ROWS, config, places=PLACES, seed=seed)


@pytest.mark.parametrize(
    ("due", "played", "num_episodes"),
    [
        ([5], ["often"], 2),
        ([10], ["often", "hard"], 5),
        ([20], [*PLACES], 7),
        ([10, 15], ["often", "hard"], 5),
        (None, [*PLACES], 7),
    ],
)
async def test_a_suite_is_played_at_its_own_interval_and_leaves_the_evaluations_reward_alone(
    due: list[int] | None, played: list[str], num_episodes: int
) -> None:
    suites = evaluator(ScriptedEngine(lambda _: [9]))
    evaluation, episodes = await suites.evaluate(due=due)
    assert evaluation.by_name is not None
    assert [*evaluation.by_name] == played
    assert evaluation.reward == 0.5
    assert (evaluation.num_episodes, len(episodes), suites.num_episodes(due)) == (num_episodes,) * 3
    if "hard" in played:
        hard = evaluation.by_name["hard"]
        assert (hard.reward, hard.num_episodes, hard.metrics["pass@2"]) == (0.25, 3, 0.0)


async def test_an_episode_has_the_same_seed_whichever_suites_are_played_beside_it() -> None:
    engines = [ScriptedEngine(lambda _: [9]) for _ in range(2)]
    for engine, due in zip(engines, ([10], [20]), strict=True):
        await evaluator(engine, seed=7).evaluate(due=due)
    some, all_ = ({request.sampling.seed for request in engine.requests} for engine in engines)
    assert None not in all_
    assert (len(some), len(all_)) == (5, 7)
    assert some < all_


@pytest.mark.parametrize(
    ("evaluation", "error"),
    [
        ({"suites": {"a": {"every": 20}}}, "evaluation.every is unset"),
        ({"every": 8, "suites": {"a": {"every": 20}}}, "not a multiple of evaluation.every=8"),
        ({"keep_best": "reward"}, "of no single model"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(evaluation: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        Config.model_validate({"model": "m", "evaluation": evaluation})


@pytest.mark.parametrize("setting", [{"hold_weights": True}, {"suites": {"a": {}}}])
async def test_settings_of_evaluations_need_examples(tmp_path: Path, setting: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=f"evaluation.{next(iter(setting))} is set, but there is nothing to evaluate on"
    ):
        async with running(tmp_path, evaluation=setting):
            pass


@pytest.mark.parametrize(
    ("metric", "error"),
    [
        ("pass@2", "'pass@2', and the evaluation has no pass@k"),
        ("hard/pass@4", "'hard/pass@4', and the suite 'hard' has pass@1, pass@2; set episodes_per_example"),
    ],
)
def test_the_best_models_metric_is_one_that_the_episodes_give(metric: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        evaluator(ScriptedEngine(lambda _: [9]), hold_weights=True, keep_best=metric)


@pytest.mark.parametrize(
    ("suites", "error"),
    [
        ({"nil": {}}, "evaluation.suites names 'nil', and the held-out datasets are: 'often', 'seldom', 'hard'"),
        ({name: {"every": 5} for name in PLACES}, "none is left for evaluation.every"),
    ],
)
def test_suites_name_held_out_datasets_and_leave_one(suites: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        evaluator(ScriptedEngine(lambda _: [9]), suites=suites)


def of(version: int, reward: float, **metrics: float) -> Evaluation:
    part = Evaluation(version=version, reward=reward / 2, num_episodes=1, num_failed=0, wall_s=1.0, metrics=metrics)
    return Evaluation(
        version=version, reward=reward, num_episodes=1, num_failed=0, wall_s=1.0, metrics=metrics, by_name={"a/b": part}
    )


def offer(best: BestModel, evaluation: Evaluation) -> None:
    value = best.value_of(evaluation)
    assert value is not None
    if best.is_better(value):
        best.keep(evaluation.version, value, lambda path: write_version(path, evaluation.version))


def write_version(directory: Path, version: int) -> None:
    directory.mkdir()
    (directory / "model").write_text(str(version))


def test_the_best_model_is_the_first_of_the_highest_metric_also_after_a_resume(tmp_path: Path) -> None:
    for rewards in ({1: 0.5, 2: float("nan"), 3: 0.75, 4: 0.75}, {5: 0.7, 6: 0.25}):
        best = BestModel(tmp_path, "reward")
        for version, reward in rewards.items():
            offer(best, of(version, reward))
    assert (tmp_path / "best" / "model").read_text() == "3"
    assert json.loads((tmp_path / "best" / "best.json").read_text()) == {
        "version": 3,
        "metric": "reward",
        "value": 0.75,
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "best-version-3"]


NOTHING = Evaluation(version=1, reward=0.5, num_episodes=1, num_failed=0, wall_s=1.0, metrics={})


@pytest.mark.parametrize("metric", ["a/b/reward", "a/b/pass@4", "pass@4"])
def test_a_metric_may_be_of_one_suite_and_one_that_is_not_there_is_named(tmp_path: Path, metric: str) -> None:
    best = BestModel(tmp_path, metric)
    assert best.value_of(of(1, 0.5, **{"pass@4": 0.25})) == 0.25
    with pytest.raises(ConfigError, match=f"keep_best is '{metric}', which .* does not have; it has: reward"):
        best.value_of(NOTHING)


def test_a_metric_may_lack_where_its_suite_was_not_played_or_the_workflow_did_not_report_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert BestModel(tmp_path, "a/b/pass@4").value_of(NOTHING, ["a/b"]) is None
    assert caplog.text == ""
    for metric in ("episode/solved", "reward/format", "a/b/episode/solved"):
        assert BestModel(tmp_path, metric).value_of(of(1, 0.5)) is None
        assert f"'{metric}', which the evaluation of version 1 does not have" in caplog.text


def test_a_model_that_cannot_be_written_leaves_the_best_one_in_its_place(tmp_path: Path) -> None:
    best = BestModel(tmp_path, "reward")
    offer(best, of(1, 0.5))

    def fail(directory: Path) -> None:
        write_version(directory, 2)
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        best.keep(2, 0.9, fail)
    assert (tmp_path / "best" / "model").read_text() == "1"
    assert best.is_better(0.6)
    assert len([*tmp_path.iterdir()]) == 2


def test_other_files_where_the_best_model_would_lie_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    with pytest.raises(ConfigError, match="something else lies there"):
        BestModel(tmp_path, "reward")


async def test_held_weights_wait_for_the_evaluation_and_training_for_its_bound(tmp_path: Path) -> None:
    may_answer, transport = asyncio.Event(), DirectTransport()

    async def answer(request: ModelRequest) -> tuple[int, ...]:
        if request.input_ids[1] == 0:  # of the first held-out example, and of one that is trained
            await may_answer.wait()
        return (7, 8, 9)

    due = {"steps": 6, "evaluate": True, "evaluation": {"every": 2, "hold_weights": True}}
    rollout = {"max_staleness": 2, "shuffle": False}
    async with running(tmp_path, transport=transport, engine=ScriptedEngine(answer), rollout=rollout, **due) as trainer:
        may_answer.set()
        assert [(await anext(trainer)).version for _ in range(1)] == [1]
        may_answer.clear()
        for version in (2, 3, 4):
            assert (await anext(trainer)).version == version
        assert transport.delivered[-1] == 2, "versions 3 and 4 wait for the evaluation of 2"
        may_answer.set()
        assert [step.version async for step in trainer] == [5, 6]
    evaluated = {row["version"]: row["metrics"]["at_version"] for row in read_jsonl(tmp_path / "evaluations.jsonl")}
    assert evaluated[2] == 1.0
    assert {*evaluated.values()} == {1.0}
    assert transport.delivered[-1] == 6


class NotedPin:
    """Notes how many are pinned at once."""

    pinned = most = num_released = 0

    def __init__(self) -> None:
        self.may_pin = asyncio.Event()
        self.may_pin.set()
        self.rows = Path()
        self.was_written: list[bool] = []
        """Whether the evaluation's row was written when servers were let go."""

    async def pin(self) -> Self:
        await self.may_pin.wait()
        self.pinned += 1
        self.most = max(self.most, self.pinned)
        return self

    async def ready(self) -> None:
        pass

    def write_model(self, directory: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(directory))

    def let_go(self) -> None:
        self.was_written.append(self.rows.exists())

    def release(self) -> None:
        self.pinned -= 1
        self.num_released += 1


@asynccontextmanager
async def evaluations(run_dir: Path, pins: NotedPin, **config: Any) -> AsyncIterator[Evaluations]:
    thread, engine = TrainThread(), ScriptedEngine(lambda _: [9], 1)
    async with asyncio.TaskGroup() as tasks:
        yield Evaluations(
            config=EvaluationConfig(every=1, hold_weights=True, **config),
            evaluator=evaluator(engine, suites={}),
            pin=pins.pin,
            best=BestModel(run_dir, "reward"),
            log=RunLog(run_dir, LogConfig(console=False)),
            thread=thread,
            tasks=tasks,
            training=asyncio.Lock(),
        )
    thread.close()


async def test_one_evaluation_runs_at_a_time_and_those_that_come_due_meanwhile_are_one(tmp_path: Path) -> None:
    pins = NotedPin()
    async with evaluations(tmp_path, pins) as beside:
        asked = asyncio.create_task(beside.evaluate(is_first=False))
        for version in (1, 2, 3):
            await asyncio.sleep(0)
            async with asyncio.timeout(5), beside.training:
                await beside.begin(version)
        await asked
        await beside.finished()
    assert (pins.most, pins.num_released) == (1, 2)


async def test_a_step_waits_for_no_evaluation_that_may_need_it_to_end(tmp_path: Path) -> None:
    """One that was asked for has ended, another waits for its turn and then for the step; the step's own is due."""
    pins = NotedPin()
    async with evaluations(tmp_path, pins) as beside:
        first, second = (asyncio.create_task(beside.evaluate(is_first=False)) for _ in range(2))
        await asyncio.sleep(0)
        async with asyncio.timeout(5), beside.training:
            while pins.num_released == 0:  # noqa: ASYNC110 - the moment right after it, before the other's turn
                await asyncio.sleep(0)
            await beside.begin(1)
        await asyncio.gather(first, second)
        await beside.finished()
    assert (pins.most, pins.num_released) == (1, 3)


async def test_an_evaluation_whose_step_was_cancelled_as_it_pinned_follows(tmp_path: Path) -> None:
    pins = NotedPin()
    pins.may_pin.clear()
    async with evaluations(tmp_path, pins) as beside:
        step = asyncio.create_task(beside.begin(1))
        await asyncio.sleep(0)
        step.cancel()
        pins.may_pin.set()
        await asyncio.wait([step])
        await beside.finished()
    assert pins.num_released == 1


async def test_a_best_model_that_cannot_be_written_is_told_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with evaluations(tmp_path, NotedPin()) as beside:
        await beside.begin(1)
        await beside.finished()
    assert len(read_jsonl(tmp_path / "evaluations.jsonl")) == 1
    assert "version 1 is the best so far and could not be kept" in caplog.text
    assert "No space left on device" in caplog.text


def test_a_version_that_is_trained_again_after_a_resume_takes_its_own_place(tmp_path: Path) -> None:
    best = BestModel(tmp_path, "reward")
    offer(best, of(3, 0.5))
    best.keep(3, 0.6, lambda path: write_version(path, 33))
    assert (tmp_path / "best" / "model").read_text() == "33"
    assert len([*tmp_path.iterdir()]) == 2
