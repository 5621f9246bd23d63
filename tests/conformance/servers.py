"""Stock SGLang and vLLM as process groups of their own: started, awaited, and gone afterwards."""

import asyncio
import contextlib
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest
from embedded_server import environment
from free_port import free_port
from protocol_client import DEADLINE_S

from arl.api.settings.engines import ClientConfig, VLLMEngineConfig

Stock = Literal["sglang", "vllm"]
PYTHONS: dict[Stock, str] = {"sglang": "ARL_SGLANG_PYTHON", "vllm": "ARL_VLLM_PYTHON"}
"""The environment variables that name the Python interpreters which have SGLang and vLLM."""
_SCRIPTS = Path(__file__).parents[2] / "scripts"
_START_TIMEOUT_S = 180.0
_POLL_S = 0.1


@dataclass(frozen=True)
class Server:
    kind: Literal["embedded"] | Stock
    url: str

    def config(self, **settings: Any) -> ClientConfig:
        """The settings of an engine that speaks to it."""
        settings = {"request_timeout_s": 60.0, **settings}
        if self.kind == "vllm":
            return VLLMEngineConfig(addresses=(self.url,), **settings)
        return ClientConfig(**settings)


def python_of(kind: Stock) -> str:
    """The interpreter that has it; the test is skipped where none is named."""
    if not (python := os.environ.get(PYTHONS[kind])):
        pytest.skip(f"needs {'SGLang' if kind == 'sglang' else 'vLLM'}: make test-{kind}")
    return python


@contextmanager
def stock(kind: Stock, model: Path, log: Path, *options: str) -> Iterator[Server]:
    """Stock SGLang or vLLM, ready to answer. Every process that it started ends with it. Its output goes to `log`."""
    port, tracking = free_port(), ["--enable-server-load-tracking"] if kind == "vllm" else []
    command = [str(_SCRIPTS / f"{kind}_cpu" / "serve"), python_of(kind), str(model), str(port), *tracking, *options]
    with log.open("wb") as stream, _group(command, stream.fileno()) as group:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(url, group, log)
        yield Server(kind, url)


@contextmanager
def _group(command: Sequence[str], output: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment(), start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=30) as answer:
            if answer.status == 200:
                return
        time.sleep(_POLL_S)
    end = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
    raise RuntimeError(f"the server did not start; the end of {log}:\n{end}")


class VLLMWatch:
    """What tests ask a vLLM server beside the engine: how much it does, and to hold certain weights."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def post(self, path: str, body: Any = None) -> Any:
        async with self.session.post(path, json=body or {}) as response:
            assert response.status == 200, await response.text()
            return await response.json(content_type=None)

    async def hold(self, directory: Path, label: str) -> None:
        """Run, idle, with these weights and no cached prefix."""
        await self.post("/pause?mode=abort")
        await self.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}})
        await self.post("/update_weight_version", {"new_version": label})
        await self.post("/resume")
        await self.until_running(0)

    async def until_running(self, count: int) -> None:
        """Wait until it has so many requests."""
        async with asyncio.timeout(DEADLINE_S):
            while await self._num_requests() != count:  # noqa: ASYNC110 - it wakes nobody
                await asyncio.sleep(0.01)

    async def until_gained(self, num_tokens: int) -> None:
        """Wait until each running request has so many more tokens: a request beside them has as many, and a few."""
        sampling = {"max_tokens": num_tokens + 5, "temperature": 0, "ignore_eos": True}
        await self.post("/inference/v1/generate", {"token_ids": [1], "sampling_params": sampling})

    async def _num_requests(self) -> int:
        async with self.session.get("/load") as response:
            return (await response.json())["server_load"]
