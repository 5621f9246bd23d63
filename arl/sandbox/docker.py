"""Programs in Docker containers, one for each, by the `docker` command. It needs a Docker engine."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import shutil
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from arl.api.errors import SandboxError
from arl.sandbox import container
from arl.sandbox.contract import MAIN, Limits, LocalSandbox, ProgramOutcome, laid_out
from arl.sandbox.streams import finish

log = logging.getLogger(__name__)

IMAGE = "python:3.11-slim"
_FIRST_PROCESS = Path(container.__file__).read_text(encoding="utf-8")
_NOBODY = "65534:65534"
_KILLED = 137
"""docker's exit code when the kernel kills the container's first process for lack of memory."""
_START_S = 120.0
"""The longest that a container may take from `docker run` until its program runs."""
ENGINE_S = 20.0
"""The longest that the engine may take to answer a question."""
_REPORT_BYTES = 4096
"""Room for the report of container.py at the end of stderr."""


class DockerSandbox(LocalSandbox):
    """Runs each program in a new container without network or capabilities, on a read-only root.

    image: an image with a `python`; the engine pulls it at first use if necessary.
    limits: for runs that name none. The container's memory limit holds for all processes and files together.
    concurrency: containers at once. runtime: one of the engine's, such as gVisor's `runsc`, instead of its default.

    Starting a container takes some tenths of a second. If arl is killed, its containers end at their wall time and the
    engine removes them.
    """

    def __init__(
        self, *, image: str = IMAGE, limits: Limits | None = None, concurrency: int | None = None,
        runtime: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(limits=limits, concurrency=concurrency)
        self._image = image
        self._runtime = runtime

    async def _open(self, opened: AsyncExitStack) -> None:
        docker = shutil.which("docker")
        if docker is None:
            raise SandboxError("docker is not installed; see https://docs.docker.com/engine/install/")
        try:
            async with asyncio.timeout(ENGINE_S):
                code, _, complaint = await call_docker(docker, "version", "--format", "{{.Server.Version}}")
                lacks_image, _, _ = await call_docker(docker, "image", "inspect", self._image)
        except TimeoutError:
            raise SandboxError(f"no Docker engine answered within {ENGINE_S:g} s; is it running?") from None
        if code != 0:
            raise SandboxError(f"no Docker engine answers: {complaint}; start one, or allow this user to use it")
        if lacks_image:
            code, _, complaint = await call_docker(docker, "pull", "--quiet", self._image)
            if code != 0:
                raise SandboxError(f"docker cannot pull the image {self._image}: {complaint}")
        self._docker, self._places = docker, asyncio.Semaphore(self._concurrency)
        outcome = await self._run(laid_out("print('ready')"), b"", self._limits)
        if outcome.stdout != "ready\n":
            raise SandboxError(f"Python does not run in a container of {self._image}: {outcome}")

    async def _run(self, contents: Mapping[str, bytes], stdin: bytes, limits: Limits) -> ProgramOutcome:
        token = secrets.token_hex(16)
        header = {"files": {path: len(content) for path, content in contents.items()}, "token": token}
        header |= {"wall_s": limits.wall_s, "main": MAIN}
        sent = [json.dumps(header).encode(), b"\n", *contents.values(), stdin]
        async with self._places:
            return await self._run_container(b"".join(sent), token, limits)

    async def _run_container(self, sent: bytes, token: str, limits: Limits) -> ProgramOutcome:
        name = f"arl-{secrets.token_hex(8)}"
        started = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *(self._docker, "run", "--name", name, *_options(limits, self._runtime), self._image),
            *("python", "-I", "-S", "-c", _FIRST_PROCESS),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for arl, which then removes the container
        )

        async def remove(is_over: bool) -> None:
            if not is_over and process.returncode is None:
                process.kill()
                try:
                    async with asyncio.timeout(ENGINE_S):
                        await call_docker(self._docker, "rm", "--force", name)
                except TimeoutError:
                    log.warning("docker did not remove the container %s within %g s", name, ENGINE_S)

        ended_by, stdout, stderr = await finish(
            process,
            sent,
            output_bytes=limits.output_bytes + _REPORT_BYTES,
            wall_s=limits.wall_s + _START_S,
            kill=remove,
        )
        code: int | None = None
        wall_s = time.monotonic() - started
        written, is_reported, report = stderr.rpartition(token.encode())
        if is_reported:
            said: dict[str, Any] = json.loads(report)
            ended_by, code, wall_s = said["ended_by"], said["code"], said["wall_s"]
        elif ended_by == "exit" and process.returncode == _KILLED:
            ended_by = "memory"
        elif ended_by == "exit":
            complaint = stderr.decode(errors="replace").strip()
            raise SandboxError(f"docker run failed with exit code {process.returncode}: {complaint}")
        return _outcome(ended_by, code, wall_s, stdout, written if is_reported else stderr, limits.output_bytes)


def _outcome(ended_by: str, code: int | None, wall_s: float, stdout: bytes, stderr: bytes, room: int) -> ProgramOutcome:
    if len(stdout) + len(stderr) > room:
        ended_by = "output"
    stdout = stdout[:room]
    return ProgramOutcome.of(ended_by, code, wall_s, stdout, stderr[: room - len(stdout)])


def _options(limits: Limits, runtime: str | None) -> list[str]:
    memory = limits.memory_bytes + limits.disk_bytes  # a tmpfs counts as the container's memory
    tmpfs = f"rw,noexec,nosuid,nodev,size={limits.disk_bytes},nr_inodes={limits.files},mode=1777"
    cpu_s = int(limits.cpu_s) + 1
    return [
        *("--rm", "--interactive", "--network", "none", "--read-only", "--cap-drop", "ALL", "--user", _NOBODY),
        *("--security-opt", "no-new-privileges", "--ipc", "private", "--hostname", "sandbox", "--log-driver", "none"),
        *("--memory", str(memory), "--memory-swap", str(memory), "--pids-limit", str(limits.processes + 1)),
        *("--cpus", "1"),  # so that all processes together have no more processor seconds than wall_s
        *("--ulimit", f"cpu={cpu_s}:{cpu_s + 1}", "--ulimit", f"nofile={limits.open_files}", "--ulimit", "core=0"),
        *("--ulimit", f"fsize={limits.disk_bytes}", "--tmpfs", f"/sandbox:{tmpfs}", "--tmpfs", f"/tmp:{tmpfs}"),
        *("--shm-size", str(limits.disk_bytes), "--workdir", "/sandbox"),
        *("--env", "HOME=/sandbox", "--env", "LANG=C.UTF-8"),
        *(() if runtime is None else ("--runtime", runtime)),
    ]


async def call_docker(docker: str, *arguments: str, stdin: bytes = b"") -> tuple[int, bytes, str]:
    """Run one short command; returns exit code, stdout, stderr. Cancelling the call kills it."""
    process = await asyncio.create_subprocess_exec(
        docker, *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        stdout, stderr = await process.communicate(stdin)
    except BaseException:
        process.kill()
        await process.wait()
        raise
    return process.returncode or 0, stdout, stderr.decode(errors="replace").strip()
