"""The engines of a run: the trainer's process, and the servers with the engines that speak to them; and where they are.

model --> trainer's process --weight_transport--> servers <-- inference engine <-- episodes

In a run of several policies each has a trainer's process, and servers of its own or an adapter on shared ones:

model of a policy --> its trainer's process --its weights--> its servers, or its adapter on shared servers
                                                               ^ requests of its roles, by its own engine
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from arl.api.engine import InferenceEngine, WeightTransport
from arl.api.errors import ArlError, ConfigError, ModelError, ServerError
from arl.api.events import Events, Finding, Placed, PlacedPart
from arl.api.settings.engines import (
    DEFAULT_CONTEXT_LENGTH,
    DeltaWeightsConfig,
    DistributedWeightsConfig,
    LocalEngineConfig,
    PolicyRoles,
    RunningServersConfig,
)
from arl.api.settings.run import Config, OwnEngines
from arl.api.train_engine import WeightSource
from arl.cluster.placement import (
    PlacementTable,
    beside_parts,
    check,
    controller_part,
    gpu_mistakes,
    hostname_of,
    planned_servers,
)
from arl.engine.client.remote_engine import RemoteInferenceEngine
from arl.engine.client.servers_file import SERVERS
from arl.engine.model_files import check_same_tokens, model_digest
from arl.engine.weights.disk import DiskTransport
from arl.rollout.episode import TrainedPolicies
from arl.run.inputs import RunTask, RunTasks
from arl.run.learner import host_learner
from arl.run.servers import OpenedServers, connect, of_policy, open_servers, shares_servers, with_named_servers
from arl.runtime.processes.logs import bounded_logs
from arl.runtime.processes.rpc import SentObject
from arl.runtime.threads import TrainThread, offload
from arl.training.learner_process import RemoteLearner, RunLearner
from arl.training.learner_recovery import RecoveringLearner
from arl.training.recording import Recorder

if TYPE_CHECKING:
    from arl.training.policies import PolicyLearners

_MIRROR_TIMEOUT_S = 10.0


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
        from arl.engine.weights.distributed import DistributedTransport

        return DistributedTransport(config.weights)
    if isinstance(config.weights, DeltaWeightsConfig):
        from arl.engine.weights.delta import DeltaTransport

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
    # A subclass of Config stays here: it may lie in the script, which the trainer's process does not import.
    values = {name: getattr(config, name) for name in Config.model_fields}
    settings = Config.model_construct(config.model_fields_set & values.keys(), **values)
    host, log = partial(host_learner, settings, own=sent), config.run_dir / "logs" / "trainer.log"
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


def _check_room(config: Config, task: RunTask, of_model: int | None) -> None:
    """Raise ConfigError if the workflow's settings do not fit the context. of_model: the model's, if it has a limit."""
    engine = config.engine
    of_server = (engine.context_length or DEFAULT_CONTEXT_LENGTH) if isinstance(engine, LocalEngineConfig) else None
    limit = min((length for length in (of_model, of_server) if length is not None), default=None)
    if limit is None:
        return
    try:
        task.workflow.check_room(limit)
    except ConfigError as error:
        remedy = "lower it" + (", or set engine.context_length" if limit == of_server else "")
        raise ConfigError(f"{f'task {task.name!r}: ' if task.name else ''}{error}; {remedy}") from None


async def close_learner(thread: TrainThread, loading: asyncio.Future[Any]) -> None:
    """Close the train engines, even if something else failed while they loaded."""
    await asyncio.wait([loading])
    if not loading.cancelled() and loading.exception() is None:
        await thread(loading.result().close)


async def open_policy_engines(
    stack: AsyncExitStack, config: Config, tasks: RunTasks, thread: TrainThread, events: Events
) -> tuple[PolicyLearners, Engines]:
    """As open_engines: train engines load while servers start."""
    from arl.training.policies import PolicyEngine, PolicyLearners, PolicyTransport

    roles, configs = PolicyRoles.of(config.policies), {name: of_policy(config, name) for name in config.policies}
    stack.enter_context(bounded_logs(config.run_dir / "policies"))

    def load_learners() -> PolicyLearners:
        for name, own in configs.items():
            if own.model != config.model:
                check_same_tokens(f"policies.{name}.model", own.model, config.model, "policy")
        kept = config.run_dir / "checkpoints"
        starts = {
            name: partial(load_learner_of, own, tasks, events, checkpoints=kept, within=f"engine/{name}")
            for name, own in configs.items()
        }
        return PolicyLearners(starts, roles)

    loading = thread.submit(load_learners)
    stack.push_async_callback(close_learner, thread, loading)
    try:
        opened = await _opened(stack, config, configs)
    except (ModelError, ServerError):
        await thread.finish(loading)  # a broken model raises the better error here
        raise
    learners = await thread.finish(loading)
    engines: dict[str, InferenceEngine] = {}
    transports: dict[str, WeightTransport] = {}
    for name, servers in opened.items():
        engines[name] = await stack.enter_async_context(await connect(configs[name], servers, events))
        transports[name] = await thread(weight_transport, configs[name], learners.engine.of[name], servers)
        stack.callback(transports[name].close)
    first = next(iter(opened.values()))
    engine, transport = PolicyEngine(engines, roles, are_shared=shares_servers(config)), PolicyTransport(transports)
    return learners, Engines(engine, first, transport=transport, policies=opened)


async def _opened(stack: AsyncExitStack, config: Config, configs: Mapping[str, Config]) -> dict[str, OpenedServers]:
    """The servers of each policy. Engines that share servers do so without knowing of each other: one alone watches
    over their processes.
    """
    if not shares_servers(config):
        return {name: await open_servers(own, stack, own.run_dir / "logs") for name, own in configs.items()}
    first, *others = config.policies
    opened = await open_servers(config, stack, config.run_dir / "logs")
    unwatched = replace(opened, processes=None, files=opened.files and replace(opened.files, run_dir=None))
    return {first: opened, **dict.fromkeys(others, unwatched)}


def policies_of(config: Config, learner: RunLearner) -> TrainedPolicies | None:
    """What a run checks of its trajectories; None for a run of one policy. Blocks."""
    if not config.policies:
        return None
    engines: Any = learner.engine
    limits = {name: weights.limits for name, weights in engines.of.items()}
    return TrainedPolicies(roles=PolicyRoles.of(config.policies), limits=limits)


def policies_identity(config: Config) -> dict[str, Any]:
    """What must not change of the policies. A run without any is another run than one with policies."""
    identity: dict[str, Any] = {"policies": {name: sorted(one.roles) for name, one in config.policies.items()} or None}
    for name in config.policies:
        model = of_policy(config, name).model
        identity |= {f"policies.{name}.model": model, f"policies.{name}.model_digest": model_digest(model)}
    return identity


# Where all of it is: what settings and mirrors show before anything starts, and what has started.


async def check_start(config: Config) -> list[Finding]:
    """What settings and mirrors show before anything starts: the warnings. Raises ConfigError with the mistakes."""
    if config.policies:
        findings = [one for name in config.policies for one in gpu_mistakes(of_policy(config, name))]
        findings = [*{finding.text: finding for finding in findings}.values()]
    else:
        config = await offload(with_named_servers, config)
        findings = [*gpu_mistakes(config), *await check_mirrors(config)]
    check(findings)
    return findings


async def check_mirrors(config: Config) -> list[Finding]:
    """Mirrors that do not answer, or refuse the key."""
    if not isinstance(config.weights, DeltaWeightsConfig):
        return []
    from arl.engine.weights.delta import MirrorClient

    key = config.weights.key

    async def fault(address: str) -> str:
        start = "start it (python -m arl.engine.weights.mirror), or correct weights.mirrors"
        try:
            async with asyncio.timeout(_MIRROR_TIMEOUT_S):
                await MirrorClient(address, key).held()
            return ""
        except TimeoutError:
            return f"the mirror at {address} gave no answer within {_MIRROR_TIMEOUT_S:g} s: {start}"
        except (ArlError, ValueError) as error:
            return f"the mirror at {address} does not answer: {error}; {start}"

    answers = await asyncio.gather(*map(fault, dict.fromkeys(config.weights.mirrors.values())))
    is_mistake = not await offload(may_join_later, config)
    return [Finding(text=text, is_mistake=is_mistake) for text in answers if text]


def may_join_later(config: Config) -> bool:
    """Whether servers come and go by a servers file; then a run begins with engine.min_servers of them."""
    return bool(getattr(config.engine, "servers_file", None)) or (config.run_dir / SERVERS).exists()


def cluster_parts(config: Config, num_nodes: int) -> Iterator[PlacedPart]:
    if config.train.ray_address is not None:
        note = f"{num_nodes} node{'s' * (num_nodes != 1)}" if num_nodes else ""
        yield PlacedPart(part="ray", address=config.train.ray_address, note=note)


def server_parts(
    config: Config, devices: Mapping[str, str], hosts: Mapping[str, str] = {}, notes: Mapping[str, str] = {}
) -> list[PlacedPart]:
    """Servers that somebody else runs. devices: what they compute on, by base URL. hosts, notes: by URL, as known."""
    given = config.engine.addresses if isinstance(config.engine, RunningServersConfig) else ()
    return [
        PlacedPart(
            part="server",
            host=hosts.get(url, hostname_of(url)),
            address=url,
            device=devices.get(url.rstrip("/"), ""),
            note="; ".join(filter(None, ("not started by arl", notes.get(url)))),
        )
        for url in given
    ]


def placed(
    config: Config, trainer: Placed, engine: InferenceEngine, opened: OpenedServers, findings: Sequence[Finding]
) -> PlacementTable:
    """What runs where, once all of it has started."""
    config, processes = with_named_servers(config), opened.processes
    devices = engine.devices if isinstance(engine, RemoteInferenceEngine) else {}
    servers = server_parts(config, devices)
    if processes is not None:
        here = planned_servers(config) or [PlacedPart(part="server")] * len(processes.addresses)
        parts, ids = {**dict(zip(processes.addresses, here, strict=True)), **processes.parts}, processes.process_ids
        servers = [structs.replace(part, address=address, pid=ids.get(address)) for address, part in parts.items()]
    parts = [controller_part(), *cluster_parts(config, 0), *trainer.parts, *servers, *beside_parts(config)]
    return PlacementTable(parts=parts, shared=trainer.shared, findings=[*findings, *trainer.findings])


def placed_policies(
    config: Config, trainers: Mapping[str, Placed], opened: Mapping[str, OpenedServers], findings: Sequence[Finding]
) -> PlacementTable:
    """What runs where, once all of it has started: the trainer of each policy, and its servers or those of all."""
    parts, seen = [controller_part()], set[str]()
    for name, trainer in trainers.items():
        parts += [structs.replace(part, name=f"{name} {part.name}".strip()) for part in trainer.parts]
        own, servers = of_policy(config, name), opened[name]
        planned = planned_servers(own) or [PlacedPart(part="server")] * len(servers.addresses)
        ids = servers.processes.process_ids if servers.processes is not None else {}
        of = "" if shares_servers(config) else name
        for part, address in zip(planned, servers.addresses, strict=True):
            if address not in seen:
                parts.append(structs.replace(part, name=of, address=address, pid=ids.get(address)))
                seen.add(address)
    warned = [*findings, *(finding for trainer in trainers.values() for finding in trainer.findings)]
    return PlacementTable(parts=[*parts, *beside_parts(config)], findings=warned)
