"""The files in run_dir/logs, kept small while processes append to them."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

OLD = ".old"
"""The ending of the older text's file name."""
_EVERY_S = 60.0
_LEAVING_S = 5.0
"""Longest wait for a disk at the end."""


@contextmanager
def bounded_logs(directory: Path, max_bytes: int) -> Iterator[None]:
    """Within the block, see to it that every minute each *.log below the directory is smaller than max_bytes.

    The text of a larger one moves to NAME.log.old, which keeps the last max_bytes. A thread does this.
    """
    is_over = threading.Event()

    def keep_small() -> None:
        while True:
            for path in directory.rglob("*.log"):
                with suppress(OSError):  # it may be gone, or there is no room for the copy
                    move_aside(path, max_bytes)
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
