"""Servers join and leave as a file names them; what is true of them stands in servers.json."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from protocol_server import Server, ask, assert_seamless, when
from scripted_weights import weights

from arl.api.errors import ConfigError, RunFileError, ServerError
from arl.api.settings.engines import ClientConfig
from arl.engine.client.membership import RosterFiles
from arl.engine.client.remote_engine import RemoteInferenceEngine
from arl.engine.client.servers_file import (
    NamedServer,
    ServerRow,
    ServersState,
    WatchedServers,
    edited,
    parse,
    read_servers,
    read_state,
)

NONE = ServerRow(address="", state="")
A, B, C = "http://10.0.0.1:30000", "http://10.0.0.2:30000", "http://10.0.0.3:30000"
M = "http://10.0.0.2:30900"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arl.engine.client.membership._LOOK_EVERY_S", 0.01)
    monkeypatch.setattr("arl.engine.client.membership._FIRST_BACKOFF_S", 0.05)
    monkeypatch.setattr("arl.engine.client.membership._GREETING_PAUSES_S", (0.0,))


# What the file says -----------------------------------------------------------------------------------------------


def test_a_line_names_a_server_its_mirror_and_when_it_is_to_leave():
    text = f"# mine\n\n{A}/  # the first\n{B} {C} \n {C}   drain=2.5\n"
    assert parse(text) == {
        A: NamedServer(address=A),
        B: NamedServer(address=B, mirror=C),
        C: NamedServer(address=C, drain_s=2.5),
    }
    assert parse("\n".join(one.line for one in parse(text).values())) == parse(text)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("10.0.0.1:30000", "line 2 holds '10.0.0.1:30000'; it must hold base URLs"),
        ("http://", "line 2 holds 'http://'"),
        ("http://a\0b:30000", "line 2 holds"),
        ("http://][@", "line 2 holds"),
        ("http://me:word@a:1", "line 2 names a user for http://a:1"),
        (f"{A} {B} {C}", "it must be ADDRESS"),
        ("drain=3", "it must be ADDRESS"),
        (f"{A} drain=soon", "line 2 has drain=soon; it must be a number of seconds"),
        (f"{A} drain=-1", "drain=-1"),
        (f"{A} drain=inf", "drain=inf"),
    ],
)
def test_a_line_that_makes_no_sense_is_named(line: str, what: str, tmp_path: Path):
    (tmp_path / "servers").write_text(f"{B}\n{line}\n")
    with pytest.raises(ConfigError, match=what):
        read_servers(tmp_path / "servers")


class Looks:
    """A file, and looks at it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.watched = WatchedServers(path, is_needed=False)

    def at(self, text: str | None, times: int) -> list[str]:
        """The addresses that count after so many looks at this text; None: there is no file."""
        self.path.unlink(missing_ok=True)
        if text is not None:
            self.path.write_bytes(text.encode(errors="surrogateescape"))
        for _ in range(times):
            self.watched.look()
        return [*(self.watched.named or {})]


@pytest.fixture
def looks(tmp_path: Path) -> Looks:
    return Looks(tmp_path / "servers.txt")


def test_a_changed_file_counts_once_two_looks_have_found_it_the_same(looks: Looks):
    assert looks.at(f"{A}\n", 1) == []
    assert looks.at(f"{A}\n{B}\n", 1) == []
    assert looks.at(f"{A}\n{B}\n", 1) == [A, B]


def test_servers_that_are_missing_leave_only_if_the_file_stays_so(looks: Looks):
    assert looks.at(f"{A}\n{B}\n{C}\n", 2) == [A, B, C]
    assert looks.at(f"{A}\n", 4) == [A, B, C]
    assert looks.at(f"{A}\n{B}\n{C}\n", 1) == [A, B, C]
    assert looks.at(f"{A}\n", 4) == [A, B, C]
    assert looks.at(f"{A}\n", 1) == [A]


def test_a_server_that_is_named_as_leaving_leaves_without_that_wait(looks: Looks):
    assert looks.at(f"{A}\n{B}\n", 2) == [A, B]
    looks.at(f"{A}\n{B} drain=5\n", 2)
    assert looks.watched.named == parse(f"{A}\n{B} drain=5\n")


def test_a_last_line_without_an_end_may_be_half_of_one(looks: Looks):
    half = A[:-1]  # a port of one digit less is a port, too
    assert looks.at(f"{B}\n{half}", 4) == []
    assert looks.at(f"{B}\n{A}", 4) == []
    assert looks.at(f"{B}\n{A}", 1) == [B, A]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "there is no such file"),
        ("", "it names no server"),
        ("# nothing\n\n", "it names no server"),
        (f"{A}\nhttp:/\n", "line 2 holds 'http:/'"),
        ("\udcff\udcfe", "can't decode"),
        (f"# {'x' * (1 << 20)}\n{A}\n", "more than 1048576 bytes"),
    ],
)
def test_a_file_that_says_nothing_changes_nothing(looks: Looks, text: str | None, problem: str):
    looks.at(f"{A}\n{B}\n", 2)
    assert looks.at(text, 50) == [A, B]
    assert problem in looks.watched.problem
    assert looks.at(f"{A}\n", 5) == [A]
    assert looks.watched.problem == ""


def test_a_missing_file_is_a_problem_only_if_somebody_else_was_to_write_it(tmp_path: Path):
    for is_needed in (False, True):
        watched = WatchedServers(tmp_path / "servers", is_needed=is_needed)
        watched.look()
        assert bool(watched.problem) == is_needed


# The file of a run ------------------------------------------------------------------------------------------------


def test_edits_keep_comments_and_wait_for_one_another(tmp_path: Path):
    path = tmp_path / "servers.txt"
    path.write_text(f"# mine\n{A}  # the first\n{B} drain=5\n")
    with edited(tmp_path, "now") as edit:
        edit.put(NamedServer(address=C, mirror=A))
    assert path.read_text() == f"# Edited now\n# mine\n{A}  # the first\n{C} {A}\n"
    assert edit.written_ns == path.stat().st_mtime_ns
    with suppress(ServerError), edited(tmp_path, "later") as edit:
        edit.forget(A)
        raise ServerError("no")
    with edited(tmp_path, "at last") as edit:
        edit.put(NamedServer(address=A, drain_s=1.0))
    assert path.read_text() == f"# Edited at last\n# mine\n{A} drain=1\n{C} {A}\n"


def test_an_edit_of_a_server_that_is_named_twice_changes_both_lines(tmp_path: Path):
    (tmp_path / "servers.txt").write_text(f"{A}\n{B}\n{A}  # again\n")
    with edited(tmp_path, "now") as edit:
        edit.put(NamedServer(address=A, drain_s=1.0))
    assert (tmp_path / "servers.txt").read_text() == f"# Edited now\n{A} drain=1\n{B}\n"


@pytest.mark.parametrize("text", ["", "# none\n"])
def test_an_edit_of_a_file_that_names_no_server_keeps_those_of_the_run(text: str, tmp_path: Path):
    rows = (ServerRow(address=A, state="serving"), ServerRow(address=B, state="fenced", mirror=M))
    ServersState(at=0.0, file=None, is_users=False, min_servers=1, servers=rows).write(tmp_path)
    (tmp_path / "servers.txt").write_text(text)
    with edited(tmp_path, "now") as edit:
        edit.put(NamedServer(address=C))
    assert (tmp_path / "servers.txt").read_text() == f"# Edited now\n{text}{A}\n{B} {M}\n{C}\n"


def test_a_file_that_is_too_long_cannot_be_edited(tmp_path: Path):
    (tmp_path / "servers.txt").write_text("#" * (1 << 20) + "\n")
    with pytest.raises(RunFileError, match="cannot be edited: it has more than"), edited(tmp_path, "now"):
        pass


# A running engine -------------------------------------------------------------------------------------------------


@asynccontextmanager
async def following(run_dir: Path, first: list[str], **settings: Any) -> AsyncIterator[RemoteInferenceEngine]:
    """An engine that follows run_dir/servers.txt."""
    files = RosterFiles(run_dir=run_dir, named=run_dir / "servers.txt", needs_all=False)
    config = ClientConfig(**{"request_timeout_s": 30.0, **settings})
    async with RemoteInferenceEngine(first, config, files=files) as engine:
        yield engine


Looking = Callable[[], Awaitable[None]]


@pytest.fixture
def several_looks(monkeypatch: pytest.MonkeyPatch) -> Looking:
    """Waits until the file has been looked at six times more."""
    looks, look = list[bool](), WatchedServers.look
    monkeypatch.setattr(WatchedServers, "look", lambda watched: (found := look(watched), looks.append(found))[0])

    async def wait() -> None:
        before = len(looks)
        await when(lambda: len(looks) > before + 6)

    return wait


def name(run_dir: Path, *servers: Server | str) -> None:
    lines = [one.address if isinstance(one, Server) else one for one in servers]
    (run_dir / "servers.txt").write_text("".join(f"{line}\n" for line in lines))


def serving(engine: RemoteInferenceEngine) -> set[str]:
    return {server.address for server in engine._pool.in_service}


def row_of(state: ServersState, server: Server) -> ServerRow:
    row = state.row(server.address)
    assert row is not None
    return row


async def told(run_dir: Path, holds: Callable[[ServersState], object]) -> ServersState:
    """What servers.json says, once this holds of it."""

    def does() -> bool:
        state = read_state(run_dir)
        return state is not None and bool(holds(state))

    await when(does)
    state = read_state(run_dir)
    assert state is not None
    return state


async def test_a_server_that_the_file_names_joins_with_the_current_weights_and_leaves_when_it_is_gone(
    server: Server, other: Server, tmp_path: Path
):
    async with following(tmp_path, [server.address]) as engine:
        await engine.update_weights(weights(3))
        name(tmp_path, server, other)
        await when(lambda: serving(engine) == {server.address, other.address})
        assert other.label == "3"
        state = await told(tmp_path, lambda state: [row.state for row in state.servers] == ["serving"] * 2)
        assert [(row.version, row.requests) for row in state.servers] == [(3, 0)] * 2
        name(tmp_path, other)
        await when(lambda: serving(engine) == {other.address})
        assert_seamless(await engine.agenerate(ask()), 4)
        assert server.pause_mode is None
    assert len(other.requests) == 1


async def test_all_servers_can_be_replaced_at_once(server: Server, other: Server, tmp_path: Path):
    """The one that leaves may only go once the one that joins serves."""
    async with following(tmp_path, [server.address]) as engine:
        other.load_gate.clear()
        await engine.update_weights(weights(1))
        name(tmp_path, other)
        await when(lambda: other.names().count("update_weights_from_disk"))
        stays = await told(tmp_path, lambda state: any(row.stays for row in state.servers))
        assert "is the last server that serves" in next(row.stays for row in stays.servers if row.stays)
        other.load_gate.set()
        await when(lambda: serving(engine) == {other.address})


async def test_a_server_that_cannot_join_is_told_of_once_and_tried_again(
    server: Server, other: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    await other.stop()
    async with following(tmp_path, [server.address]) as engine:
        name(tmp_path, server, other)
        state = await told(tmp_path, lambda state: state.servers[-1].state == "absent")
        assert state.servers[1].version is None
        assert "could not be reached" in state.servers[1].why
        await when(lambda: engine._roster and engine._roster._num_failures > 2)
        await other.start()
        await when(lambda: serving(engine) == {server.address, other.address})
        assert (await told(tmp_path, lambda state: row_of(state, other).state == "serving")).problem == ""
    said = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1
    assert f"{other.address} cannot join, and is tried again" in said[0]


async def test_a_server_that_is_named_no_more_gives_up_joining(server: Server, other: Server, tmp_path: Path):
    async with following(tmp_path, [server.address]) as engine:
        await engine.update_weights(weights(1))
        other.load_gate.clear()
        name(tmp_path, server, other)
        await when(lambda: "update_weights_from_disk" in other.names())
        name(tmp_path, server)
        await when(lambda: [one.address for one in engine._pool.servers] == [server.address])
        await when(lambda: "continue_generation" in other.names()[-1])
        other.load_gate.set()
        await told(tmp_path, lambda state: len(state.servers) == 1)


async def test_a_server_that_gives_up_joining_is_resumed_even_if_that_takes_several_looks(
    server: Server, other: Server, tmp_path: Path, several_looks: Looking
):
    async with following(tmp_path, [server.address]) as engine:
        await engine.update_weights(weights(1))
        other.load_gate.clear()
        name(tmp_path, server, other)
        await when(lambda: "update_weights_from_disk" in other.names())
        other.resume_gate.clear()
        name(tmp_path, server)
        await when(lambda: "continue_generation" in other.names()[-1])
        assert engine._roster is not None
        change = engine._roster._changes[other.address]
        await several_looks()
        assert not change.done()
        other.resume_gate.set()
        await when(lambda: other.pause_mode is None)


async def test_a_server_that_is_named_again_while_it_drains_stays(server: Server, other: Server, tmp_path: Path):
    other.is_automatic = False
    async with following(tmp_path, [server.address, other.address]) as engine, asyncio.TaskGroup() as group:
        engine._line._sessions["s"] = (engine._pool.servers[1], 0)
        call = await other.begin(group, engine.agenerate(ask(session="s")))
        name(tmp_path, server, f"{other.address} drain=600")
        state = await told(tmp_path, lambda state: row_of(state, other).state == "draining")
        assert row_of(state, other).requests == 1
        name(tmp_path, server, other)
        await told(tmp_path, lambda state: row_of(state, other).state == "serving")
        other.advance(4)
        assert_seamless(await call, 4)
    assert other.aborted == []


async def test_a_server_that_leaves_drains_as_long_as_its_line_says(server: Server, other: Server, tmp_path: Path):
    other.is_automatic = False
    async with following(tmp_path, [server.address, other.address]) as engine, asyncio.TaskGroup() as group:
        engine._line._sessions["s"] = (engine._pool.servers[1], 0)
        call = await other.begin(group, engine.agenerate(ask(6, session="s")))
        other.advance(2)
        name(tmp_path, server, f"{other.address} drain=0.05")
        assert_seamless(await call, 6)  # continued on the server that stays
        await when(lambda: serving(engine) == {server.address})
    assert [len(sent["input_ids"]) for sent in server.requests] == [5]


async def test_an_empty_or_missing_file_is_told_of_once_and_changes_nothing(
    server: Server, other: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, several_looks: Looking
):
    async with following(tmp_path, [server.address, other.address]) as engine:
        name(tmp_path, server, other)
        await told(tmp_path, lambda state: state.settled_ns)
        for spoil in (name, lambda run_dir: (run_dir / "servers.txt").unlink()):
            spoil(tmp_path)
            await told(tmp_path, lambda state: state.problem)
            await several_looks()
            assert serving(engine) == {server.address, other.address}
    assert [record.message.partition(":")[2] for record in caplog.records] == [
        " it names no server; the servers stay as they are until that is mended",
        " there is no such file; the servers stay as they are until that is mended",
    ]


async def test_a_run_starts_with_those_of_its_file_that_answer(
    server: Server, other: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    await other.stop()
    name(tmp_path, server, other)
    async with following(tmp_path, [server.address, other.address]) as engine:
        assert serving(engine) == {server.address}
        assert f"1 of 2 servers cannot join: {other.address}" in caplog.text
        await other.start()
        await when(lambda: serving(engine) == {server.address, other.address})
    await other.stop()
    with pytest.raises(ServerError, match=r"1 of 2 servers cannot join: .* needs 2 of them \(engine\.min_servers\)"):
        async with following(tmp_path, [server.address, other.address], min_servers=2):
            pass


async def test_a_run_whose_file_names_too_few_servers_does_not_start(server: Server, tmp_path: Path):
    with pytest.raises(ServerError, match=r"needs 2 servers \(engine\.min_servers\), and its servers file has 1"):
        async with following(tmp_path, [server.address], min_servers=2):
            pass


async def test_a_state_that_cannot_be_written_stops_nothing(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "servers.json").mkdir()
    async with following(tmp_path, [server.address]) as engine:
        await when(lambda: "the state of the servers cannot be written" in caplog.text)
        (tmp_path / "servers.json").rmdir()
        await told(tmp_path, lambda state: state.servers)
        assert_seamless(await engine.agenerate(ask()), 4)


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_the_file_says_in_between_the_servers_are_those_of_its_end_and_no_request_is_lost(
    seed: int, tmp_path: Path
):
    rng, stop = random.Random(seed), asyncio.Event()
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(Server()) for _ in range(5)]
        gone = servers[-1]
        await gone.stop()
        addresses = [server.address for server in servers]
        spoilt = ["", "#\n", "http://\n", addresses[0][:-1] + "\n", f"{addresses[1]}\n{addresses[0][:9]}", None]
        engine = await stack.enter_async_context(following(tmp_path, addresses[:2]))
        answers = list[Any]()

        async def keep_asking(number: int) -> None:
            while not stop.is_set():
                answers.append(await engine.agenerate(ask(4, session=str(number))))
                await asyncio.sleep(0.002)

        async with asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(keep_asking(number))
            for version in range(1, 13):
                group.create_task(engine.update_weights(weights(version)))
                text = rng.choice(spoilt)
                if rng.random() < 0.3 and text is None:
                    (tmp_path / "servers.txt").unlink(missing_ok=True)
                elif rng.random() < 0.4:
                    (tmp_path / "servers.txt").write_text(text or "")
                else:
                    drained = [f"{address} drain=0.01" for address in rng.sample(addresses, rng.randrange(2))]
                    name(tmp_path, *rng.sample(servers, rng.randrange(1, 5)), *drained)
                await asyncio.sleep(rng.choice((0.0, 0.02, 0.15)))
            wanted = {server.address for server in rng.sample(servers[:-1], rng.randrange(1, 5))}
            name(tmp_path, *wanted, gone.address)
            await when(lambda: serving(engine) == wanted)
            left = {*wanted, gone.address}  # one that leaves is named until it has left

            def is_settled(state: ServersState) -> bool:
                rows = {row.address: row for row in state.servers}
                return rows.keys() == left and "not be reached" in rows[gone.address].why

            await told(tmp_path, is_settled)
            asked = len(answers)
            await when(lambda: len(answers) > asked + 20)
            stop.set()
        assert engine.version == 12
    for answer in answers:
        assert_seamless(answer, 4)
