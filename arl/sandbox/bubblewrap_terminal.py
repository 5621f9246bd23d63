"""Terminals: a sandbox whose files stay from one command to the next, for an agent that works with a shell.

A BubblewrapTerminal holds nothing between two commands but the files, as an archive in arl's memory: no process, no
directory of the host. Each command is a program of the sandbox (one_command.py), which unpacks the files, runs, and
packs them again.
"""

from __future__ import annotations

import io
import json
import posixpath
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, cast

from arl.api.errors import SandboxError
from arl.runtime.threads import offload
from arl.sandbox import one_command
from arl.sandbox.bubblewrap import BubblewrapSandbox, RawOutcome
from arl.sandbox.contract import NO_FILES, EndedBy, Limits, laid_out, not_open

TerminalFiles = Mapping[str, str | bytes | Path]
"""Absolute path in the terminal -> contents, or the file of this machine that has them."""

_PROGRAM = Path(one_command.__file__).read_text(encoding="utf-8")
_BEYOND_S = 30.0
"""Seconds for unpacking, packing, and Python's start, beyond a command's time."""
_ANSWER_BYTES = 1 << 20
"""Bytes of an answer beside the files and the output."""
_EXECUTABLE = 0o755


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOutcome:
    """What a command wrote, and how it ended."""

    output: str
    """stdout and stderr as they came, up to the terminal's limit. Bytes that are not UTF-8 become U+FFFD."""
    num_dropped: int = 0
    """Bytes of output beyond that limit."""
    exit_code: int | None
    """None if a limit ended the command; above 128 for a signal, as in shells."""
    ended_by: EndedBy = "exit"
    """"timeout", the limit of the sandbox at which it ended, or "signal" if it killed its terminal. After any but
    "exit" and "timeout" the files are as they were before the command."""
    wall_s: float = 0.0
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """The files that `read` named, as far as they are there."""


class Terminal(Protocol):
    """Runs commands by bash, one after another, over files that stay."""

    async def run(
        self,
        command: str,
        *,
        timeout_s: float,
        env: Mapping[str, str] = ...,
        files: TerminalFiles = ...,
        fresh: Sequence[str] = ...,
        read: Sequence[str] = ...,
    ) -> CommandOutcome:
        """Run a command and wait for its end. Processes that it leaves behind end with it.

        timeout_s: ends the command; what it has written stays. files: absolute path -> contents, put there before it,
        executable by all. fresh: absolute paths to remove before that. read: absolute paths of files to return.
        Raises SandboxError if no command can be run.
        """
        ...


class BubblewrapTerminal:
    """A Terminal in a BubblewrapSandbox whose `directories` hold every path of it.

    workdir: the directory that commands start in, made if it is not there. files: what is there at first, by absolute
    paths. env: variables of every command. limits: of each command; disk_bytes must hold the files twice, and wall_s is
    the command's timeout_s and some seconds. most_bytes: the most output of a command that is kept, and the most of a
    file that is read.
    """

    def __init__(
        self, sandbox: BubblewrapSandbox, *, workdir: str, files: TerminalFiles = NO_FILES,
        env: Mapping[str, str] | None = None, limits: Limits = Limits(),  # noqa: B008 - it is frozen
        most_bytes: int = 1 << 16,
    ) -> None:  # fmt: skip
        self._sandbox = sandbox
        self._workdir = workdir
        self._limits = limits
        self._env = dict(env or {})
        self._most_bytes = most_bytes
        self._files = files
        self._kept: bytes | None = None

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
        if not self._sandbox.is_open:
            raise not_open()
        request = {
            "command": command,
            "workdir": self._workdir,
            "directory": _within(self._workdir),
            "directories": [*map(_within, (*self._sandbox.directories, self._workdir))],
            "timeout_s": timeout_s,
            "env": {**self._env, **(env or {})},
            "fresh": [*map(_within, fresh)],
            "read": [*map(_within, read)],
            "most_bytes": self._most_bytes,
        }
        if self._kept is None:
            self._kept = await offload(packed, _inside(self._files))
        archives = {"kept.tar": self._kept, "added.tar": await offload(packed, _inside(files))}
        kept_bytes = self._limits.disk_bytes + (1 + len(read)) * self._most_bytes
        limits = replace(self._limits, wall_s=timeout_s + _BEYOND_S, output_bytes=kept_bytes + _ANSWER_BYTES)
        contents = laid_out(_PROGRAM, {name: content for name, content in archives.items() if content}, limits)
        outcome = await self._sandbox.run_raw(contents, json.dumps(request).encode(errors="surrogatepass"), limits)
        return await offload(self._answered, outcome, read)

    def _answered(self, outcome: RawOutcome, read: Sequence[str]) -> CommandOutcome:
        """Keep the files, and say how the command ended."""
        ended_by, exit_code, wall_s, stdout, stderr = outcome
        line, newline, _ = stdout.partition(b"\n")
        if not newline or (ended_by, exit_code) != ("exit", 0):
            if ended_by == "exit":
                raise SandboxError(f"a command could not be run: {stderr.decode(errors='replace')[-1000:].strip()}")
            return CommandOutcome(output="", exit_code=None, ended_by=cast("EndedBy", ended_by), wall_s=wall_s)
        answer = json.loads(line)
        at, parts = len(line) + 1, list[bytes]()
        for length in answer["lengths"]:
            parts.append(stdout[at : at + length])
            at += length
        output, *contents = parts
        self._kept = stdout[at:]
        code: int | None = answer["code"]
        found = dict(zip(answer["files"], contents, strict=True))
        return CommandOutcome(
            output=output.decode(errors="replace"),
            num_dropped=answer["num_dropped"],
            exit_code=code if code is None or code >= 0 else 128 - code,
            ended_by="timeout" if code is None else "exit",
            wall_s=answer["wall_s"],
            files={path: found[inside] for path in read if (inside := _within(path)) in found},
        )


def _inside(files: TerminalFiles) -> TerminalFiles:
    return {_within(path): content for path, content in files.items()}


def _within(path: str) -> str:
    """Where the working directory holds an absolute path of the terminal. /tmp is the working directory itself."""
    plain = checked_path(path)
    return plain.removeprefix("/tmp/").lstrip("/") or "."


def checked_path(path: str) -> str:
    """The path. Raises SandboxError if it is not absolute and plain."""
    if not posixpath.isabs(path) or posixpath.normpath(path) != path:
        raise SandboxError(
            f"{path!r:.300} is no path of a terminal; it must be absolute, without .. and a slash at its end"
        )
    return path


def packed(files: TerminalFiles) -> bytes:
    """A tar of files that everybody may execute; nothing for no files. Blocks."""
    if not files:
        return b""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path, content in files.items():
            raw = content.read_bytes() if isinstance(content, Path) else content
            raw = raw.encode(errors="surrogatepass") if isinstance(raw, str) else raw
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.size, entry.mode = len(raw), _EXECUTABLE
            tar.addfile(entry, io.BytesIO(raw))
    return archive.getvalue()
