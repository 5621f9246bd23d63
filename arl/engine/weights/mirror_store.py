"""What a mirror holds: the newest version of a model and the one before, each a directory that is whole or absent."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from arl.api.errors import ConfigError
from arl.engine.weights import package as delta
from arl.engine.weights.package import DeltaError, FilePart, PackageHeader
from arl.engine.weights.replica import Replica, patched_block, spans, survey

_STALL_S = 60.0
"""How long a sender may send nothing before its update is given up, so that another can be taken."""
_NAME = re.compile(r"version-(\d+)-([0-9a-f]{64})")
_ASIDE = ".writing-"
_LOCK = ".lock"


class WrongBaseError(Exception):
    """A package starts from something else than what is here, or leads to something else than it says."""


class ByteReader(Protocol):
    """The body of a request."""

    async def readexactly(self, n: int) -> bytes: ...


class MirrorStore:
    """Versions below `home`, which is this store's alone while it is open; removed when it is closed.

    What a killed predecessor left there is kept if it is whole. A new version is built aside, checked, and renamed;
    one at a time. Before that all but the newest and the base are removed: a server may still load the newest.
    """

    def __init__(self, home: Path, num_threads: int) -> None:
        """Raises ConfigError if `home` is not to be had."""
        self.home = Path(os.path.abspath(home))
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, "arl-mirror")
        self._receiving = asyncio.Lock()
        self._lock = _lock_directory(self.home)
        self._held: list[Replica] = []

    def __enter__(self) -> Self:
        for path in sorted(self._own_directories(), key=lambda path: path.stat().st_mtime):
            replica = survey(path, self._pool)
            if path.name.endswith(replica.checksum):
                self._held.append(replica)
            else:
                shutil.rmtree(path, ignore_errors=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown()
        for path in self._own_directories():
            shutil.rmtree(path, ignore_errors=True)
        (self.home / _LOCK).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # what others keep there stays
            self.home.rmdir()
        os.close(self._lock)

    def _own_directories(self) -> list[Path]:
        return [path for path in self.home.iterdir() if _NAME.fullmatch(path.name) or path.name.startswith(_ASIDE)]

    @property
    def newest(self) -> Replica | None:
        return self._held[-1] if self._held else None

    async def receive(self, body: ByteReader) -> Replica:
        """Make the version that the package in `body` describes the newest.

        Raises DeltaError, asyncio.IncompleteReadError and OSError as well as WrongBaseError; what is held stays then.
        """
        async with self._receiving:
            reader = _Patient(body)
            length = delta.header_bytes(await reader.readexactly(delta.PREAMBLE.size))
            header = PackageHeader.parse(await reader.readexactly(length))
            base = next((held for held in self._held if held.checksum == header.base), None)
            if header.base is not None and base is None:
                raise WrongBaseError(f"version {header.version} starts from a base that is not held here")
            await asyncio.to_thread(self._prune, base)
            replica = await self._build(header, base, reader)
            self._held = [held for held in self._held if held.checksum != replica.checksum] + [replica]
            return replica

    def _prune(self, base: Replica | None) -> None:
        """Leave the newest alone, and the base of what is to come."""
        for old in self._held[:-1]:
            if old is not base:
                self._held.remove(old)
                shutil.rmtree(old.directory, ignore_errors=True)

    async def _build(self, header: PackageHeader, base: Replica | None, reader: ByteReader) -> Replica:
        aside = Path(tempfile.mkdtemp(prefix=_ASIDE, dir=self.home))
        try:
            files = {part.name: await self._file(part, base, aside, reader) for part in header.files}
            built = Replica(directory=self.home / f"version-{header.version}-{header.checksum}", files=files)
            if built.checksum != header.checksum:
                raise WrongBaseError(f"version {header.version} came out with another checksum than the package has")
            await asyncio.to_thread(_publish, aside, built.directory)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return built

    async def _file(self, part: FilePart, base: Replica | None, aside: Path, reader: ByteReader) -> tuple[int, str]:
        """Write one file of the new version; returns its bytes and digest."""
        theirs = base.files.get(part.name) if base else None
        if part.how != "whole" and (base is None or theirs is None or theirs[0] != part.num_bytes):
            raise DeltaError(f"{part.name} is given as {part.how}, and the base has none of {part.num_bytes} bytes")
        if part.how == "kept" and base and theirs:
            os.link(base.directory / part.name, aside / part.name)
            return theirs
        digests: list[bytes] = []
        loop = asyncio.get_running_loop()
        blocks = spans(part.block_sizes)
        with (aside / part.name).open("wb") as file:
            # As many blocks at a time as there are threads: little memory, and the next ones wait in the socket.
            for i in range(0, len(blocks), self._num_threads):
                work = [await _block_work(part, base, span, reader) for span in blocks[i : i + self._num_threads]]
                done = await asyncio.gather(*(loop.run_in_executor(self._pool, make) for make in work))
                digests += [digest for _, digest in done]
                await asyncio.to_thread(file.writelines, [block for block, _ in done])
        return part.num_bytes, delta.file_digest(digests)


class _Patient:
    """Reads from a sender that has to send something now and then."""

    def __init__(self, body: ByteReader) -> None:
        self._body = body

    async def readexactly(self, n: int) -> bytes:
        try:
            async with asyncio.timeout(_STALL_S):
                return await self._body.readexactly(n)
        except TimeoutError:
            raise DeltaError(f"nothing came for {_STALL_S:g} s") from None


def _publish(aside: Path, directory: Path) -> None:
    aside.chmod(0o755)  # servers may run as someone else
    if not directory.exists():  # else the same bytes were sent again
        aside.rename(directory)


def replica_version(directory: Path) -> int:
    """The version in the name of one of a store's directories."""
    return int(directory.name.split("-")[1])


async def _block_work(
    part: FilePart, base: Replica | None, span: tuple[int, int], reader: ByteReader
) -> Callable[[], tuple[bytes | bytearray, bytes]]:
    """Read what the package says about a block; returns the work that makes the block and its digest of it."""
    start, size = span
    if part.how == "whole" or base is None:
        return partial(_with_digest, await reader.readexactly(size))
    header = await reader.readexactly(delta.BLOCK_HEADER.size)
    length = delta.payload_bytes(header)
    if length > 4 * delta.BLOCK_BYTES:
        raise DeltaError(f"a block of {part.name} says that {length} bytes belong to it")
    encoded = header + await reader.readexactly(length)
    return partial(patched_block, base.directory, start, size, part, encoded)


def _with_digest(block: bytes) -> tuple[bytes, bytes]:
    return block, delta.block_digest(block)


def _lock_directory(path: Path) -> int:
    """Make a directory that is this process's alone, until the descriptor that this returns is closed."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if path.stat().st_uid != os.getuid():
            raise ConfigError(f"{path} belongs to someone else; give another --directory")
        path.chmod(0o755)
        lock = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"a model cannot be kept in {path}: {error}; give another --directory") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(f"another mirror keeps its model in {path}; give another --directory") from None
    return lock
