"""`arl view` as a process."""

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from made_run import began, life

from arl.cli import viewing
from arl.runtime.http.server import bind


@contextmanager
def viewing_process(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and the line that it prints."""
    with subprocess.Popen(
        [sys.executable, "-m", "arl", "view", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    ) as process:
        try:
            assert process.stdout
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_it_prints_its_address_serves_the_page_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    life(tmp_path / "run", [began()])
    with viewing_process(str(tmp_path), "--port", "0") as (process, address):
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(address, timeout=20) as page:
            assert b"<!doctype html>" in page.read().lower()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert process.stderr
        assert process.stderr.read() == ""


def test_its_key_is_never_printed(tmp_path: Path) -> None:
    life(tmp_path, [began()])
    with viewing_process(str(tmp_path), "--port", "0", ARL_VIEW_KEY="a-secret") as (process, address):
        assert address.endswith("/#key=KEY, with your key for KEY")
        process.send_signal(signal.SIGTERM)
        out, error = process.communicate(timeout=20)
    assert "a-secret" not in address + out + error


def test_without_a_port_it_takes_another_if_its_own_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(viewing, "PORT", port)
        with viewing.listening_socket("127.0.0.1", None) as other:
            assert other.getsockname()[1] not in (0, port)
