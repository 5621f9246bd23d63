"""Mirrors: in this process, or in one of their own that may be killed and started again at the same address."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from embedded_server import ServerProcess

from arl.engine.weights.delta import Held, MirrorClient
from arl.engine.weights.mirror import build_app, mirror_store
from arl.runtime.http.server import bind, serving


@dataclass
class Mirror:
    """Where a mirror is, and what it keeps: in a directory of its own below `directory`."""

    directory: Path
    address: str

    @property
    def versions(self) -> list[int]:
        """The versions whose directories have their final names."""
        return sorted(int(path.name.split("-")[1]) for path in self.directory.glob("*/version-*"))

    @property
    def unfinished(self) -> list[Path]:
        return list(self.directory.glob("*/.writing-*"))


async def sent(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def put(client: MirrorClient, pieces: Iterable[bytes]) -> Held:
    """Send a package to a mirror; returns what it holds then."""
    return await client.put(sent(pieces))


@asynccontextmanager
async def mirror_here(directory: Path, api_key: str | None = None) -> AsyncIterator[Mirror]:
    """A mirror in this process."""
    with mirror_store(directory, num_threads=2) as store:
        async with serving(build_app(store, api_key), bind("127.0.0.1", 0)) as port:
            yield Mirror(directory, f"http://127.0.0.1:{port}")


class MirrorProcess(ServerProcess, Mirror):
    def __init__(self, directory: Path, *options: str) -> None:
        self.directory = directory
        super().__init__("arl.engine.weights.mirror", "--directory", str(directory), *options)
