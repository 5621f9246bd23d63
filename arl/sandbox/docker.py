"""Programs in Docker containers, one for each, and terminals, which keep theirs; by the `docker` command."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from arl.api.errors import SandboxError
from arl.api.workflow import Shared
from arl.runtime.threads import offload
from arl.sandbox import container
from arl.sandbox.bubblewrap_terminal import CommandOutcome, TerminalFiles, checked_path, packed
from arl.sandbox.contract import MAIN, NO_FILES, Limits, LocalSandbox, ProgramOutcome, laid_out
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
_LIFE_S = 6 * 3600
"""Seconds after which a container ends by itself, if arl was killed before it could remove it."""
_TIMER = f"end=$(($(date +%s) + {_LIFE_S})); while [ $(date +%s) -lt $end ]; do sleep 60; done"
"""It also reaps what commands leave behind."""
_BEYOND_S = 30.0
"""Seconds that the engine may take to start and end a command."""
_BUILD_S = 1800.0
_CHUNK = 1 << 16


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
        code, _, complaint = await _call(ENGINE_S, "version", "--format", "{{.Server.Version}}")
        if code != 0:
            raise SandboxError(f"no Docker engine answers: {complaint}; start one, or allow this user to use it")
        await _pulled(self._image)
        self._places = asyncio.Semaphore(self._concurrency)
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
            *(_docker(), "run", "--name", name, *_options(limits, self._runtime), self._image),
            *("python", "-I", "-S", "-c", _FIRST_PROCESS),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for arl, which then removes the container
        )

        async def remove(is_over: bool) -> None:
            if not is_over and process.returncode is None:
                process.kill()
                await _remove(name)

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
        stderr, room = written if is_reported else stderr, limits.output_bytes
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


class DockerImages(Shared):
    """Terminals in containers. network: whether those that may have the network get it. concurrency: commands at
    once.

    A command is whoever the image says, mostly root, with Docker's usual capabilities and no new ones. It may write
    everywhere in its container; nothing limits the space that it takes there.
    """

    def __init__(self, *, network: bool = False, concurrency: int = 8) -> None:
        super().__init__()
        self._network = network
        self._places = asyncio.Semaphore(concurrency)
        self._images: dict[str | Path, str] = {}
        self._making: dict[str | Path, asyncio.Lock] = {}

    async def _open(self, opened: AsyncExitStack) -> None:
        """Images are made when a terminal needs them."""

    def check(self) -> None:
        """Raise SandboxError if there is no docker command."""
        _docker()

    @asynccontextmanager
    async def terminal(
        self, image: str | Path, *, limits: Limits, workdir: str | None = None, env: Mapping[str, str] | None = None,
        cpus: float | None = None, allows_network: bool = False,
    ) -> AsyncIterator[DockerTerminal]:  # fmt: skip
        """A terminal in a new container, removed at the end. image: an image's name, or a directory with a Dockerfile.

        limits: memory_bytes and processes hold for the container. Raises SandboxError if it cannot be started.
        """
        name = f"arl-{secrets.token_hex(8)}"
        made = await self._image(image)
        has_network = self._network and allows_network
        options = [
            *("--detach", "--rm", "--name", name, "--network", "bridge" if has_network else "none"),
            *("--memory", str(limits.memory_bytes), "--memory-swap", str(limits.memory_bytes)),
            *("--pids-limit", str(limits.processes + 1), "--cpus", str(cpus or 1), "--log-driver", "none"),
            *("--security-opt", "no-new-privileges", "--ipc", "private", "--hostname", "sandbox"),
            *(() if workdir is None else ("--workdir", workdir)),
            *(part for key, value in (env or {}).items() for part in ("--env", f"{key}={value}")),
        ]
        try:
            await _checked(120.0, "run", *options, "--entrypoint", "sh", made, "-c", _TIMER)
            yield DockerTerminal(name, self._places)
        finally:
            await asyncio.shield(_remove(name))

    async def _image(self, source: str | Path) -> str:
        async with self._making.setdefault(source, asyncio.Lock()):
            if source not in self._images:
                if isinstance(source, Path):  # a Dockerfile's, under a name that depends on its path
                    made = f"arl-task-{hashlib.sha256(str(source).encode()).hexdigest()[:16]}"
                    await _checked(_BUILD_S, "build", "--quiet", "--tag", made, str(source))
                    self._images[source] = made
                else:
                    self._images[source] = await _pulled(source)
            return self._images[source]


class DockerTerminal:
    """A Terminal in a running container."""

    def __init__(self, container: str, places: asyncio.Semaphore, *, most_bytes: int = 1 << 16) -> None:
        self._container = container
        self._places = places
        self._most_bytes = most_bytes

    async def run(
        self,
        command: str,
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        files: TerminalFiles = NO_FILES,
        fresh: Sequence[str] = (),
        read: Sequence[str] = (),
    ) -> CommandOutcome:
        """See Terminal.run."""
        async with self._places:
            if fresh:
                await _checked(_BEYOND_S, "exec", self._container, "rm", "-rf", *fresh)
            if files:
                archive = await offload(packed, {checked_path(path): files[path] for path in files})
                await _checked(_BEYOND_S, "cp", "-", f"{self._container}:/", stdin=archive)
            outcome = await self._run(command, timeout_s, env or {})
            await _call(_BEYOND_S, "exec", self._container, "sh", "-c", "kill -9 -1")
            found: dict[str, bytes] = {}
            for path in read:
                beginning = ("head", "-c", str(self._most_bytes), path)
                code, content, _ = await _call(_BEYOND_S, "exec", self._container, *beginning)
                if code == 0:
                    found[path] = content
            return replace(outcome, files=found)

    async def _run(self, command: str, timeout_s: float, env: Mapping[str, str]) -> CommandOutcome:
        variables = [part for key, value in env.items() for part in ("--env", f"{key}={value}")]
        started = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *(_docker(), "exec", *variables, self._container, "timeout", "-s", "KILL", f"{timeout_s:g}"),
            *("bash", "-c", 'exec bash -c "$0" 2>&1', command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for arl
        )
        assert process.stdout is not None
        kept, num_read = bytearray(), 0
        try:
            async with asyncio.timeout(timeout_s + _BEYOND_S):
                while chunk := await process.stdout.read(_CHUNK):
                    kept += chunk[: self._most_bytes - len(kept)]
                    num_read += len(chunk)
                code = await process.wait()
        except TimeoutError:
            kept, num_read, code = bytearray(), 0, _KILLED
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        wall_s = time.monotonic() - started
        is_timeout = code in (124, 137) and wall_s >= timeout_s
        return CommandOutcome(
            output=kept.decode(errors="replace"),
            num_dropped=num_read - len(kept),
            exit_code=None if is_timeout else code,
            ended_by="timeout" if is_timeout else "exit",
            wall_s=wall_s,
        )


async def _pulled(image: str) -> str:
    if (await _call(ENGINE_S, "image", "inspect", image))[0]:
        code, _, complaint = await _call(_BUILD_S, "pull", "--quiet", image)
        if code != 0:
            raise SandboxError(f"docker cannot pull the image {image}: {complaint[-2000:]}")
    return image


async def _remove(name: str) -> None:
    try:
        await _call(ENGINE_S, "rm", "--force", name)
    except SandboxError as error:
        log.warning("docker did not remove the container %s: %s", name, error)


async def _checked(limit_s: float, *arguments: str, stdin: bytes = b"") -> None:
    """Raises SandboxError, with what docker complains of."""
    code, _, complaint = await _call(limit_s, *arguments, stdin=stdin)
    if code != 0:
        raise SandboxError(f"docker {arguments[0]} failed with exit code {code}: {complaint[-2000:]}")


async def _call(limit_s: float, *arguments: str, stdin: bytes = b"") -> tuple[int, bytes, str]:
    """Run one docker command; returns exit code, stdout, stderr. Cancelling the call kills it."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(_docker(), *arguments, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(limit_s):
            stdout, stderr = await process.communicate(stdin)
    except TimeoutError:
        raise SandboxError(
            f"`docker {arguments[0]}` did not end within {limit_s:g} s; is the engine running?"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, stdout, stderr.decode(errors="replace").strip()


def _docker() -> str:
    if (docker := shutil.which("docker")) is None:
        raise SandboxError("docker is not installed; see https://docs.docker.com/engine/install/")
    return docker
