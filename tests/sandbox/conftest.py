"""Fixtures of sandbox tests: bubblewrap, which a machine may lack, a fake docker, and pipes to programs."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TextIO

import pytest
import pytest_asyncio

from arl.api.errors import SandboxError
from arl.sandbox import BubblewrapSandbox, Limits

FAKE_DOCKER = Path(__file__).parent / "fake_docker.py"
PATIENT = Limits(wall_s=60, cpu_s=30, memory_bytes=128 << 20, processes=12, disk_bytes=8 << 20, files=200)
"""Small, so that programs soon reach them; but long enough for a busy machine."""


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def bubblewrap() -> AsyncIterator[BubblewrapSandbox]:
    """One for all tests."""
    try:
        async with BubblewrapSandbox(limits=PATIENT, concurrency=4) as sandbox:
            yield sandbox
    except SandboxError as reason:
        go_without(reason)


def sleeper(pipe: Path) -> str:
    """A program that writes to a pipe of the host once it runs. The pipe ends with its last process."""
    return f"import os, time\nos.write(os.open('{pipe}', os.O_WRONLY), b'running\\n')\nos.fork()\ntime.sleep(600)"


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """In a directory that programs may read: writing to a pipe takes no more."""
    tmp_path.chmod(0o755)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "pipe").chmod(0o666)
    return tmp_path / "pipe"


@asynccontextmanager
async def once_running(pipe: Path) -> AsyncIterator[TextIO]:
    """The reading end of a pipe, once the program at the other end runs."""
    with await asyncio.to_thread(pipe.open) as reader:
        assert await asyncio.to_thread(reader.readline) == "running\n"
        yield reader


def go_without(reason: SandboxError) -> None:
    """Skip a test that needs a sandbox, or fail it if ARL_NEEDS_SANDBOX is set, as in continuous integration."""
    if os.environ.get("ARL_NEEDS_SANDBOX"):
        raise reason
    pytest.skip("needs bubblewrap")


@pytest.fixture
def docker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The directory of a fake docker, which is on PATH."""
    command = tmp_path / "docker"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {FAKE_DOCKER} "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_DOCKER", str(tmp_path))
    return tmp_path


def calls(docker: Path) -> list[list[str]]:
    """What the fake docker was asked."""
    return [json.loads(line) for line in (docker / "calls.jsonl").read_text().splitlines()]
