"""What servers and mirrors that somebody else runs say of themselves, and what is wrong with them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arl.api.config import Config
from arl.api.engine_config import DeltaWeightsConfig, RunningServersConfig
from arl.api.errors import ArlError, ConfigError, ServerError
from arl.api.placed import Finding, PlacedPart
from arl.cluster.node_checks import NodeReport
from arl.cluster.planned import hostname_of
from arl.cluster.servers_file import SERVERS, base_url, read_servers
from arl.engine.client.remote_engine import client_class
from arl.engine.client.server_client import Greeting, ServerClient, difference, expected_of, greet
from arl.engine.model_files import served_model
from arl.engine.weights.delta import MirrorClient
from arl.offload import offload
from arl.web.connections import Connections

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
