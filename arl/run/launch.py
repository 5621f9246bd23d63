"""The composition root: with the modules beside it, the one place that names concrete classes.

`launch` composes a whole run, with the engines of engines.py. It closes in reverse order what it opened.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from arl.api.engine import InferenceEngine
from arl.api.errors import ConfigError, ImageError
from arl.api.events import NOWHERE, Events, EventStore, Finding, RunBegan
from arl.api.settings.endpoint import entered
from arl.api.settings.engines import (
    AdapterWeightsConfig,
)
from arl.api.settings.objective import DistillationAdvantage
from arl.api.settings.run import Config, OwnEngines
from arl.api.settings.sections import settings_without_keys
from arl.api.tracking import TrackedRun, Tracker
from arl.api.types import Example, Group
from arl.api.version import __version__
from arl.api.workflow import Curriculum, RolloutWorkflow, Task, TaskCurriculum
from arl.cluster.placement import PlacementTable
from arl.data.lazy_rows import NamedRows, StreamedRows
from arl.engine.model_files import copy_tokenizer, load_tokenizer, model_digest
from arl.observe.events.cpu_watch import CpuWatch, num_cores
from arl.observe.events.writer import EventLog
from arl.observe.tracking.fan_out import Trackers
from arl.observe.tracking.ready_made import check_trackers
from arl.rollout.buffer import Replay, ReplayBuffer
from arl.rollout.controller import Dataset, RolloutController
from arl.rollout.episode import EpisodeRunner
from arl.rollout.failure_log import FailureLog
from arl.rollout.task_workflows import TaskWorkflows
from arl.rollout.token_ledger import TokenLedger
from arl.rollout.workers.pool import EpisodeWorkers
from arl.run.dry_run import check_start, placed, placed_policies
from arl.run.engines import Engines, open_engines, open_policy_engines, policies_identity, policies_of, weight_transport
from arl.run.inputs import Given, RunTask, RunTasks, check_settings, given_tasks, group_rules, ledger_of
from arl.runtime.console import json_console
from arl.runtime.processes.logs import bounded_logs
from arl.runtime.processes.rpc import check_is_no_import
from arl.runtime.threads import TrainThread, finished, offload
from arl.training.checkpoints import Checkpoints
from arl.training.display import Display, display_of
from arl.training.evaluator import Evaluator
from arl.training.learner_process import RunLearner
from arl.training.metrics import RunTotals
from arl.training.metrics_log import RunLog
from arl.training.prometheus import metrics_served
from arl.training.recording import forget_steps
from arl.training.run_environment import say_changes
from arl.training.run_result import OpenRun
from arl.training.trainer import Trainer
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
    engines: OwnEngines | None = None


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
    engines: OwnEngines | None = None,
    held: OpenRun | None = None,
) -> AsyncGenerator[Trainer]:
    """Start everything that `config` names and give the Trainer; resume if run_dir has a checkpoint.

    dataset, eval_dataset: a length and integer indexing; each item is a mapping, which `arun_episode` gets as `data`. A
    dataset may be a stream of `datasets`, whose rows come in its order. eval_dataset may be several datasets by name:
    each is evaluated and reported under its name.
    keep: a filter; it rejects a finished group by returning False, and the group's place is refilled. curriculum: the
    examples of each stage, in order; without one, epochs of the whole dataset. tasks: several of these at once, in the
    place of workflow, dataset, eval_dataset, keep and curriculum; the run's groups are shared among them by
    their weights, which task_curriculum may change. trackers: your own, beside those of
    log.trackers. engines: your own, of a model of another kind (docs/extending.md); config.model is whatever they take
    for one. held: run_dir, if the caller holds it. The workflow is entered first and left last, in each worker if
    there are any. Leaving the block, by its end, an error or a cancellation, saves a checkpoint, stops the servers that
    arl started and writes END.json. Raises the ArlError of a part that could not start (RunFileError while another run
    trains in run_dir), and out of the block the first error of the run.
    """
    check_is_no_import()
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
    given = _GivenRun(
        tasks=run_tasks,
        held_out=run_tasks.held_out,
        workflow=run_tasks.workflow,
        trackers=trackers,
        engines=engines,
    )
    _check(config, given)
    played = _played(config, given.workflow)
    async with AsyncExitStack() as stack:
        stack.enter_context(json_console(config.log.format == "json"))
        if held is None:
            held = await stack.enter_async_context(OpenRun(config))
        stack.enter_context(bounded_logs(config.run_dir / "logs"))
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
    if given.engines and config.policies:
        raise ConfigError("engines of your own train one policy, and `policies` is set; leave one of them out")
    check_trackers(config.log.trackers, given.trackers)
    if given.engines:
        given.engines.check(config)
    if config.evaluation.every and given.held_out is None:
        raise ConfigError(
            f"evaluation.every is {config.evaluation.every}, but there is nothing to evaluate on; give launch an "
            "eval_dataset, or leave evaluation.every unset"
        )
    if given.held_out is None and (unused := config.evaluation.needs_examples):
        raise ConfigError(
            f"evaluation.{unused[0]} is set, but there is nothing to evaluate on; give launch an eval_dataset, or "
            "leave it out"
        )
    is_distilled = isinstance(config.algorithm.advantage, DistillationAdvantage)
    for task in given.tasks.tasks:
        check_sees(config, task, task.dataset)
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


def check_sees(config: Config, task: RunTask, rows: Dataset | StreamedRows) -> None:
    """Raise ImageError if the first row has images that cannot be read, or that the model does not see as they are."""
    if not isinstance(task.workflow, AgentWorkflow):
        return
    models = {policy.model or config.model for policy in config.policies.values()} or {config.model}
    try:
        messages = task.workflow.messages(rows.head(1)[0] if isinstance(rows, StreamedRows) else rows[0])
    except ImageError as error:
        raise ImageError(f"{task.called('the first example')}: {error}") from error
    except Exception:  # noqa: BLE001 - the user's code, whose failures fail episodes
        return
    try:
        task.workflow.check_sees(messages, sorted(models))
    except ImageError as error:
        raise ImageError(f"{task.called('the first example')}: {error}") from error
    if remark := task.workflow.unseen(messages):
        log.warning("%s %s", task.called("the first example"), remark)


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
    tokens, own = TokenLedger(), given.engines
    with display.waiting(f"loading {config.model}, and connecting to its inference servers"):
        learner, engines, placement = await _engines(stack, config, given, thread, events, findings)
    engine, opened = engines.training, engines.opened
    if (transport := engines.transport) is None:
        transport = await thread(weight_transport, config, learner.engine, opened)
        stack.callback(transport.close)
    is_decoded = trackers.has_any and config.log.track_trajectories and not own
    decode = await offload(decoder, config.model) if is_decoded else None
    tracker = trackers if trackers.has_any else None
    settings = settings_without_keys(config)
    run_log = RunLog(config.run_dir, config.log, display=display, decode=decode, tracker=tracker, settings=settings)

    digest = await offload(model_digest, config.model)
    model = {"model": config.model, "model_digest": digest}
    identity = {**model, "seed": config.seed, **await offload(policies_identity, config)}
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
    replay = Replay(kept.replay_groups, max_staleness=kept.max_staleness)
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
        evaluator=_evaluator(config, given, engine, runner),
        checkpoints=checkpoints,
        log=run_log,
        thread=thread,
        replay=replay,
        totals=RunTotals(**state.values["totals"]) if state else RunTotals(),
        events=events,
    )


async def _engines(
    stack: AsyncExitStack,
    config: Config,
    given: _GivenRun,
    thread: TrainThread,
    events: Events,
    findings: Sequence[Finding],
) -> tuple[RunLearner, Engines, PlacementTable]:
    """The learner and the servers, of one policy or of several; and where all of it runs."""
    if not config.policies:
        learner, engines = await open_engines(stack, config, given.tasks, thread, events, given.engines)
        at = await thread(learner.placed)
        return learner, engines, await offload(placed, config, at, engines.training, engines.opened, findings)
    learners, engines = await open_policy_engines(stack, config, given.tasks, thread, events)
    trainers = await thread(learners.placed)
    return learners, engines, await offload(placed_policies, config, trainers, engines.policies, findings)


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


def _runner(
    stack: AsyncExitStack,
    config: Config,
    given: _GivenRun,
    played: RolloutWorkflow,
    learner: RunLearner,
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
        policies=policies_of(config, learner),
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
        max_concurrent=config.rollout.max_concurrent_held_out,
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
