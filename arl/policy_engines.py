"""The engines of a run of several policies: a trainer's process for each, and servers for each or shared by all.

model of a policy --> its trainer's process --its weights--> its servers, or its adapter on shared servers
                                                               ^ requests of its roles, by its own engine
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from arl.api.config import Config
from arl.api.engine import InferenceEngine, WeightTransport
from arl.api.errors import ModelError, ServerError
from arl.api.events import Events
from arl.api.policy_config import PolicyRoles
from arl.api.policy_parts import of_policy, shares_servers
from arl.engine.model_files import check_same_tokens, model_digest
from arl.given_tasks import RunTasks
from arl.log_files import bounded_logs
from arl.offload import TrainThread
from arl.policies.policy_learners import PolicyLearners
from arl.policies.policy_servers import PolicyEngine, PolicyTransport
from arl.rollout.constrained import TrainedPolicies
from arl.run_engines import Engines, close_learner, load_learner_of, weight_transport
from arl.serving import OpenedServers, connect, open_servers
from arl.training.run_learner import RunLearner


async def open_policy_engines(
    stack: AsyncExitStack, config: Config, tasks: RunTasks, thread: TrainThread, events: Events
) -> tuple[PolicyLearners, Engines]:
    """As open_engines: train engines load while servers start."""
    roles = PolicyRoles.of(config.policies)
    stack.enter_context(bounded_logs(config.run_dir / "policies", int(config.log.max_mb * 1e6)))
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
