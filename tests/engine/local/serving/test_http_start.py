"""How the server starts, refuses to start, and ends."""

from __future__ import annotations

import asyncio
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
from protocol_client import DEADLINE_S, Client
from server_process import command, environment, running_server

from arl.api.errors import ArlError, ConfigError, ModelError
from arl.engine.local.__main__ import bind, check_arguments, main, parse_arguments

PROMPT = [10, 11, 12, 13]
ENDLESS = {"max_new_tokens": 4000, "ignore_eos": True}


@asynccontextmanager
async def connected(url: str, **options: object) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(url, **options) as session:  # pyright: ignore[reportArgumentType]
        yield Client(session)


async def test_a_key_is_asked_for_everywhere_but_at_health_and_sigterm_ends_the_server(model_a: str) -> None:
    with running_server(model_a, "--host", "0.0.0.0", "--api-key", "secret") as server:
        async with connected(server.url) as stranger:
            assert (await stranger.get("/health")).status == 200
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
                assert (await stranger.get("/model_info", headers=headers)).status == 401
                assert (await stranger.post("/generate", {"input_ids": PROMPT}, headers=headers)).status == 401
        async with connected(server.url, headers={"Authorization": "Bearer secret"}) as client:
            running = asyncio.create_task(client.generate(input_ids=PROMPT, sampling_params=ENDLESS))
            await client.until_running(1)
            server.process.terminate()
            answer = await running
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert server.process.wait(DEADLINE_S) == 0


async def test_sigint_ends_it_also_while_it_is_paused_and_waits_for_a_trainer(model_a: str) -> None:
    with running_server(model_a) as server:
        async with connected(server.url) as client:
            await client.post("/pause_generation", {"mode": "in_place"})
            waiting = asyncio.create_task(client.generate(input_ids=PROMPT, sampling_params=ENDLESS))
            at = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
            joining = asyncio.create_task(client.post("/init_weights_update_group", at))
            await client.until_waiting(1)
            server.process.send_signal(signal.SIGINT)
            assert (await waiting)["meta_info"]["finish_reason"]["type"] == "abort"
            assert server.process.wait(DEADLINE_S) == 0
            with pytest.raises(aiohttp.ClientError):
                await joining


DYING = """
import sys
from arl.engine.local.__main__ import main
from arl.engine.local.running_batch import Batch
def broken(*_): raise RuntimeError("an illegal memory access")
Batch.step = Batch.fail = broken
sys.exit(main(sys.argv[1:]))
"""


def test_it_ends_with_its_model_thread(model_a: str) -> None:
    argv = [sys.executable, "-c", DYING, "--model", model_a]
    body = json.dumps({"input_ids": PROMPT, "sampling_params": ENDLESS}).encode()
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}/generate"
        with suppress(OSError):
            urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})).close()
        assert process.wait(DEADLINE_S) == 1


PARENT = """
import os, subprocess, sys
child = subprocess.Popen([*sys.argv[1:], "--parent-pid", str(os.getpid())], stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline(), flush=True)
sys.stdin.read()
"""


def test_it_ends_with_its_parent_however_that_ended(model_a: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *command(model_a)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert parent.stdout is not None
    pid, _, ready = parent.stdout.readline().partition(" ")
    assert json.loads(ready)["event"] == "ready"
    server = os.pidfd_open(int(pid))
    try:
        assert select.select([server], [], [], 0)[0] == []
        parent.kill()
        parent.communicate()
        assert select.select([server], [], [], DEADLINE_S)[0] == [server]
    finally:
        os.close(server)


def broken_weights(model: str, directory: Path) -> str:
    shutil.copytree(model, directory)
    (directory / "model.safetensors").write_bytes(b"nothing")
    return str(directory)


def broken_tokenizer(model: str, directory: Path) -> str:
    shutil.copytree(model, directory)
    (directory / "tokenizer.json").write_text("{")
    return str(directory)


def broken_config(model: str, directory: Path) -> str:
    shutil.copytree(model, directory)
    (directory / "config.json").write_text("{}")
    return str(directory)


@pytest.mark.parametrize("breaking", [broken_weights, broken_tokenizer, broken_config])
def test_a_broken_model_directory_is_one_sentence_and_code_2(
    model_a: str, tmp_path: Path, breaking: Callable[[str, Path], str], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = breaking(model_a, tmp_path / "broken")
    assert main(["--model", directory]) == 2
    written = capsys.readouterr()
    assert [directory in line for line in written.err.splitlines() if line.startswith("error:")] == [True]
    assert "Traceback" not in written.err
    assert written.out == ""


def test_the_code_of_a_failed_start_is_the_process_exit_code() -> None:
    ended = subprocess.run(command("/nonexistent"), capture_output=True, text=True, env=environment(), check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: --model is '/nonexistent'")


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        (["--model", "/nonexistent"], ModelError, "'/nonexistent', which is not a directory"),
        (["--model", "/"], ModelError, "holds no config.json"),
        (["--host", "0.0.0.0"], ConfigError, "other machines can reach; give --api-key KEY too"),
        (["--host", "example.com"], ConfigError, "other machines can reach"),
        (["--port", "70000"], ConfigError, "--port is 70000"),
        (["--num-threads", "0"], ConfigError, "--num-threads is 0; it must be above 0"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_is_loaded(
    model_a: str, options: list[str], error: type[ArlError], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        check_arguments(parse_arguments(["--model", model_a, *options]))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.1.2.3"])
def test_loopback_needs_no_key(model_a: str, host: str) -> None:
    check_arguments(parse_arguments(["--model", model_a, "--host", host]))


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="cannot listen on 127"):
        bind("127.0.0.1", taken.getsockname()[1])
