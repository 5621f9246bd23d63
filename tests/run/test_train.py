"""`arl.train`: what it takes, what it refuses, and what it returns."""

import asyncio
import json
import os
import signal
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from scripted_launch import use_fakes

import arl
from arl.api.errors import CheckpointError, ConfigError, DatasetError, RewardError, TrainingError
from arl.engine.tiny import TURN_END, tiny_tokenizer
from arl.rewards import NumericMatch, from_trl, math_reward
from arl.run.train import _alone, _blocking, _settings
from arl.runtime.processes.rpc import OtherTracebackError

TOKENIZER = tiny_tokenizer()
SUMS = [{"question": f"{a} + 1 = ?", "answer": str(a + 1)} for a in range(6)]
SMALL: dict[str, Any] = {"steps": 2, "batch_size": 2, "group_size": 2}
QUIET = arl.Config(model="none", log={"console": False})


async def right(answer: str, data: arl.Example) -> float:
    return float(answer == data["answer"])


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments of a small run, whose model says 3 to everything."""
    TOKENIZER.save_pretrained(tmp_path / "model")
    use_fakes(monkeypatch, arl.ScriptedEngine(lambda request: TOKENIZER.encode("3" + TURN_END)))
    return {**SMALL, "model": tmp_path / "model", "run_dir": tmp_path / "run", "config": QUIET}


async def test_it_trains_on_a_reward_and_returns_what_the_run_left(small: dict[str, Any]) -> None:
    result = await arl.atrain(dataset=SUMS, reward=right, eval_dataset=SUMS[2:3], max_new_tokens=4, **small)
    assert [row["version"] for row in result.metrics] == [1, 2]
    assert result.summary["eval_reward_after"] == 1.0
    assert result.model == str(small["run_dir"] / "trained")
    assert result.plot() == small["run_dir"] / "reward.png"


async def test_held_out_datasets_with_names_are_reported_by_name_whose_mean_is_the_reward(
    small: dict[str, Any], tmp_path: Path
) -> None:
    """The model says 3: right for the last sum alone. Columns are computed for every dataset."""
    (tmp_path / "last.jsonl").write_text(json.dumps(SUMS[2]) + "\n")
    named = {"all": SUMS, "last": tmp_path / "last.jsonl"}
    columns = {"copy": lambda row: row["question"]}
    result = await arl.atrain(
        dataset=SUMS, reward=right, eval_dataset=named, columns=columns, max_new_tokens=4, **small
    )
    share, summary = 1 / len(SUMS), result.summary
    assert (summary["eval_reward_after/all"], summary["eval_reward_before/last"]) == (share, 1.0)
    assert summary["eval_reward_after"] == (share + 1.0) / 2
    run = arl.read_run(result.run_dir)
    rows = [row for row in run.evaluations if row["version"] == 0]
    assert [rows[0]["by_name"][name]["num_episodes"] for name in named] == [len(SUMS), 1]
    table = run.to_arrow("evaluations").to_pylist()
    assert [row["name"] for row in table if row["version"] == 0] == [None, "all", "last"]


async def test_several_tasks_are_trained_and_evaluated_by_their_names(small: dict[str, Any], tmp_path: Path) -> None:
    """A task's dataset may be a file, as that of a run may."""
    (tmp_path / "last.jsonl").write_text(json.dumps(SUMS[2]) + "\n")
    workflow = arl.SingleTurnWorkflow(TOKENIZER, right, sampling=arl.SamplingParams(max_new_tokens=4))
    file: Any = tmp_path / "last.jsonl"
    tasks = [
        arl.Task(name="all", workflow=workflow, dataset=SUMS, eval_dataset={"few": SUMS[:2], "file": file}),
        arl.Task(name="last", workflow=workflow, dataset=file, eval_dataset=file),
    ]
    result = await arl.atrain(tasks=tasks, **small)
    rewards = {name: value for name, value in result.summary.items() if name.startswith("eval_reward_after/")}
    names = ("all/few", "all/file", "last")
    assert rewards == {f"eval_reward_after/{name}": reward for name, reward in zip(names, (0.0, 1.0, 1.0), strict=True)}
    assert [row["task/last/reward"] for row in result.metrics] == [1.0, 1.0]


class Versions(arl.Tracker):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def step(self, stats: arl.StepStats, trajectories: Sequence[arl.TrackedTrajectory]) -> None:
        self.seen.append(stats.version)


async def test_trackers_are_names_or_objects(small: dict[str, Any]) -> None:
    pytest.importorskip("tensorboard")
    own = Versions()
    result = await arl.atrain(dataset=SUMS, reward=right, trackers=["tensorboard", own], **small)
    assert own.seen == [1, 2]
    assert len([*(result.run_dir / "tensorboard").iterdir()]) == 1


def test_a_script_calls_it_without_an_event_loop_and_may_evaluate_nothing(
    small: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    summary = arl.train(dataset=SUMS, reward=right, **small).summary
    assert summary["steps"] == 2
    assert "eval_reward_before" not in summary
    assert capsys.readouterr().out.startswith("trained 2 steps, ")


def test_an_error_stands_alone_in_a_scripts_traceback(small: dict[str, Any]) -> None:
    with pytest.raises(DatasetError) as raised:
        arl.train(dataset=[], reward=right, **small)
    assert raised.value.__context__ is None
    files = [Path(frame.filename).name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert files == [Path(__file__).name, "train.py"]


def test_the_traceback_of_the_trainers_process_stays_where_the_message_does_not_say_enough() -> None:
    for error, stays in ((CheckpointError("another model"), False), (TrainingError("a bug"), True)):
        error.__cause__ = OtherTracebackError("in the trainer's process: ...")
        assert (_alone(error).__cause__ is not None) == stays


async def test_within_an_event_loop_it_says_what_to_await(small: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"await arl\.atrain"):
        arl.train(dataset=SUMS, reward=right, **small)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dataset": SUMS, "stpes": 3}, "arl.train got an unexpected keyword argument 'stpes'; did you mean steps?"),
        ({"dataset": SUMS, "n": 3}, "arl.train got an unexpected keyword argument 'n'; did you mean group_size?"),
        ({"dataset": SUMS, "xyz": 3}, "arl.train got an unexpected keyword argument 'xyz'"),
        ({}, "train got no model; give a Hugging Face directory, or a name on the hub"),
        (
            {"model": "m", "reward": right},
            "train got no dataset; give rows, a file or a name on the hub, or tasks=[arl.Task(...)]",
        ),
        (
            {"model": "m", "reward": right, "tasks": []},
            "train got tasks, and reward too; each arl.Task has its own: leave them out",
        ),
    ],
)
def test_an_argument_that_is_unknown_or_missing_is_named_with_a_close_one(arguments: Any, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        arl.train(**arguments)
    assert str(raised.value) == said


async def test_several_rewards_are_named_and_weighted_and_a_file_is_a_dataset(
    small: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "sums.jsonl").write_text('{"question": "2 + 1 = ?", "answer": "3"}\n')
    parts = {"right": right, "short": (0.5, lambda answer, data: float(len(answer) < 4))}
    result = await arl.atrain(dataset=tmp_path / "sums.jsonl", reward=parts, **small)
    assert [row["reward"] for row in result.metrics] == [1.5, 1.5]
    assert {"reward/right", "reward/short"} <= result.metrics[0].keys()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ConfigError, "neither of reward and workflow"),
        ({"reward": right, "workflow": arl.SingleTurnWorkflow(TOKENIZER, right)}, ConfigError, "both of reward"),
        ({"reward": {"a": NumericMatch(column="sum")}}, RewardError, "no column 'sum' with a reference"),
        (
            {"dataset": [*SUMS, {"question": "?", "answer": "forty two"}], "reward": math_reward()},
            RewardError,
            "'forty two' is not mathematics",
        ),
        (
            {"workflow": arl.SingleTurnWorkflow(TOKENIZER, right), "system": "Add."},
            ConfigError,
            "system cannot be given",
        ),
        ({"reward": right, "group_size": 0}, ConfigError, r"rollout\.group_size is 0"),
        ({"reward": right, "algorithm": "grop"}, ConfigError, "grpo"),
        ({"reward": right, "dataset": [{"text": "2 + 2"}]}, DatasetError, "columns text, .* pass prompt="),
        ({"reward": right, "dataset": iter(SUMS)}, DatasetError, r"give its rows: list\(dataset\)"),
        ({"reward": right, "dataset": []}, DatasetError, "dataset is empty"),
        ({"reward": right, "eval_dataset": {"a": SUMS, "b": [{"text": "2"}]}}, DatasetError, "columns text, .* pass"),
        ({"reward": right, "dataset": ["2 + 2"]}, DatasetError, "each row must be a dict"),
        ({"reward": {"right": ("much", right)}}, ConfigError, "finite weight"),
        ({"reward": right, "prompt": "Add {a} and {b}"}, ConfigError, "prompt is 'Add .*give a function"),
        ({"reward": right, "config": {"steps": 3}}, ConfigError, r"config is a dict; give an arl\.Config"),
        ({"reward": lambda answer: 1.0}, ConfigError, "cannot be called with"),
    ],
)
async def test_unusable_arguments_are_refused_at_once(
    arguments: dict[str, Any], error: type[Exception], message: str, small: dict[str, Any]
) -> None:
    with pytest.raises(error, match=message):
        await arl.atrain(**{"dataset": SUMS, **small, **arguments})
    assert not (small["run_dir"] / "metrics.jsonl").exists()


def test_settings_that_are_given_stand_over_those_of_the_config() -> None:
    base = arl.Config(model="m", seed=3, rollout={"max_staleness": 5}, engine={"num_threads": 7})
    both = _settings(base, {"model": None, "rollout": {"group_size": 4}, "engine": {"device": "cuda"}})
    assert (both.model, both.seed) == ("m", 3)
    assert (both.rollout.max_staleness, both.rollout.group_size, both.rollout.batch_size) == (5, 4, 32)
    assert both.engine.model_dump(include={"num_threads", "device"}) == {"num_threads": 7, "device": "cuda"}


def test_a_function_of_the_script_itself_needs_no_worker_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from arl.rewards import ThreadReward
    from arl.run.train import _runnable

    def own(answer: str, data: arl.Example) -> float:
        return 1.0

    own.__module__, own.__qualname__ = "__main__", "own"
    assert isinstance(_runnable(own), ThreadReward)
    assert _runnable(right) is right


def test_a_notice_of_preemption_lets_train_save_and_ends_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    saved: list[bool] = []

    async def atrain(config: arl.Config | None = None) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            saved.append(True)

    said: list[str] = []
    for given in (None, arl.Config(model="none", log={"format": "json"})):
        with pytest.raises(SystemExit) as ended:
            _blocking(atrain)(config=given)
        assert (ended.value.code, saved.pop()) == (143, True)
        said.append(capsys.readouterr().err)
    plain = "stopped by SIGTERM; arl.train with the same run_dir continues from its newest checkpoint, if there is one"
    assert said[0] == plain + "\n"
    assert json.loads(said[1])["message"] == plain


def of_trl(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    return [float(one == a) for one, a in zip(completions, answer, strict=True)]


async def misspelt(answer: str, data: arl.Example) -> float:
    return float(answer == data["anser"])


async def only_of_some(answer: str, data: arl.Example) -> float:
    return 1 / (data["answer"] != "1")


@pytest.mark.parametrize("num_workers", [0, 1])
async def test_a_reward_that_cannot_work_ends_the_start_with_what_to_do(
    small: dict[str, Any], num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"arl\.rewards\.from_trl"):
        await arl.atrain(dataset=SUMS, reward=of_trl, **small)
    monkeypatch.setattr("arl.run.launch.open_engines", lambda *_: pytest.fail("servers started"))
    small["config"] = arl.Config.model_validate(
        {"model": "none", "log": {"console": False}, "rollout": {"num_workers": num_workers}}
    )
    with pytest.raises(
        RewardError, match=rf"failed for 12 of 12 made-up answers.*{Path(__file__).name}, line .*'anser'"
    ):
        await arl.atrain(dataset=SUMS, reward=misspelt, **small)


@pytest.mark.runs
@pytest.mark.parametrize("reward", [only_of_some, from_trl(of_trl)])
async def test_one_that_fails_for_one_example_and_one_that_was_written_for_trl_train(
    small: dict[str, Any], reward: Any
) -> None:
    assert (await arl.atrain(dataset=SUMS, reward=reward, **small)).summary["steps"] == 2
