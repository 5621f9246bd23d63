"""Mirrors: in this process, or in one of their own that may be killed and started again at the same address."""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from arl.engine.weights.mirror import MirrorStore, build_app
from arl.web.server import bind, serving


@dataclass
class Mirror:
    """Where a mirror is, and what it keeps."""

    directory: Path
    address: str

    @property
    def versions(self) -> list[int]:
        """Of the directories that are there under their names."""
        return sorted(int(path.name.split("-")[1]) for path in self.directory.glob("version-*"))

    @property
    def unfinished(self) -> list[Path]:
        return list(self.directory.glob(".writing-*"))


@asynccontextmanager
async def mirror_here(directory: Path) -> AsyncIterator[Mirror]:
    """A mirror in this process."""
    with MirrorStore(directory, num_threads=2) as store:
        async with serving(build_app(store, None), bind("127.0.0.1", 0)) as port:
            yield Mirror(directory, f"http://127.0.0.1:{port}")


class MirrorProcess(Mirror):
    def __init__(self, directory: Path, *options: str) -> None:
        self._options = options
        self._port = 0
        self.directory = directory
        self.process = self.start()
        super().__init__(directory, f"http://127.0.0.1:{self._port}")

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "arl.engine.weights.mirror", "--port", str(self._port)]
        command += ["--directory", str(self.directory), "--parent-pid", str(os.getpid()), *self._options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        self._port = json.loads(self.process.stdout.readline())["port"]
        return self.process

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
