"""What a script's `experiment` does with its settings, and what it leaves behind when it has trained."""

import asyncio
import json
import sys
import threading
from collections.abc import Mapping
from functools import wraps
from math import sqrt
from pathlib import Path
from typing import Any, ClassVar

import pytest
from one_turn import OneTurn
from pydantic import PositiveInt
from scripted_launch import small, use_fakes

import arl.run.servers
from arl.api.engine import Sampler
from arl.api.errors import ConfigError, EngineClosedError, FailureBudgetError, HookError, RunFileError
from arl.api.fakes import ScriptedEngine
from arl.api.settings.run import Config
from arl.api.types import Example, Group, ModelRequest, StepStats, Trajectory
from arl.api.version import install_command
from arl.data.loading import held_out_of
from arl.run.experiment import Experiment, ExperimentConfig, Setup, StepHook, _not_risen, _write_results
from arl.run.launch import launch
from arl.run.script import load_config
from arl.run.servers import OpenedServers, serve
from arl.training.run_dir import RunLock
from arl.training.run_result import how_it_ended
from arl.training.trainer import Trainer

EXAMPLES = [{"number": number} for number in range(8)]


class OwnConfig(ExperimentConfig):
    """Of a script."""

    tiny_settings: ClassVar[Mapping[str, Any]] = {
        "steps": 60,
        "rollout": {"batch_size": 16, "max_staleness": 1},
        "train": {"optimizer": {"lr": 1e-4}},
        "algorithm": {"preset": "grpo", "minibatches": 2},
        "num_turns": 3,
    }

    num_turns: PositiveInt = 6
    """How often the agent may speak."""


class Numbers(OneTurn):
    """The reward is the first token; metrics say how many turns there were."""

    is_open = False

    def __init__(self) -> None:
        super().__init__(lambda answer: {"reward": float(answer), "metrics": {"turns": 1}})

    async def __aenter__(self) -> "Numbers":
        self.is_open = True
        return self

    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory:
        assert self.is_open
        return await super().arun_episode(engine, data)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rewards 0 in the first evaluation, 0.5 on average later."""
    numbers = iter([0] * len(EXAMPLES) + [0, 1] * 1000)
    use_fakes(monkeypatch, ScriptedEngine(lambda _: [next(numbers)]))


def setup(**changes: Any) -> Setup:
    return Setup(**{"model": "none", "workflow": Numbers(), "dataset": EXAMPLES, "eval_dataset": EXAMPLES, **changes})


# Settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], (60, 16, 8, 1, "grpo", 2, 3)),
        (["--config", "run.yaml", "--steps", "7", "--rollout.group_size", "3"], (7, 16, 3, 5, "grpo", 2, 3)),
        (["--algorithm.preset", "dapo"], (60, 16, 8, 1, "dapo", 16, 3)),
        (["--model", "Qwen/Qwen3-0.6B"], (100, 32, 8, 2, "decoupled_ppo", 1, 6)),
    ],
    ids=["the tiny model's", "flags over the file over these", "another preset takes nothing", "another model's"],
)
def test_settings_are_the_flags_over_the_files_over_the_tiny_models_over_the_defaults(
    flags: list[str], expected: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("rollout: {max_staleness: 5, group_size: 2}\nsteps: 9\n")
    config = load_config(OwnConfig, flags)
    rollout, algorithm = config.rollout, config.algorithm
    sizes = config.steps, rollout.batch_size, rollout.group_size, rollout.max_staleness
    assert (*sizes, algorithm.preset, algorithm.minibatches, config.num_turns) == expected
    assert config.train.optimizer.lr == (1e-4 if config.is_tiny else Config(model="m").train.optimizer.lr)
    assert config.is_tiny is ("--model" not in flags)


# Training --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("engine")
async def test_training_evaluates_before_and_after_and_leaves_summary_plot_and_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Group] = []
    made = setup(keep=lambda group: not seen.append(group))
    await Experiment(config=Config, prepare=lambda _: made).train(small(tmp_path))
    assert len(seen) >= 4
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["eval_reward_before"], summary["eval_reward_after"]) == (0.0, 0.5)
    errors = summary["eval_standard_error_before"], summary["eval_standard_error_after"]
    assert errors == (0.0, pytest.approx(sqrt(8 * 0.25 / 7) / sqrt(8)))
    assert (summary["turns_per_episode_before"], summary["turns_per_episode_after"]) == (1, 1)
    assert (summary["steps"], summary["episodes_trained"]) == (2, 8)
    assert (tmp_path / "reward.png").stat().st_size > 0
    assert json.loads((tmp_path / "trained" / "weights.json").read_text()) == {"version": 2}
    said = capsys.readouterr().out
    assert said.startswith("held-out reward 0.000 ± 0.000 -> 0.500 ± 0.189 in 2 steps, ")
    assert said.endswith(f"; see {tmp_path}/summary.json and {tmp_path}/reward.png\n")
    end = how_it_ended(tmp_path)
    assert end is not None
    best = {"version": 2, "reward": 0.5, "standard_error": summary["eval_standard_error_after"]}
    assert (end.how, end.evaluations["best"]) == ("finished", best)
    assert end.what_next == f"set steps above 2 to train further; the trained model is {tmp_path}/trained"


@pytest.mark.usefixtures("engine")
async def test_a_suite_that_was_not_due_at_the_last_step_is_played_after_training(tmp_path: Path) -> None:
    made = setup(eval_dataset={"often": EXAMPLES, "seldom": EXAMPLES[:2]})
    evaluation = {"every": 1, "suites": {"seldom": {"every": 5}}}
    await Experiment(config=Config, prepare=lambda _: made).train(small(tmp_path, evaluation=evaluation))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {name for name in summary if name.startswith("eval_reward_after")} == {
        "eval_reward_after",
        "eval_reward_after/often",
        "eval_reward_after/seldom",
    }


@pytest.mark.usefixtures("engine")
async def test_a_rerun_knows_the_first_evaluation_evaluates_new_weights_and_needs_no_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    experiment = Experiment(config=Config, prepare=lambda _: setup())
    for steps, after in ((2, 0.5), (2, 0.5), (3, 1.0)):
        await experiment.train(small(tmp_path, steps=steps))
        summary = json.loads((tmp_path / "summary.json").read_text())
        assert (summary["eval_reward_before"], summary["eval_reward_after"]) == (0.0, after)
        use_fakes(monkeypatch, ScriptedEngine(lambda _: [1]))
    assert install_command("examples") in caplog.text


async def test_a_hook_gets_each_step_and_the_trainer_and_a_coroutine_is_awaited_before_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []

    async def awaited(step: StepStats, trainer: Trainer) -> None:
        await trainer.save()
        seen.append((step.version, sorted(path.name for path in (tmp_path / "b" / "checkpoints").iterdir())))

    hooks: dict[str, StepHook] = {"a": lambda step, trainer: seen.append((step.version, trainer.version)), "b": awaited}
    for name, hook in hooks.items():
        use_fakes(monkeypatch, ScriptedEngine(lambda _: [1]))
        experiment = Experiment(config=Config, prepare=lambda _: setup(eval_dataset=None), on_step=hook)
        await experiment.train(small(tmp_path / name))
    saved = ["version-00000001", "version-00000002"]
    assert seen == [(1, 1), (2, 2), (1, saved[:1]), (2, saved)]


@pytest.mark.usefixtures("engine")
async def test_a_hook_that_raises_ends_the_run_with_its_own_traceback_and_a_checkpoint(tmp_path: Path) -> None:
    def wrong(step: StepStats, trainer: Trainer) -> None:
        {}["missing"]

    experiment = Experiment(config=Config, prepare=lambda _: setup(eval_dataset=None), on_step=wrong)
    with pytest.raises(HookError, match="on_step raised KeyError after step 1: 'missing'"):
        await experiment.train(small(tmp_path))
    end = how_it_ended(tmp_path)
    assert end is not None
    assert (end.error, end.version, Path(end.checkpoint or "").name) == ("HookError", 1, "version-00000001")
    assert 'in wrong\n    {}["missing"]' in end.traceback


@pytest.mark.parametrize(
    ("first", "last", "told"),
    [
        ((0.4, 0.03), (0.6, 0.04), ""),
        ((0.4, 0.03), (0.5, 0.04), "has not risen by more than twice its standard error"),
        ((0.5, None), (0.5, None), "has not risen by more than twice its standard error"),
        ((0.5, None), (1.0, None), ""),
        ((1.0, 0.0), (1.0, 0.0), "had the reward 1.000, before and after: others would tell more"),
    ],
)
def test_the_last_line_says_so_if_the_reward_has_not_risen_by_two_standard_errors(
    first: tuple[float, float | None], last: tuple[float, float | None], told: str
) -> None:
    said = _not_risen(first, last, Path("runs/run"))
    assert told in said
    assert ("docs/reward.md" in said) is bool(told)


def test_after_a_reward_that_has_not_risen_the_worst_finding_is_told(tmp_path: Path) -> None:
    config = Config(model="none", run_dir=tmp_path)
    row = {"reward": 0.0, "reward_min": 0.0, "reward_max": 0.0, "reward_std": 0.0, "equal_groups": 1.0}
    rows = [json.dumps({"version": version, **row}) for version in range(1, 9)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    reward = {f"eval_{name}_{when}": 0.0 for name in ("reward", "standard_error") for when in ("before", "after")}
    said = _write_results(config, {"steps": 8, "wall_s": 1.0, **reward})
    assert said.splitlines()[-1].startswith(
        "All episodes of the last 8 steps had the reward 0: there is nothing to learn"
    )


class Misspelt(Numbers):
    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory:
        return await super().arun_episode(engine, daata)  # noqa: F821 # pyright: ignore[reportUndefinedVariable]


@pytest.mark.usefixtures("engine")
async def test_a_run_whose_first_evaluation_fails_wholly_does_not_start_and_tells_its_cause_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = "all of the first 8 episodes of the first evaluation failed.* NameError: name 'daata' is not defined"
    with pytest.raises(FailureBudgetError, match=whole) as ended:
        await Experiment(config=Config, prepare=lambda _: setup(workflow=Misspelt())).train(small(tmp_path))
    assert isinstance(ended.value.__cause__, NameError)
    assert not (tmp_path / "metrics.jsonl").exists()
    end = how_it_ended(tmp_path)
    assert end is not None
    assert end.traceback.endswith("NameError: name 'daata' is not defined\n")
    assert [record.exc_info is not None for record in caplog.records if "daata" in record.message] == [True]
    assert (tmp_path / "logs" / "episodes.log").read_text().count("Traceback") == 1


class Fussy(Numbers):
    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory:
        if "number" not in data:
            raise KeyError("number")
        return await super().arun_episode(engine, data)


@pytest.mark.usefixtures("engine")
async def test_a_run_does_not_start_if_all_episodes_of_one_named_dataset_fail(tmp_path: Path) -> None:
    held_out = held_out_of({"right": EXAMPLES, "wrong": [{"value": 1}] * 3})
    message = r"all 3 episodes of eval_dataset\['wrong'\] failed in the first evaluation.* KeyError: 'number'"
    prepared = setup(workflow=Fussy(), eval_dataset=held_out)
    with pytest.raises(FailureBudgetError, match=message):
        await Experiment(config=Config, prepare=lambda _: prepared).train(small(tmp_path))
    assert not (tmp_path / "metrics.jsonl").exists()


async def test_a_function_prepares_on_a_thread_and_a_coroutine_function_here_in_a_run_dir_that_is_there(
    tmp_path: Path,
) -> None:
    seen: list[tuple[bool, bool]] = []

    def prepare(config: Config) -> Setup:
        seen.append((threading.current_thread() is threading.main_thread(), config.run_dir.is_dir()))
        return setup(model=config.model + " made here")

    async def aprepare(config: Config) -> Setup:
        return prepare(config)

    for function in (prepare, aprepare):
        config, _ = await Experiment(config=Config, prepare=function).aprepare(small(tmp_path / "run"))
        assert config.model == "none made here"
    assert seen == [(False, True), (True, True)]


async def test_a_preparation_that_is_stopped_says_so_and_keeps_other_runs_out_until_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begun, go, ended = asyncio.Event(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def prepare(config: Config) -> Setup:
        loop.call_soon_threadsafe(begun.set)
        go.wait(30)
        ended.set()
        return setup()

    task = asyncio.create_task(Experiment(config=Config, prepare=prepare).train(small(tmp_path)))
    await begun.wait()
    task.cancel()
    async with asyncio.timeout(10):
        while "press Ctrl-C again to end it now" not in caplog.text:  # noqa: ASYNC110 - a log tells nobody
            await asyncio.sleep(0)
    with pytest.raises(RunFileError, match="another run trains"):
        RunLock(tmp_path).take()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    end = how_it_ended(tmp_path)
    assert end is not None
    assert (end.how, end.version) == ("interrupted", None)
    lock = RunLock(tmp_path)
    lock.take()
    lock.release()


async def test_an_unusable_run_dir_is_refused_before_anything_is_prepared(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    experiment = Experiment(config=Config, prepare=lambda _: pytest.fail("nobody asks"))
    with pytest.raises(ConfigError, match=r"run_dir is .*: it is a file"):
        await experiment.aprepare(small(tmp_path / "file"))


# Serving without training -----------------------------------------------------------------------------------------


async def test_servers_that_do_not_train_have_logs_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fakes(monkeypatch, ScriptedEngine(lambda _: [7]))
    logs: list[Path] = []

    async def addresses(config: Config, stack: object, directory: Path) -> OpenedServers:
        logs.append(directory)
        return OpenedServers(addresses=[])

    monkeypatch.setattr(arl.run.servers, "open_servers", addresses)
    async with serve(small(tmp_path)) as engine:
        response = await engine.agenerate(ModelRequest(input_ids=(1,)))
    assert response.output_ids == (7,)
    assert logs == [tmp_path / "logs" / "serve"]
    with pytest.raises(EngineClosedError):
        await engine.agenerate(ModelRequest(input_ids=(1,)))


# Workflows that are none -----------------------------------------------------------------------------------------


class Blocking(Numbers):
    def arun_episode(self, engine: Any, data: Any) -> Any:
        return None


@pytest.mark.parametrize(
    ("workflow", "complaint"),
    [
        (Numbers, "workflow is the class Numbers; pass an instance: Numbers"),
        (lambda engine, data: None, "workflow is a function; it must be an arl.RolloutWorkflow"),
        (Blocking(), "Blocking.arun_episode is not a coroutine function; declare it with `async def`"),
    ],
)
async def test_an_object_that_is_not_a_workflow_is_refused_before_anything_starts(
    tmp_path: Path, workflow: Any, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        setup(workflow=workflow)
    with pytest.raises(ConfigError, match=complaint):
        async with launch(small(tmp_path / "run"), workflow=workflow, dataset=EXAMPLES):
            pass
    assert not (tmp_path / "run").exists()


def test_a_decorator_may_make_a_workflow_async() -> None:
    class Threaded(Numbers):
        @wraps(Blocking.arun_episode)
        async def arun_episode(self, engine: Any, data: Any) -> Any:
            return await asyncio.to_thread(Blocking.arun_episode, self, engine, data)

    setup(workflow=Threaded())
