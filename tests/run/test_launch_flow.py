"""What settings and arguments of `launch` make of the flow of groups, over the official fakes."""

import tempfile
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from one_turn import OneTurn
from scripted_launch import small, use_fakes
from training.trainer_run import running

from arl.api.errors import CheckpointError, ConfigError, PromptTooLongError, StarvedError
from arl.api.fakes import ScriptedEngine
from arl.api.settings.run import Config
from arl.api.types import ModelRequest, SamplingParams, StepStats, TurnSpan
from arl.api.workflow import ExampleRecord, RolloutWorkflow
from arl.engine.tiny import write_tiny_model
from arl.observe.events.records import GroupRecord
from arl.observe.events.run_record import read_run
from arl.run.launch import launch
from arl.training.metrics_log import read_jsonl


class Run:
    """A whole run; `asked` is how each request was to be sampled."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.asked: list[SamplingParams] = []

    def _answer(self, request: ModelRequest) -> Sequence[int]:
        self.asked.append(request.sampling)
        return [int(request.sampling.temperature == 0), len(self.asked) % 7]

    async def __call__(self, workflow: RolloutWorkflow, *, evaluate: bool = False, **settings: Any) -> list[StepStats]:
        settings = {"steps": 3, "workflow": workflow, "evaluate": evaluate, **settings}
        async with running(self.run_dir, engine=ScriptedEngine(self._answer), **settings) as trainer:
            steps = [step async for step in trainer]
            if evaluate:
                await trainer.evaluate()
        return steps

    def trained(self) -> list[GroupRecord]:
        """Batch by batch."""
        groups = [group for group in read_run(self.run_dir).groups if group.step]
        return sorted(groups, key=lambda group: group.step or 0)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


async def test_a_script_may_add_settings_which_stay_in_its_own_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OwnConfig(Config):  # it does not pickle, just as no other process finds the class of a script
        largest: int = 9

    use_fakes(monkeypatch, ScriptedEngine(lambda request: (7, 8, 9)))
    config = OwnConfig.model_validate(small(tmp_path).model_dump(exclude_unset=True) | {"largest": 5})
    async with launch(config, workflow=OneTurn(), dataset=[{"number": 1}] * 4) as trainer:
        assert trainer.config is config
        assert [step.version async for step in trainer] == [1, 2]


async def test_an_algorithm_with_a_greedy_baseline_has_one_greedy_episode_for_each_group(run: Run) -> None:
    """It answers 1 where it is greedy, which is its reward."""
    greedy = OneTurn(lambda answer: {"reward": float(answer)})
    advantage = {"kind": "returns", "baseline": "greedy", "scale": "none"}
    steps = await run(greedy, algorithm={"advantage": advantage}, rollout={"max_staleness": 0})
    assert len(run.trained()) == 6
    for group in run.trained():
        greedy, *others = sorted(group.episodes, key=lambda episode: episode.episode, reverse=True)
        assert (greedy.episode, greedy.reward, greedy.trained) == (f"{group.group}.greedy", 1.0, [])
        assert [(episode.reward, episode.trained[0].advantage) for episode in others] == [(0.0, -1.0)] * 2
    greedy_requests = sum(sampling.temperature == 0 for sampling in run.asked)
    assert 6 <= steps[-1].metrics["baselines_finished"] <= greedy_requests <= 8


def parts_differ(number: int) -> dict[str, Any]:
    return {"rewards": {"form": float(number % 2), "answer": 1.0 - number % 2}}


def way_is_shorter(number: int) -> dict[str, Any]:
    turns = TurnSpan(start=2, stop=3, state="there"), TurnSpan(start=3, stop=4, state=f"here {number}")
    return {"turns": turns if number % 2 else turns[:1]}


@pytest.mark.parametrize(
    ("changes", "advantage"), [(parts_differ, {"separate_rewards": True}), (way_is_shorter, {"kind": "gigpo"})]
)
async def test_dynamic_sampling_keeps_groups_of_equal_outcomes_where_advantages_see_a_difference(
    run: Run, changes: Callable[[int], dict[str, Any]], advantage: dict[str, Any]
) -> None:
    numbers = count()
    steps = await run(
        OneTurn(lambda _: {"reward": 1.0, **changes(next(numbers))}),
        algorithm={"dynamic_sampling": True, "advantage": advantage},
        rollout={"max_staleness": 0},
    )
    assert steps[-1].metrics["episodes_rejected"] == 0


async def test_a_run_whose_groups_all_lack_a_difference_says_so_long_before_it_ends(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StarvedError, match=r"the last 1000 groups were all rejected .* rewards included, are equal"):
        await run(OneTurn(lambda *_: parts_differ(3)), algorithm={"dynamic_sampling": True})
    assert caplog.messages[0].startswith("32 of the last 32 groups gave nothing to train on")


async def test_a_curriculum_says_what_is_trained(run: Run) -> None:
    def odd_ones(stage: int, records: Sequence[ExampleRecord]) -> Sequence[int]:
        return [record.index for record in records if record.index % 2]

    await run(OneTurn(), curriculum=odd_ones, rollout={"max_staleness": 0})
    assert [group.row for group in run.trained()] == [1, 3, 5, 7, 9, 11]
    assert {(sampling.temperature, sampling.seed) for sampling in run.asked} == {(1.0, None)}  # nothing asks for more


async def test_a_run_that_has_all_its_steps_says_so_evaluates_and_ends(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    await run(OneTurn())
    assert caplog.records == []
    assert await run(OneTurn(), evaluate=True, steps=2) == []
    (record,) = caplog.records
    assert "has trained 3 steps, and steps is 2: there is nothing left to train" in record.getMessage()
    assert [row["version"] for row in read_jsonl(run.run_dir / "evaluations.jsonl")] == [3]


@pytest.mark.parametrize(
    ("below", "is_file", "said"),
    [
        ("", True, r"run_dir is .*run, where .*: it is a file; set run_dir"),
        ("below/it", True, r"run_dir is .*run/below/it, where .*: Not a directory; set"),
        ("", False, "cannot write its files: Permission denied"),
    ],
)
async def test_a_run_dir_that_cannot_hold_files_is_refused_before_anything_starts(
    run: Run, monkeypatch: pytest.MonkeyPatch, below: str, is_file: bool, said: str
) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    if is_file:
        run.run_dir.write_text("a file")
    else:
        monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    run.run_dir = run.run_dir / below
    with pytest.raises(ConfigError, match=said):
        await run(OneTurn())
    assert run.asked == []


@pytest.mark.parametrize(("reward", "replayed", "when_continued"), [(1.0, [0, 1, 1], [1]), (0.0, [0, 0, 0], [0])])
async def test_groups_with_a_reward_are_replayed_also_when_a_run_is_continued(
    run: Run, reward: float, replayed: list[int], when_continued: list[int]
) -> None:
    rollout = {"max_staleness": 30, "max_concurrent_episodes": 2, "replay_groups": 1}
    for steps, expected in ((3, replayed), (4, when_continued)):
        trained = await run(OneTurn(lambda _: {"reward": reward}), rollout=rollout, steps=steps)
        assert [step.metrics["replayed_groups"] for step in trained] == expected


async def test_failed_attempts_are_lines_in_the_log_and_tracebacks_in_the_run_directory(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = count()

    def fails_once(_: int) -> dict[str, Any]:
        if next(attempts) == 0:
            raise PromptTooLongError("600 tokens\nof 512")
        return {}

    await run(OneTurn(fails_once), rollout={"max_staleness": 0})
    path = run.run_dir / "logs" / "episodes.log"
    line, summary = (message for message in caplog.messages if "PromptTooLongError" in message)
    assert all(record.exc_info is None for record in caplog.records)
    assert line.endswith("(attempt 1 of 2) failed with PromptTooLongError: 600 tokens of 512; it runs again")
    assert summary.startswith("attempts at episodes that failed: 1 with PromptTooLongError at test_launch_flow.py:")
    assert summary.endswith(f"; tracebacks are in {path}")
    assert path.read_text().startswith(f"{line}\nTraceback")


async def test_a_version_from_the_future_and_an_unknown_token_fail_their_episodes_and_the_run_goes_on(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = count()

    def sometimes_impossible(_: int) -> dict[str, Any]:
        impossible = {"versions": (-1, -1, 999, 999)}, {"token_ids": (1, 1 << 30, 0, 0)}, {"reward": 1e308}
        return dict(enumerate(impossible)).get(next(attempts), {})

    steps = await run(OneTurn(sometimes_impossible), rollout={"max_staleness": 0, "episode_retries": 3})
    assert len(steps) == 3
    said = [message for message in caplog.messages if "(attempt" in message]
    words = "a token of version 999, but the newest weights are of version 0", "but the model has", "reward is 1e+308"
    assert [word in line for word, line in zip(words, said, strict=True)] == [True] * 3


async def test_a_run_that_was_moved_with_its_model_continues_and_another_model_does_not(run: Run) -> None:
    begun = run.run_dir
    write_tiny_model(begun / "model", ["Say a number"])
    await run(OneTurn(), model=str(begun / "model"), steps=2)
    run.run_dir = begun.rename(begun.with_name("moved"))
    steps = await run(OneTurn(), model=str(run.run_dir / "model"), steps=3)
    assert [step.version for step in steps] == [3]
    other = write_tiny_model(begun / "other", ["Say a number"], seed=1)
    with pytest.raises(CheckpointError, match=r"written with model='.*moved/model', this run has '.*other'"):
        await run(OneTurn(), model=str(other), steps=4)
