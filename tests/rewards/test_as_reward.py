"""Rewards made by as_reward: their kinds, who opens and closes them, and that none stops the event loop."""

import asyncio
import functools
import logging
import os
import sys
import threading
import types
from collections.abc import Mapping
from contextlib import AsyncExitStack
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scoring import length, reads_to_the_end, two_parts

from arl.api.engine import Sampler
from arl.api.errors import ConfigError, RewardError, RewardTimeoutError
from arl.api.fakes import ScriptedEngine
from arl.api.settings.run import EvaluationConfig
from arl.api.types import Example, Trajectory
from arl.api.workflow import RolloutWorkflow, Shared
from arl.rewards import AsyncReward, InlineReward, RewardPool, Score, ThreadReward, WeightedReward, as_reward
from arl.rewards.score import score_of
from arl.rollout.episode import EpisodeRunner
from arl.training.evaluator import Evaluator


async def judge(answer: str, data: Example) -> float:
    await asyncio.sleep(0)
    return float(answer == data["answer"])


async def graded(answer: str, data: Example, scale: float) -> float:
    return scale * (answer == data["answer"])


class Remote:
    """A user's own reward, which they open and close themselves."""

    async def __call__(self, answer: str, data: Example) -> float:
        if answer == "break":
            raise OSError("no route to host")
        return 0.25

    async def __aenter__(self) -> "Remote":
        raise AssertionError("it is the user's to open")

    async def __aexit__(self, *exc: object) -> None: ...


class Exits:
    """A reward that ends like a script."""

    async def __call__(self, answer: str, data: Example) -> float:
        raise SystemExit(3)


class Counted(Shared):
    """Remembers when it was opened and closed."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    async def _open(self, opened: AsyncExitStack) -> None:
        await asyncio.sleep(0)
        self.log.append("opened")
        opened.callback(self.log.append, "closed")

    async def __call__(self, answer: str, data: Example) -> float:
        assert self.log == ["opened"]
        return 1.0


async def test_every_kind_of_reward_gives_a_score() -> None:
    data = {"answer": "4"}
    for given, expected in [
        (judge, Score(1.0)),
        (functools.partial(graded, scale=3.0), Score(3.0)),
        (InlineReward(lambda answer, data: Score(2.0, {"x": 3.0})), Score(2.0, {"x": 3.0})),
        (ThreadReward(lambda answer, data: Fraction(1, 4)), Score(0.25)),
        (AsyncReward(judge), Score(1.0)),
        (Remote(), Score(0.25)),
        (WeightedReward({"a": (2.0, judge)}), Score(2.0, {"a": 1.0})),
        (two_parts, Score(1.5, {"a": 1.0, "b": 0.5})),
    ]:
        async with as_reward(given) as reward:
            assert await reward("4", data) == expected
            assert as_reward(reward) is reward


async def test_the_event_loop_goes_on_while_a_synchronous_reward_blocks(tmp_path: Path) -> None:
    """Each blocks until this loop has closed a pipe."""
    for k, kind in enumerate((as_reward(reads_to_the_end, workers=1), as_reward(ThreadReward(reads_to_the_end)))):
        async with kind as reward, asyncio.TaskGroup() as group:
            pipe = tmp_path / f"pipe{k}"
            os.mkfifo(pipe)
            call = group.create_task(reward(str(pipe), {}))
            with await asyncio.to_thread(pipe.open, "wb"):
                assert not call.done()
        assert call.result() == Score(1.0)


async def test_one_reward_is_opened_by_its_first_user_and_closed_by_its_last() -> None:
    inner = Counted()
    first, second = as_reward(inner), WeightedReward({"a": (1.0, inner), "b": (1.0, inner)})
    async with second:
        assert (await second("", {})).value == 2.0
        async with first:
            pass
        assert inner.log == ["opened"]
    assert inner.log == ["opened", "closed"]
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(first.__aenter__())
    assert inner.log == ["opened", "closed", "opened"]


def test_other_objects_are_refused_as_rewards() -> None:
    for given, what in [
        (0.5, "reward is 0.5; give a function"),
        (Remote, "give a function .*, or an instance of a reward"),
        (lambda answer: 1.0, r"<lambda> cannot be called with \(answer, data\)"),
    ]:
        with pytest.raises(ConfigError, match=what):
            as_reward(given)  # type: ignore[arg-type]
    with pytest.raises(
        RewardError, match="cannot be sent to a worker; define it at the top level of a module, or wrap"
    ):
        as_reward(lambda answer, data: 1.0)


def test_limits_that_a_reward_does_not_take_are_refused() -> None:
    with pytest.raises(ConfigError, match="Remote has its own limits"):
        as_reward(Remote(), timeout_s=1.0)
    with pytest.raises(ConfigError, match="judge is async and uses no worker processes"):
        as_reward(judge, workers=3)
    for kind in (RewardPool, ThreadReward, AsyncReward):
        with pytest.raises(ConfigError, match="timeout_s is 0"):
            kind(length, timeout_s=0)
    with pytest.raises(ConfigError, match="workers is 0; it must be at least 1"):
        RewardPool(length, workers=0)
    with pytest.raises(RewardError, match="judge is async; use AsyncReward"):
        RewardPool(judge)


@pytest.mark.parametrize(
    "wrong",
    [float("nan"), float("-inf"), "1", "long" * 1000, None, 10**400, 10**9000, np.array([1.0])],
    ids=lambda _: "",
)
async def test_a_reward_that_is_not_a_finite_number_is_an_error_naming_function_and_value(wrong: Any) -> None:
    def score(answer: str, data: Example) -> Any:
        return wrong

    async def ascore(answer: str, data: Example) -> Any:
        return wrong

    for reward in (InlineReward(score), ThreadReward(score), AsyncReward(ascore)):
        with pytest.raises(RewardError, match=r"score returned .*must be a finite number") as raised:
            await reward("", {})
        assert len(str(raised.value)) < 600


def test_scores_take_numbers_of_other_libraries_and_no_mappings() -> None:
    assert score_of(np.float32(0.5)) == Score(0.5)
    assert score_of(True) == Score(1.0)
    score = Score(np.float32(0.5), {"a": np.int64(1)}, {"b": np.float64(2)})  # pyright: ignore[reportArgumentType]
    assert {type(number) for number in (score.value, *score.parts.values(), *score.metrics.values())} == {float}
    with pytest.raises(RewardError, match=r"return Score\(value, parts\) for several named ones"):
        score_of({"a": 1.0})
    with pytest.raises(ValueError, match=r"parts\['a'\] is nan"):
        Score(1.0, {"a": float("nan")})


async def test_a_thread_that_runs_too_long_is_left_behind_and_too_many_are_an_error() -> None:
    go = threading.Event()
    reward = ThreadReward(lambda answer, data: go.wait() if answer == "hang" else 1.0, timeout_s=0.05, workers=1)
    with pytest.raises(RewardTimeoutError, match=r"<lambda> ran longer than 0\.05 s"):
        await reward("hang", {})
    with pytest.raises(RewardError, match="1 earlier calls hang in threads"):
        await reward("", {})
    go.set()


@pytest.mark.parametrize("error", [KeyError("colour"), SystemExit(3), StopIteration()])
async def test_an_error_in_a_function_names_it(error: BaseException) -> None:
    def leave(answer: str, data: Example) -> float:
        raise error

    async def aleave(answer: str, data: Example) -> float:
        raise error

    with pytest.raises(RewardError, match=rf"leave failed.*{type(error).__name__}"):
        await ThreadReward(leave)("", {})
    for reward in (InlineReward(leave), AsyncReward(aleave)):
        with pytest.raises(RewardError, match="leave failed: ") as raised:
            await reward("", {})
        assert type(error).__name__ in str(raised.value)


async def test_a_function_typed_into_a_notebook_runs_in_a_thread_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    notebook = types.ModuleType("__main__")
    exec("def score(answer, data):\n    return len(answer)", notebook.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    with caplog.at_level(logging.WARNING):
        async with as_reward(notebook.score, timeout_s=5.0) as reward:
            assert await reward("abc", {}) == Score(3.0)
    assert "score was typed in interactively" in caplog.text
    assert "%%writefile" in caplog.text
    with pytest.raises(RewardError, match="was typed in interactively, so no worker can import it"):
        RewardPool(notebook.score)
    monkeypatch.setattr(notebook, "__file__", "asyncio/__main__.py", raising=False)
    score = vars(notebook).pop("score")  # `python -m asyncio` keeps what is typed in elsewhere
    with pytest.raises(RewardError, match="was typed in interactively"):
        RewardPool(score)


async def test_a_weighted_sum_runs_its_parts_at_once_and_names_each() -> None:
    both = asyncio.Barrier(2)

    def waits_for_the_other(value: float, **more: Mapping[str, float]) -> Any:
        async def score(answer: str, data: Example) -> Score:
            await both.wait()
            return Score(value, **more)

        return score

    reward = WeightedReward(
        {
            "correct": (2.0, waits_for_the_other(0.5, parts={"steps": 3.0}, metrics={"cached": 1.0})),
            "long": (-0.1, waits_for_the_other(4.0)),
            "seen": (0, InlineReward(lambda answer, data: 7.0)),
        }
    )
    async with reward, asyncio.timeout(5):
        score = await reward("", {})
    assert score.value == pytest.approx(0.6)
    assert score.parts == {"correct": 0.5, "long": 4.0}
    assert score.metrics == {"seen": 7.0, "correct/steps": 3.0, "correct/cached": 1.0}


async def test_a_part_that_fails_fails_the_sum_with_its_name() -> None:
    async def hangs(answer: str, data: Example) -> float:
        await asyncio.Event().wait()
        return 1.0

    for part, error, what in [
        (AsyncReward(hangs, timeout_s=0.01), RewardTimeoutError, "the part 'bad' of the reward: .*ran longer than"),
        (InlineReward(lambda a, d: float("nan")), RewardError, "the part 'bad' of the reward: .*returned nan"),
        (Remote(), RewardError, "the part 'bad' of the reward: .*no route to host"),
        (Exits(), RewardError, r"the part 'bad' of the reward: .*SystemExit\(3\)"),
    ]:
        async with WeightedReward({"good": (1.0, AsyncReward(hangs)), "bad": (1.0, part)}) as reward:
            with pytest.raises(error, match=what) as raised:
                await reward("break", {})
        assert raised.value.__cause__ is not None


def test_malformed_sums_are_refused() -> None:
    weights = (float("nan"), 10**400, "1", None)
    unweighable = [({"a": (weight, judge)}, "finite weight") for weight in weights]
    for parts, what in [({}, "no parts"), ({"a": judge}, "must be"), *unweighable]:
        with pytest.raises(ConfigError, match=what):
            WeightedReward(parts)  # type: ignore[arg-type]


class Rewarded(RolloutWorkflow):
    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory:
        return Trajectory(
            token_ids=(1, 9),
            loss_mask=(0, 1),
            behavior_logprobs=(0.0, -1.0),
            versions=(-1, 0),
            reward=data["value"],
            rewards={"half": data["value"] / 2},
        )


async def test_an_evaluation_has_the_mean_of_each_named_part() -> None:
    engine, runner = ScriptedEngine(lambda request: [9]), EpisodeRunner(workflow=Rewarded(), timeout_s=5.0)
    evaluation, _ = await Evaluator(engine, runner, [{"value": 2.0}, {"value": 4.0}], EvaluationConfig()).evaluate()
    assert (evaluation.reward, evaluation.metrics["reward/half"]) == (3.0, 1.5)
