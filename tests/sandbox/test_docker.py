"""Containers: the docker commands and their outcomes, by a fake docker, and by an engine if one runs."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sandbox.conftest import calls

import arl.sandbox.docker
from arl.api.errors import SandboxError
from arl.sandbox import DockerSandbox, Limits, container

LIMITS = Limits(wall_s=20, output_bytes=10_000)


@pytest.fixture
async def sandbox(docker: Path) -> AsyncIterator[DockerSandbox]:
    async with DockerSandbox(limits=LIMITS) as sandbox:
        yield sandbox


async def test_a_program_runs_in_a_container_of_its_own(
    docker: Path, sandbox: DockerSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://user:secret@proxy")  # the docker client puts it into containers
    assert (await sandbox.run("import os; print(set(os.environ) - {'LC_CTYPE'})")).stdout == "set()\n"
    first, inspect, probe, run = calls(docker)
    assert (first[0], inspect[:2], probe[0]) == ("version", ["image", "inspect"], "run")
    assert probe[2] != run[2]
    for option, value in {
        "--network": "none",
        "--cap-drop": "ALL",
        "--security-opt": "no-new-privileges",
        "--user": "65534:65534",
        "--memory": str((512 + 64) << 20),
        "--memory-swap": str((512 + 64) << 20),
        "--pids-limit": "33",
        "--cpus": "1",
    }.items():
        assert run[run.index(option) + 1] == value
    assert {"--read-only", "--rm"} <= set(run)
    assert not {"--volume", "-v", "--mount", "--privileged"} & set(run)


async def test_the_first_process_of_a_container_ends_it_at_its_wall_time(docker: Path, sandbox: DockerSandbox) -> None:
    assert (await sandbox.run("import time\ntime.sleep(600)", limits=Limits(wall_s=0.5))).ended_by == "timeout"
    assert not any(call[0] == "rm" for call in calls(docker))


async def test_an_engine_that_does_not_remove_a_container_is_not_waited_for(
    docker: Path, sandbox: DockerSandbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(arl.sandbox.docker, "ENGINE_S", 0.2)
    (docker / "stuck").touch()
    assert (await sandbox.run("while True: print('x' * 1000)")).ended_by == "output"
    assert "docker did not remove the container arl-" in caplog.text


@pytest.mark.parametrize("sent", [b"", b'{"files": {"a": 9}', b'{"files": {"a": 9}}\nhalf'])
async def test_a_container_with_incomplete_input_ends_itself(tmp_path: Path, sent: bytes) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, container.__file__, stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=tmp_path
    )
    _, complaint = await process.communicate(sent)
    assert (process.returncode, b"was not sent" in complaint) == (1, True)


async def test_a_container_that_the_kernel_killed_ran_out_of_memory(docker: Path, sandbox: DockerSandbox) -> None:
    (docker / "killed").touch()
    outcome = await sandbox.run("")
    assert (outcome.ended_by, outcome.exit_code) == ("memory", None)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (["no_engine"], "no Docker engine answers: Cannot connect to the Docker daemon"),
        (["no_image", "no_pull"], "cannot pull the image python:3.11-slim: pull access denied"),
        (["broken"], "docker run failed with exit code 125: docker: Error response from daemon: no space"),
    ],
)
async def test_an_engine_that_cannot_be_used_says_why(docker: Path, state: list[str], message: str) -> None:
    for name in state:
        (docker / name).touch()
    with pytest.raises(SandboxError, match=message):
        await DockerSandbox().__aenter__()


async def test_an_image_that_is_not_there_is_pulled(docker: Path) -> None:
    (docker / "no_image").touch()
    async with DockerSandbox(image="mine:1"):
        assert ["pull", "--quiet", "mine:1"] in calls(docker)


def engine_answers() -> bool:
    try:
        return subprocess.run(["docker", "version"], capture_output=True, timeout=20, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


async def test_a_real_engine_contains_programs() -> None:
    if not await asyncio.to_thread(engine_answers):
        pytest.skip("needs Docker")
    async with DockerSandbox(limits=Limits(memory_bytes=64 << 20, disk_bytes=8 << 20, processes=16)) as sandbox:
        assert (await sandbox.run("print(input())", stdin="x")).stdout == "x\n"
        assert (await sandbox.run("x = [bytearray(1 << 20) for _ in range(1000)]")).ended_by == "memory"
        assert (await sandbox.run("import time; time.sleep(600)", limits=Limits(wall_s=1))).ended_by == "timeout"
        outcome = await sandbox.run("import socket; socket.create_connection(('1.1.1.1', 53), timeout=5)")
        assert "unreachable" in outcome.stderr
