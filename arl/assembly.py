"""The composition root: the one place that names concrete classes and decides what runs where.

`launch` composes a whole run, with the servers and the engine of serving.py. It closes in reverse order what it opened.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from arl.api.config import Config
from arl.api.endpoint import entered
from arl.api.engine import InferenceEngine, WeightSource, WeightTransport
from arl.api.engine_config import (
    DEFAULT_CONTEXT_LENGTH,
    AdapterWeightsConfig,
    DeltaWeightsConfig,
    DiskWeightsConfig,
    DistributedWeightsConfig,
    LocalEngineConfig,
    WeightFilesConfig,
)
from arl.api.errors import ConfigError, ModelError, ServerError
from arl.api.events import NOWHERE, Events, EventStore, RunBegan
from arl.api.installing import __version__
from arl.api.objective import DistillationAdvantage
from arl.api.run_tasks import Task, TaskCurriculum
from arl.api.settings import settings_without_keys
from arl.api.tracking import TrackedRun, Tracker
from arl.api.types import Example, Group
from arl.api.unreceived import Unreceived
from arl.api.workflow import Curriculum, RolloutWorkflow
from arl.data.lazy_rows import NamedRows
from arl.engine.model_files import copy_tokenizer, load_tokenizer, model_digest
from arl.engine.weights.delta import DeltaTransport
from arl.engine.weights.disk import DiskTransport
from arl.engine.weights.distributed import DistributedTransport
from arl.eventlog.cpu_watch import CpuWatch, num_cores
from arl.eventlog.writer import EventLog
from arl.given_tasks import Given, RunTask, RunTasks, check_settings, given_tasks, group_rules, ledger_of
from arl.json_console import json_console
from arl.log_files import bounded_logs
from arl.metrics_endpoint import metrics_served
from arl.offload import TrainThread, finished, offload
from arl.rehearsal import check_start, placed
from arl.rollout.buffer import Replay, ReplayBuffer
from arl.rollout.controller import Dataset, RolloutController
from arl.rollout.episode import EpisodeRunner
from arl.rollout.failure_log import FailureLog
from arl.rollout.task_workflows import TaskWorkflows
from arl.rollout.token_ledger import TokenLedger
from arl.serving import OpenedServers, connect, connect_for_evaluations, open_all_servers
from arl.tracking.fan_out import Trackers
from arl.tracking.ready_made import check_trackers
from arl.trainer_process import host_learner
from arl.training.checkpoint import Checkpoints
from arl.training.display import Display, display_of
from arl.training.evaluator import Evaluator
from arl.training.metrics import RunTotals
from arl.training.pinned_weights import EvaluationServers
from arl.training.recording import Recorder, forget_steps
from arl.training.recovery import RecoveringLearner
from arl.training.remote_learner import RemoteLearner
from arl.training.resumed_settings import say_changes
from arl.training.run_end import OpenRun
from arl.training.run_files import RunLog
from arl.training.trainer import Trainer
from arl.workers.episode_workers import EpisodeWorkers
from arl.workflow.agent import AgentWorkflow
from arl.workflow.teachers import DistillationWorkflow

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _GivenRun:
    """What is trained, checked, and who looks on."""

    tasks: RunTasks
    held_out: Dataset | None
    workflow: RolloutWorkflow
    trackers: Sequence[Tracker]


@dataclass(frozen=True, slots=True)
class _Engines:
    """The engines of a run, and the servers behind them."""

    training: InferenceEngine
    opened: OpenedServers
    evaluations: InferenceEngine | None = None
    """Of servers for evaluations alone."""
    opened_for_evaluations: OpenedServers | None = None


@asynccontextmanager
async def launch(  # noqa: PLR0913 - what a run is given, by name
    config: Config,
    *,
    workflow: RolloutWorkflow | None = None,
    dataset: Dataset | Iterable[Example] | None = None,
    eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
    keep: Callable[[Group], bool] | None = None,
    curriculum: Curriculum | None = None,
    tasks: Sequence[Task] | None = None,
    task_curriculum: TaskCurriculum | None = None,
    trackers: Sequence[Tracker] = (),
    held: OpenRun | None = None,
) -> AsyncGenerator[Trainer]:
    """Start everything that `config` names and give the Trainer; resume if run_dir has a checkpoint.

    dataset, eval_dataset: a length and integer indexing; each item is a mapping, which `arun_episode` gets as `data`. A
    dataset may be a stream of `datasets`, whose rows come in its order. eval_dataset may be several datasets by name:
    each is evaluated and reported under its name.
    keep: a filter; it rejects a finished group by returning False, and the group's place is refilled. curriculum: the
    examples of each stage, in order; without one, epochs of the whole dataset. tasks: several of these at once, in the
    place of workflow, dataset, eval_dataset, keep and curriculum; rollout.mixture shares the run's groups among them by
    their weights, which task_curriculum may change. trackers: your own, beside those of
    log.trackers. held: run_dir, if the caller holds it. The workflow is entered first and left last, in each worker if
    there are any. Leaving the block, by its end, an error or a cancellation, saves a checkpoint, stops the servers that
    arl started and writes END.json. Raises the ArlError of a part that could not start (RunFileError while another run
    trains in run_dir), and out of the block the first error of the run.
    """
    own = Given(
        workflow=workflow,
        dataset=dataset,
        eval_dataset=eval_dataset,
        keep=keep,
        curriculum=curriculum,
        tasks=tasks,
        task_curriculum=task_curriculum,
    )
    run_tasks = given_tasks(own)
    given = _GivenRun(tasks=run_tasks, held_out=run_tasks.held_out, workflow=run_tasks.workflow, trackers=trackers)
    _check(config, given)
    played = _played(config, given.workflow)
    async with AsyncExitStack() as stack:
        stack.enter_context(json_console(config.log.format == "json"))
        if held is None:
            held = await stack.enter_async_context(OpenRun(config))
        stack.enter_context(bounded_logs(config.run_dir / "logs", int(config.log.max_mb * 1e6)))
        show_metrics = await stack.enter_async_context(metrics_served(config))
        if isinstance(played, EpisodeWorkers):
            await stack.enter_async_context(played)
        else:
            await stack.enter_async_context(entered(played, config.endpoint))
        trainer = await _build(stack, config, given, played)
        trainer.last_words = held.stalled_now
        held.trains_with(trainer)
        show_metrics(trainer)
        async with trainer.running():
            yield trainer


def decoder(model: str) -> Callable[[Sequence[int]], str]:
    """Token ids -> text, with special tokens. Raises ModelError."""
    tokenizer = load_tokenizer(model)
    return lambda token_ids: str(tokenizer.decode(list(token_ids)))


def _played(config: Config, workflow: RolloutWorkflow) -> RolloutWorkflow:
    """The workflow that runs the episodes: the given one, or its worker processes."""
    if not config.rollout.num_workers:
        return workflow
    return EpisodeWorkers(workflow, config.rollout.num_workers, config.run_dir / "logs", config.endpoint)


def _check(config: Config, given: _GivenRun) -> None:
    check_settings(config, given.tasks)
    check_trackers(config.log.trackers, given.trackers)
    if config.evaluation.every and given.held_out is None:
        raise ConfigError(
            f"evaluation.every is {config.evaluation.every}, but there is nothing to evaluate on; give launch an "
            "eval_dataset, or leave evaluation.every unset"
        )
    is_distilled = isinstance(config.algorithm.advantage, DistillationAdvantage)
    for task in given.tasks.tasks:
        if is_distilled and isinstance(task.workflow, DistillationWorkflow) and task.workflow.keep_reward:
            raise ConfigError(
                f"the {task.called('workflow')} keeps its own rewards beside the teacher's (keep_reward=True), and "
                "algorithm.advantage.kind=distillation would take them all for the teacher's; leave keep_reward out, "
                "or choose another algorithm"
            )
    if config.train.lora and config.train.dtype == "bfloat16" and not isinstance(config.weights, AdapterWeightsConfig):
        log.warning(
            "weights.transport=%s publishes adapters merged into the model: if it is stored in bfloat16, rounding "
            "removes most of what a few steps change; weights.transport=adapter publishes the adapters themselves",
            config.weights.transport,
        )


async def _build(stack: AsyncExitStack, config: Config, given: _GivenRun, played: RolloutWorkflow) -> Trainer:
    events = _events(stack, config)
    if isinstance(played, EpisodeWorkers):
        played.report_to(events)
    thread = TrainThread()
    stack.callback(thread.close)
    display = display_of(config.log, config.steps)
    stack.callback(display.close)
    trackers = Trackers(config.log.trackers, given.trackers)
    stack.push_async_exit(partial(_close_trackers, trackers))
    findings = await check_start(config)
    tokens = TokenLedger(mask_truncated=config.algorithm.overlong.mask_truncated)
    with display.waiting(f"loading {config.model}, and connecting to its inference servers"):
        learner, engines = await _engines(stack, config, given.tasks, thread, events, tokens.unreceived)
    engine, opened = engines.training, engines.opened
    placement = await offload(placed, config, await thread(learner.placed), engine, opened, findings)
    transport = await thread(weight_transport, config, learner.engine, opened)
    stack.callback(transport.close)
    evaluation_servers = await thread(_evaluation_servers, stack, config, engines, learner.engine)
    is_decoded = trackers.has_any and config.log.track_trajectories
    decode = await offload(decoder, config.model) if is_decoded else None
    tracker = trackers if trackers.has_any else None
    settings = settings_without_keys(config)
    run_log = RunLog(config.run_dir, config.log, display=display, decode=decode, tracker=tracker, settings=settings)

    digest = await offload(model_digest, config.model)
    model = {"model": config.model, "model_digest": digest}
    identity = {**model, "seed": config.seed}
    if (
        not given.tasks.names and given.tasks.num_examples is not None
    ):  # their ledger knows each task's, and lets tasks be added
        identity["num_examples"] = given.tasks.num_examples
    checkpoints = Checkpoints(config.run_dir / "checkpoints", config.checkpoint.keep, identity)
    state = await thread(checkpoints.load_newest, learner.load)
    await thread(run_log.resume, learner.version, state.values.get("logs", {}) if state else {})
    await offload(forget_steps, config.run_dir, learner.version)
    await offload(trackers.open, TrackedRun(run_dir=config.run_dir, settings=settings, version=learner.version))
    buffer = ReplayBuffer(config.rollout.batch_size, config.rollout.max_staleness, version=learner.version)
    runner = _runner(stack, config, given, played, learner, events, tokens)
    rollout = await offload(_rollout, config, given, engine, runner, buffer)
    kept = config.rollout
    replay = Replay(kept.replay_groups, min_reward=kept.replay_min_reward, max_staleness=kept.max_staleness)
    if state is None:
        await offload(rollout.ledger.prepare)
    else:
        await offload(rollout.load_state_dict, state.values["rollout"], state.groups)
        replay.add(state.replay, learner.version)
        _say_where_it_continues(config, learner.version, display)
        say_changes(state.values.get("settings"), settings, learner.version, display.say)
    tokens.note_undone(await thread(run_log.counted))
    waiting = [group.group_id for group in buffer.untrained(learner.version)]
    events.emit(_beginning(given, settings, learner.version, waiting))
    events.emit(tokens.counted())
    events.emit(placement.record())
    placement.tell(display.tell)
    if config.log.events:
        await offload(copy_tokenizer, config.model, config.run_dir / "events")
    return Trainer(
        config=config,
        learner=learner,
        inference_engine=engine,
        transport=transport,
        buffer=buffer,
        rollout=rollout,
        evaluator=_evaluator(config, given, engines.evaluations or engine, runner),
        evaluation_servers=evaluation_servers,
        checkpoints=checkpoints,
        log=run_log,
        thread=thread,
        replay=replay,
        totals=RunTotals(**state.values["totals"]) if state else RunTotals(),
        events=events,
    )


def _events(stack: AsyncExitStack, config: Config) -> EventStore:
    if config.log.events is None:
        return NOWHERE
    opened = EventLog(config.run_dir, config.log.events, CpuWatch().read).open()
    stack.push_async_exit(partial(_close_events, opened))
    return opened.__enter__()


async def _close_events(opened: AbstractContextManager[EventLog], *error: Any) -> None:
    """In a thread, because it waits for a disk that hangs. error: what ended the run, if anything did."""
    await finished(offload(opened.__exit__, *error))


def _beginning(given: _GivenRun, settings: dict[str, Any], version: int, waiting: list[int]) -> RunBegan:
    return RunBegan(
        version=version,
        waiting=waiting,
        arl=__version__,
        host=socket.gethostname(),
        pid=os.getpid(),
        cores=num_cores(),
        workflow=", ".join(dict.fromkeys(type(task.workflow).__name__ for task in given.tasks.tasks)),
        num_examples=given.tasks.num_examples or 0,
        num_eval_examples=len(given.held_out or ()),
        tasks=given.tasks.names,
        settings=settings,
    )


async def _close_trackers(trackers: Trackers, kind: type[BaseException] | None, error: object, *_: object) -> None:
    """kind, error: what ended the run, if anything did."""
    said = None if kind is None else f"{kind.__name__}: {error}".removesuffix(": ")
    await finished(offload(trackers.close, said))


async def _engines(
    stack: AsyncExitStack,
    config: Config,
    tasks: RunTasks,
    thread: TrainThread,
    events: Events,
    unreceived: Unreceived,
) -> tuple[RecoveringLearner, _Engines]:
    """Both at once: the train engine loads while servers start, unless they take turns on one device."""
    loading = thread.submit(_load_learner, config, tasks, events)
    stack.push_async_callback(_close, thread, loading)
    if config.engine.colocated:  # the device has no room for both
        await thread((await thread.finish(loading)).offload)
    try:
        opened, for_evaluations = await open_all_servers(config, stack, config.run_dir / "logs")
    except (ModelError, ServerError):
        await thread.finish(loading)  # a broken model raises the better error here
        raise
    learner = await thread.finish(loading)  # a cancelled start waits, and closes what was loaded
    training = await stack.enter_async_context(await connect(config, opened, events, unreceived))
    if config.engine.colocated:  # the engine's end wakes servers that sleep: the trainer has to be gone by then
        stack.push_async_callback(_close, thread, loading)
    if for_evaluations is None:
        return learner, _Engines(training, opened)
    of_evaluations = await connect_for_evaluations(config, for_evaluations, events, unreceived)
    return learner, _Engines(training, opened, await stack.enter_async_context(of_evaluations), for_evaluations)


def _evaluation_servers(
    stack: AsyncExitStack, config: Config, engines: _Engines, source: WeightSource
) -> EvaluationServers | None:
    """Evaluated weights are written as a whole model, in a place of their own, whatever training's transport."""
    if engines.evaluations is None or engines.opened_for_evaluations is None:
        return None
    of_training = config.weights.directory if isinstance(config.weights, WeightFilesConfig) else None
    files = DiskWeightsConfig(directory=config.evaluation.directory or of_training)
    addresses = engines.opened_for_evaluations.addresses
    transport = DiskTransport(files, config.run_dir, source, addresses, setting="evaluation.directory")
    stack.callback(transport.close)
    return EvaluationServers(engine=engines.evaluations, transport=transport)


def _runner(
    stack: AsyncExitStack,
    config: Config,
    given: _GivenRun,
    played: RolloutWorkflow,
    learner: RecoveringLearner,
    events: Events,
    tokens: TokenLedger,
) -> EpisodeRunner:
    """Tracebacks of failed episodes go to logs/episodes.log; the log sums them up when the run ends."""
    failures = FailureLog(config.run_dir / "logs" / "episodes.log")
    stack.callback(failures.sum_up)
    rollout = config.rollout
    runner = EpisodeRunner(
        workflow=played,
        workflow_name=" and ".join(dict.fromkeys(type(task.workflow).__name__ for task in given.tasks.tasks)),
        timeout_s=rollout.episode_timeout_s,
        retries=rollout.episode_retries,
        failures=failures,
        limits=learner.engine.limits,
        newest_version=lambda: learner.version,
        events=events,
        tokens=tokens,
    )
    if not isinstance(played, EpisodeWorkers | TaskWorkflows) or not given.tasks.names:
        return runner
    of_tasks = {
        task.name: replace(runner, workflow=played.of(task.name), workflow_name=type(task.workflow).__name__)
        for task in given.tasks.tasks
    }
    return replace(runner, of_tasks=of_tasks)


def _rollout(
    config: Config,
    given: _GivenRun,
    engine: InferenceEngine,
    runner: EpisodeRunner,
    buffer: ReplayBuffer,
) -> RolloutController:
    return RolloutController(
        engine,
        runner,
        given.tasks.datasets,
        config.rollout,
        buffer,
        seed=config.seed,
        rules={task.name: group_rules(config.algorithm, task) for task in given.tasks.tasks},
        ledger=ledger_of(config, given.tasks),
    )


def _evaluator(config: Config, given: _GivenRun, engine: InferenceEngine, runner: EpisodeRunner) -> Evaluator | None:
    if given.held_out is None:
        return None
    return Evaluator(
        engine,
        runner.without_retries(),
        given.held_out,
        config.evaluation,
        seed=config.seed if config.rollout.seed_requests else None,
        places=given.held_out.places if isinstance(given.held_out, NamedRows) else None,
        task_of=partial(given.tasks.task_of, given.held_out),
    )


def _say_where_it_continues(config: Config, version: int, display: Display) -> None:
    if version < config.steps:
        display.say(f"continuing {config.run_dir} from version {version} of {config.steps}")
        return
    log.warning(
        "%s holds a run that has trained %d steps, and steps is %d: there is nothing left to train; set steps higher "
        "to go on, or another run_dir to start over",
        config.run_dir,
        version,
        config.steps,
    )


def _load_learner(config: Config, tasks: RunTasks, events: Events) -> RecoveringLearner:
    host, log = partial(host_learner, _without_own_settings(config)), config.run_dir / "logs" / "trainer.log"
    hosts = chain([partial(host, looks_at_nodes=True)], repeat(host))  # a recovery takes the nodes that there are

    def start() -> RemoteLearner:
        return RemoteLearner(next(hosts), log, config.train.num_threads)

    recorder = Recorder(config, model_digest(config.model)) if config.record else None
    learner = RecoveringLearner(start, config.run_dir / "checkpoints", config.train, events, recorder)
    try:
        for task in tasks.tasks:
            _check_room(config, task, learner.engine.limits.context_length)
    except BaseException:
        learner.close()
        raise
    return learner


def _without_own_settings(config: Config) -> Config:
    """A subclass stays here: it may lie in the script, which the trainer's process does not import."""
    values = {name: getattr(config, name) for name in Config.model_fields}
    return Config.model_construct(config.model_fields_set & values.keys(), **values)


def _check_room(config: Config, task: RunTask, of_model: int | None) -> None:
    """Raise ConfigError if answers of the workflow's max_new_tokens leave no room for a prompt.

    of_model: the model's context in tokens, if it has a limit.
    """
    engine, workflow = config.engine, task.workflow
    of_server = (engine.context_length or DEFAULT_CONTEXT_LENGTH) if isinstance(engine, LocalEngineConfig) else None
    limit = min((length for length in (of_model, of_server) if length is not None), default=None)
    if isinstance(workflow, AgentWorkflow) and limit is not None and workflow.sampling.max_new_tokens >= limit:
        raise ConfigError(
            f"{task.called('max_new_tokens')} is {workflow.sampling.max_new_tokens}, and prompt and answer have room "
            f"for {limit} tokens together; lower it" + (", or set engine.context_length" if limit == of_server else "")
        )


async def _close(thread: TrainThread, loading: asyncio.Future[RecoveringLearner]) -> None:
    """Close the train engines, even if something else failed while they loaded."""
    await asyncio.wait([loading])
    if not loading.cancelled() and loading.exception() is None:
        await thread(loading.result().close)


def weight_transport(
    config: Config, engine: WeightSource, opened: OpenedServers, directory: Path | None = None
) -> WeightTransport:
    """directory: instead of run_dir, for weights that find no other place."""
    run_dir = directory or config.run_dir
    if isinstance(config.weights, DistributedWeightsConfig):
        return DistributedTransport(config.weights)
    if isinstance(config.weights, DeltaWeightsConfig):
        return DeltaTransport(config.weights, run_dir, engine, opened.addresses, opened.mirrors)
    return DiskTransport(config.weights, run_dir, engine, opened.addresses)
