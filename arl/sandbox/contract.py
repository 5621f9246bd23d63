"""The contract of sandboxes: a sandbox runs a program within limits and returns how it ended."""

from __future__ import annotations

import os
import posixpath
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Literal, Protocol, Self, cast

from arl.api.errors import SandboxError
from arl.api.workflow import Shared

EndedBy = Literal["exit", "signal", "timeout", "cpu", "memory", "processes", "disk", "output"]
"""How a program ended: by itself, by a signal (a crash), or at the limit of that name; `timeout` is wall_s."""

Files = Mapping[str, str | bytes]
"""The files beside a program at its start: path relative to its working directory -> contents."""

NO_FILES: Files = MappingProxyType({})

MAIN = "main.py"
"""The program's file name in its working directory."""

_MIB = 1 << 20
_PAGE = 4096
_MAX_PATH = 2048
_MAX_FILE_NAME = 255
_MAX_DEPTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one program and all processes that it starts. docs/sandbox.md says what enforces each."""

    wall_s: float = 10.0
    """Seconds from its start."""
    cpu_s: float = 10.0
    """Processor seconds."""
    memory_bytes: int = 512 * _MIB
    """Memory of all its processes together."""
    processes: int = 32
    """Processes and threads at once."""
    output_bytes: int = _MIB
    """stdout and stderr together. The sandbox ends a program that writes more, and drops the rest."""
    disk_bytes: int = 64 * _MIB
    """Space in the working directory, which is memory on top of memory_bytes; also the longest file."""
    files: int = 4096
    """Files and directories in the working directory."""
    open_files: int = 128
    """Open files of each process."""

    def __post_init__(self) -> None:
        for field in fields(self):
            number = getattr(self, field.name)
            if not 0 < number < float("inf"):
                raise SandboxError(f"Limits.{field.name} is {number}; it must be above 0, and finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOutcome:
    exit_code: int | None
    """The program's exit code, minus the number of the signal that ended it, or None if a limit ended it."""
    stdout: str
    """The output up to the end; with stderr at most Limits.output_bytes. Bytes that are not UTF-8 become U+FFFD."""
    stderr: str
    wall_s: float
    """Seconds that it ran."""
    ended_by: EndedBy

    @classmethod
    def of(cls, ended_by: str, code: int | None, wall_s: float, stdout: bytes, stderr: bytes) -> Self:
        """code: counts where the program ended by itself or by a signal."""
        return cls(
            exit_code=code if ended_by in ("exit", "signal") else None,
            stdout=stdout.decode(errors="replace"),
            stderr=stderr.decode(errors="replace"),
            wall_s=wall_s,
            ended_by=cast("EndedBy", ended_by),
        )

    @property
    def succeeded(self) -> bool:
        return self.ended_by == "exit" and self.exit_code == 0


class Sandbox(Protocol):
    """Runs Python programs that nobody has read. Many tasks may enter it; the last to leave closes it."""

    async def run(
        self, program: str, *, stdin: str = "", files: Files = NO_FILES, limits: Limits | None = None
    ) -> ProgramOutcome:
        """Run a program alone, without any trace of earlier programs, and wait for its end.

        program: the text of main.py, run as `python -I main.py` in a directory that also holds `files`.
        stdin: the whole text of its standard input.
        limits: the sandbox's limits by default.

        Waiting for a place to run does not count as time. Cancelling the call ends the program. However the program
        ends, the result is a ProgramOutcome. Raises SandboxError if the program could not be run.
        """
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...


class LocalSandbox(Shared):
    """A sandbox on this machine. limits: for runs that name none. concurrency: programs at once, or one a processor."""

    def __init__(self, *, limits: Limits | None = None, concurrency: int | None = None) -> None:
        super().__init__()
        self._limits = limits or Limits()
        self._concurrency = concurrency or len(os.sched_getaffinity(0))

    async def run(
        self, program: str, *, stdin: str = "", files: Files = NO_FILES, limits: Limits | None = None
    ) -> ProgramOutcome:
        """See Sandbox.run."""
        if not self.is_open:
            raise not_open()
        limits = limits or self._limits
        contents = laid_out(program, files, limits)
        return await self._run(contents, stdin.encode(errors="surrogatepass"), limits)

    @abstractmethod
    async def _run(self, contents: Mapping[str, bytes], stdin: bytes, limits: Limits) -> ProgramOutcome: ...


def not_open() -> SandboxError:
    return SandboxError("the sandbox is not open; call it within `async with`")


def laid_out(program: str, files: Files = NO_FILES, limits: Limits | None = None) -> dict[str, bytes]:
    """Every file of the working directory, as bytes. Raises SandboxError for a path that leads out of it or is not
    possible there, and for files that do not fit into limits.disk_bytes."""
    for path in files:
        outside = posixpath.isabs(path) or posixpath.normpath(path) != path or path.split("/")[0] in ("", ".", "..")
        if outside or path == MAIN or not _is_possible(path):
            raise SandboxError(f"files has {path!r:.300}; it must be a plain relative path, without .. and not {MAIN}")
        for end in (end for end, letter in enumerate(path) if letter == "/"):
            if (above := path[:end]) in files or above == MAIN:
                raise SandboxError(f"files has {path!r:.300}, which is below the file {above!r:.300}")
    contents = {path: _bytes(content) for path, content in {**files, MAIN: program}.items()}
    pages = sum(-(-len(content) // _PAGE) for content in contents.values())
    if limits is not None and pages > -(-limits.disk_bytes // _PAGE):
        raise SandboxError(f"the files take {pages * _PAGE} bytes; Limits.disk_bytes is {limits.disk_bytes}")
    return contents


def _is_possible(path: str) -> bool:
    """Whether Linux's limits allow the path, with room for that of the working directory."""
    try:
        raw = os.fsencode(path)
    except UnicodeEncodeError:
        return False
    names = raw.split(b"/")
    is_short = len(raw) <= _MAX_PATH and len(names) <= _MAX_DEPTH and max(map(len, names)) <= _MAX_FILE_NAME
    return is_short and b"\0" not in raw


def _bytes(content: str | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.encode(errors="surrogatepass")
