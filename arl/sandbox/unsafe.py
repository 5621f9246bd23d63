"""Programs as plain processes: they have limits, but may read, write and reach whatever this process may."""

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
from dataclasses import asdict
from pathlib import Path

from arl.api.workflow import Shared
from arl.sandbox.contract import MAIN, NO_FILES, Files, Limits, ProgramOutcome, laid_out, not_open
from arl.sandbox.streams import finish

_LAUNCH = """
import json, os, resource, sys
for name, value in json.loads(sys.argv[1]).items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value + (name == "CPU")))
os.execv(sys.argv[2], sys.argv[2:])
"""
_log = logging.getLogger(__name__)


class UnsafeSandbox(Shared):
    """No sandbox at all: for programs that you would run by hand, on a machine that you could lose.

    It limits each process's memory, processor seconds and largest file, and the run's wall time and output. A program
    that leaves its process group lives on. It warns once per process.
    """

    _warned = False

    def __init__(
        self, *, python: str | None = None, limits: Limits | None = None, concurrency: int | None = None
    ) -> None:
        super().__init__()
        self._python = python or sys.executable
        self._limits = limits or Limits()
        self._places = asyncio.Semaphore(concurrency or len(os.sched_getaffinity(0)))
        self._is_open = False

    async def _open(self) -> None:
        if not UnsafeSandbox._warned:
            UnsafeSandbox._warned = True
            _log.warning("programs run without any isolation (kind='unsafe'): they can read and delete what you can")
        self._is_open = True

    async def _close(self) -> None:
        self._is_open = False

    async def run(
        self, program: str, *, stdin: str = "", files: Files = NO_FILES, limits: Limits | None = None
    ) -> ProgramOutcome:
        """As Sandbox.run, except as the class says."""
        if not self._is_open:
            raise not_open()
        contents = laid_out(program, files)
        async with self._places:
            with tempfile.TemporaryDirectory(prefix="arl-unsafe-", ignore_cleanup_errors=True) as directory:
                await asyncio.to_thread(_write, Path(directory), contents)
                return await self._run(directory, stdin.encode(errors="surrogatepass"), limits or self._limits)

    async def _run(self, directory: str, stdin: bytes, limits: Limits) -> ProgramOutcome:
        started = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _LAUNCH, json.dumps(_rlimits(limits))),
            *(self._python, "-I", "-u", MAIN),
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


def _rlimits(limits: Limits) -> dict[str, int]:
    values = asdict(limits)
    return {
        "AS": values["memory_bytes"],
        "CPU": int(values["cpu_s"]) + 1,
        "FSIZE": values["disk_bytes"],
        "NOFILE": values["open_files"],
        "CORE": 0,
    }


def _write(directory: Path, contents: dict[str, bytes]) -> None:
    for path, content in contents.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(content)
