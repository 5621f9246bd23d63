"""The promises of docs/security.md that no other test holds; its table names the others."""

import argparse
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
from sources import trees

from arl.api.errors import ConfigError
from arl.api.settings.engines import DeltaWeightsConfig, LocalEngineConfig, SGLangEngineConfig, SGLangProcessesConfig
from arl.api.settings.run import Config
from arl.api.types import ModelRequest, SamplingParams
from arl.engine.tiny import TinyShape, write_tiny_model
from arl.run.script import load_config
from arl.run.servers import serve
from arl.runtime.http import server as module
from arl.runtime.http.bodies import BodyError, RequestBody, parse
from arl.runtime.http.server import add_key_option, bind, body_of, key_of, serving

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


@pytest.mark.parametrize("flag", ["--engine.api_key", "--weights.api_key=secret", "--log.metrics_key"])
def test_no_key_is_taken_from_the_command_line(flag: str) -> None:
    with pytest.raises(ConfigError, match=r"_key on the command line shows the key to every user") as refused:
        load_config(Config, ["--model", "m", flag, "secret"])
    assert "secret" not in str(refused.value)
    with pytest.raises(ValueError, match="arguments has an API key"):
        SGLangProcessesConfig(arguments=("--api-key=secret",))


def test_a_key_is_no_option_of_a_server() -> None:
    parser = argparse.ArgumentParser()
    add_key_option(parser, "ANY_KEY")
    assert parser.parse_args(["--api-key-file", "key"]).api_key_file == Path("key")
    with pytest.raises(SystemExit):
        parser.parse_args(["--api-key", "secret"])


def test_keys_in_settings_show_in_no_text_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SGLangEngineConfig.model_validate({"addresses": ["http://a:1"], "api_key": "secret"})
    weights = DeltaWeightsConfig.model_validate({"mirrors": {"http://a:1": "http://m:1"}, "api_key": "secret"})
    assert (engine.key, weights.key) == ("secret", "secret")
    config = Config(model="m", engine=engine, weights=weights)
    assert not [
        text
        for text in (repr(config), str(config), config.model_dump_json(), str(config.model_dump()))
        if "secret" in text
    ]
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
    return [(path.stem, called_in(tree)) for path, tree in trees().items()]


def callers(*names: str) -> set[str]:
    """The modules of arl that call something by one of these names, whatever it is a part of."""
    ends = tuple(f".{name}" for name in names)
    return {stem for stem, found in called() if any(one in names or one.endswith(ends) for one in found)}


def test_data_is_never_read_as_code() -> None:
    nodes = [(path.stem, node) for path, tree in trees().items() for node in ast.walk(tree)]
    arguments = [(stem, word) for stem, node in nodes if isinstance(node, ast.Call) for word in node.keywords]
    assert not [(stem, word.arg) for stem, word in arguments if word.arg == "trust_remote_code"]
    pickles = [(stem, ast.unparse(word.value)) for stem, word in arguments if word.arg == "allow_pickle"]
    assert set(pickles) == {("batch_codec", "False"), ("vllm_client", "False")}
    assert callers("np.load") == {"batch_codec", "vllm_client"}
    assert callers("torch.load", "yaml.load", "unsafe_load", "marshal.loads", "shelve.open", "joblib.load") == set()
    pickled = {"pool", "rpc", "actor", "messages", "pickled_object", "worker"}
    assert callers("pickle.loads", "pickle.load") == pickled, "by arl's own processes, which began one another"
    evaluated = callers("eval", "exec") - {"model", "runner", "lora", "reference_model"}  # models' own eval()
    assert evaluated == {"examiner"}, "in the sandbox"


def test_one_place_compares_keys_and_few_listen() -> None:
    assert callers("compare_digest") == {"server"}
    assert callers("is_same") == {"server", "proxy", "episodes_api"}
    assert callers("serving") - {"verifiers_workflow"} == {"process", "__main__", "proxy", "prometheus"}
    assert callers("answer_until") == {"mirror", "viewing"}
    listeners = callers("create_server", "start_server", "TCPStore", "TCPSite", "run_app")
    assert listeners == {"process_groups", "rank_actor", "node_probe"}


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
