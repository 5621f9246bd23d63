"""The common part of the processes that arl starts: where their output goes, and words about how they ended."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_END_BYTES, _END_LINES = 1 << 16, 20


class ChildLog:
    """A file that gets the output of a process, and of those that replace it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = 0

    @contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        """The stream for a process that is about to start."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as stream:
            with suppress(OSError):  # a process can do without a log on a full disk
                stream.write(time.strftime("--- started at %Y-%m-%d %H:%M:%S\n").encode())
            self._start = stream.tell()
            yield stream

    def end(self) -> str:
        lines: list[str] = []
        with suppress(OSError), self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = self._start if self._start <= size else 0  # older text may have been moved to another file
            file.seek(max(start, size - _END_BYTES))
            lines = file.read().decode(errors="replace").splitlines()[-_END_LINES:]
        return f"the end of {self.path}:\n" + "\n".join(lines or ["(it is empty)"])


def how_it_ended(exit_code: int) -> str:
    """exit_code: as subprocess gives it, negative for a signal."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    if exit_code == -signal.SIGKILL:
        return "was ended by SIGKILL, as the kernel does where memory runs out"
    with suppress(ValueError):  # real-time signals have no names
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"was ended by signal {-exit_code}"


OLD = ".old"
"""The ending of the older text's file name."""
MAX_BYTES = 64_000_000
"""Largest size of a log, and of its older text."""
_EVERY_S = 60.0
_LEAVING_S = 5.0


@contextmanager
def bounded_logs(directory: Path) -> Iterator[None]:
    """Within the block, see to it that every minute each *.log below the directory is smaller than MAX_BYTES.

    The text of a larger one moves to NAME.log.old, which keeps the last MAX_BYTES. A thread does this.
    """
    is_over = threading.Event()

    def keep_small() -> None:
        while True:
            for path in directory.rglob("*.log"):
                with suppress(OSError):  # it may be gone, or there is no room for the copy
                    move_aside(path, MAX_BYTES)
            if is_over.wait(_EVERY_S):
                return

    thread = threading.Thread(target=keep_small, name="arl-logs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(_LEAVING_S)


def move_aside(path: Path, max_bytes: int) -> None:
    """Move the text of a file of max_bytes or more to NAME.old, in place of what that held.

    Processes that have opened the file for appending go on writing to it. What they write within the moment between the
    copy and the cut is lost. Raises OSError.
    """
    if path.stat().st_size < max_bytes:
        return
    old = path.with_name(path.name + OLD)
    aside = old.with_name(old.name + ".tmp")
    try:
        with path.open("rb") as file, aside.open("wb") as copy:
            file.seek(max(file.seek(0, os.SEEK_END) - max_bytes, 0))
            shutil.copyfileobj(file, copy)
        aside.replace(old)
        os.truncate(path, 0)
    finally:
        aside.unlink(missing_ok=True)
