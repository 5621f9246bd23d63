"""What an episode tells the event log comes back as it was, and nothing in it can end or hold up the run."""

import asyncio
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pictures
from records import trajectory

from arl.api.engine import Sampler
from arl.api.errors import TrajectoryError
from arl.api.events import EPISODE, EpisodeContext, RewardEnded, ToolEnded
from arl.api.fakes import ScriptedEngine
from arl.api.images import Image
from arl.api.settings.run import EventsConfig
from arl.api.types import Example, ModelRequest, ModelResponse, Trajectory, TurnSpan
from arl.api.workflow import RolloutWorkflow
from arl.observe.events.run_record import RunRecord, read_run
from arl.observe.events.writer import EventLog
from arl.rewards.score import Score, reported
from arl.rollout.controller import run_examples
from arl.rollout.episode import EpisodeRunner
from arl.rollout.episode_events import EpisodeReport, shown
from arl.workflow.call_formats import ToolCall
from arl.workflow.tools import arun_tools


class Returns(RolloutWorkflow):
    """Asks once, then returns the trajectory, or raises the error."""

    def __init__(self, end: Trajectory | Exception) -> None:
        self._end = end

    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory:
        await engine.agenerate(ModelRequest(input_ids=(5, 6)))
        if isinstance(self._end, Exception):
            raise self._end
        return self._end


def answer(logprob: float = -0.5) -> ModelResponse:
    return ModelResponse(
        output_ids=(7,), output_logprobs=(logprob,), output_versions=(0,), stop_reason="stop", temperature=0.25
    )


def record_of(
    run_dir: Path, end: Trajectory | Exception, response: ModelResponse | None = None, example: Example | None = None
) -> RunRecord:
    with EventLog(run_dir, EventsConfig()).open() as log:
        runner = EpisodeRunner(workflow=Returns(end), timeout_s=30.0, events=log)
        engine = ScriptedEngine(lambda _: response or answer())
        asyncio.run(run_examples(engine, runner, [example or {}], max_concurrent=1, number=1))
    return read_run(run_dir)


@pytest.mark.parametrize(
    "given",
    [
        {"reward": np.float64(0.5)},
        {"rewards": {"correct": np.float64(0.5), "short": True}},
        {"metrics": {"turns": np.float64(3.0), "solved": False}},
        {"turns": (TurnSpan(start=1, stop=2, reward=np.float64(0.5)),)},
        {"role": np.str_("solver")},
    ],
    ids=lambda given: next(iter(given)),
)
def test_numbers_and_names_that_are_not_pythons_own_are_in_the_log(tmp_path: Path, given: dict[str, Any]):
    run = record_of(tmp_path, trajectory(versions=(0, 0), **given))
    assert run.problems == []
    (episode,) = run.episodes
    (summary,) = episode.trajectories
    (tokens,) = run.tokens(episode)
    assert episode.how == "finished"
    for name in given.keys() - {"turns", "reward"}:
        assert getattr(summary, name) == getattr(tokens.row, name) == given[name]
    assert tokens.row.reward == given.get("reward", 0.0)
    assert summary.reward == (0.5 if given.keys() & {"turns", "reward"} else 0.0)


def test_an_answer_that_is_no_trajectory_fails_its_episode_alone(tmp_path: Path):
    (episode,) = record_of(tmp_path, TrajectoryError("a logprob is nan"), answer(logprob=math.nan)).episodes
    assert (episode.how, episode.message, episode.places) == ("failed", "a logprob is nan", {})


class SilentError(Exception):
    def __str__(self) -> str:
        raise LookupError("nothing to say")


def test_an_error_without_a_text_fails_its_episode_alone(tmp_path: Path):
    (episode,) = record_of(tmp_path, SilentError()).episodes
    assert (episode.how, episode.error) == ("failed", "RuntimeError")
    assert episode.message == "arun_episode raised SilentError, whose text raised LookupError('nothing to say')"


def test_what_a_failed_episode_last_saw_is_kept_with_its_temperature(tmp_path: Path):
    run = record_of(tmp_path, ValueError("no luck"))
    (tokens,) = run.tokens(run.episodes[0])
    assert tokens.columns["token_ids"].tolist() == [5, 6, 7]
    assert tokens.columns["versions"].tolist() == [-1, -1, 0]
    assert tokens.row.temperature == 0.25


@pytest.mark.parametrize("end", [trajectory(versions=(0, 0)), ValueError("no luck")], ids=["finished", "failed"])
def test_a_held_out_episode_has_its_example(tmp_path: Path, end: Trajectory | Exception):
    (episode,) = record_of(tmp_path, end, example={"question": "1 + 1", "answer": 2}).episodes
    assert episode.example == {"question": "1 + 1", "answer": 2}


def test_of_an_example_with_many_long_columns_the_log_holds_the_first_and_says_how_many_follow():
    told = shown({f"column{n}": "a" * 1990 for n in range(1000)})
    assert list(told) == [*(f"column{n}" for n in range(11)), "..."]
    assert told["..."] == "989 more columns"
    assert shown({"b": 1, "a": [2]}) == {"b": 1, "a": "[2]"}


HUGE = "a" * 2_000_000
CUT = "a" * 200 + "..."


def test_of_long_names_the_log_holds_the_beginnings(tmp_path: Path):
    """Of a role, rewards, metrics, states and the columns of an example."""
    given = {"role": HUGE, "rewards": {HUGE: 1.0}, "metrics": {HUGE: 2.0}}
    run = record_of(tmp_path, trajectory(versions=(0, 0), **given, turns=(TurnSpan(start=1, stop=2, state=HUGE),)))
    (episode,) = run.episodes
    (tokens,) = run.tokens(episode)
    for told in (episode.trajectories[0], tokens.row):
        assert (told.role, told.rewards, told.metrics) == (CUT, {CUT: 1.0}, {CUT: 2.0})
    assert tokens.row.states == [CUT]
    assert shown({HUGE: 1}) == {CUT: 1}


class Scored:
    """A reward with this name, and a part of the same name."""

    def __init__(self, name: Any) -> None:
        self.name = name

    @reported
    async def __call__(self) -> Score:
        return Score(1.0, {self.name: 1.0})


@pytest.mark.parametrize(("name", "is_told_as"), [(HUGE, CUT), ("correct", "correct"), (7, "7")])
def test_of_long_names_of_tools_and_rewards_the_log_holds_the_beginnings(tmp_path: Path, name: Any, is_told_as: str):
    """A model may call a tool by any name."""

    async def call() -> None:
        EPISODE.set(EpisodeContext("0.0", log))
        await arun_tools([ToolCall(name=str(name), arguments={})], [])
        await Scored(name)()

    with EventLog(tmp_path, EventsConfig()).open() as log:
        asyncio.run(call())
    tool, reward = read_run(tmp_path).calls(0.0, math.inf)
    assert isinstance(tool, ToolEnded)
    assert isinstance(reward, RewardEnded)
    assert (tool.tool, reward.reward, reward.parts) == (is_told_as, is_told_as, {is_told_as: 1.0})


class Counted:
    """Counts how often one of them is looked at."""

    num = 0

    def __repr__(self) -> str:
        Counted.num += 1
        return "here"


@pytest.mark.parametrize(
    ("value", "is_shown_as"),
    [
        ({"b": [1, "x"], "a": (2.5, None)}, "{'b': [1, 'x'], 'a': (2.5, None)}"),
        (b"bytes", "b'bytes'"),
        ("text", "text"),
        (np.str_("text"), "text"),
        (np.float64(0.5), 0.5),
        (True, True),
        (1 << 63, "9223372036854775808"),
        (10**5000, "int, whose repr raised ValueError"),
        (Fraction(1, 2), "Fraction(1, 2)"),
        ("a" * 2001, "a" * 2000 + "..."),
        (b"a" * 100_000, "b'" + "a" * 1998 + "..."),
        ([0] * 100_000, ("[" + "0, " * 2000)[:2000] + "..."),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_examples_values_are_shown_as_they_are_and_long_ones_cut(value: object, is_shown_as: object):
    assert shown({"column": value}) == {"column": is_shown_as}
    assert shown(value) == {"": is_shown_as} or isinstance(value, dict)


PICTURE = Pictures.new("RGB", (48, 24), "red")
FILE = Image.of(PICTURE).data


@pytest.mark.parametrize(
    ("value", "is_shown_as"),
    [
        (PICTURE, "<image 48x24>"),
        (Image.of(PICTURE), f"<image 48x24, {len(FILE)} bytes>"),
        (FILE, f"<image {len(FILE)} bytes>"),
        (FILE + bytes(5000), f"<image {len(FILE) + 5000:,} bytes>"),
        ({"bytes": FILE, "path": None}, f"{{'bytes': <image {len(FILE)} bytes>, 'path': None}}"),
        ([PICTURE, PICTURE], "[<image 48x24>, <image 48x24>]"),
    ],
    ids=("picture", "image", "file", "large file", "row", "list"),
)
def test_an_image_of_an_example_is_shown_by_its_size(value: object, is_shown_as: str) -> None:
    assert shown({"image": value}) == {"image": is_shown_as}


def test_of_a_huge_value_only_the_beginning_is_looked_at():
    for value in ([Counted()] * 100_000, [[Counted()] * 1000] * 1000, {n: Counted() for n in range(100_000)}):
        Counted.num = 0
        assert len(shown({"column": value})["column"]) == 2003
        assert Counted.num <= 2000


def test_what_an_episode_last_saw_keeps_the_arrays_that_request_and_response_both_have() -> None:
    report = EpisodeReport()
    request = ModelRequest(input_ids=[1], arrays={"x": np.zeros((1, 2)), "y": np.zeros(1)})
    ids, one = (2, 3), np.ones((2, 2))
    response = ModelResponse(
        output_ids=ids, output_logprobs=(1.5, -1.0), output_versions=(0, 0), stop_reason="stop", arrays={"x": one}
    )
    report.answered(request, response, 0.1)
    report.end((), None, 1, ValueError("no reward"))
    assert report.seen is not None
    assert {name: rows.tolist() for name, rows in report.seen.arrays.items()} == {"x": [[0, 0], [1, 1], [1, 1]]}
