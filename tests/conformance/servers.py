"""Stock SGLang as a process group of its own: started, awaited, and gone afterwards."""

import contextlib
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from embedded_server import environment, free_port

SGLANG_PYTHON = "ARL_SGLANG_PYTHON"
"""The environment variable that names the Python interpreter which has SGLang."""
_SERVE = Path(__file__).parents[2] / "scripts" / "sglang_cpu" / "serve"
_START_TIMEOUT_S = 180.0
_POLL_S = 0.1


@dataclass(frozen=True)
class Server:
    kind: Literal["embedded", "sglang"]
    url: str


def sglang_python() -> str:
    """The interpreter that has SGLang; the test is skipped where none is named."""
    python = os.environ.get(SGLANG_PYTHON)
    if not python:
        pytest.skip(f"no SGLang here: `make test-sglang` installs it and names its interpreter in {SGLANG_PYTHON}")
    return python


@contextmanager
def sglang(model: Path, log: Path, *options: str) -> Iterator[Server]:
    """Stock SGLang, ready to answer. Every process that it started ends with it. Its output goes to `log`."""
    port = free_port()
    command = [str(_SERVE), sglang_python(), str(model), str(port), *options]
    with log.open("wb") as stream, _group(command, stream.fileno()) as process:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(url, process, log)
        yield Server("sglang", url)


@contextmanager
def _group(command: Sequence[str], output: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment(), start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=30) as answer:
            if answer.status == 200:
                return
        time.sleep(_POLL_S)
    end = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
    raise RuntimeError(f"the server did not start; the end of {log}:\n{end}")
