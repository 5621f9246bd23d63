"""How the server starts, refuses to start, and ends."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from embedded_server import command, environment, server_process
from protocol_client import DEADLINE_S, Client
from weight_trainer import joining as joining_body

from arl.api.errors import ConfigError
from arl.engine.local.__main__ import main, parse_arguments, run
from arl.engine.local.scheduler import RunningBatch
from arl.runtime.http.server import bind
from arl.runtime.processes.parent_watch import Watch

PROMPT = [10, 11, 12, 13]
ENDLESS = {"max_new_tokens": 4000, "ignore_eos": True}


@asynccontextmanager
async def connected(url: str, **options: object) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(url, **options) as session:  # pyright: ignore[reportArgumentType]
        yield Client(session)


@asynccontextmanager
async def run_here(model: str) -> AsyncIterator[tuple[Client, asyncio.Task[int]]]:
    """A client, and the server's whole life as a task of this process, which gives its exit code."""
    sock = bind("127.0.0.1", 0)
    with Watch() as watch:
        serving = asyncio.create_task(run(parse_arguments(["--model", model]), sock, watch))
        async with connected(f"http://127.0.0.1:{sock.getsockname()[1]}") as client:
            yield client, serving
        await asyncio.wait([serving])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_and_answers_what_runs(
    model_a: str, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    async with run_here(model_a) as (client, serving):
        running = asyncio.create_task(client.generate(input_ids=PROMPT, sampling_params=ENDLESS))
        await client.until_running(1)
        os.kill(os.getpid(), number)
        assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"
    assert await serving == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["event"] == "ready"


@pytest.mark.runs
async def test_sigint_ends_the_process_also_while_it_is_paused_and_waits_for_a_trainer(model_a: str) -> None:
    with server_process(model_a) as server:
        async with connected(server.address) as client:
            await client.post("/pause_generation", {"mode": "in_place"})
            waiting = asyncio.create_task(client.generate(input_ids=PROMPT, sampling_params=ENDLESS))
            joining = asyncio.create_task(client.post("/init_weights_update_group", joining_body(9, "nobody")))
            await client.until_waiting(1)
            server.process.send_signal(signal.SIGINT)
            assert (await waiting)["meta_info"]["finish_reason"]["type"] == "abort"
            assert server.process.wait(DEADLINE_S) == 0
            with pytest.raises(aiohttp.ClientError):
                await joining


async def test_it_ends_with_its_model_thread(model_a: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(RunningBatch, "step", broken)
    monkeypatch.setattr(RunningBatch, "fail", broken)
    async with run_here(model_a) as (client, serving):
        answer = await client.post("/generate", {"input_ids": PROMPT, "sampling_params": ENDLESS})
        assert answer.body["meta_info"]["finish_reason"]["type"] == "abort"
    assert await serving == 1


def test_a_broken_model_directory_is_one_sentence_and_code_2(
    model_a: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "broken"
    shutil.copytree(model_a, directory)
    (directory / "config.json").write_text("{}")
    assert main(["--model", str(directory)]) == 2
    written = capsys.readouterr()
    assert [str(directory) in line for line in written.err.splitlines() if line.startswith("error:")] == [True]
    assert "Traceback" not in written.err
    assert written.out == ""


def test_the_code_of_a_failed_start_is_the_process_exit_code() -> None:
    ended = subprocess.run(command("/nonexistent"), capture_output=True, env=environment(), check=False)
    assert (ended.returncode, ended.stdout) == (2, b"")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--model", "/nonexistent"], "'/nonexistent', which is not a directory"),
        (["--model", "/"], "holds no config.json"),
        (["--host", "0.0.0.0"], "open to other machines; give it a key (--api-key-file), or listen on 127"),
        (["--num-threads", "0"], "--num-threads is 0; it must be above 0"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_is_loaded(
    model_a: str, options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", model_a, *options]) == 2
    assert sentence in capsys.readouterr().err


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="cannot listen on 127"):
        bind("127.0.0.1", taken.getsockname()[1])
