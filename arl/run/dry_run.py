"""`--dry-run`: what would run where, and the mistakes in it, without starting anything. A real start checks part of it.

Settings, mirrors, this machine's GPUs and directories, the servers, and the nodes of a Ray cluster by a probe on each.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from arl.api.errors import ArlError, ConfigError, ServerError
from arl.api.events import Finding, SharedPath
from arl.api.settings.engines import DeltaWeightsConfig, DistributedWeightsConfig, RunningServersConfig
from arl.api.settings.run import Config
from arl.cluster.node_checks import NodeReport, local_finding, written
from arl.cluster.placement import (
    PlacementTable,
    beside_parts,
    controller_part,
    gpu_mistakes,
    hostname_of,
    planned_servers,
    planned_trainer,
    visible_gpus,
)
from arl.engine.client.remote_engine import client_class
from arl.engine.client.server_client import Greeting, ServerClient, difference, expected_of, greet
from arl.engine.client.servers_file import base_url
from arl.engine.model_files import served_model
from arl.run.engines import check_mirrors, cluster_parts, may_join_later, server_parts
from arl.run.learner import asked_cluster
from arl.run.servers import of_policy, shares_servers, with_named_servers
from arl.runtime.http.client import Connections
from arl.runtime.http.server import is_here
from arl.runtime.threads import offload
from arl.training.display import display_of
from arl.training.run_dir import LOCK, holder_of, is_locked


async def ask_servers(config: Config) -> tuple[list[Greeting], list[Finding]]:
    """The given servers' descriptions of themselves, and what is wrong with them. Changes nothing on them."""
    engine = config.engine
    if not isinstance(engine, RunningServersConfig):
        return [], []
    try:
        urls = list(dict.fromkeys(map(base_url, engine.addresses)))
    except ConfigError as error:
        return [], [Finding(text=str(error))]

    async def greeted(client: ServerClient) -> Greeting | ServerError:
        try:
            return await greet(client, sets_going=False)
        except ServerError as error:
            return error

    async with Connections() as connections:
        clients = [client_class(engine)(connections, url, engine.key) for url in urls]
        answers = await asyncio.gather(*map(greeted, clients))
    greetings = [answer for answer in answers if isinstance(answer, Greeting)]
    texts = [f"{answer}: start the server, or take it out" for answer in answers if isinstance(answer, ServerError)]
    partly = [one for one in greetings if one.unreached]
    texts += [f"weight updates would not reach all of {one.address}, which runs with {one.unreached}" for one in partly]
    expected = list[Greeting]()
    try:
        if await offload(Path(config.model).is_dir):  # a model of the hub is not downloaded for this
            expected = [expected_of(await offload(served_model, config.model))]
    except ArlError as error:
        return greetings, [Finding(text=text) for text in [*texts, str(error)]]
    if sentence := difference([*expected, *greetings]):
        texts.append(f"the servers do not serve the same model: {sentence}; start all with the model of this run")
    is_mistake = len(greetings) < engine.min_servers or not await offload(may_join_later, config)
    return greetings, [Finding(text=text, is_mistake=is_mistake) for text in texts]


def dry_run(config: Config) -> PlacementTable:
    """What would run where, and the mistakes in it, without starting anything: a table, whose text says it all.

    Connects to the cluster at train.ray_address, asks the servers of engine.addresses and the mirrors, and leaves no
    file. For scripts and notebooks; `--dry-run` does the same for a script of `arl.run_script` or an Experiment.
    """
    with ThreadPoolExecutor(1, "arl-dry-run") as thread:  # a notebook's event loop runs in this one
        return thread.submit(asyncio.run, rehearse(config)).result()


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
    findings += [*of_servers, *of_mirrors, *report.findings, *await offload(_other_run, config)]
    trainer = report.ranks if config.train.is_over_ray and config.train.ray_address else planned_trainer(config)
    parts = [controller_part(), *cluster_parts(config, report.num_nodes), *trainer]
    parts += [
        *planned_servers(config),
        *report.servers,
        *await offload(server_parts, config, devices, report.hosts, report.notes),
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
    own += await offload(_other_run, config)
    return PlacementTable(parts=[*parts, *beside_parts(config)], shared=shared, findings=[*findings.values(), *own])


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


def _other_run(config: Config) -> list[Finding]:
    if not is_locked(lock := config.run_dir / LOCK):
        return []
    return [Finding(text=f"another run trains in {config.run_dir}: {holder_of(lock)}; wait for its end")]


def _own_directories(config: Config) -> tuple[list[SharedPath], list[Finding]]:
    """The directories that this machine writes to."""
    shared, findings, far = list[SharedPath](), list[Finding](), list[str]()
    if not isinstance(config.weights, DistributedWeightsConfig):  # servers elsewhere load weights from these files
        given = config.engine.addresses if isinstance(config.engine, RunningServersConfig) else ()
        mirrored = config.weights.mirrors if isinstance(config.weights, DeltaWeightsConfig) else {}
        loading = {url.rstrip("/") for url in given} - {url.rstrip("/") for url in mirrored}
        far = sorted(hostname_of(url) for url in loading if not is_here(url))
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
            seen |= dict.fromkeys(far, "not checked (no Ray node there to look from)")
        shared.append(SharedPath(name=name, path=str(whole), seen=seen))
    return shared, findings
