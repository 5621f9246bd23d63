"""The promises of docs/security.md that no other test holds; its table names the others."""

import ast
import asyncio
import os
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from sources import ROOT, trees

from arl.api.errors import ConfigError
from arl.api.settings.engines import DeltaWeightsConfig, LocalEngineConfig, SGLangEngineConfig, SGLangProcessesConfig
from arl.api.settings.run import Config
from arl.api.settings.sections import settings_of
from arl.api.types import ModelRequest, SamplingParams
from arl.engine.tiny import TinyShape, write_tiny_model
from arl.run.servers import serve
from arl.runtime.http import server as module
from arl.runtime.http.bodies import BodyError, RequestBody, parse
from arl.runtime.http.server import bind, body_of, key_of, serving

LISTENING = "0A"
"""The state of a socket in /proc/net/tcp."""
SHAPE = TinyShape(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=2, context_length=64)


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def seen_of(pid: int, name: str) -> list[bytes]:
    """The environment of a process, which its user may read, or its command line, which everybody may."""
    return Path(f"/proc/{pid}/{name}").read_bytes().split(b"\0")


def listening(pid: int) -> set[str]:
    """The IPv4 addresses that a process listens at; its IPv6 ones as they stand in /proc."""
    links = (os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir())
    inodes = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        rows = [row.split() for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]]
        addresses = [row[1].split(":")[0] for row in rows if row[3] == LISTENING and row[9] in inodes]
        found |= {socket.inet_ntoa(bytes.fromhex(one)[::-1]) if table == "tcp" else one for one in addresses}
    return found


@pytest.mark.runs
async def test_servers_that_arl_starts_take_a_key_that_no_other_user_can_read(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", shape=SHAPE, seed=0)
    before = set(children())
    async with serve(
        Config(model=str(model), run_dir=tmp_path / "run", engine=LocalEngineConfig(num_servers=1))
    ) as engine:
        (server,) = set(children()) - before
        environment = dict(one.split(b"=", 1) for one in seen_of(server, "environ") if one)
        key = environment[b"ARL_SERVER_API_KEY"]
        command = seen_of(server, "cmdline")
        port = int(command[command.index(b"--port") + 1])
        assert key not in b" ".join(command)
        assert listening(server) == {"127.0.0.1"}
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            for path in ("/model_info", "/generate_frames"):
                async with session.get(path) as refused:
                    assert refused.status == 401
            async with session.get("/model_info", headers={"Authorization": f"Bearer {key.decode()}"}) as answer:
                assert answer.status == 200
            async with session.get("/server_info", headers={"Authorization": f"Bearer {key.decode()}"}) as told:
                assert key.decode() not in await told.text()
        response = await engine.agenerate(ModelRequest(input_ids=[1], sampling=SamplingParams(max_new_tokens=1)))
        assert len(response.output_ids) == 1
    written = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert written
    assert not [content for content in written if key in content]


def test_no_key_is_taken_from_the_command_line() -> None:
    assert [setting.name for setting in settings_of(Config) if setting.name.endswith("key")] == []
    with pytest.raises(ValueError, match="arguments has an API key"):
        SGLangProcessesConfig(arguments=("--api-key=secret",))


def test_keys_are_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARL_SERVER_API_KEY", "servers")
    monkeypatch.setenv("ARL_MIRROR_API_KEY", "mirrors")
    assert SGLangEngineConfig(addresses=("http://a:1",)).key == "servers"
    assert DeltaWeightsConfig(mirrors={"http://a:1": "http://m:1"}).key == "mirrors"


def test_a_key_file_holds_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANY_KEY", "of-the-environment")
    file = tmp_path / "key"
    assert key_of(None, "ANY_KEY") == "of-the-environment"
    for content in (b"", b"a\nb", b"\xff", "é".encode()):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="--api-key-file is"):
            key_of(file, "ANY_KEY")
    file.write_text("secret\n")
    assert key_of(file, "ANY_KEY") == "secret"


def called_in(tree: ast.AST) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


@cache
def called() -> list[tuple[str, set[str]]]:
    return [(path.parent.relative_to(ROOT / "arl").as_posix(), called_in(tree)) for path, tree in trees().items()]


def callers(*names: str) -> set[str]:
    """The packages of arl that call something by one of these names, whatever it is a part of."""
    ends = tuple(f".{name}" for name in names)
    return {package for package, found in called() if any(one in names or one.endswith(ends) for one in found)}


def test_data_is_never_read_as_code() -> None:
    calls = [node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    arguments = [word for call in calls for word in call.keywords]
    assert "trust_remote_code" not in {word.arg for word in arguments}
    assert {ast.unparse(word.value) for word in arguments if word.arg == "allow_pickle"} == {"False"}
    assert callers("np.load") == {"training", "engine/client"}
    assert callers("torch.load", "yaml.load", "unsafe_load", "marshal.loads", "shelve.open", "joblib.load") == set()
    pickled = {"rewards", "rollout/workers", "runtime/processes"}
    assert callers("pickle.loads", "pickle.load") == pickled, "by arl's own processes, which began one another"
    evaluated = callers("eval", "exec") - {"engine/fsdp", "engine/local", "observe/doctor"}  # models' own eval()
    assert evaluated == {"rewards"}, "in the sandbox"


def test_one_place_compares_keys_and_few_listen() -> None:
    assert callers("compare_digest") == {"runtime/http"}
    assert callers("is_same") == {"runtime/http", "endpoint"}
    assert callers("serving") == {"runtime/http", "engine/local", "endpoint", "training"}
    assert callers("answer_until") == {"engine/weights", "cli"}
    listeners = callers("create_server", "start_server", "TCPStore", "TCPSite", "run_app")
    assert listeners == {"engine/weights", "engine/fsdp", "cluster"}


@asynccontextmanager
async def slow_server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(module, "_IDLE_S", 0.2)
    monkeypatch.setattr(module, "_BODY_S", 0.2)

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=await body_of(request))

    app = web.Application(middlewares=[module.boundary(lambda error: {"error": error.message})])
    app.router.add_post("/", answer)
    async with serving(app, bind("127.0.0.1", 0)) as port:
        yield port


@pytest.mark.parametrize(
    ("begun", "more", "answer"),
    [
        (b"", b"", b""),
        (b"POST / HTTP/1.1\r\nHost: a\r\n", b"x: y\r\n", b""),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9999\r\n\r\n", b"x", b"HTTP/1.1 408 Request Timeout"),
    ],
)
async def test_a_sender_that_dribbles_or_is_silent_loses_its_connection(
    begun: bytes, more: bytes, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with slow_server(monkeypatch) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begun)

        async def dribble() -> None:
            while more:
                writer.write(more)
                await asyncio.sleep(0.02)

        async with asyncio.TaskGroup() as group, asyncio.timeout(60):
            dribbling = group.create_task(dribble())
            assert (await reader.readline()).startswith(answer)
            dribbling.cancel()
        writer.close()


async def test_a_compressed_body_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    async with slow_server(monkeypatch) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Encoding: gzip\r\nContent-Length: 9999\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 415 ")
        writer.close()


def test_a_body_that_nests_deeply_is_refused() -> None:
    with pytest.raises(BodyError, match="it nests more than 100 lists and objects"):
        parse(RequestBody, b'{"a":' * 101 + b"1" + b"}" * 101)


def test_every_test_that_the_guide_names_is_there() -> None:
    root = Path(__file__).parents[1]
    guide = (root / "docs" / "security.md").read_text()
    named = set(re.findall(r"`((?:tests|arl)/[^` ]+)`", guide))
    assert len(named) > 15
    assert [name for name in sorted(named) if not (root / name).exists()] == []
