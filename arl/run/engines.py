"""The engines of a run: the trainer's process, and the servers with the engines that speak to them.

model --> trainer's process --weight_transport--> servers <-- inference engine <-- episodes

In a run of several policies each has a trainer's process, and servers of its own or an adapter on shared ones:

model of a policy --> its trainer's process --its weights--> its servers, or its adapter on shared servers
                                                               ^ requests of its roles, by its own engine
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from arl.api.engine import InferenceEngine, WeightTransport
from arl.api.errors import ConfigError, ModelError, ServerError
from arl.api.events import Events
from arl.api.settings.engines import (
    DEFAULT_CONTEXT_LENGTH,
    DeltaWeightsConfig,
    DistributedWeightsConfig,
    LocalEngineConfig,
    PolicyRoles,
)
from arl.api.settings.run import Config, OwnEngines
from arl.api.train_engine import WeightSource
from arl.api.types import SamplingParams
from arl.engine.model_files import check_same_tokens, model_digest
from arl.engine.weights.delta import DeltaTransport
from arl.engine.weights.disk import DiskTransport
from arl.engine.weights.distributed import DistributedTransport
from arl.rollout.episode_checks import TrainedPolicies
from arl.run.inputs import RunTask, RunTasks
from arl.run.learner import host_learner
from arl.run.policy_settings import of_policy, shares_servers
from arl.run.servers import OpenedServers, connect, open_servers
from arl.runtime.processes.logs import bounded_logs
from arl.runtime.processes.rpc import SentObject
from arl.runtime.threads import TrainThread
from arl.training.learner_process import RemoteLearner, RunLearner
from arl.training.learner_recovery import RecoveringLearner
from arl.training.policies.policy_learners import PolicyLearners
from arl.training.policies.policy_servers import PolicyEngine, PolicyTransport
from arl.training.recording import Recorder
from arl.workflow.agent import AgentWorkflow
from arl.workflow.compacting import Compaction
from arl.workflow.sub_agents import all_agents
from arl.workflow.tool_agent import ToolAgentWorkflow


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines of a run, and the servers behind them."""

    training: InferenceEngine
    opened: OpenedServers
    transport: WeightTransport | None = None
    """The user's own, or the policies', which is closed with the engines, too."""
    policies: Mapping[str, OpenedServers] = field(default_factory=dict[str, OpenedServers])
    """The servers of each policy, in a run of several."""


async def open_engines(
    stack: AsyncExitStack,
    config: Config,
    tasks: RunTasks,
    thread: TrainThread,
    events: Events,
    own: OwnEngines | None = None,
) -> tuple[RecoveringLearner, Engines]:
    """Both at once: the train engine loads while servers start, unless they take turns on one device.

    own: instead of those that the settings name.
    """
    loading = thread.submit(load_learner_of, config, tasks, events, own)
    stack.push_async_callback(close_learner, thread, loading)
    if own is not None:
        stack.push_async_callback(own.inference.aclose)
        stack.callback(own.transport.close)
        learner = await thread.finish(loading)
        return learner, Engines(own.inference, OpenedServers(addresses=[]), transport=own.transport)
    if config.engine.colocated:  # the device has no room for both
        await thread((await thread.finish(loading)).offload)
    try:
        opened = await open_servers(config, stack, config.run_dir / "logs")
    except (ModelError, ServerError):
        await thread.finish(loading)  # a broken model raises the better error here
        raise
    learner = await thread.finish(loading)  # a cancelled start waits, and closes what was loaded
    training = await stack.enter_async_context(await connect(config, opened, events))
    if config.engine.colocated:  # the engine's end wakes servers that sleep: the trainer has to be gone by then
        stack.push_async_callback(close_learner, thread, loading)
    return learner, Engines(training, opened)


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


_TRAVELS = "It is loaded there: give a class, or a function at the top of a module, and no lambda"


def load_learner_of(
    config: Config,
    tasks: RunTasks,
    events: Events,
    own: OwnEngines | None = None,
    *,
    checkpoints: Path | None = None,
    within: str = "engine",
) -> RecoveringLearner:
    """The learner of a run, or of one of its policies, in a process of its own. Blocks.

    checkpoints: the run's; unset: those in run_dir. within: where in a checkpoint its files lie.
    """
    sent = own and SentObject.of(own.train, "engines.train", "the trainer's process", _TRAVELS)
    host, log = partial(host_learner, _without_own_settings(config), own=sent), config.run_dir / "logs" / "trainer.log"
    hosts = chain([partial(host, looks_at_nodes=True)], repeat(host))  # a recovery takes the nodes that there are

    def start() -> RemoteLearner:
        return RemoteLearner(next(hosts), log, config.train.num_threads)

    recorder = Recorder(config, model_digest(config.model)) if config.record else None
    kept = checkpoints or config.run_dir / "checkpoints"
    learner = RecoveringLearner(start, kept, config.train, events, recorder, within)
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
    """Raise ConfigError if answers of max_new_tokens leave no room for a prompt, or if compaction would come too late.

    of_model: the model's context in tokens, if it has a limit.
    """
    engine, workflow = config.engine, task.workflow
    of_server = (engine.context_length or DEFAULT_CONTEXT_LENGTH) if isinstance(engine, LocalEngineConfig) else None
    limit = min((length for length in (of_model, of_server) if length is not None), default=None)
    if not isinstance(workflow, AgentWorkflow) or limit is None:
        return
    remedy = "lower it" + (", or set engine.context_length" if limit == of_server else "")
    agents: list[tuple[str, SamplingParams | None, Compaction | None]] = [("", workflow.sampling, workflow.compaction)]
    if isinstance(workflow, ToolAgentWorkflow):
        called = all_agents(workflow.sub_agents)
        agents += [(f" of the sub-agent {agent.name}", agent.sampling, agent.compaction) for agent in called]
    for whose, sampling, compaction in agents:
        wanted = (
            ("max_new_tokens", sampling and sampling.max_new_tokens, limit - 1),
            ("compaction.context_length", compaction and compaction.context_length, limit),
        )
        for name, num_tokens, most in wanted:
            if num_tokens is not None and num_tokens > most:
                raise ConfigError(
                    f"{task.called(name + whose)} is {num_tokens}, and prompt and answer have room for {limit} tokens "
                    f"together; {remedy}"
                )


async def close_learner(thread: TrainThread, loading: asyncio.Future[Any]) -> None:
    """Close the train engines, even if something else failed while they loaded."""
    await asyncio.wait([loading])
    if not loading.cancelled() and loading.exception() is None:
        await thread(loading.result().close)


async def open_policy_engines(
    stack: AsyncExitStack, config: Config, tasks: RunTasks, thread: TrainThread, events: Events
) -> tuple[PolicyLearners, Engines]:
    """As open_engines: train engines load while servers start."""
    roles = PolicyRoles.of(config.policies)
    stack.enter_context(bounded_logs(config.run_dir / "policies"))
    loading = thread.submit(_load_learners, config, tasks, events, roles)
    stack.push_async_callback(close_learner, thread, loading)
    try:
        opened = await _opened(stack, config)
    except (ModelError, ServerError):
        await thread.finish(loading)  # a broken model raises the better error here
        raise
    learners = await thread.finish(loading)
    engines: dict[str, InferenceEngine] = {}
    transports: dict[str, WeightTransport] = {}
    for name, servers in opened.items():
        own = of_policy(config, name)
        engines[name] = await stack.enter_async_context(await connect(own, servers, events))
        transports[name] = await thread(weight_transport, own, learners.engine.of[name], servers)
        stack.callback(transports[name].close)
    first = next(iter(opened.values()))
    engine, transport = PolicyEngine(engines, roles, are_shared=shares_servers(config)), PolicyTransport(transports)
    return learners, Engines(engine, first, transport=transport, policies=opened)


def _load_learners(config: Config, tasks: RunTasks, events: Events, roles: PolicyRoles) -> PolicyLearners:
    for name in config.policies:
        if (model := of_policy(config, name).model) != config.model:
            check_same_tokens(f"policies.{name}.model", model, config.model, "policy")
    checkpoints = config.run_dir / "checkpoints"
    starts = {
        name: partial(
            load_learner_of, of_policy(config, name), tasks, events, checkpoints=checkpoints, within=f"engine/{name}"
        )
        for name in config.policies
    }
    return PolicyLearners(starts, roles)


async def _opened(stack: AsyncExitStack, config: Config) -> dict[str, OpenedServers]:
    """The servers of each policy. Engines that share servers do so without knowing of each other: one alone watches
    over their processes.
    """
    if not shares_servers(config):
        configs = {name: of_policy(config, name) for name in config.policies}
        return {name: await open_servers(own, stack, own.run_dir / "logs") for name, own in configs.items()}
    first, *others = config.policies
    opened = await open_servers(config, stack, config.run_dir / "logs")
    unwatched = replace(opened, processes=None, files=opened.files and replace(opened.files, run_dir=None))
    return {first: opened, **dict.fromkeys(others, unwatched)}


def policies_of(config: Config, learner: RunLearner) -> TrainedPolicies | None:
    """What a run checks of its trajectories; None for a run of one policy. Blocks."""
    if not isinstance(learner, PolicyLearners):
        return None
    limits = {name: weights.limits for name, weights in learner.engine.of.items()}
    return TrainedPolicies(roles=PolicyRoles.of(config.policies), limits=limits)


def policies_identity(config: Config) -> dict[str, Any]:
    """What must not change of the policies. A run without any is another run than one with policies."""
    identity: dict[str, Any] = {"policies": {name: sorted(one.roles) for name, one in config.policies.items()} or None}
    for name in config.policies:
        model = of_policy(config, name).model
        identity |= {f"policies.{name}.model": model, f"policies.{name}.model_digest": model_digest(model)}
    return identity
