"""Episodes in worker processes: what comes back is what comes back without workers, and what ends does not hang."""

import asyncio
import logging
import multiprocessing.process
import os
import pickle
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from errands import Errands
from msgspec import structs
from players import InLetters, Moody, Sees, TwoTurns, controlled, train

from arl import MCPTools, OpenAIProxy
from arl.api.errors import (
    ArlError,
    ConfigError,
    DatasetError,
    EpisodeTimeoutError,
    PromptTooLongError,
    ServerError,
    ToolError,
    WorkerError,
)
from arl.api.events import (
    EpisodeEnded,
    Event,
    KeptTokens,
    RewardEnded,
    ToolEnded,
    TurnEnded,
)
from arl.api.fakes import ScriptedEngine
from arl.api.routed_experts import Routes
from arl.api.sampling_mask import KeptIds
from arl.api.types import Group, ModelRequest, ModelResponse
from arl.api.workflow import RolloutWorkflow
from arl.engine.tiny import tiny_tokenizer
from arl.rewards import NumericMatch
from arl.rollout.episode import Episode, EpisodeRunner, EpisodeSampler
from arl.rollout.episode_events import EpisodeReport
from arl.rollout.workers import pool, worker
from arl.rollout.workers.messages import Pipe
from arl.rollout.workers.pool import EpisodeWorkers, WorkerProcess
from arl.runtime.clocks import EpisodeClock
from arl.runtime.processes.rpc import OtherTracebackError
from arl.workflow.teachers import DistillationWorkflow, TeacherClient
from arl.workflow.tool_agent import ToolAgentWorkflow
from arl.workflow.tools import Tool


class Waits:
    """A script that never answers a request for (9,), and knows how many of these run."""

    def __init__(self) -> None:
        self.num_running = 0
        self.begun = asyncio.Event()

    async def __call__(self, request: ModelRequest) -> list[int]:
        if len(request.input_ids) > 5:
            raise PromptTooLongError("too long")
        if request.input_ids[0] == 9:
            self.num_running += 1
            self.begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.num_running -= 1
        return [5, 6, 7]


async def run(
    workflow: RolloutWorkflow, *errands: str, retries: int = 0, timeout_s: float = 60, script: Any = None, **data: Any
) -> list[Any]:
    engine = ScriptedEngine(script or Waits())
    runner = EpisodeRunner(workflow=workflow, timeout_s=timeout_s, retries=retries)
    examples = [{"errand": errand, "number": number, **data} for number, errand in enumerate(errands)]
    return await asyncio.gather(*(runner.run(engine, example, name=example["errand"]) for example in examples))


def told(episode: Episode) -> Any:
    return episode.trajectories or (type(episode.error), str(episode.error))


def marks(directory: Path, kind: str) -> int:
    return len([*directory.glob(f"{kind}-*")])


async def test_while_an_episode_waits_for_a_place_in_a_worker_its_time_limit_stands_still(tmp_path: Path) -> None:
    seen: list[bool] = []

    def answer(_: ModelRequest) -> list[int]:
        seen.append(clock.is_still)
        return [5, 6, 7]

    async with EpisodeWorkers(Errands(tmp_path), 1, tmp_path) as workers:
        runner, clock = EpisodeRunner(workflow=workers, timeout_s=60), EpisodeClock(60.0)
        ended = await runner.attempt(ScriptedEngine(answer), {"errand": "queue", "number": 0}, clock)
    assert not isinstance(ended, Exception)
    assert seen == [True, False]


@pytest.fixture
def restarts_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_FIRST_BACKOFF_S", 0.01)


@pytest.fixture
def impatient(restarts_soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is silent for 2 s is killed: as short as a busy machine allows."""
    monkeypatch.setattr(pool, "_BEAT_S", 0.05)
    monkeypatch.setattr(pool, "_SILENT_S", 1.0)


@pytest.mark.parametrize("workflow", [TwoTurns(), Moody(), InLetters(), Sees()])
async def test_the_same_groups_are_trained_with_workers_and_without(workflow: RolloutWorkflow, tmp_path: Path) -> None:
    async def batches(workflow: RolloutWorkflow) -> tuple[list[list[Group]], set[Any]]:
        settings: dict[str, Any] = {"group_size": 4, "min_group_size": 1, "max_staleness": 0, "seed_requests": True}
        script = ScriptedEngine(lambda request: answer(request, script.version))
        controller, buffer, engine = controlled(workflow, 20, script, has_baseline=True, episode_retries=0, **settings)
        trained = await train(controller, buffer, engine, range(4))
        of_trained = {t.token_ids.item(0) for batch in trained for group in batch for t in group.trajectories}
        asked = {(*r.input_ids, r.sampling, r.images, r.role) for r in engine.requests if r.input_ids[0] in of_trained}
        return trained, asked

    alone = await batches(workflow)
    async with EpisodeWorkers(workflow, 2, tmp_path) as away:
        assert await batches(away) == alone


async def test_an_image_crosses_to_the_controller_once_however_many_turns_and_trajectories_show_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = list[int]()
    received = Pipe.data_received
    monkeypatch.setattr(Pipe, "data_received", lambda self, data: (sizes.append(len(data)), received(self, data))[1])
    async with EpisodeWorkers(Sees(1_000_000), 1, tmp_path) as away:
        engine, runner = ScriptedEngine(lambda _: [5, 6, 7]), EpisodeRunner(workflow=away, timeout_s=60)
        episode = await runner.run(engine, {"number": 0}, name="0.0")
    assert [len(placed.image.data) for placed in episode.trajectories[0].images] == [2_000_000, 20]
    assert 2_000_000 < sum(sizes) < 2_100_000


def answer(request: ModelRequest, version: int) -> list[int] | ModelResponse:
    """A function of the prompt and the seed, with sets of all kinds and routes under a grammar."""
    said = (7 * sum(request.input_ids) + (request.sampling.seed or 0)) % 101
    if request.sampling.grammar is None:
        return [said] * 3
    return ModelResponse(
        output_ids=(said,) * 3,
        output_logprobs=(-0.25, -0.5, -1.0),
        output_versions=(version,) * 3,
        stop_reason="length",
        kept_ids=KeptIds.of([[said, 200], None, range(said, 200)], vocab_size=201),
        routes=Routes.joined([request.routes_from, Routes.of(np.full((3, 2, 2), said, np.uint8)), 1]),
    )


async def test_an_episode_ends_in_a_worker_as_it_ends_without(tmp_path: Path, caplog: Any) -> None:
    errands = ("plain", "reject", "give_nonsense", "stumble", "exit", "cancel_itself", "ask_too_much",
               "ask_two_and_drop_one")  # fmt: skip
    here, script = Errands(tmp_path), Waits()
    async with EpisodeWorkers(here, 1, tmp_path) as away:
        there = await run(away, *errands, "raise_unsendable", "raise_homely", "warn", script=script)
        assert script.num_running == 0
        with pytest.raises(ArlError, match="raised KeyboardInterrupt: the run ends"):
            await run(away, "interrupt")
        (unsendable,) = await run(away, "plain", lock=asyncio.Lock, function=lambda: None)
    assert [told(episode) for episode in there[: len(errands)]] == [told(e) for e in await run(here, *errands)]
    failed = there[errands.index("stumble")].error
    assert isinstance(failed.__cause__, OtherTracebackError)
    assert "errands.py" in str(failed.__cause__)
    odd, homely, _ = (episode.error for episode in there[len(errands) :])
    assert str(odd) == "UnsendableError: this cannot travel"
    assert str(homely) == "errands.HomelyError: at home"
    assert isinstance(unsendable.error, DatasetError)
    assert "num_workers=0" in str(unsendable.error)
    (said,) = [record for record in caplog.records if record.name == "arl.tests.errands"]
    assert (said.levelno, "episode worker 0: a word from" in said.getMessage()) == (logging.WARNING, True)
    assert not said.getMessage().endswith(str(os.getpid()))


async def test_a_cancelled_episode_ends_in_its_worker_with_its_requests_before_it_ends_here(tmp_path: Path) -> None:
    script = Waits()
    async with EpisodeWorkers(Errands(tmp_path), 1, tmp_path) as away, asyncio.TaskGroup() as tasks:
        task = tasks.create_task(run(away, "wait", script=script))
        await script.begun.wait()
        task.cancel()
        await asyncio.wait([task])
        assert (tmp_path / "cleaned up").exists()
        assert script.num_running == 0
        for turns in range(4):  # of the event loop: its task there may not have begun
            soon = tasks.create_task(run(away, "wait", "plain"))
            for _ in range(turns + 1):
                await asyncio.sleep(0)
            soon.cancel()
            await asyncio.wait([soon])
        (late,) = await run(away, "wait", timeout_s=0.1, retries=1)
        assert (type(late.error), late.attempts) == (EpisodeTimeoutError, 1)


@pytest.mark.parametrize(
    ("number", "how"), [("SIGKILL", "was ended by SIGKILL"), ("SIGSTOP", "gave no sign of life for 2 s and was killed")]
)
async def test_the_episodes_of_a_worker_that_is_killed_or_stopped_run_again_and_so_does_it(
    number: str, how: str, restarts_soon: None, request: pytest.FixtureRequest, tmp_path: Path, caplog: Any
) -> None:
    if number == "SIGSTOP":
        request.getfixturevalue("impatient")
    script = Waits()
    async with EpisodeWorkers(Errands(tmp_path), 1, tmp_path) as away:
        (episode,) = await run(away, "die", retries=1, signal=number, script=script)
        assert (episode.is_finished, episode.attempts) == (True, 2)
        assert script.num_running == 0
    assert f"failed with WorkerError: episode worker 0 {how}" in caplog.text
    assert "episode worker 0 died with 1 episodes; restart 1 of 5" in caplog.text
    assert (marks(tmp_path, "entered"), marks(tmp_path, "left")) == (2, 1)


async def test_a_worker_whose_cancelled_episode_does_not_end_is_killed_and_named(
    restarts_soon: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(pool, "_STOPPING_S", 0.1)
    script = Waits()
    async with EpisodeWorkers(Errands(tmp_path), 1, tmp_path) as away, asyncio.TaskGroup() as tasks:
        task = tasks.create_task(run(away, "linger", script=script))
        await script.begun.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        (after,) = await run(away, "plain", retries=1)
        assert after.is_finished
    assert "episode worker 0 died with 1 episodes" in caplog.text
    assert "it did not end a cancelled episode within 0.1 s and was killed" in caplog.text


class Stopped(WorkerProcess):
    """A process that is stopped before its interpreter has started."""

    async def _spawn(self, theirs: socket.socket, beats: socket.socket) -> asyncio.subprocess.Process:
        self.spawned = await super()._spawn(theirs, beats)
        self.spawned.send_signal(signal.SIGSTOP)
        return self.spawned


async def test_a_worker_that_is_stopped_before_its_first_sign_of_life_is_killed_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "WorkerProcess", Stopped)
    monkeypatch.setattr(pool, "_STARTING_S", 0.05)
    with pytest.raises(WorkerError, match=r"worker 0 did not start: it gave no sign of life for 0.1 s and was killed"):
        async with EpisodeWorkers(Errands(tmp_path), 1, tmp_path):
            pass


async def test_a_request_that_outlives_its_episode_is_answered_with_an_error(tmp_path: Path) -> None:
    async with EpisodeWorkers(Errands(tmp_path), 1, tmp_path) as away:
        (left,) = await run(away, "leave_a_task")
        (joined,) = await run(away, "join_it", timeout_s=20)
        assert left.is_rejected
        assert joined.is_rejected


async def test_a_worker_whose_event_loop_is_blocked_gives_signs_of_life(impatient: None, tmp_path: Path) -> None:
    async with EpisodeWorkers(Errands(tmp_path), 1, tmp_path) as away:
        (episode,) = await run(away, "block", s=2.3)
        assert episode.is_rejected


async def test_a_workers_log_shows_where_its_event_loop_is_blocked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = "in test_a_workers_log_shows"
    monkeypatch.setattr(worker, "_BLOCKED_S", 0.02)
    with (tmp_path / "log").open("wb") as log:
        watching = asyncio.create_task(worker._watch_for_blocks(log.fileno()))
        while place not in (tmp_path / "log").read_text():
            await asyncio.sleep(0.01)  # the watch begins again: it tells one place, which may be the event loop's own
            time.sleep(0.05)  # noqa: ASYNC251
        watching.cancel()
        await asyncio.wait([watching])


async def test_a_worker_that_dies_too_often_ends_the_run(
    restarts_soon: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_MAX_RESTARTS", 0)

    async def play() -> None:
        async with EpisodeWorkers(Errands(tmp_path), 2, tmp_path) as away:
            await run(away, "die", signal="SIGKILL")
            await asyncio.Event().wait()

    with pytest.raises(WorkerError, match=r"died 1 times in a row; the last time it was ended by SIGKILL"):
        await play()
    assert (marks(tmp_path, "entered"), marks(tmp_path, "left")) == (2, 1)  # the other one is not killed


async def test_an_episode_that_no_worker_can_take_any_more_does_not_fail_while_the_run_saves(
    restarts_soon: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would count as a failure for good, and its example would not run again after a resume."""
    monkeypatch.setattr(pool, "_MAX_RESTARTS", 0)

    async def play() -> None:
        async with EpisodeWorkers(Errands(tmp_path), 1, tmp_path) as away, asyncio.TaskGroup() as tasks:
            playing = tasks.create_task(run(away, "die", signal="SIGKILL", retries=1))
            try:
                await asyncio.Event().wait()
            finally:
                for _ in range(50):  # turns of the event loop, in which it would fail
                    await asyncio.sleep(0)
                assert not playing.done()

    with pytest.raises(WorkerError, match="died 1 times in a row"):
        await play()


async def test_what_entering_and_leaving_the_workflow_raises_in_a_worker_is_raised_here(
    tmp_path: Path, caplog: Any
) -> None:
    with pytest.raises(ConfigError, match="no door") as raised:
        async with EpisodeWorkers(Errands(tmp_path, entering=ConfigError("no door")), 2, tmp_path):
            pass
    assert "in episode worker" in str(raised.value.__cause__)
    with pytest.raises(ValueError, match="no way out"):
        async with EpisodeWorkers(Errands(tmp_path, leaving=ValueError("no way out")), 1, tmp_path):
            pass
    with pytest.raises(KeyError):
        async with EpisodeWorkers(Errands(tmp_path, leaving=ValueError("no exit")), 1, tmp_path):
            raise KeyError
    assert "episode worker 0 failed, too: ValueError('no exit')" in caplog.text


async def test_a_worker_that_does_not_leave_the_workflow_is_killed_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(pool, "_CLOSING_S", 0.1)
    async with EpisodeWorkers(Errands(tmp_path), 1, tmp_path):
        (tmp_path / "stay").touch()
    assert "episode worker 0 ended before it had left the workflow" in caplog.text


def test_a_workflow_that_cannot_travel_is_refused_before_a_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Local(TwoTurns):
        pass

    with pytest.raises(ConfigError, match=r"Local cannot be sent to worker processes.*rollout.num_workers=0"):
        EpisodeWorkers(Local(), 1, tmp_path)
    Local.__module__, Local.__qualname__ = "__main__", "Local"
    monkeypatch.setattr(sys.modules["__main__"], "Local", Local, raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    with pytest.raises(ConfigError, match="Local uses what a notebook or an interactive session defines"):
        EpisodeWorkers(Local(), 1, tmp_path)
    monkeypatch.setattr(multiprocessing.process.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(ConfigError, match="__name__ == "):
        EpisodeWorkers(TwoTurns(), 1, tmp_path)


def doubled(x: int) -> str:
    """Doubles a number.

    Args:
        x: the number
    """
    return str(2 * x)


class Kept:
    """Events that keeps records in memory, without their times."""

    def __init__(self) -> None:
        self.records: list[Any] = []

    def emit(self, event: Event) -> None:
        of_clock = {name: 0.0 for name in ("t", "seconds", "began") if hasattr(event, name)}
        self.records.append(structs.replace(event, **of_clock))

    def keep(self, tokens: KeptTokens) -> None:
        self.records.append([(name, number) for name, number, _ in tokens.rows])


@pytest.mark.runs
async def test_turns_tools_and_rewards_are_reported_from_workers_as_without_them(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(["doubled x 21 42 <tool_call> </tool_call> name arguments the answer is"])

    async def reported(workflow: RolloutWorkflow) -> list[Any]:
        events, call = Kept(), '<tool_call>{"name": "doubled", "arguments": {"x": 21}}</tool_call>'
        engine = ScriptedEngine.saying(tokenizer, call, "the answer is 42", "<tool_call>{</tool_call>", "no answer")
        runner = EpisodeRunner(workflow=workflow, timeout_s=60)
        for number in range(2):
            report = EpisodeReport(events, f"5.{number}")
            example = {"question": "21 doubled", "answer": "42"}
            await runner.run(EpisodeSampler(engine), example, name="it", report=report)
        return [structs.replace(r, rid="") if isinstance(r, TurnEnded) else r for r in events.records]

    agent = ToolAgentWorkflow(tokenizer, NumericMatch(), tools=[doubled])
    async with agent:
        here = await reported(agent)
    async with EpisodeWorkers(agent, 1, tmp_path) as away:
        assert await reported(away) == here
    assert [(r.episode, r.tool, r.failure) for r in here if isinstance(r, ToolEnded)] == [
        ("5.0", "doubled", ""),
        ("5.1", "", "malformed"),
    ]
    rewards = [(r.episode, r.reward, r.value) for r in here if isinstance(r, RewardEnded)]
    assert rewards == [("5.0", "NumericMatch", 1.0), ("5.1", "NumericMatch", 0.0)]
    assert [r.episode for r in here if isinstance(r, TurnEnded)] == ["5.0", "5.0", "5.1", "5.1"]
    assert [r.how for r in here if isinstance(r, EpisodeEnded)] == ["finished", "finished"]


async def test_the_parts_of_ready_made_workflows_travel() -> None:
    """What they remember, and what belongs to an event loop, stays behind."""
    tokenizer = tiny_tokenizer(["a b"])
    teacher = TeacherClient("http://127.0.0.1:1", tokenizer=tokenizer, retries=0)
    agent = ToolAgentWorkflow(tokenizer, NumericMatch(), tools=[doubled])
    proxy, server = OpenAIProxy(tokenizer), MCPTools.stdio(sys.executable, ["-c", "raise SystemExit"])
    parts = (DistillationWorkflow(agent, teacher), Tool.from_function(doubled), teacher, proxy, server)
    _, tool, asked, _, absent = pickle.loads(pickle.dumps(parts))
    assert await tool.acall({"x": "21"}) == "42"
    with pytest.raises(ToolError, match="argument x"):
        await tool.acall({"x": "many"})
    with pytest.raises(ServerError, match=r"http://127.0.0.1:1"):
        await asked.logprobs((1, 2))
    with pytest.raises(ServerError):
        await absent.__aenter__()
