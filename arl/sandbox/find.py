"""find_sandbox, which finds a sandbox on this machine; and UnsafeSandbox, which isolates nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Literal

from arl.api.errors import SandboxError
from arl.runtime.threads import offload
from arl.sandbox.bubblewrap import INSTALL, BubblewrapSandbox
from arl.sandbox.contract import MAIN, Limits, LocalSandbox, ProgramOutcome, Sandbox
from arl.sandbox.docker import DockerSandbox
from arl.sandbox.streams import finish

_LAUNCH = """
import json, os, resource, sys
for name, value in json.loads(sys.argv[1]).items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value + (name == "CPU")))
os.execv(sys.argv[2], sys.argv[2:])
"""
_log = logging.getLogger(__name__)


class UnsafeSandbox(LocalSandbox):
    """No sandbox at all: for programs that you would run by hand, on a machine that you could lose.

    A program is a plain process, which may read, write and reach whatever this process may. Limits: each process's
    memory, processor seconds and largest file, and the run's wall time and output. A program that leaves its process
    group lives on. It warns once per process.
    """

    _warned = False

    async def _open(self, opened: AsyncExitStack) -> None:
        self._places = asyncio.Semaphore(self._concurrency)
        if not UnsafeSandbox._warned:
            UnsafeSandbox._warned = True
            _log.warning("programs run without any isolation (kind='unsafe'): they can read and delete what you can")

    async def _run(self, contents: Mapping[str, bytes], stdin: bytes, limits: Limits) -> ProgramOutcome:
        async with self._places:
            with tempfile.TemporaryDirectory(prefix="arl-unsafe-", ignore_cleanup_errors=True) as directory:
                await offload(_write, Path(directory), contents)
                return await self._run_in(directory, stdin, limits)

    async def _run_in(self, directory: str, stdin: bytes, limits: Limits) -> ProgramOutcome:
        started = time.monotonic()
        rlimits = {"AS": limits.memory_bytes, "FSIZE": limits.disk_bytes, "NOFILE": limits.open_files}
        rlimits |= {"CPU": int(limits.cpu_s) + 1, "CORE": 0}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _LAUNCH, json.dumps(rlimits)),
            *(sys.executable, "-I", "-u", MAIN),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=directory,
            env={"PATH": os.defpath, "HOME": directory, "LANG": "C.UTF-8"},
            start_new_session=True,
        )

        async def kill(_: bool) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        ended_by, stdout, stderr = await finish(
            process, stdin, output_bytes=limits.output_bytes, wall_s=limits.wall_s, kill=kill
        )
        code = process.returncode
        if ended_by == "exit" and code is not None and code < 0:
            ended_by = "cpu" if code == -signal.SIGXCPU else "signal"
        return ProgramOutcome.of(ended_by, code, time.monotonic() - started, stdout, stderr)


def _write(directory: Path, contents: Mapping[str, bytes]) -> None:
    for path, content in contents.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(content)


class FirstSandbox(LocalSandbox):
    """Bubblewrap if it can run a program, else Docker if an engine can."""

    async def _open(self, opened: AsyncExitStack) -> None:
        reasons: list[str] = []
        for kind in (BubblewrapSandbox, DockerSandbox):
            found = kind(limits=self._limits, concurrency=self._concurrency)
            try:
                await opened.enter_async_context(found)
            except SandboxError as reason:
                reasons.append(f"\n- {reason}")
            else:
                self._found = found
                return
        raise SandboxError(
            f"no sandbox was found:{''.join(reasons)}\nThe simplest remedy: {INSTALL}. To run programs without any "
            "isolation, on a machine that you could lose, ask for kind='unsafe'."
        )

    async def _run(self, contents: Mapping[str, bytes], stdin: bytes, limits: Limits) -> ProgramOutcome:
        return await self._found._run(contents, stdin, limits)


Kind = Literal["auto", "bubblewrap", "docker", "unsafe"]
_KINDS: dict[Kind, type[LocalSandbox]] = {
    "auto": FirstSandbox,
    "bubblewrap": BubblewrapSandbox,
    "docker": DockerSandbox,
    "unsafe": UnsafeSandbox,
}


def find_sandbox(kind: Kind = "auto", *, limits: Limits | None = None, concurrency: int | None = None) -> Sandbox:
    """A sandbox, to enter by `async with`. If none works, that raises SandboxError, with what to install or allow.

    kind: "auto" is bubblewrap if it can run a program, else Docker if an engine can. It is never "unsafe".
    limits: for runs that name none. concurrency: programs at once; one per processor by default.
    """
    if kind not in _KINDS:
        raise SandboxError(f"there is no sandbox of kind {kind!r}; it is auto, bubblewrap, docker or unsafe")
    return _KINDS[kind](limits=limits, concurrency=concurrency)
