"""Servers and trainer take turns (engine.colocated): runs on the embedded server, with real weights."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from agent_script import TOKENIZER
from embedded_server import ServerProcess, server_process
from scripted_launch import small, use_scripted_training

from arl.api import events
from arl.api.engine import Sampler
from arl.api.errors import ServerError, TrainingError
from arl.api.events import Event
from arl.api.settings.engines import RELEASED
from arl.api.train_engine import TokenLoss, TrainSequence
from arl.api.types import Example, SamplingParams, Trajectory
from arl.api.workflow import RolloutWorkflow
from arl.engine.client.remote_engine import RemoteInferenceEngine
from arl.engine.fsdp.train_engine import FSDPTrainEngine
from arl.engine.tiny import write_tiny_model
from arl.observe.events.run_record import read_run
from arl.run.launch import launch
from arl.run.servers import serve
from arl.training.metrics_log import read_jsonl
from arl.workflow.conversation import Conversation

pytestmark = pytest.mark.runs
SCRIPT = Path(__file__).parents[1] / "agent_script.py"
DATASET: Any = [{"number": n} for n in range(64)]
ETA = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", ["Say a number"])


@pytest.fixture
def server(model: Path) -> Iterator[ServerProcess]:
    with server_process(str(model)) as process:
        yield process


class Unequal(RolloutWorkflow):
    """Answers of very different lengths, so that some are under way whenever a batch is taken."""

    def __init__(self) -> None:
        self.versions: list[list[int]] = []

    async def arun_episode(self, engine: Sampler, data: Example) -> Sequence[Trajectory]:
        conversation = Conversation(TOKENIZER, [{"role": "user", "content": f"Say a number {data['number']}"}])
        sampling = SamplingParams(max_new_tokens=600 if data["number"] % 4 == 0 else 20, ignore_eos=True)
        await conversation.agenerate(engine, sampling)
        trajectories = conversation.trajectories(float(data["number"] % 2))
        self.versions += [[v for v in t.versions.tolist() if v >= 0] for t in trajectories]
        return trajectories


def state_of(address: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{address}/server_info", timeout=30) as answer:
        return json.loads(answer.read())["internal_states"][0]


class Watching(FSDPTrainEngine):
    """Notes what it is told, and what the server says of itself while a batch is trained."""

    address = ""
    told: list[Any]
    is_training: threading.Event
    may_train: threading.Event

    def train_batch(self, minibatches: Sequence[Sequence[TrainSequence]], loss: TokenLoss) -> dict[str, float]:
        self.is_training.set()
        assert self.may_train.wait(30)
        self.told.append(state_of(self.address))
        return super().train_batch(minibatches, loss)

    def onload(self) -> None:
        self.told.append("onload")
        super().onload()

    def offload(self) -> None:
        self.told.append("offload")
        super().offload()


@pytest.fixture
def watching(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> type[Watching]:
    class Own(Watching):
        address, told, is_training, may_train = server.address, [], threading.Event(), threading.Event()

    Own.may_train.set()
    use_scripted_training(monkeypatch, Own)
    return Own


def config(run_dir: Path, model: Path, server: ServerProcess, **settings: Any) -> Any:
    engine = {"kind": "sglang", "addresses": [server.address], "colocated": True, "check_weights": False}
    rollout = {"max_staleness": ETA, "max_concurrent_episodes": 6}
    return small(run_dir, model=str(model), engine=engine, rollout=rollout, **{"steps": 4, **settings})


def step_of(record: Event) -> str | None:
    """What a record says of a turn; None if it is of something else."""
    match record:
        case events.ServerPaused() | events.ServerSlept() | events.ServerWoke() | events.ServerLoaded():
            return type(record).__name__
        case events.ServerResumed() | events.BatchTrained() | events.SnapshotTaken():
            return type(record).__name__
        case events.TrainerMoved():
            return "onto the device" if record.is_on_device else "off the device"
        case _:
            return None


TURN = ["ServerPaused", "ServerSlept", "onto the device", "SnapshotTaken", "off the device"]
TURN += ["ServerWoke", "ServerLoaded", "ServerResumed"]


async def test_the_servers_sleep_while_the_trainer_has_the_device_and_no_version_is_too_old(
    model: Path, server: ServerProcess, watching: type[Watching], tmp_path: Path
):
    workflow, run_dir = Unequal(), tmp_path / "run"
    async with launch(config(run_dir, model, server), workflow=workflow, dataset=DATASET) as trainer:
        steps = [step async for step in trainer]
    record = read_run(run_dir)
    found = [step for _, one in record.system if (step := step_of(one)) not in (None, "BatchTrained")]
    assert found == TURN * 5  # the first turn publishes the model itself
    states = [one for one in watching.told if isinstance(one, dict)]
    assert [(state["released"], state["held_bytes"]) for state in states] == [
        (["kv_cache", "weights"], {"kv_cache": 0, "weights": 0})
    ] * 4
    assert watching.told == [
        "offload",
        *(x for state in [None, *states] for x in ("onload", *([state] * bool(state)), "offload")),
    ]
    assert max(step.max_staleness_seen for step in steps) <= ETA
    assert all(versions == sorted(versions) for versions in workflow.versions)
    assert any(len(set(versions)) > 1 for versions in workflow.versions), "no answer lived through a turn"
    rows = read_jsonl(run_dir / "metrics.jsonl")
    assert all(row[f"turns/{name}_s"] > 0 for row in rows for name in ("release", "onload", "offload", "resume"))
    assert state_of(server.address)["released"] == []


async def test_an_evaluation_after_a_cancelled_step_wakes_the_servers(
    model: Path, server: ServerProcess, watching: type[Watching], tmp_path: Path
):
    settings = config(tmp_path / "run", model, server)
    async with launch(settings, workflow=Unequal(), dataset=DATASET, eval_dataset=DATASET[:2]) as trainer:
        watching.may_train.clear()
        step = asyncio.create_task(anext(trainer))
        await asyncio.to_thread(watching.is_training.wait, 30)
        step.cancel()
        await asyncio.sleep(0)  # the cancellation arrives while the batch is trained
        watching.may_train.set()
        evaluation = await trainer.evaluate()
        assert evaluation.version in (0, 1)
        assert (await anext(trainer)).version in (1, 2)


async def test_evaluations_and_turns_leave_each_other_their_time(
    model: Path, server: ServerProcess, watching: type[Watching], tmp_path: Path
):
    """An evaluation's requests sleep with the servers, and go on."""
    settings = config(tmp_path / "run", model, server, evaluation={"every": 1})
    async with launch(settings, workflow=Unequal(), dataset=DATASET, eval_dataset=DATASET[:4]) as trainer:
        async for _ in trainer:
            pass
    assert max(trainer.evaluations) == trainer.version == 4
    asleep = [one.t for _, one in read_run(tmp_path / "run").system if isinstance(one, events.ServerSlept)]
    ended = [one for _, one in read_run(tmp_path / "run").system if isinstance(one, events.EvaluationEnded)]
    assert any(one.t - one.seconds < t < one.t for one in ended for t in asleep), "no evaluation lived through a turn"


async def test_a_turn_waits_for_an_evaluation_that_holds_its_weights(
    model: Path, server: ServerProcess, watching: type[Watching], tmp_path: Path
):
    """If the servers slept, the evaluation would wait for weights that wait for its end."""
    settings = config(tmp_path / "run", model, server, steps=3, evaluation={"every": 1, "hold_weights": True})
    async with launch(settings, workflow=Unequal(), dataset=DATASET, eval_dataset=DATASET[:4]) as trainer:
        async with asyncio.timeout(60):
            async for _ in trainer:
                pass
    assert {*trainer.evaluations} == {1, 2, 3}
    system = [one for _, one in read_run(tmp_path / "run").system]
    asleep = [one.t for one in system if isinstance(one, events.ServerSlept)]
    ended = [one for one in system if isinstance(one, events.EvaluationEnded)]
    assert not any(one.t - one.seconds < t < one.t for one in ended for t in asleep)


async def test_the_trainer_is_gone_before_the_servers_wake_when_its_error_ends_the_run(
    model: Path, server: ServerProcess, watching: type[Watching], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A server that took memory beside the trainer could end for want of it."""

    def fail(*_: object) -> Any:
        raise TrainingError("the loss is not a number")

    def close(engine: Watching) -> None:
        watching.told.append(("closed", state_of(server.address)["released"]))
        FSDPTrainEngine.close(engine)

    monkeypatch.setattr(watching, "train_batch", fail)
    monkeypatch.setattr(watching, "close", close)
    with pytest.raises(TrainingError, match="not a number"):
        async with launch(config(tmp_path / "run", model, server), workflow=Unequal(), dataset=DATASET) as trainer:
            await anext(trainer)
    assert next(one for one in watching.told if one[0] == "closed") == ("closed", ["kv_cache", "weights"])
    assert state_of(server.address)["released"] == []


def started(model: Path, run_dir: Path, server: ServerProcess, steps: int) -> "subprocess.Popen[str]":
    command = [sys.executable, str(SCRIPT), "--model", str(model), "--run_dir", str(run_dir), "--steps", str(steps)]
    command += ["--engine.kind", "sglang", "--engine.addresses", server.address, "--engine.colocated"]
    command += ["--rollout.batch_size", "2", "--rollout.group_size", "2", "--checkpoint.every", "1"]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parent.parent)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


async def test_servers_that_a_run_left_without_weights_are_not_asked_for_answers(
    model: Path, server: ServerProcess, tmp_path: Path
):
    settings = config(tmp_path / "run", model, server)
    async with RemoteInferenceEngine([server.address], settings.engine) as engine:
        await engine.release_memory()
    with pytest.raises(ServerError, match="has no whole weights: a run ended before"):
        async with serve(settings):
            pass


def until_done(address: str) -> None:
    """What the server was asked for before is done: it flushes its cache in turn."""
    flush = urllib.request.Request(f"{address}/flush_cache", method="POST")
    with urllib.request.urlopen(flush, timeout=30):
        pass


@pytest.mark.timeout(300)
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_ended_while_servers_sleep_goes_on_with_them(
    model: Path, server: ServerProcess, tmp_path: Path, end: signal.Signals
):
    process = started(model, tmp_path / "run", server, 100_000)
    try:
        while True:
            assert process.poll() is None
            if state_of(server.address)["released"]:
                process.send_signal(signal.SIGSTOP)
                until_done(server.address)
                if state_of(server.address)["released"] and (tmp_path / "run" / "checkpoints").exists():
                    break
                process.send_signal(signal.SIGCONT)
        process.send_signal(end)
        process.send_signal(signal.SIGCONT)
        output = process.communicate()[0]
    finally:
        process.kill()
    assert state_of(server.address)["released"] == (["kv_cache", "weights"] if end is signal.SIGKILL else []), output
    version = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]["version"]
    again = started(model, tmp_path / "run", server, version + 2)
    output, _ = again.communicate()
    assert again.returncode == 0, output
    assert state_of(server.address)["released"] == []
    with urllib.request.urlopen(f"{server.address}/model_info", timeout=30) as answer:
        assert json.loads(answer.read())["weight_version"] == str(version + 2) != RELEASED
