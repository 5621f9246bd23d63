"""The composition root: with the modules beside it, the one place that names concrete classes.

`launch` composes a whole run, with the engines of engines.py. It closes in reverse order what it opened.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from arl.api.errors import ConfigError, ImageError
from arl.api.events import NOWHERE, Events, EventStore, RunBegan
from arl.api.settings.endpoint import entered
from arl.api.settings.engines import AdapterWeightsConfig
from arl.api.settings.objective import DistillationAdvantage
from arl.api.settings.run import Config, OwnEngines
from arl.api.settings.sections import settings_without_keys
from arl.api.tracking import TrackedRun, Tracker
from arl.api.types import Example, Group
from arl.api.version import __version__
from arl.api.workflow import Curriculum, RolloutWorkflow, Task, TaskCurriculum
from arl.data.lazy_rows import NamedRows, StreamedRows
from arl.engine.model_files import copy_tokenizer, load_tokenizer, model_digest
from arl.observe.events.writer import CpuWatch, EventLog, num_cores
from arl.observe.tracking import Trackers, check_trackers
from arl.rollout.buffer import Replay, ReplayBuffer
from arl.rollout.controller import Dataset, RolloutController
from arl.rollout.episode import EpisodeRunner
from arl.rollout.episode_events import FailureLog
from arl.rollout.token_ledger import TokenLedger
from arl.run.engines import (
    check_start,
    open_engines,
    open_policy_engines,
    placed,
    placed_policies,
    policies_identity,
    policies_of,
    weight_transport,
)
from arl.run.inputs import Given, RunTask, RunTasks, check_settings, given_tasks, group_rules, ledger_of
from arl.runtime.console import json_console
from arl.runtime.processes.logs import bounded_logs
from arl.runtime.processes.rpc import check_is_no_import
from arl.runtime.threads import TrainThread, finished, offload
from arl.training.checkpoints import Checkpoints
from arl.training.display import display_of
from arl.training.evaluator import Evaluator
from arl.training.learner_process import RunLearner
from arl.training.metrics import RunTotals
from arl.training.metrics_log import RunLog
from arl.training.recording import forget_steps
from arl.training.run_dir import say_changes
from arl.training.run_result import OpenRun
from arl.training.trainer import Trainer

if TYPE_CHECKING:
    from arl.rollout.workers.pool import EpisodeWorkers

log = logging.getLogger(__name__)


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
    _check(config, run_tasks, engines)
    check_trackers(config.log.trackers, trackers)
    workers: EpisodeWorkers | None = None
    if config.rollout.num_workers:
        from arl.rollout.workers.pool import EpisodeWorkers

        logs = config.run_dir / "logs"
        workers = EpisodeWorkers(run_tasks.workflow, config.rollout.num_workers, logs, config.endpoint)
    async with AsyncExitStack() as stack:
        stack.enter_context(json_console(config.log.format == "json"))
        if held is None:
            held = await stack.enter_async_context(OpenRun(config))
        stack.enter_context(bounded_logs(config.run_dir / "logs"))
        scrapes: Callable[[Trainer], None] | None = None
        if config.log.metrics_address is not None:
            from arl.training.prometheus import metrics_served

            scrapes = await stack.enter_async_context(metrics_served(config))
        await stack.enter_async_context(workers or entered(run_tasks.workflow, config.endpoint))
        for task in run_tasks.tasks:
            if type(task.workflow).arehearse is not RolloutWorkflow.arehearse:
                await task.workflow.arehearse(await offload(_few, task.dataset))
        trainer = await _build(stack, config, run_tasks, workers, engines, trackers)
        trainer.last_words = held.stalled_now
        held.trains_with(trainer)
        if scrapes is not None:
            scrapes(trainer)
        async with trainer.running():
            yield trainer


def decoder(model: str) -> Callable[[Sequence[int]], str]:
    """Token ids -> text, with special tokens. Raises ModelError."""
    tokenizer = load_tokenizer(model)
    return lambda token_ids: str(tokenizer.decode(list(token_ids)))


def _check(config: Config, tasks: RunTasks, engines: OwnEngines | None) -> None:
    check_settings(config, tasks)
    if engines and config.policies:
        raise ConfigError("engines of your own train one policy, and `policies` is set; leave one of them out")
    if engines:
        engines.check(config)
    unused = ["every"] * bool(config.evaluation.every) + config.evaluation.needs_examples
    if tasks.held_out is None and unused:
        raise ConfigError(
            f"evaluation.{unused[0]} is set, but there is nothing to evaluate on; give launch an eval_dataset, or "
            "leave it out"
        )
    for task in tasks.tasks:
        check_sees(config, task, task.dataset)
        if isinstance(config.algorithm.advantage, DistillationAdvantage):
            from arl.workflow.teachers import DistillationWorkflow

            if isinstance(task.workflow, DistillationWorkflow) and task.workflow.keep_reward:
                raise ConfigError(
                    f"the {task.called('workflow')} keeps its own rewards beside the teacher's (keep_reward=True), and "
                    "algorithm.advantage.kind=distillation would take them all for the teacher's; leave keep_reward "
                    "out, or choose another algorithm"
                )
    if config.train.lora and config.train.dtype == "bfloat16" and not isinstance(config.weights, AdapterWeightsConfig):
        log.warning(
            "weights.transport=%s publishes adapters merged into the model: if it is stored in bfloat16, rounding "
            "removes most of what a few steps change; weights.transport=adapter publishes the adapters themselves",
            config.weights.transport,
        )


def check_sees(config: Config, task: RunTask, rows: Dataset | StreamedRows) -> None:
    """Raise ImageError if the first row has images that cannot be read, or that the model does not see as they are."""
    if type(task.workflow).check_first is RolloutWorkflow.check_first:
        return  # and reads no row
    models = {policy.model or config.model for policy in config.policies.values()} or {config.model}
    try:
        try:
            first = rows.head(1)[0] if isinstance(rows, StreamedRows) else rows[0]
        except ImageError:
            raise
        except Exception:  # noqa: BLE001 - the user's code, whose failures fail episodes
            return
        remark = task.workflow.check_first(first, sorted(models))
    except ImageError as error:
        raise ImageError(f"{task.called('the first example')}: {error}") from error
    if remark:
        log.warning("%s %s", task.called("the first example"), remark)


def _few(rows: Dataset | StreamedRows) -> list[Example]:
    """The first rows of a stream; the first, middle and last of others. Fewer if the user's code fails on one."""
    found = list[Example]()
    with suppress(Exception):  # its failures fail episodes
        if isinstance(rows, StreamedRows):
            return rows.head(3)
        found += (rows[index] for index in sorted({0, len(rows) // 2, len(rows) - 1}))
    return found


async def _build(
    stack: AsyncExitStack,
    config: Config,
    tasks: RunTasks,
    workers: EpisodeWorkers | None,
    own: OwnEngines | None,
    own_trackers: Sequence[Tracker],
) -> Trainer:
    async def close_events(*error: Any) -> None:
        await finished(offload(log_file.__exit__, *error))  # it waits for a disk that hangs

    async def close_trackers(kind: type[BaseException] | None, error: object, *_: object) -> None:
        said = None if kind is None else f"{kind.__name__}: {error}".removesuffix(": ")
        await finished(offload(trackers.close, said))

    events: EventStore = NOWHERE
    if config.log.events is not None:
        log_file = EventLog(config.run_dir, config.log.events, CpuWatch().read).open()
        stack.push_async_exit(close_events)
        events = log_file.__enter__()
    if workers is not None:
        workers.report_to(events)
    thread = TrainThread()
    stack.callback(thread.close)
    display = display_of(config.log, config.steps)
    stack.callback(display.close)
    trackers = Trackers(config.log.trackers, own_trackers)
    stack.push_async_exit(close_trackers)
    findings = await check_start(config)
    with display.waiting(f"loading {config.model}, and connecting to its inference servers"):
        learner: RunLearner
        if config.policies:
            learner, engines = await open_policy_engines(stack, config, tasks, thread, events)
            trainers = await thread(learner.placed)
            placement = await offload(placed_policies, config, trainers, engines.policies, findings)
        else:
            learner, engines = await open_engines(stack, config, tasks, thread, events, own)
            at = await thread(learner.placed)
            placement = await offload(placed, config, at, engines.training, engines.opened, findings)
    engine = engines.training
    if (transport := engines.transport) is None:
        transport = await thread(weight_transport, config, learner.engine, engines.opened)
        stack.callback(transport.close)
    is_decoded = trackers.has_any and config.log.track_trajectories and not own
    decode = await offload(decoder, config.model) if is_decoded else None
    settings = settings_without_keys(config)
    tracker = trackers if trackers.has_any else None
    run_log = RunLog(config.run_dir, config.log, display=display, decode=decode, tracker=tracker, settings=settings)

    model = {"model": config.model, "model_digest": await offload(model_digest, config.model)}
    identity = {**model, "seed": config.seed, **await offload(policies_identity, config)}
    if not tasks.names and tasks.num_examples is not None:  # the ledger of tasks knows their own, and takes new tasks
        identity["num_examples"] = tasks.num_examples
    checkpoints = Checkpoints(config.run_dir / "checkpoints", config.checkpoint.keep, identity)
    state = await thread(checkpoints.load_newest, learner.load)
    await thread(run_log.resume, learner.version)
    await offload(forget_steps, config.run_dir, learner.version)
    await offload(trackers.open, TrackedRun(run_dir=config.run_dir, settings=settings, version=learner.version))
    buffer = ReplayBuffer(config.rollout.batch_size, config.rollout.max_staleness, version=learner.version)
    failures, tokens = FailureLog(config.run_dir / "logs" / "episodes.log"), TokenLedger()
    stack.callback(failures.sum_up)
    runner = _runner(config, tasks, workers, learner, failures=failures, events=events, tokens=tokens)
    rollout = RolloutController(
        engine,
        runner,
        tasks.datasets,
        config.rollout,
        buffer,
        seed=config.seed,
        rules={task.name: group_rules(config.algorithm, task) for task in tasks.tasks},
        ledger=await offload(ledger_of, config, tasks),
    )
    kept = config.rollout
    replay = Replay(kept.replay_groups, max_staleness=kept.max_staleness)
    if state is None:
        await offload(rollout.ledger.prepare)
    else:
        await offload(rollout.load_state_dict, state.values["rollout"], state.groups)
        replay.add(state.replay, learner.version)
        if learner.version < config.steps:
            display.say(f"continuing {config.run_dir} from version {learner.version} of {config.steps}")
        else:
            log.warning(
                "%s holds a run that has trained %d steps, and steps is %d: there is nothing left to train; set steps "
                "higher to go on, or another run_dir to start over",
                config.run_dir,
                learner.version,
                config.steps,
            )
        say_changes(state.values.get("settings"), settings, learner.version, display.say)
    tokens.note_undone(await thread(run_log.counted))
    events.emit(
        RunBegan(
            version=learner.version,
            waiting=[group.group_id for group in buffer.untrained(learner.version)],
            arl=__version__,
            host=socket.gethostname(),
            pid=os.getpid(),
            cores=num_cores(),
            workflow=", ".join(dict.fromkeys(type(task.workflow).__name__ for task in tasks.tasks)),
            num_examples=tasks.num_examples or 0,
            num_eval_examples=len(tasks.held_out or ()),
            tasks=tasks.names,
            settings=settings,
        )
    )
    events.emit(tokens.counted())
    events.emit(placement.record())
    placement.tell(display.tell)
    if config.log.events:
        await offload(copy_tokenizer, config.model, config.run_dir / "events")
    evaluator = None
    if (held_out := tasks.held_out) is not None:
        evaluator = Evaluator(
            engine,
            runner.without_retries(),
            held_out,
            config.evaluation,
            seed=config.seed if config.rollout.seed_requests else None,
            places=held_out.places if isinstance(held_out, NamedRows) else None,
            max_concurrent=config.rollout.max_concurrent_held_out,
            task_of=partial(tasks.task_of, held_out),
        )
    return Trainer(
        config=config,
        learner=learner,
        inference_engine=engine,
        transport=transport,
        buffer=buffer,
        rollout=rollout,
        evaluator=evaluator,
        checkpoints=checkpoints,
        log=run_log,
        thread=thread,
        replay=replay,
        totals=RunTotals(**state.values["totals"]) if state else RunTotals(),
        events=events,
    )


def _runner(
    config: Config,
    tasks: RunTasks,
    workers: EpisodeWorkers | None,
    learner: RunLearner,
    *,
    failures: FailureLog,
    events: Events,
    tokens: TokenLedger,
) -> EpisodeRunner:
    """Runs the episodes, here or in worker processes; in a run of tasks, each task's workflow."""
    rollout = config.rollout
    runner = EpisodeRunner(
        workflow=workers or tasks.workflow,
        workflow_name=" and ".join(dict.fromkeys(type(task.workflow).__name__ for task in tasks.tasks)),
        timeout_s=rollout.episode_timeout_s,
        retries=rollout.episode_retries,
        failures=failures,
        limits=learner.engine.limits,
        policies=policies_of(config, learner),
        newest_version=lambda: learner.version,
        events=events,
        tokens=tokens,
    )
    if not tasks.names:
        return runner
    of_tasks = {
        task.name: replace(
            runner,
            workflow=workers.of(task.name) if workers else task.workflow,
            workflow_name=type(task.workflow).__name__,
        )
        for task in tasks.tasks
    }
    return replace(runner, of_tasks=of_tasks)
