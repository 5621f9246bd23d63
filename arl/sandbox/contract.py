"""What runs a program apart from everything else, what it may use, and how it ended."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Literal, Protocol, Self

from arl.api.errors import SandboxError

EndedBy = Literal["exit", "signal", "timeout", "cpu", "memory", "processes", "disk", "output"]
"""What ended a program: itself, a signal (a crash), or the limit whose name it is, `timeout` being wall_s."""

Files = Mapping[str, str | bytes]
"""What is laid beside the program before it starts: a path relative to its working directory -> contents."""

NO_FILES: Files = MappingProxyType({})

MAIN = "main.py"
"""The program's own name in its working directory."""

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one program may use, with all the processes it starts. docs/sandbox.md says who keeps which, and how well.

    wall_s: seconds from its start. cpu_s: processor seconds. memory_bytes: of all its processes together.
    processes: processes and threads at once. output_bytes: of stdout and stderr together, of what is written the rest
    is dropped and the program is ended. disk_bytes: in the working directory, which is kept in memory and comes on
    top of memory_bytes; also the longest file. files: files and directories in it. open_files: of each process.
    """

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_bytes: int = 512 * _MIB
    processes: int = 32
    output_bytes: int = _MIB
    disk_bytes: int = 64 * _MIB
    files: int = 4096
    open_files: int = 128

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 < getattr(self, field.name) < float("inf"):
                raise SandboxError(
                    f"Limits.{field.name} is {getattr(self, field.name)}; it must be above 0, and finite"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a program ended, and what it wrote.

    exit_code: its own, or minus the number of the signal that ended it, or None where a limit did.
    stdout, stderr: what was written until then, no more than Limits.output_bytes of both together; bytes that are no
    UTF-8 are U+FFFD. wall_s: seconds it ran.
    """

    exit_code: int | None
    stdout: str
    stderr: str
    wall_s: float
    ended_by: EndedBy

    @property
    def succeeded(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.ended_by == "exit" and self.exit_code == 0


class Sandbox(Protocol):
    """Runs Python programs that nobody has read. Used within `async with`, in one event loop, by many tasks at once.

    It may be entered again while it is open, so that each who uses it can do so; the last who leaves closes it.
    """

    async def run(
        self, program: str, *, stdin: str = "", files: Files = NO_FILES, limits: Limits | None = None
    ) -> Outcome:
        """Run a program by itself, with nothing left of any that ran before, and wait for its end.

        program: the text of main.py, run as `python -I main.py` in a directory that holds `files` too. stdin: all it
        can read there. limits: the sandbox's own unless given. Time spent waiting for a place to run does not count.
        Cancelling the call ends the program.

        Raises SandboxError if the program could not be run. How it went, however badly, is the Outcome.
        """
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...


def laid_out(program: str, files: Files) -> dict[str, bytes]:
    """Every file of the working directory, as bytes. Raises SandboxError for a path that leads out of it."""
    for path in files:
        outside = posixpath.isabs(path) or posixpath.normpath(path) != path or path.split("/")[0] in ("", ".", "..")
        if outside or "\0" in path or path == MAIN:
            raise SandboxError(f"files has {path!r}; it must be a plain relative path, without .. and not {MAIN}")
    return {path: _bytes(content) for path, content in {**files, MAIN: program}.items()}


def _bytes(content: str | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.encode(errors="surrogatepass")
