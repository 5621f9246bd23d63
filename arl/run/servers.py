"""The inference side of a run: the servers of a configuration, and the engine that speaks to them.

`serve` is an engine alone, for episodes without training. `launch` opens the same parts beside a trainer. A run of
several policies opens them for the settings of each (`of_policy`). `played_elsewhere` makes of a workflow one whose
episodes programs elsewhere play (`arl serve`).
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arl.api.engine import InferenceEngine, ServedModel
from arl.api.errors import ConfigError, ServerError
from arl.api.events import NOWHERE, Events
from arl.api.settings.engines import (
    AdapterWeightsConfig,
    DeltaWeightsConfig,
    DistributedWeightsConfig,
    LocalEngineConfig,
    PolicyRoles,
    RunningServersConfig,
    ServerProcessesConfig,
)
from arl.api.settings.run import Config
from arl.api.workflow import RolloutWorkflow
from arl.engine.client.membership import RosterFiles
from arl.engine.client.remote_engine import RemoteInferenceEngine, client_class
from arl.engine.client.server_processes import ServerProcesses, adapter_options, started_here
from arl.engine.client.servers_file import SERVERS, read_servers
from arl.engine.model_files import load_tokenizer, local_directory, served_model
from arl.runtime.threads import offload
from arl.training.run_dir import make_run_dir

if TYPE_CHECKING:
    from arl.endpoint.served_workflow import ServedWorkflow
    from arl.training.policies import PolicyEngine

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedServers:
    """The servers that a run begins with, and how others join."""

    addresses: Sequence[str]
    api_key: str | None = None
    processes: ServerProcesses | None = None
    files: RosterFiles | None = None
    mirrors: dict[str, str] = field(default_factory=dict[str, str])
    """Server -> its mirror. Servers that join with a mirror are added to it."""


def with_named_servers(config: Config) -> Config:
    """The settings with the servers and mirrors of the servers file, if there is one. Raises ConfigError."""
    engine, weights = config.engine, config.weights
    if not isinstance(engine, RunningServersConfig):
        return config
    named = read_servers(engine.servers_file or config.run_dir / SERVERS)
    if not named:
        return config
    changes: dict[str, Any] = {"engine": engine.model_copy(update={"addresses": tuple(named)})}
    if isinstance(weights, DeltaWeightsConfig):
        mirrors = {one.address: one.mirror for one in named.values() if one.mirror}
        changes["weights"] = weights.model_copy(update={"mirrors": {**weights.mirrors, **mirrors}})
    return config.model_copy(update=changes)


def shares_servers(config: Config) -> bool:
    """Whether all policies are adapters on the same servers; else each has servers of its own."""
    return isinstance(config.weights, AdapterWeightsConfig)


def of_policy(config: Config, name: str) -> Config:
    """The settings of one policy's trainer and servers, with files of their own beneath run_dir."""
    policy, train, engine = config.policies[name], config.train, config.engine
    optimizer = train.optimizer.model_copy(update={"lr": policy.lr or train.optimizer.lr})
    changes: dict[str, Any]
    if shares_servers(config):
        changes = {}
    elif isinstance(engine, LocalEngineConfig):
        changes = {"device": policy.device or engine.device}
    elif isinstance(engine, RunningServersConfig):
        changes = {"addresses": policy.addresses or engine.addresses}
    else:
        place = [*config.policies].index(name)
        changes = {"first_gpu": engine.first_gpu + place * engine.num_servers * engine.gpus_per_server}
    return config.model_copy(
        update={
            "model": policy.model or config.model,
            "run_dir": config.run_dir / "policies" / name,
            "train": train.model_copy(update={"optimizer": optimizer, "device": policy.device or train.device}),
            "engine": engine.model_copy(update=changes),
            "policies": {},
        }
    )


@asynccontextmanager
async def serve(config: Config) -> AsyncGenerator[InferenceEngine]:
    """The inference engine alone, at version 0, without a trainer.

    Starts servers of config.model, with their logs in run_dir/logs/serve; or connects to the servers of
    engine.addresses, with whatever weights they hold. Reads only model, engine and run_dir of `config`, and does not
    disturb a run that trains in the same run_dir. Leaving the block stops the servers that it started. Raises
    ConfigError, ModelError, ServerError.

    Of several policies each is served by servers of its model; those of one model share them.
    """
    if config.policies:
        async with AsyncExitStack() as stack:
            yield await _policies_served(stack, config)
        return
    await offload(make_run_dir, config.run_dir)
    # Nothing is trained on the answers: no server is refused for what a trainer would need.
    without = {"replay_routing": False, "replay_truncation": False, "colocated": False}
    config = config.model_copy(update={"engine": config.engine.model_copy(update=without)})
    async with AsyncExitStack() as stack:
        opened = await open_servers(config, stack, config.run_dir / "logs" / "serve")
        if opened.files is not None:
            opened = replace(opened, files=replace(opened.files, run_dir=None))
        engine = await stack.enter_async_context(await connect(config, opened))
        if lacking := engine.without_weights:
            raise ServerError(
                f"{', '.join(lacking)} has no whole weights: a run ended before it had loaded them, or is loading them "
                "now; start that run or these servers again, or wait"
            )
        yield engine


async def _policies_served(stack: AsyncExitStack, config: Config) -> PolicyEngine:
    from arl.training.policies import PolicyEngine

    engines: dict[object, InferenceEngine] = {}
    of: dict[str, InferenceEngine] = {}
    for name in config.policies:
        own = of_policy(config, name)
        key = own.model, own.engine.addresses if isinstance(own.engine, RunningServersConfig) else ()
        if key not in engines:
            engines[key] = await stack.enter_async_context(serve(own))
        of[name] = engines[key]
    return PolicyEngine(of, PolicyRoles.of(config.policies))


def played_elsewhere(workflow: RolloutWorkflow, model: str, on_open: Callable[[str], object]) -> ServedWorkflow:
    """The workflow, with programs elsewhere in its place: they get its sampling, chat template and reward, if it is one
    of arl's that has them. model: whose tokenizer to take if not. Raises ConfigError for one that needs its own calls.
    """
    from arl.endpoint.proxy import OpenAIProxy
    from arl.endpoint.sdk_workflow import SDKWorkflow
    from arl.endpoint.served_workflow import ServedWorkflow
    from arl.workflow.agent import AgentWorkflow
    from arl.workflow.teachers import DistillationWorkflow
    from arl.workflow.tool_agent import ToolAgentWorkflow

    match workflow:
        case ServedWorkflow():
            return workflow
        case SDKWorkflow():
            return ServedWorkflow(proxy=workflow.proxy, reward=workflow.reward, on_open=on_open)
        case AgentWorkflow():
            proxy = OpenAIProxy(
                workflow.tokenizer,
                sampling=workflow.sampling,
                template_options=workflow.template_options,
                rewriting=workflow.rewriting,
                call_format=workflow.call_format if isinstance(workflow, ToolAgentWorkflow) else None,
            )
            return ServedWorkflow(proxy=proxy, reward=workflow.reward, on_open=on_open)
        case DistillationWorkflow():
            raise ConfigError(
                "arl serve replaces the workflow by programs that run elsewhere, but a DistillationWorkflow rewards "
                "the tokens of its own episodes; train it as a script"
            )
        case _:
            return ServedWorkflow(load_tokenizer(model), on_open=on_open)


async def open_servers(config: Config, stack: AsyncExitStack, logs: Path) -> OpenedServers:
    """Find the servers, or start them; their logs go to `logs`. Raises ConfigError, ModelError, ServerError."""
    if isinstance(config.engine, RunningServersConfig):
        return await _running_servers(config, config.engine)
    directory, api_key = await offload(local_directory, config.model), None
    routing = (await offload(wanted_model, config)).routing  # an unknown mixture is refused before servers start
    started: LocalEngineConfig | ServerProcessesConfig = config.engine
    if isinstance(started, LocalEngineConfig) or started.on_ray:
        api_key = secrets.token_hex(32)  # others can reach the network, and the loopback interface of this machine
    if isinstance(started, ServerProcessesConfig):
        of_routes = ["--enable-return-routed-experts"] if routing is not None else []
        of_memory = [client_class(started).memory_flag] if started.colocated else []
        of_tensors = []
        if started.protocol == "vllm" and isinstance(config.weights, DistributedWeightsConfig):
            of_tensors = ["--weight-transfer-config", '{"backend": "nccl"}']
        own = (*adapter_options(config), *of_routes, *of_memory, *of_tensors)
        started = started.model_copy(update={"arguments": (*own, *started.arguments)})  # the user's own prevail
    source = None
    if started.on_ray:
        from arl.engine.client.ray_servers import started_on_ray

        assert api_key is not None
        assert config.train.ray_address is not None
        servers = started_on_ray(directory, started, config.train.ray_address, logs, api_key)
        source = processes = await stack.enter_async_context(servers)
    else:
        processes = await stack.enter_async_context(started_here(directory, started, logs, api_key or ""))
    files = RosterFiles(run_dir=config.run_dir, source=source)
    return OpenedServers(addresses=processes.addresses, api_key=api_key, processes=processes, files=files)


async def _running_servers(config: Config, engine: RunningServersConfig) -> OpenedServers:
    """The servers file decides, if there is one; else engine.addresses."""
    path = engine.servers_file or config.run_dir / SERVERS
    named = await offload(read_servers, path)
    if not named and not engine.addresses:
        raise ConfigError(f"engine.servers_file is {path}, which names no server, and engine.addresses is empty")
    left_out = [address for address in engine.addresses if address.rstrip("/") not in named]
    if named and left_out:
        log.warning(
            "%s names the servers of this run, so engine.addresses is ignored: %s is left out. Add it with "
            "`arl servers add`, or delete the file",
            path,
            ", ".join(left_out),
        )
    mirrors = dict[str, str]()
    if isinstance(config.weights, DeltaWeightsConfig):
        mirrors = {server.rstrip("/"): mirror for server, mirror in config.weights.mirrors.items()}
    elif of := [one for one in named.values() if one.mirror]:
        raise ConfigError(f"{path} names a mirror of {of[0].address}, but only weights.transport=delta has mirrors")
    mirrors.update({one.address: one.mirror for one in named.values() if one.mirror})
    return OpenedServers(
        addresses=list(named) or engine.addresses,
        api_key=engine.key,
        mirrors=mirrors,
        files=RosterFiles(
            run_dir=config.run_dir,
            named=path,
            is_users=engine.servers_file is not None,
            needs_all=not named,
            mirrors=mirrors if isinstance(config.weights, DeltaWeightsConfig) else None,
        ),
    )


def wanted_model(config: Config) -> ServedModel:
    """The model that servers should serve in this run. Raises ModelError."""
    return served_model(config.model, replay_routing=config.engine.replay_routing)


async def connect(config: Config, opened: OpenedServers, events: Events = NOWHERE) -> RemoteInferenceEngine:
    model = await offload(wanted_model, config)
    if opened.processes is not None:
        opened.processes.report_to(events)
    return RemoteInferenceEngine(
        opened.addresses,
        config.engine,
        api_key=opened.api_key,
        model=model,
        processes=opened.processes,
        events=events,
        files=opened.files,
    )
