"""A real embedded server, as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RunningServer:
    process: subprocess.Popen[str]
    ready: dict[str, Any]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ready['port']}"


def command(model: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "arl.engine.local", "--model", model, *options]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@contextmanager
def running_server(model: str, *options: str) -> Iterator[RunningServer]:
    process = subprocess.Popen(command(model, *options), stdout=subprocess.PIPE, text=True, env=environment())
    assert process.stdout is not None
    try:
        yield RunningServer(process, json.loads(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
