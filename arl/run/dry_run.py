"""`--dry-run`: what would run where, and the mistakes in it, without starting anything. A real start checks the same.

rehearse, check_start   settings, mirrors; a dry run alone: this machine's GPUs and directories, and the servers
asked_cluster           the nodes of a Ray cluster, by a probe on each, in the process that is in the cluster
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import Any

from msgspec.structs import replace

from arl.api.engine import InferenceEngine
from arl.api.errors import ArlError, ConfigError, ServerError
from arl.api.events import Finding, Placed, PlacedPart, SharedPath
from arl.api.settings.engines import DeltaWeightsConfig, DistributedWeightsConfig, RunningServersConfig
from arl.api.settings.run import Config
from arl.cluster.node_checks import NodeReport, check_nodes, local_finding, written
from arl.cluster.placement import PlacementTable, check
from arl.cluster.planned import (
    beside_parts,
    controller_part,
    gpu_mistakes,
    hostname_of,
    planned_servers,
    planned_trainer,
    visible_gpus,
)
from arl.cluster.ray_nodes import probes, ray_nodes
from arl.engine.client.remote_engine import RemoteInferenceEngine, client_class
from arl.engine.client.server_client import Greeting, ServerClient, difference, expected_of, greet
from arl.engine.client.servers_file import SERVERS, base_url, read_servers
from arl.engine.model_files import served_model
from arl.engine.weights.delta import MirrorClient
from arl.run.policy_settings import of_policy, shares_servers
from arl.run.servers import OpenedServers
from arl.runtime.http.client import Connections
from arl.runtime.http.server import is_here
from arl.runtime.threads import offload
from arl.training.display import display_of
from arl.training.run_dir import LOCK, holder_of, is_locked

_MIRROR_TIMEOUT_S = 10.0


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


def server_parts(devices: Mapping[str, str], report: NodeReport, config: Config) -> list[PlacedPart]:
    """Servers that somebody else runs. devices: what they compute on, by base URL."""
    given = config.engine.addresses if isinstance(config.engine, RunningServersConfig) else ()
    return [
        PlacedPart(
            part="server",
            host=report.hosts.get(url, hostname_of(url)),
            address=url,
            device=devices.get(url.rstrip("/"), ""),
            note="; ".join(filter(None, ("not started by arl", report.notes.get(url)))),
        )
        for url in given
    ]


async def ask_servers(config: Config) -> tuple[list[Greeting], list[Finding]]:
    """The given servers' descriptions of themselves, and what is wrong with them. Changes nothing on them."""
    engine = config.engine
    if not isinstance(engine, RunningServersConfig):
        return [], []
    try:
        urls = list(dict.fromkeys(map(base_url, engine.addresses)))
    except ConfigError as error:
        return [], [Finding(text=str(error))]
    async with Connections() as connections:
        clients = [client_class(engine)(connections, url, engine.key) for url in urls]
        answers = await asyncio.gather(*map(_greeted, clients))
    greetings = [answer for answer in answers if isinstance(answer, Greeting)]
    texts = [f"{answer}: start the server, or take it out" for answer in answers if isinstance(answer, ServerError)]
    partly = [one for one in greetings if one.unreached]
    texts += [f"weight updates would not reach all of {one.address}, which runs with {one.unreached}" for one in partly]
    try:
        expected = await offload(_expected, config.model)
    except ArlError as error:
        return greetings, [Finding(text=text) for text in [*texts, str(error)]]
    if sentence := difference([*expected, *greetings]):
        texts.append(f"the servers do not serve the same model: {sentence}; start all with the model of this run")
    is_mistake = len(greetings) < engine.min_servers or not await offload(_may_join_later, config)
    return greetings, [Finding(text=text, is_mistake=is_mistake) for text in texts]


def _may_join_later(config: Config) -> bool:
    """Whether servers come and go by a servers file; then a run begins with engine.min_servers of them."""
    return bool(getattr(config.engine, "servers_file", None)) or (config.run_dir / SERVERS).exists()


def _expected(model: str) -> list[Greeting]:
    """A model of the hub is not downloaded for this."""
    return [expected_of(served_model(model))] if Path(model).is_dir() else []


async def _greeted(client: ServerClient) -> Greeting | ServerError:
    try:
        return await greet(client, sets_going=False)
    except ServerError as error:
        return error


async def check_mirrors(config: Config) -> list[Finding]:
    """Mirrors that do not answer, or refuse the key."""
    if not isinstance(config.weights, DeltaWeightsConfig):
        return []
    key = config.weights.key
    addresses = list(dict.fromkeys(config.weights.mirrors.values()))
    answers = await asyncio.gather(*(_mirror_fault(address, key) for address in addresses))
    is_mistake = not await offload(_may_join_later, config)
    return [Finding(text=text, is_mistake=is_mistake) for text in answers if text]


async def _mirror_fault(address: str, key: str | None) -> str:
    start = "start it (python -m arl.engine.weights.mirror), or correct weights.mirrors"
    try:
        async with asyncio.timeout(_MIRROR_TIMEOUT_S):
            await MirrorClient(address, key).held()
        return ""
    except TimeoutError:
        return f"the mirror at {address} gave no answer within {_MIRROR_TIMEOUT_S:g} s: {start}"
    except (ArlError, ValueError) as error:
        return f"the mirror at {address} does not answer: {error}; {start}"


def dry_run(config: Config) -> PlacementTable:
    """What would run where, and the mistakes in it, without starting anything: a table, whose text says it all.

    Connects to the cluster at train.ray_address, asks the servers of engine.addresses and the mirrors, and leaves no
    file. For scripts and notebooks; `--dry-run` does the same for a script of `arl.run_script` or an Experiment.
    """
    tables: list[PlacementTable] = []
    failures: list[BaseException] = []

    def look() -> None:  # in a thread of its own, because a notebook's event loop runs in this one
        try:
            tables.append(asyncio.run(rehearse(config)))
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    thread = Thread(target=look, name="arl-dry-run")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return tables[0]


async def print_dry_run(config: Config) -> None:
    """Print the table. Raises SystemExit, with code 1, if there are mistakes."""
    table = await rehearse(config)
    end = f"{len(table.mistakes)} mistake(s)" if table.mistakes else "no mistakes found"
    display_of(config.log.model_copy(update={"console": True})).tell(
        "placement", f"{table}\n{end}; nothing was started", **table.rows()
    )
    if table.mistakes:
        raise SystemExit(1)


async def rehearse(config: Config) -> PlacementTable:
    """Does the same as dry_run."""
    if config.policies:
        return await _rehearsed_policies(config)
    try:
        config = await offload(with_named_servers, config)
    except ArlError as error:
        return PlacementTable(parts=[controller_part()], findings=[Finding(text=str(error))])
    findings = gpu_mistakes(config, visible_gpus())
    asking = asyncio.gather(ask_servers(config), check_mirrors(config))
    report = await offload(_asked, config)
    (greetings, of_servers), of_mirrors = await asking
    devices = {greeting.address: greeting.device for greeting in greetings}
    findings += [*of_servers, *of_mirrors, *report.findings, *await offload(_of_run_dir, config)]
    trainer = report.ranks if config.train.is_over_ray and config.train.ray_address else planned_trainer(config)
    parts = [controller_part(), *cluster_parts(config, report.num_nodes), *trainer]
    parts += [
        *planned_servers(config),
        *report.servers,
        *await offload(server_parts, devices, report, config),
        *beside_parts(config),
    ]
    shared = report.shared
    if config.train.ray_address is None:
        shared, own = await offload(_own_directories, config)
        findings += own
    return PlacementTable(parts=parts, shared=shared, findings=findings)


async def _rehearsed_policies(config: Config) -> PlacementTable:
    """Each policy's trainer and servers, and the controller once."""
    tables = {name: await rehearse(of_policy(config, name)) for name in config.policies}
    parts, first = [controller_part()], next(iter(tables))
    for name, table in tables.items():
        parts += [replace(p, name=f"{name} {p.name}".strip()) for p in table.parts if p.part == "trainer"]
        if name == first or not shares_servers(config):
            of = "" if shares_servers(config) else name
            parts += [replace(part, name=of) for part in table.parts if part.part == "server"]
    findings = {one.text: one for table in tables.values() for one in table.findings}
    shared, own = await offload(_own_directories, config)
    own += await offload(_of_run_dir, config)
    return PlacementTable(parts=[*parts, *beside_parts(config)], shared=shared, findings=[*findings.values(), *own])


def placed(
    config: Config,
    trainer: Placed,
    engine: InferenceEngine,
    opened: OpenedServers,
    findings: Sequence[Finding],
) -> PlacementTable:
    """What runs where, once all of it has started."""
    config, processes = with_named_servers(config), opened.processes
    devices = engine.devices if isinstance(engine, RemoteInferenceEngine) else {}
    servers = server_parts(devices, NodeReport(), config)
    if processes is not None:
        here = planned_servers(config) or [PlacedPart(part="server")] * len(processes.addresses)
        parts, ids = {**dict(zip(processes.addresses, here, strict=True)), **processes.parts}, processes.process_ids
        servers = [replace(part, address=address, pid=ids.get(address)) for address, part in parts.items()]
    parts = [controller_part(), *cluster_parts(config, 0), *trainer.parts, *servers, *beside_parts(config)]
    return PlacementTable(parts=parts, shared=trainer.shared, findings=[*findings, *trainer.findings])


def placed_policies(
    config: Config, trainers: Mapping[str, Placed], opened: Mapping[str, OpenedServers], findings: Sequence[Finding]
) -> PlacementTable:
    """What runs where, once all of it has started: the trainer of each policy, and its servers or those of all."""
    parts, seen = [controller_part()], set[str]()
    for name, trainer in trainers.items():
        parts += [replace(part, name=f"{name} {part.name}".strip()) for part in trainer.parts]
        own, servers = of_policy(config, name), opened[name]
        planned = planned_servers(own) or [PlacedPart(part="server")] * len(servers.addresses)
        ids = servers.processes.process_ids if servers.processes is not None else {}
        of = "" if shares_servers(config) else name
        for part, address in zip(planned, servers.addresses, strict=True):
            if address not in seen:
                parts.append(replace(part, name=of, address=address, pid=ids.get(address)))
                seen.add(address)
    warned = [*findings, *(finding for trainer in trainers.values() for finding in trainer.findings)]
    return PlacementTable(parts=[*parts, *beside_parts(config)], findings=warned)


async def check_start(config: Config) -> list[Finding]:
    """What settings and mirrors show before anything starts: the warnings. Raises ConfigError with the mistakes."""
    if config.policies:
        findings = [one for name in config.policies for one in gpu_mistakes(of_policy(config, name))]
        findings = [*{finding.text: finding for finding in findings}.values()]
        check(findings)
        return findings
    config = await offload(with_named_servers, config)
    findings = [*gpu_mistakes(config), *await check_mirrors(config)]
    check(findings)
    return findings


def asked_cluster(config: Config) -> NodeReport:
    """What the nodes of the cluster at train.ray_address say. Raises ConfigError if there is none."""
    from arl.engine.fsdp.ray_cluster import RayLease

    config = with_named_servers(config)
    with ExitStack() as stack:
        lease = RayLease(config.train.ray_address, num_cpus=0, num_gpus=0)
        stack.callback(lease.release)
        nodes = ray_nodes()
        return check_nodes(config, nodes, stack.enter_context(probes(nodes)))


def _asked(config: Config) -> NodeReport:
    """The cluster's report; without a cluster, or if it cannot be reached, one that says so."""
    weights, engine = config.weights, config.engine
    given = engine.addresses if isinstance(engine, RunningServersConfig) else ()
    if config.train.ray_address is not None:
        try:
            return asked_cluster(config)
        except ArlError as error:
            return NodeReport(findings=[Finding(text=str(error))])
    why = "not checked whether it reaches the trainer: there is no Ray node on its machine to try from"
    is_sent = isinstance(weights, DistributedWeightsConfig)
    return NodeReport(notes={url: why for url in given if is_sent and not is_here(url)})


def cluster_parts(config: Config, num_nodes: int) -> Iterator[PlacedPart]:
    if config.train.ray_address is not None:
        note = f"{num_nodes} node{'s' * (num_nodes != 1)}" if num_nodes else ""
        yield PlacedPart(part="ray", address=config.train.ray_address, note=note)


def _of_run_dir(config: Config) -> list[Finding]:
    lock = config.run_dir / LOCK
    if not is_locked(lock):
        return []
    return [Finding(text=f"another run trains in {config.run_dir}: {holder_of(lock)}; wait for its end")]


def _own_directories(config: Config) -> tuple[list[SharedPath], list[Finding]]:
    """The directories that this machine writes to."""
    shared, findings = list[SharedPath](), list[Finding]()
    weights: Any = getattr(config.weights, "directory", None)
    for name, path in (("run_dir", config.run_dir), ("weights.directory", weights)):
        if path is None:
            continue
        whole = Path(path).absolute()
        try:
            with written(whole):
                answer = "yes"
        except OSError as error:
            findings.append(local_finding(name, whole, error))
            answer = "no"
        seen = {controller_part().host: answer}
        if (name == "weights.directory") == (weights is not None):
            seen |= dict.fromkeys(_far_readers(config), "not checked (no Ray node there to look from)")
        shared.append(SharedPath(name=name, path=str(whole), seen=seen))
    return shared, findings


def _far_readers(config: Config) -> list[str]:
    """Hosts of servers on other machines that load weights from the trainer's files."""
    if isinstance(config.weights, DistributedWeightsConfig):
        return []
    given = config.engine.addresses if isinstance(config.engine, RunningServersConfig) else ()
    mirrored = config.weights.mirrors if isinstance(config.weights, DeltaWeightsConfig) else {}
    loading = {url.rstrip("/") for url in given} - {url.rstrip("/") for url in mirrored}
    return sorted(hostname_of(url) for url in loading if not is_here(url))
