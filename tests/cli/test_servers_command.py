"""`arl servers`, beside an engine that follows the file which the command edits."""

import asyncio
import re
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from engine.client.protocol_server import Server, ask, assert_seamless
from engine.client.scripted_weights import weights

from arl.__main__ import main
from arl.api.settings.engines import ClientConfig
from arl.engine.client.membership import RosterFiles
from arl.engine.client.remote_engine import RemoteInferenceEngine
from arl.engine.client.servers_file import parse, read_state
from arl.training.run_dir import RunLock


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with Server() as server:
        yield server


@pytest.fixture
async def other() -> AsyncIterator[Server]:
    async with Server() as server:
        yield server


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arl.engine.client.membership._LOOK_EVERY_S", 0.01)
    monkeypatch.setattr("arl.cli.servers_command._LOOK_EVERY_S", 0.02)


class Said(NamedTuple):
    code: int
    out: str
    err: str


class Command:
    """`arl servers` on one run: called on a thread, or in a process of its own."""

    def __init__(self, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.run_dir = run_dir
        self._capsys = capsys

    async def __call__(self, action: str, *arguments: str) -> Said:
        def call() -> int:
            try:
                main(["servers", action, str(self.run_dir), *arguments])
            except SystemExit as end:
                return end.code if isinstance(end.code, int) else 1
            return 0

        self._capsys.readouterr()
        code = await asyncio.to_thread(call)
        said = self._capsys.readouterr()
        return Said(code, said.out, said.err)

    async def process(self, action: str, *arguments: str) -> Said:
        pipe = asyncio.subprocess.PIPE
        argv = (sys.executable, "-m", "arl", "servers", action, str(self.run_dir), *arguments)
        process = await asyncio.create_subprocess_exec(*argv, stdout=pipe, stderr=pipe)
        out, err = await process.communicate()
        return Said(process.returncode or 0, out.decode(), err.decode())


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path / "run", capsys)


@asynccontextmanager
async def run_over(run_dir: Path, *servers: Server, **settings: Any) -> AsyncIterator[RemoteInferenceEngine]:
    """What a run has of it: the lock, and an engine over these servers that follows run_dir/servers.txt."""
    lock = RunLock(run_dir)
    lock.take()
    files = RosterFiles(run_dir=run_dir, **{"named": run_dir / "servers.txt", **settings.pop("files", {})})
    config = ClientConfig(**{"request_timeout_s": 30.0, **settings})
    addresses = [server.address for server in servers]
    try:
        async with RemoteInferenceEngine(addresses, config, files=files) as engine, asyncio.timeout(60):
            while read_state(run_dir) is None:  # noqa: ASYNC110 - it is a file
                await asyncio.sleep(0.01)
            yield engine
    finally:
        lock.release()


def named(command: Command) -> set[str]:
    text = (command.run_dir / "servers.txt").read_text()
    return {address for address, one in parse(text).items() if one.drain_s is None}


async def test_a_server_joins_and_leaves_a_run_from_another_process(server: Server, other: Server, command: Command):
    async with run_over(command.run_dir, server) as engine:
        await engine.update_weights(weights(7))
        joined = await command.process("add", other.address)
        assert joined == (0, f"{other.address} serves, with weights of version 7\n", "")
        responses = await asyncio.gather(*(engine.agenerate(ask()) for _ in range(4)))
        assert len(other.requests) == 2
        left = await command.process("remove", server.address)
        assert left == (0, f"{server.address} has left\n", "")
        assert [one.address for one in engine._pool.servers] == [other.address]
        for response in [*responses, await engine.agenerate(ask())]:
            assert_seamless(response, 4)
    assert named(command) == {other.address}


async def test_the_table_shows_each_server_and_why_it_does_not_serve(server: Server, other: Server, command: Command):
    async with run_over(command.run_dir, server, other, files={"mirrors": {server.address: "http://m:1"}}) as engine:
        engine._upkeep.fence(engine._pool.servers[1], "it answered [/b] \x1b]0;nonsense")
        other.is_healthy = False
        await command("add", "http://127.0.0.1:9", "--no-wait")
        async with asyncio.timeout(30):
            while "127.0.0.1:9 " not in (said := await command.process("list")).out or "absent" not in said.out:
                pass
    assert (said.code, said.err) == (0, "")
    text = re.sub(r"\s+", " ", said.out)
    assert "trains" in text.partition("server state for version requests mirror why")[0]
    assert re.search(rf"{other.address} fenced \d+ s 0 0 it answered \[/b\] \]0;nonsense", text)
    assert "\x1b" not in said.out
    assert re.search(r"http://127\.0\.0\.1:9 absent \d+ s .*could not be", text)
    assert re.search(rf"{server.address} serving \d+ s 0 0 http://m:1", text)
    assert "1 of 3 servers serve; engine.min_servers is 1" in text
    after = await command("list")
    assert "no run trains here now; at 20" in after.out


async def test_a_server_that_cannot_join_is_an_error_with_its_reason(server: Server, other: Server, command: Command):
    async with run_over(command.run_dir, server):
        other.tells["model_info"] = {"no": "model"}
        said = await command("add", other.address)
        assert said.code == 1
        assert f"{other.address} does not serve: {other.address} is not an SGLang server" in said.err
        assert "the run tries again" in said.err
        assert named(command) == {server.address, other.address}
        other.tells.clear()
        assert (await command("add", other.address)).code == 0


async def test_a_server_that_does_not_leave_stays_in_the_file(server: Server, other: Server, command: Command):
    async with run_over(command.run_dir, server, other) as engine:
        engine._upkeep.fence(engine._pool.servers[1], "it answered nonsense")
        other.is_healthy = False
        said = await command("remove", server.address)
        assert said.code == 1
        assert f"{server.address} stays: {server.address} is the last server that serves" in said.err
        assert named(command) == {server.address, other.address}
        said = await command("remove", server.address, other.address)
        assert said.code == 1
        assert f"{other.address} is the last server; add another before removing it" in said.err
        said = await command("remove", "http://127.0.0.1:9")
        assert said.code == 1
        assert f"http://127.0.0.1:9 is not one of the servers: {server.address}, {other.address}" in said.err


async def test_no_server_leaves_if_too_few_would_be_left(server: Server, other: Server, command: Command):
    async with run_over(command.run_dir, server, other, min_servers=2):
        said = await command("remove", server.address)
    assert said == (1, "", "error: engine.min_servers is 2, and 1 server would be left\n")
    assert not (command.run_dir / "servers.txt").exists()


async def test_requests_that_outlast_the_drain_timeout_go_on_elsewhere(server: Server, other: Server, command: Command):
    other.is_automatic = False
    async with run_over(command.run_dir, server, other) as engine, asyncio.TaskGroup() as group:
        engine._line._sessions["s"] = (engine._pool.servers[1], 0)
        call = await other.begin(group, engine.agenerate(ask(6, session="s")))
        other.advance(2)
        assert (await command("remove", other.address, "--drain-timeout", "0.1")).code == 0
        assert_seamless(await call, 6)
    assert [len(sent["input_ids"]) for sent in server.requests] == [5]


async def test_a_command_that_is_interrupted_leaves_the_rest_to_the_run(
    server: Server, other: Server, command: Command, monkeypatch: pytest.MonkeyPatch
):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    async with run_over(command.run_dir, server) as engine:
        monkeypatch.setattr("arl.cli.servers_command._failed", interrupt)
        said = await command("add", other.address)
        assert said == (130, "", "not waited for: the run still does what its servers file says\n")
        while engine.counters()["servers/serving"] < 2:
            await engine._pool.changed()


async def test_without_a_run_the_file_waits_for_the_next_start(server: Server, other: Server, command: Command):
    async with run_over(command.run_dir, server):
        pass
    said = await command("add", other.address)
    assert said.code == 0
    assert (
        said.out == f"{command.run_dir / 'servers.txt'} names 2 servers; no run trains now: the next start has these\n"
    )
    assert named(command) == {server.address, other.address}
    assert (await command("remove", server.address)).code == 0
    assert named(command) == {other.address}


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"named": None}, "engine.num_servers says how many"),
        ({"named": Path("/of/somebody"), "is_users": True}, "edit /of/somebody"),
    ],
)
async def test_servers_that_others_choose_cannot_be_told(
    files: dict[str, Any], reason: str, server: Server, other: Server, command: Command
):
    async with run_over(command.run_dir, server, files=files):
        for action in ("add", "remove"):
            said = await command(action, other.address)
            assert said.code == 2
            assert reason in said.err
        assert server.address in (await command("list")).out


async def test_without_such_a_run_or_address_nothing_is_done(server: Server, command: Command):
    for action in ("list", "add", "remove"):
        said = await command(action, *["http://127.0.0.1:9"] * (action != "list"))
        assert said.code == 2
        assert "there is no run in" in said.err
    lock = RunLock(command.run_dir)
    lock.take()
    said = await command("add", "http://127.0.0.1:9")
    assert "has not connected to its servers yet" in said.err
    own = [command.run_dir / "policies" / name for name in ("author", "critic")]
    for directory in own:
        directory.mkdir(parents=True)
        (directory / "servers.json").write_text("{}")
    for action in ("list", "add"):
        said = await command(action, *["http://127.0.0.1:9"] * (action != "list"))
        assert f"give the directory of one: {own[0]}, {own[1]}" in said.err
    shutil.rmtree(command.run_dir / "policies")
    lock.release()
    async with run_over(command.run_dir, server):
        said = await command("add", "10.0.0.5:30000")
        assert said.code == 2
        assert "the command holds '10.0.0.5:30000'; it must hold base URLs" in said.err
    assert not (command.run_dir / "servers.txt").exists()
