"""Files of run_dir/logs stay small, and the processes that write them notice nothing."""

import errno
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from training.trainer_run import run

from arl.runtime.processes import logs
from arl.runtime.processes.logs import ChildLog, bounded_logs, move_aside

WRITER = """
import sys
for line in sys.stdin:
    sys.stdout.write(line)
    sys.stdout.flush()
    sys.stderr.write("done\\n")
    sys.stderr.flush()
"""


def test_a_process_goes_on_writing_to_a_file_whose_text_was_moved_aside(tmp_path: Path) -> None:
    log = ChildLog(tmp_path / "server-0.log")
    pipe = subprocess.PIPE
    with log.opened() as stream:
        process = subprocess.Popen([sys.executable, "-c", WRITER], stdin=pipe, stdout=stream, stderr=pipe, text=True)
    with process:
        assert process.stdin is not None
        assert process.stderr is not None
        for line, bound in (("first\n", 1), ("second\n", 1000), ("third\n", 1)):
            process.stdin.write(line)
            process.stdin.flush()
            assert process.stderr.readline() == "done\n"
            if line != "third\n":
                move_aside(log.path, bound)
        process.stdin.close()
    assert log.path.read_text() == "second\nthird\n"
    assert (tmp_path / "server-0.log.old").read_text() == "\n", "the last byte of the first"
    assert log.end().endswith("second\nthird"), "the end of the newest process's output"


def test_every_large_log_is_moved_and_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_EVERY_S", 0.01)
    monkeypatch.setattr(logs, "MAX_BYTES", 100)
    large, small, other = (tmp_path / name for name in ("serve/server-0.log", "trainer.log", "notes.txt"))
    large.parent.mkdir()
    with bounded_logs(tmp_path):
        small.write_bytes(b"s" * 99)
        other.write_bytes(b"o" * 500)
        for letter in (b"a", b"b"):
            large.write_bytes(letter * 150)
            until = time.monotonic() + 60
            while large.stat().st_size:
                assert time.monotonic() < until
                time.sleep(0.01)
    assert (large.parent / "server-0.log.old").read_bytes() == b"b" * 100
    assert (small.stat().st_size, other.stat().st_size) == (99, 500)
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == [
        "notes.txt", "server-0.log", "server-0.log.old", "trainer.log",
    ]  # fmt: skip


def test_a_full_disk_loses_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    log = tmp_path / "server-0.log"
    log.write_text("all of it")
    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(OSError, match="No space left"):
        move_aside(log, 1)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("server-0.log", "all of it")]


async def test_a_run_begins_by_moving_what_earlier_ones_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_BYTES", 10_000)
    log = tmp_path / "logs" / "trainer.log"
    log.parent.mkdir()
    log.write_bytes(bytes(20_000))
    await run(tmp_path, steps=1)
    assert (log.stat().st_size, (tmp_path / "logs" / "trainer.log.old").stat().st_size) == (0, 10_000)
