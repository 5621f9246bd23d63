"""The training loop over the official fakes: what it waits for, what it overlaps, and what survives an interruption."""

import asyncio
import gc
import itertools
import json
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from training.trainer_run import DirectTransport, run, running, trained_examples

import arl.run.launch
import arl.run.learner
from arl.api.engine import WeightUpdate
from arl.api.errors import ConfigError, ServerError, TransportError
from arl.api.fakes import ScriptedEngine, ScriptedTrainEngine
from arl.api.settings.run import Config
from arl.api.types import Group, StepStats
from arl.rollout.ledger import GroupOutcome
from arl.runtime.threads import TrainThread
from arl.training import weight_sync
from arl.training.checkpoints import Checkpoints
from arl.training.learner import Learner, PreparedBatch
from arl.training.metrics_log import read_jsonl
from arl.training.trainer import Trainer


async def test_each_step_trains_and_publishes_a_batch_within_the_bound_and_checkpoints_and_exports_are_of_their_version(
    tmp_path: Path,
) -> None:
    train_engine, steps = ScriptedTrainEngine(), list[StepStats]()
    async with running(tmp_path, train_engine, steps=7, checkpoint={"every": 2, "keep": 9}) as trainer:
        async for step in trainer:
            steps.append(step)
            await trainer.export(tmp_path / f"model-{step.version}")
        await trainer.export(tmp_path / "model")
        assert trainer.inference_engine.version == 7
        with pytest.raises(ConfigError, match="give launch an eval_dataset"):
            await trainer.evaluate()
    assert [(step.version, step.num_episodes) for step in steps] == [(version, 4) for version in range(1, 8)]
    assert [len(batch) for batch in trained_examples(train_engine)] == [4] * 7
    assert trainer.summary()["max_staleness_seen"] == max(step.max_staleness_seen for step in steps) <= 2
    exported = [json.loads((tmp_path / name / "weights.json").read_text()) for name in ("model-1", "model-7", "model")]
    assert exported == [{"version": 1}, {"version": 7}, {"version": 7}]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == [f"version-{version:08d}" for version in (2, 4, 6, 7)]


async def test_an_error_that_ends_a_run_leaves_its_tokens_counted_to_the_end(tmp_path: Path) -> None:
    at_the_step, trainers = 0, list[Trainer]()

    async def script() -> None:
        nonlocal at_the_step
        async with running(tmp_path, ScriptedTrainEngine(), steps=3) as trainer:
            trainers.append(trainer)
            await anext(trainer)
            at_the_step = trainer.log.counted().received
            while trainer.rollout.tokens.received == at_the_step:  # noqa: ASYNC110  episodes go on beside
                await asyncio.sleep(0.01)
            raise ValueError("of the script")

    with pytest.raises(ValueError, match="of the script"):
        await script()
    written, known = trainers[0].log.counted(), trainers[0].rollout.tokens.counted()
    assert (written.received, written.fates) == (known.received, known.fates)
    assert written.received > at_the_step


async def test_with_max_staleness_0_a_step_ends_with_its_weights_served_and_trains_their_tokens_alone(
    tmp_path: Path,
) -> None:
    async def many_turns(_: WeightUpdate) -> None:
        for _ in range(50):
            await asyncio.sleep(0)

    train_engine, slow = ScriptedTrainEngine(), DirectTransport(many_turns)
    async with running(tmp_path, train_engine, slow, rollout={"max_staleness": 0}) as trainer:
        async for step in trainer:
            assert trainer.inference_engine.version == step.version
    versions = [{int(v) for m in batch for s in m for v in s.versions[s.loss_mask]} for batch in train_engine.batches]
    assert versions == [{0}, {1}, {2}, {3}]


async def test_a_slow_delivery_delays_training_by_the_bound_alone_and_the_newest_weights_follow(
    tmp_path: Path,
) -> None:
    """Steps do not wait for the delivery of the weights before them."""
    async with running(tmp_path, transport=(transport := DirectTransport(held=1)), steps=4) as trainer:
        async for step in trainer:
            if step.version == 3:  # batches 0, 1 and 2 are what max_staleness 2 admits at version 0
                transport.may_deliver.set()
    assert transport.delivered == [0, 1, 3, 4]
    assert transport.discarded == [2]


async def test_an_evaluation_waits_for_its_version_and_not_for_a_moment_without_deliveries(tmp_path: Path) -> None:
    trained, evaluated = {v: asyncio.Event() for v in range(1, 7)}, asyncio.Event()

    async def until_there_is_a_newer_one(update: WeightUpdate) -> None:
        if 0 < update.version < 6 and not evaluated.is_set():
            await trained[update.version + 1].wait()

    transport = DirectTransport(until_there_is_a_newer_one)
    async with running(tmp_path, transport=transport, steps=6, evaluate=True) as trainer:
        assert (await anext(trainer)).version == 1
        evaluation = asyncio.create_task(trainer.evaluate())
        for version in range(2, 6):
            assert (await anext(trainer)).version == version
            trained[version].set()
        assert (await evaluation).version < 5
        evaluated.set()
        trained[6].set()


async def test_servers_that_fail_an_update_end_the_run_with_their_error(tmp_path: Path) -> None:
    async def fail(update: WeightUpdate) -> None:
        if update.version == 2:
            raise ServerError("every server is gone")

    with pytest.raises(ServerError, match="every server is gone"):
        await run(tmp_path, transport=DirectTransport(fail))


def failing_at(*attempts: int) -> Callable[[WeightUpdate], Awaitable[None]]:
    """Fails these attempts to deliver, counted from 0, before a server is touched."""
    count = itertools.count()

    async def fail(update: WeightUpdate) -> None:
        if next(count) in attempts:
            raise TransportError("no room")

    return fail


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_weights_that_never_reached_a_server_are_followed_by_a_new_snapshot_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, max_staleness: int
) -> None:
    """Also where no step can follow until they are published: at the start, and with max_staleness 0."""
    monkeypatch.setattr(weight_sync, "_PAUSES_S", (0.0, 0.0))
    transport = DirectTransport(failing_at(0, 1, 3, 4, 6))
    async with running(tmp_path, transport=transport, rollout={"max_staleness": max_staleness}) as trainer:
        async for step in trainer:
            published = trainer.inference_engine.version
            assert published == transport.delivered[-1] <= step.version <= published + 1 + max_staleness
            assert step.max_staleness_seen <= max_staleness
    assert transport.delivered[0] == 0
    assert transport.delivered[-1] == 4
    assert len(transport.discarded) >= 5
    assert [record.levelname for record in caplog.records if "no room" in record.message] == ["ERROR"] * 5


async def test_weights_that_can_never_be_published_end_the_run_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_sync, "_PAUSES_S", (0.0, 0.0))
    transport = DirectTransport(failing_at(1, 2, 3))
    with pytest.raises(TransportError, match="3 times in a row: no room"):
        await run(tmp_path, transport=transport)
    assert transport.delivered == [0]


async def test_a_cancellation_amid_training_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    is_training, may_end = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def block_in_second_batch(_: object) -> None:
        if first.version == 1:
            loop.call_soon_threadsafe(is_training.set)
            may_end.wait(10)

    first, second = ScriptedTrainEngine(on_train=block_in_second_batch), ScriptedTrainEngine()

    task = asyncio.create_task(run(tmp_path, first))
    await is_training.wait()
    task.cancel()
    loop.call_soon(may_end.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [row["version"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]
    async with running(tmp_path, second) as trainer:
        assert trainer.version == 2
        assert len(trainer.rollout.ledger.outcomes(0)[GroupOutcome.TRAINED]) == 4
        _ = [step async for step in trainer]
    before, after = ({e for batch in trained_examples(engine) for e in batch} for engine in (first, second))
    assert not before & after


def held_up(monkeypatch: pytest.MonkeyPatch, phase: str, version: int) -> tuple[asyncio.Event, threading.Event]:
    """Has the learner wait in this phase of the batch for `version`: set once it does, and to be set."""
    is_there, may_end, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

    def wait(learner: Learner, *arguments: Any) -> Any:
        if learner.version == version:
            loop.call_soon_threadsafe(is_there.set)
            may_end.wait(10)
        return whole(learner, *arguments)

    whole = getattr(Learner, phase)
    monkeypatch.setattr(Learner, phase, wait)
    return is_there, may_end


async def cancelled_step(trainer: Trainer, is_there: asyncio.Event, may_end: threading.Event) -> None:
    step = asyncio.ensure_future(anext(trainer))
    await is_there.wait()
    step.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await step


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize(
    ("phase", "version", "rest"), [("prepare", 1, [2, 3, 4]), ("train", 1, [3, 4]), ("train", 3, [])]
)
async def test_the_steps_after_one_that_was_cancelled_are_as_if_it_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, version: int, rest: list[int], max_staleness: int
) -> None:
    """One that had begun to train has trained, also the last one; any other goes on with the batch that it took."""
    train_engine, events = ScriptedTrainEngine(), held_up(monkeypatch, phase, version)
    async with running(tmp_path, train_engine, rollout={"max_staleness": max_staleness}) as trainer:
        for _ in range(version):
            await anext(trainer)
        await cancelled_step(trainer, *events)
        assert [step.version async for step in trainer] == rest
        assert trainer.inference_engine.version == 4
    assert [row["version"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [len(batch) for batch in trained_examples(train_engine)] == [4] * 4


async def test_an_evaluation_does_not_wait_for_the_weights_of_a_cancelled_step_that_nobody_will_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = held_up(monkeypatch, "train", 1)
    async with asyncio.timeout(10), running(tmp_path, evaluate=True) as trainer:
        await anext(trainer)
        await cancelled_step(trainer, *events)
        await trainer.save()
        assert trainer.version == 2
        assert (await trainer.evaluate()).version == 1


async def test_the_kept_model_is_the_one_that_servers_held_also_after_a_cancelled_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step has trained version 2, and its weights were not published when it was cancelled."""
    events = held_up(monkeypatch, "train", 1)
    held = {"hold_weights": True, "keep_best": "reward"}
    async with asyncio.timeout(10), running(tmp_path, evaluate=True, evaluation=held) as trainer:
        await anext(trainer)
        await cancelled_step(trainer, *events)
        assert (await trainer.evaluate()).version == trainer.version == 2
    assert json.loads((tmp_path / "best" / "best.json").read_text())["version"] == 2


async def test_giving_up_on_the_end_of_a_run_does_not_cancel_the_evaluation_that_it_waited_for(tmp_path: Path) -> None:
    may_answer, is_asked, transport = asyncio.Event(), asyncio.Event(), DirectTransport(held=1)
    may_answer.set()

    async def answer(_: object) -> tuple[int, ...]:
        is_asked.set()
        await may_answer.wait()
        return (7, 8, 9)

    due = {"steps": 1, "evaluate": True, "evaluation": {"every": 1}}
    async with running(tmp_path, transport=transport, engine=ScriptedEngine(answer), **due) as trainer:
        await anext(trainer)
        may_answer.clear()
        is_asked.clear()
        transport.may_deliver.set()
        ending = asyncio.create_task(anext(trainer))
        await is_asked.wait()
        ending.cancel()
        await asyncio.wait([ending])
        assert ending.cancelled()
        may_answer.set()
    assert [row["version"] for row in read_jsonl(tmp_path / "evaluations.jsonl")] == [1]


async def test_a_start_that_is_cancelled_while_the_engine_loads_closes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_loading, may_end, loop, closed = asyncio.Event(), threading.Event(), asyncio.get_running_loop(), list[Learner]()

    def load(config: Config) -> Learner:
        loop.call_soon_threadsafe(is_loading.set)
        may_end.wait(10)
        return Learner(ScriptedTrainEngine(), config.algorithm)

    monkeypatch.setattr(arl.run.learner, "load_learner", load)
    monkeypatch.setattr(Learner, "close", lambda learner: closed.append(learner))
    start = asyncio.create_task(run(tmp_path))
    await is_loading.wait()
    start.cancel()
    await asyncio.sleep(0)
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert len(closed) == 1


async def test_a_batch_that_failed_halfway_is_not_saved(tmp_path: Path) -> None:
    def fail_in_third(_: object) -> None:
        if train_engine.version == 2:
            raise RuntimeError("out of memory")

    train_engine = ScriptedTrainEngine(on_train=fail_in_third)
    with pytest.raises(RuntimeError, match="out of memory"):
        await run(tmp_path, train_engine, checkpoint={"every": 1})
    assert Checkpoints(tmp_path / "checkpoints", 2, {}).newest_version() == 2


async def test_an_error_before_the_first_optimizer_step_of_a_batch_leaves_weights_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_in_third(learner: Learner, groups: Sequence[Group], replayed: Sequence[Group] = ()) -> PreparedBatch:
        if learner.version == 2:
            raise ValueError("rewards that cannot be compared")
        return prepare(learner, groups, replayed)

    prepare = Learner.prepare
    monkeypatch.setattr(Learner, "prepare", fail_in_third)
    with pytest.raises(ValueError, match="cannot be compared"):
        await run(tmp_path)
    monkeypatch.undo()
    async with running(tmp_path, second := ScriptedTrainEngine()) as trainer:
        assert trainer.version == 2
        assert len(trainer.rollout.ledger.outcomes(0)[GroupOutcome.TRAINED]) == 4
        assert [step.version async for step in trainer] == [3, 4]
    assert all(len(batch) == 4 for batch in trained_examples(second))


async def test_evaluations_are_logged_at_the_version_that_they_were_due_at(tmp_path: Path) -> None:
    async with running(tmp_path, steps=6, evaluate=True, evaluation={"every": 3}) as trainer:
        before = await trainer.evaluate()
        _ = [step async for step in trainer]
        after = await trainer.evaluate()
    assert (before.version, before.reward, before.num_episodes) == (0, 1.5, 4)
    assert after.version == 6
    assert [row["version"] for row in read_jsonl(tmp_path / "evaluations.jsonl")] == [0, 3, 6, 6]


async def test_giving_up_on_an_evaluation_does_not_cancel_the_delivery_it_waited_for(tmp_path: Path) -> None:
    transport = DirectTransport(held=1)
    async with running(tmp_path, transport=transport, steps=3, evaluate=True) as trainer:
        assert (await anext(trainer)).version == 1
        await transport.is_held.wait()
        evaluation = asyncio.create_task(trainer.evaluate())
        await asyncio.sleep(0)
        evaluation.cancel()
        transport.may_deliver.set()
        assert [step.version async for step in trainer] == [2, 3]
        assert trainer.inference_engine.version == 3


async def test_the_error_of_a_call_whose_caller_was_cancelled_is_not_reported_as_forgotten() -> None:
    """The run ends with its own error; asyncio would add one that nobody retrieved."""
    thread, may_fail, told = TrainThread(), threading.Event(), list[dict[str, Any]]()
    loop, is_running = asyncio.get_running_loop(), asyncio.Event()
    loop.set_exception_handler(lambda _, context: told.append(context))

    def fails() -> None:
        loop.call_soon_threadsafe(is_running.set)
        may_fail.wait(10)
        raise RuntimeError("a rank died")

    async def call() -> None:
        await thread(fails)

    caller = asyncio.create_task(call())
    await is_running.wait()
    caller.cancel()
    await asyncio.sleep(0)  # the cancellation arrives, and the caller waits for the end of its call
    may_fail.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    del caller
    gc.collect()
    await asyncio.sleep(0)
    assert told == []
    thread.close()
