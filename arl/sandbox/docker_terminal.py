"""Terminals in Docker: a container for each, from an image that is built or pulled once."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from arl.api.errors import SandboxError
from arl.api.workflow import Shared
from arl.offload import offload
from arl.sandbox.bubblewrap_terminal import CommandOutcome, TerminalFiles, checked_path, packed
from arl.sandbox.contract import NO_FILES, Limits
from arl.sandbox.docker import ENGINE_S, call_docker

log = logging.getLogger(__name__)

_LIFE_S = 6 * 3600
"""Seconds after which a container ends by itself, if arl was killed before it could remove it."""
_FIRST_PROCESS = f"end=$(($(date +%s) + {_LIFE_S})); while [ $(date +%s) -lt $end ]; do sleep 60; done"
"""It also reaps what commands leave behind."""
_BEYOND_S = 30.0
"""Seconds that the engine may take to start and end a command."""
_BUILD_S = 1800.0
_CHUNK = 1 << 16


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
            await _checked(120.0, "run", *options, "--entrypoint", "sh", made, "-c", _FIRST_PROCESS)
            yield DockerTerminal(name, self._places)
        finally:
            await asyncio.shield(_remove(name))

    async def _image(self, source: str | Path) -> str:
        async with self._making.setdefault(source, asyncio.Lock()):
            if source not in self._images:
                self._images[source] = await (_built(source) if isinstance(source, Path) else _pulled(source))
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
        try:
            async with asyncio.timeout(timeout_s + _BEYOND_S):
                kept, num_dropped = await _drained(process.stdout, self._most_bytes)
                code = await process.wait()
        except TimeoutError:
            kept, num_dropped, code = b"", 0, 137
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        wall_s = time.monotonic() - started
        is_timeout = code in (124, 137) and wall_s >= timeout_s
        return CommandOutcome(
            output=kept.decode(errors="replace"),
            num_dropped=num_dropped,
            exit_code=None if is_timeout else code,
            ended_by="timeout" if is_timeout else "exit",
            wall_s=wall_s,
        )


async def _drained(stream: asyncio.StreamReader, most: int) -> tuple[bytes, int]:
    """A stream's first bytes, and how many came after them."""
    kept, dropped = bytearray(), 0
    while chunk := await stream.read(_CHUNK):
        taken = chunk[: most - len(kept)]
        kept += taken
        dropped += len(chunk) - len(taken)
    return bytes(kept), dropped


async def _built(directory: Path) -> str:
    """The image of a Dockerfile, under a name that depends on its path."""
    name = f"arl-task-{hashlib.sha256(str(directory).encode()).hexdigest()[:16]}"
    await _checked(_BUILD_S, "build", "--quiet", "--tag", name, str(directory))
    return name


async def _pulled(image: str) -> str:
    if (await _call(ENGINE_S, "image", "inspect", image))[0]:
        await _checked(_BUILD_S, "pull", "--quiet", image)
    return image


async def _checked(limit_s: float, *arguments: str, stdin: bytes = b"") -> None:
    """Raises SandboxError, with what docker complains of."""
    code, _, complaint = await _call(limit_s, *arguments, stdin=stdin)
    if code != 0:
        raise SandboxError(f"docker {arguments[0]} failed with exit code {code}: {complaint[-2000:]}")


async def _call(limit_s: float, *arguments: str, stdin: bytes = b"") -> tuple[int, bytes, str]:
    try:
        async with asyncio.timeout(limit_s):
            return await call_docker(_docker(), *arguments, stdin=stdin)
    except TimeoutError:
        raise SandboxError(f"`docker {arguments[0]}` did not end within {limit_s:g} s") from None


async def _remove(name: str) -> None:
    try:
        await _call(ENGINE_S, "rm", "--force", name)
    except SandboxError as error:
        log.warning("docker did not remove the container %s: %s", name, error)


def _docker() -> str:
    if (docker := shutil.which("docker")) is None:
        raise SandboxError("docker is not installed; see https://docs.docker.com/engine/install/")
    return docker
