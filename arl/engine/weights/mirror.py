"""A mirror: keeps a copy of the trained model beside inference servers: `python -m arl.engine.weights.mirror --port N`.

The trainer sends what changed from version to version over HTTP (delta.py). It belongs to one run at a time.

- Once it answers requests, it prints one line to stdout: `{"event": "ready", "host": "127.0.0.1", "port": 30900, "pid":
  4711, "directory": "/dev/shm/arl-mirror-node-4711-x"}`. It logs to stderr. If it cannot start, it says so there in one
  sentence and exits with code 2.
- The copy is in memory unless `--directory` says otherwise: twice the model's size while an update arrives.
- SIGTERM and SIGINT stop it and remove the copy, with exit code 0. After SIGKILL the copy stays until the next mirror
  of this machine removes it. With `--parent-pid PID` it stops when that process is gone.
- It listens on 127.0.0.1 unless `--host` says otherwise; any other address needs a key, by `--api-key-file` or the
  environment variable ARL_MIRROR_API_KEY.

| call | answer |
|---|---|
| GET /health | 200 |
| GET /version | 200 `{"version": 8, "checksum": "..", "directory": "/.."}`; all null while it holds nothing |
| PUT /version, a package as the body | the same, when the new directory is complete; the one before it stays |
| | 409 if it does not hold the package's base, or the result is not what the package said; 400 if it is no package |
| | 507 if there is no room |
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import StreamReader, web

from arl.api.errors import ConfigError
from arl.api.settings.engines import MIRROR_KEY
from arl.engine.weights import delta
from arl.engine.weights.delta import DeltaError, FilePart, PackageHeader, Replica, WrongBaseError
from arl.engine.weights.disk import OwnDirectory
from arl.runtime.http.bodies import RequestError
from arl.runtime.http.server import (
    add_key_option,
    answer_until,
    bind,
    boundary,
    check_address,
    json_response,
    key_of,
    require_key,
    run_server,
)
from arl.runtime.processes.parent_watch import Watch

_RAM = Path("/dev/shm")
_STALL_S = 60.0
"""The longest silence of a sender; then its update is given up, so that another can begin."""

Read = Callable[[int], Awaitable[bytes]]
"""Exactly so many bytes of a package."""


class MirrorStore:
    """The newest version of a model and the one before, each a directory of `home` that is whole or absent.

    A new version is built aside, checked and renamed, one at a time. Before that the store removes all but the newest,
    which a server may still load, and the base.
    """

    def __init__(self, home: Path, num_threads: int) -> None:
        self.home = home
        self._num_threads = num_threads
        self.pool = ThreadPoolExecutor(num_threads, "arl-mirror")
        self._receiving = asyncio.Lock()
        self._held: list[Replica] = []

    @property
    def newest(self) -> dict[str, Any]:
        """The newest version, as the trainer is told."""
        if not self._held:
            return {"version": None, "checksum": None, "directory": None}
        checksum, directory = self._held[-1].checksum, self._held[-1].directory
        return {"version": int(directory.name.split("-")[1]), "checksum": checksum, "directory": str(directory)}

    async def receive(self, read: Read) -> None:
        """Make the version in this package the newest.

        Raises WrongBaseError, DeltaError, asyncio.IncompleteReadError and OSError; the held versions stay then.
        """
        async with self._receiving:
            length = delta.header_bytes(await read(delta.PREAMBLE.size))
            header = PackageHeader.parse(await read(length))
            base = next((held for held in self._held if held.checksum == header.base), None)
            if header.base is not None and base is None:
                raise WrongBaseError(f"version {header.version} starts from a base that is not held here")
            for old in [old for old in self._held[:-1] if old is not base]:
                self._held.remove(old)
                await asyncio.to_thread(shutil.rmtree, old.directory, ignore_errors=True)
            wanted = sum(part.num_bytes for part in header.files if not part.is_kept)
            if wanted > (free := shutil.disk_usage(self.home).free):
                raise OSError(errno.ENOSPC, f"version {header.version} takes {wanted} bytes, and {free} are free")
            replica = await self._build(header, base, read)
            self._held = [held for held in self._held if held.checksum != replica.checksum] + [replica]

    async def _build(self, header: PackageHeader, base: Replica | None, read: Read) -> Replica:
        aside = Path(tempfile.mkdtemp(prefix=".writing-", dir=self.home))
        try:
            files = {part.name: await self._file(part, base, aside, read) for part in header.files}
            built = Replica(directory=self.home / f"version-{header.version}-{header.checksum}", files=files)
            if built.checksum != header.checksum:
                raise WrongBaseError(f"version {header.version} came out with another checksum than the package says")
            await asyncio.to_thread(_publish, aside, built.directory)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return built

    async def _file(self, part: FilePart, base: Replica | None, aside: Path, read: Read) -> tuple[int, str]:
        """Write one file of the new version; returns its bytes and digest."""
        theirs = base.file(part.name, part.num_bytes) if base is not None else None
        if part.is_kept:
            if base is None or theirs is None:
                raise DeltaError(f"{part.name} is kept, but the base has no such file of {part.num_bytes} bytes")
            os.link(theirs, aside / part.name)
            return base.files[part.name]
        digests: list[bytes] = []
        loop = asyncio.get_running_loop()
        blocks = delta.spans(part.num_bytes)
        with (aside / part.name).open("wb") as file:
            # As many blocks at a time as there are threads: little memory, and the next ones wait in the socket.
            for i in range(0, len(blocks), self._num_threads):
                builds = list[Callable[[], tuple[bytes | bytearray, bytes]]]()
                for block in blocks[i : i + self._num_threads]:
                    header = await read(delta.BLOCK_HEADER.size)
                    if (length := sum(delta.BLOCK_HEADER.unpack(header)[2:])) > 4 * delta.BLOCK_BYTES:
                        raise DeltaError(f"a block of {part.name} claims to have {length} bytes")
                    sent = header + await read(length)
                    builds.append(partial(delta.built_block, theirs, block, part.width, sent))
                built = await asyncio.gather(*(loop.run_in_executor(self.pool, build) for build in builds))
                digests += [digest for _, digest in built]
                await asyncio.to_thread(file.writelines, [block for block, _ in built])
        return part.num_bytes, delta.file_digest(digests)


def _publish(aside: Path, directory: Path) -> None:
    aside.chmod(0o755)  # servers may run as someone else
    if not directory.exists():  # else the same bytes were sent again
        aside.rename(directory)


@contextlib.contextmanager
def mirror_store(place: Path | None, num_threads: int) -> Iterator[MirrorStore]:
    """A store in a new directory below `place`, by default in memory; it is removed at the end.

    Raises ConfigError if `place` cannot be used.
    """
    if place is None:
        place = _RAM if _RAM.is_dir() and os.access(_RAM, os.W_OK) else Path(tempfile.gettempdir())
    try:
        home = OwnDirectory(place.absolute(), f"arl-mirror-{socket.gethostname()}-", f"{os.getpid()}-")
    except OSError as error:
        raise ConfigError(f"a model cannot be kept in {place}: {error}; give another --directory") from error
    home.path.chmod(0o755)  # servers may run as someone else
    store = MirrorStore(home.path, num_threads)
    try:
        yield store
    finally:
        store.pool.shutdown()
        home.remove()


def build_app(store: MirrorStore, api_key: str | None) -> web.Application:
    async def health(request: web.Request) -> web.Response:
        return web.Response()

    async def get_version(request: web.Request) -> web.Response:
        return json_response(store.newest)

    async def put_version(request: web.Request) -> web.Response:
        try:
            await store.receive(partial(_read, request.content))
        except WrongBaseError as error:
            raise RequestError(str(error), 409) from error
        except (DeltaError, asyncio.IncompleteReadError) as error:
            raise RequestError(f"not a package that can be applied: {error}") from error
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise RequestError(f"there is no room in {store.home}: {error}", 507) from error
        return json_response(store.newest)

    key = [require_key(api_key)] if api_key else []
    app = web.Application(middlewares=[boundary(lambda error: {"error": {"message": error.message}}), *key])
    app.add_routes([web.get("/health", health), web.get("/version", get_version), web.put("/version", put_version)])
    return app


async def _read(stream: StreamReader, num_bytes: int) -> bytes:
    """Raises DeltaError if the sender stalls, asyncio.IncompleteReadError if it ends too early."""
    try:
        async with asyncio.timeout(_STALL_S):
            return await stream.readexactly(num_bytes)
    except TimeoutError:
        raise DeltaError(f"nothing came for {_STALL_S:g} s") from None


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m arl.engine.weights.mirror", description="Keep a model beside its servers."
    )
    add = parser.add_argument
    add("--port", type=int, default=0, help="0 (the default) takes a free one")
    add("--host", default="127.0.0.1", help="the address to listen on")
    add_key_option(parser, MIRROR_KEY)
    add("--directory", type=Path, help="where to keep the model; by default in /dev/shm")
    add("--num-threads", type=int, default=min(4, os.cpu_count() or 1), help="threads that patch and hash")
    add("--parent-pid", type=int, help="stop when this process is gone")
    return parser.parse_args(argv)


async def serve(args: argparse.Namespace, watch: Watch) -> None:
    """Answer until told to stop, and leave nothing behind. Raises ConfigError."""
    check_address(args.host, args.port, key := key_of(args.api_key_file, MIRROR_KEY))
    if args.num_threads <= 0:
        raise ConfigError(f"--num-threads is {args.num_threads}; it must be above 0")
    stop, sock = watch.stop_event(), bind(args.host, args.port)
    with mirror_store(args.directory, args.num_threads) as store:
        ready = {"event": "ready", "host": args.host, "pid": os.getpid(), "directory": str(store.home)}
        await answer_until(stop, build_app(store, key), sock, lambda port: json.dumps({**ready, "port": port}))


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    return run_server(lambda watch: serve(args, watch), args.parent_pid)


if __name__ == "__main__":
    sys.exit(main())
