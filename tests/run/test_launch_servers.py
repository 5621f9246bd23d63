"""Which servers a run has: those of engine.addresses, or of a servers file, which it follows."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from engine.client.protocol_server import Server
from one_turn import OneTurn
from scripted_launch import small, use_scripted_training

import arl.run.servers
from arl.api.engine import ServedModel
from arl.api.errors import ConfigError
from arl.api.settings.engines import DeltaWeightsConfig
from arl.api.settings.run import Config
from arl.engine.client.servers_file import ServersState, read_state
from arl.engine.weights.delta import DeltaTransport
from arl.run.launch import launch
from arl.run.servers import OpenedServers, open_servers, serve

A, B, M = "http://10.0.0.1:30000", "http://10.0.0.2:30000", "http://10.0.0.2:30900"


async def opened(config: Config) -> OpenedServers:
    async with AsyncExitStack() as stack:
        return await open_servers(config, stack, config.run_dir)


@pytest.fixture
async def servers(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Server]]:
    use_scripted_training(monkeypatch)
    monkeypatch.setattr(arl.run.servers, "served_model", lambda name, **_: ServedModel(name=name))
    monkeypatch.setattr("arl.engine.client.membership._LOOK_EVERY_S", 0.01)
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Server()) for _ in range(2)]


async def test_a_run_trains_with_the_servers_of_its_file_while_they_change(servers: list[Server], tmp_path: Path):
    file = tmp_path / "servers"
    file.write_text(servers[0].address + "\n")
    config = small(tmp_path / "run", engine={"kind": "sglang", "servers_file": file})
    dataset = [{"number": number} for number in range(8)]
    async with launch(config, workflow=OneTurn(), dataset=dataset) as trainer, asyncio.timeout(60):
        await anext(trainer)
        file.write_text(servers[1].address + "\n")
        while of(state := read_state(config.run_dir)) != [servers[1].address]:  # noqa: ASYNC110 - it is a file
            await asyncio.sleep(0.01)
        await anext(trainer)
        while servers[1].label != "2":  # noqa: ASYNC110 - of what the server does, it tells nobody
            await asyncio.sleep(0.01)
    assert state is not None
    assert (state.file, state.is_users) == (str(file), True)
    assert servers[1].requests


def of(state: ServersState | None) -> list[str]:
    return [row.address for row in state.servers] if state else []


async def test_episodes_without_training_follow_the_file_and_tell_nobody(servers: list[Server], tmp_path: Path):
    file = tmp_path / "servers"
    file.write_text(servers[0].address + "\n")
    config = small(tmp_path / "run", engine={"kind": "sglang", "servers_file": file})
    async with serve(config), asyncio.timeout(60):
        file.write_text("".join(f"{server.address}\n" for server in servers))
        await servers[1].until(lambda: "health" in [name for name, _ in servers[1].calls])
    assert read_state(config.run_dir) is None


async def test_the_file_of_a_run_decides_when_it_starts_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    config = small(tmp_path, engine={"kind": "sglang", "addresses": [A + "/"]})
    of_settings = await opened(config)
    assert ([*of_settings.addresses], of_settings.files and of_settings.files.needs_all) == ([A + "/"], True)
    (tmp_path / "servers.txt").write_text(f"{A} drain=5\n{B}\n")
    of_file = await opened(config)
    assert ([*of_file.addresses], of_file.files and of_file.files.needs_all) == ([B], False)
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 1
    assert f"engine.addresses is ignored: {A}/ is left out" in said[0]


async def test_a_file_that_names_no_server_leaves_the_choice_to_the_addresses(tmp_path: Path):
    engine = {"kind": "sglang", "servers_file": tmp_path / "servers"}
    with pytest.raises(ConfigError, match=r"servers, which names no server, and engine\.addresses is empty"):
        await opened(small(tmp_path, engine=engine))
    (tmp_path / "servers").write_text("# none yet\n")
    found = await opened(small(tmp_path, engine={**engine, "addresses": [A]}))
    assert [*found.addresses] == [A]
    (tmp_path / "servers").write_text(f"{A}\nhttp:/\n")
    with pytest.raises(ConfigError, match="servers: line 2 holds 'http:/'"):
        await opened(small(tmp_path, engine=engine))


async def test_a_server_of_the_file_brings_its_mirror(tmp_path: Path):
    """Also one that joins later: the transport asks for the mirror at each update."""
    engine = {"kind": "sglang", "servers_file": tmp_path / "servers"}
    (tmp_path / "servers").write_text(f"{A}\n{B} {M}\n")
    with pytest.raises(ConfigError, match=rf"names a mirror of {B}, but only weights.transport=delta has mirrors"):
        await opened(small(tmp_path, engine=engine))
    config = small(tmp_path, engine=engine, weights={"transport": "delta"})
    found = await opened(config)
    assert found.files is not None
    assert found.files.mirrors is found.mirrors
    assert found.mirrors == {B: M}
    assert isinstance(config.weights, DeltaWeightsConfig)
    transport = DeltaTransport(config.weights, tmp_path, mirrors=found.mirrors)
    found.mirrors[A] = M
    assert transport.mirror_of(A) is transport.mirror_of(B)
    assert transport.mirror_of("http://10.0.0.3:30000") is None
    transport.close()
