"""A mirror: keeps a copy of the trained model beside inference servers: `python -m arl.engine.weights.mirror --port N`.

The trainer sends what changed from version to version over HTTP (package.py). A mirror belongs to one run at a time.

- Once it answers requests, it prints one line to stdout: `{"event": "ready", "host": "127.0.0.1", "port": 30900, "pid":
  4711, "directory": "/dev/shm/arl-mirror-0-30900"}`. It logs to stderr. If it cannot start, it says so there in one
  sentence and exits with code 2.
- The copy is in memory unless `--directory` says otherwise: twice the model's size while an update arrives.
- SIGTERM and SIGINT stop it and remove the copy, with exit code 0. After SIGKILL the copy stays until the next mirror
  for the same directory removes it. With `--parent-pid PID` it stops when that process is gone.
- It listens on 127.0.0.1 unless `--host` says otherwise; any other address needs a key, by `--api-key-file` or the
  environment variable ARL_MIRROR_API_KEY.

| call | answer |
|---|---|
| GET /health | 200 |
| GET /version | 200 `{"version": 8, "checksum": "..", "directory": "/.."}`; all null while it holds nothing |
| PUT /version, a package as the body | the same, when the new directory is complete; the one before it stays |
| | 409 if it does not hold the package's base, or the result is not what the package said; 400 if it is no package |
| | 507 if there is no room |
| PUT /version, a route and a package | 200 when this mirror and all below it are done: the same, and "below": the |
| | same of each of those by address, or null if nobody sent it anything. A failure adds "status" and "reason" |
| | 403 if this mirror has no key: then nobody knows who named the addresses |
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from arl.api.engine_config import MIRROR_KEY
from arl.api.errors import ConfigError
from arl.engine.weights import package as delta
from arl.engine.weights.package import DeltaError, FilePart, PackageHeader, Replica, WrongBaseError
from arl.engine.weights.relay import NOTHING_HELD, PackageBody, Read, pass_on_and_receive
from arl.web.bodies import RequestError
from arl.web.process import add_key_option, answer_until, check_address, key_of, run_server
from arl.web.server import bind, boundary, json_response, require_key
from arl.web.watch import Watch

_NAME = re.compile(r"version-(\d+)-([0-9a-f]{64})")
_ASIDE = ".writing-"
_LOCK = ".lock"
_RAM = Path("/dev/shm")


class MirrorStore:
    """The newest version of a model and the one before, each a directory below `home` that is whole or absent.

    `home` belongs to this store while it is open; opening and closing remove what mirrors have left there. A new
    version is built aside, checked and renamed, one at a time. Before that the store removes all but the newest, which
    a server may still load, and the base.
    """

    def __init__(self, home: Path, num_threads: int) -> None:
        """Raises ConfigError if `home` cannot be used."""
        self.home = Path(os.path.abspath(home))
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, "arl-mirror")
        self._receiving = asyncio.Lock()
        self._lock = _lock_directory(self.home)
        self._held: list[Replica] = []

    def __enter__(self) -> Self:
        self._remove_own()
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()
        self._remove_own()
        (self.home / _LOCK).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # what others keep there stays
            self.home.rmdir()
        os.close(self._lock)

    def _remove_own(self) -> None:
        for path in self.home.iterdir():
            if _NAME.fullmatch(path.name) or path.name.startswith(_ASIDE):
                shutil.rmtree(path, ignore_errors=True)

    @property
    def newest(self) -> Replica | None:
        return self._held[-1] if self._held else None

    async def receive(self, read: Read) -> Replica:
        """Make the version in this package the newest.

        Raises WrongBaseError, DeltaError, asyncio.IncompleteReadError and OSError; the held versions stay then.
        """
        async with self._receiving:
            length = delta.header_bytes(await read(delta.PREAMBLE.size))
            header = PackageHeader.parse(await read(length))
            base = next((held for held in self._held if held.checksum == header.base), None)
            if header.base is not None and base is None:
                raise WrongBaseError(f"version {header.version} starts from a base that is not held here")
            await asyncio.to_thread(self._prune, base)
            self._check_room(header)
            replica = await self._build(header, base, read)
            self._held = [held for held in self._held if held.checksum != replica.checksum] + [replica]
            return replica

    def _check_room(self, header: PackageHeader) -> None:
        wanted, free = (
            sum(part.num_bytes for part in header.files if part.how != "kept"),
            shutil.disk_usage(self.home).free,
        )
        if wanted > free:
            raise OSError(errno.ENOSPC, f"version {header.version} takes {wanted} bytes, and {free} are free")

    def _prune(self, base: Replica | None) -> None:
        for old in self._held[:-1]:
            if old is not base:
                self._held.remove(old)
                shutil.rmtree(old.directory, ignore_errors=True)

    async def _build(self, header: PackageHeader, base: Replica | None, read: Read) -> Replica:
        aside = Path(tempfile.mkdtemp(prefix=_ASIDE, dir=self.home))
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
        theirs = base.files.get(part.name) if base else None
        if part.how != "whole" and (base is None or theirs is None or theirs[0] != part.num_bytes):
            raise DeltaError(f"{part.name} is {part.how}, but the base has no such file of {part.num_bytes} bytes")
        if part.how == "kept" and base and theirs:
            os.link(base.directory / part.name, aside / part.name)
            return theirs
        digests: list[bytes] = []
        loop = asyncio.get_running_loop()
        blocks = delta.spans(part.num_bytes)
        with (aside / part.name).open("wb") as file:
            # As many blocks at a time as there are threads: little memory, and the next ones wait in the socket.
            for i in range(0, len(blocks), self._num_threads):
                work = [await _block_work(part, base, span, read) for span in blocks[i : i + self._num_threads]]
                done = await asyncio.gather(*(loop.run_in_executor(self._pool, make) for make in work))
                digests += [digest for _, digest in done]
                await asyncio.to_thread(file.writelines, [block for block, _ in done])
        return part.num_bytes, delta.file_digest(digests)


def _publish(aside: Path, directory: Path) -> None:
    aside.chmod(0o755)  # servers may run as someone else
    if not directory.exists():  # else the same bytes were sent again
        aside.rename(directory)


async def _block_work(
    part: FilePart, base: Replica | None, span: tuple[int, int], read: Read
) -> Callable[[], tuple[bytes | bytearray, bytes]]:
    """Read the package's bytes for a block; returns the work that makes the block and its digest from them."""
    start, size = span
    if part.how == "whole" or base is None:
        return partial(_with_digest, await read(size))
    header = await read(delta.BLOCK_HEADER.size)
    length = delta.payload_bytes(header)
    if length > 4 * delta.BLOCK_BYTES:
        raise DeltaError(f"a block of {part.name} claims to have {length} bytes")
    encoded = header + await read(length)
    return partial(delta.patched_block, base.directory, start, size, part, encoded)


def _with_digest(block: bytes) -> tuple[bytes, bytes]:
    return block, delta.block_digest(block)


def _lock_directory(path: Path) -> int:
    """Make a directory that belongs to this process until the returned descriptor is closed."""
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


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m arl.engine.weights.mirror", description="Keep a model beside its servers."
    )
    add = parser.add_argument
    add("--port", type=int, default=0, help="0 (the default) takes a free one")
    add("--host", default="127.0.0.1", help="the address to listen on")
    add_key_option(parser, MIRROR_KEY)
    add("--directory", type=Path, help="where to keep the model, for this mirror alone; by default in /dev/shm")
    add("--num-threads", type=int, default=min(4, os.cpu_count() or 1), help="threads that patch and hash")
    add("--parent-pid", type=int, help="stop when this process is gone")
    return parser.parse_args(argv)


def check_arguments(args: argparse.Namespace) -> None:
    """Raises ConfigError."""
    check_address(args.host, args.port, key_of(args.api_key_file, MIRROR_KEY))
    if args.num_threads <= 0:
        raise ConfigError(f"--num-threads is {args.num_threads}; it must be above 0")


def build_app(store: MirrorStore, api_key: str | None) -> web.Application:
    async def health(request: web.Request) -> web.Response:
        return web.Response()

    async def get_version(request: web.Request) -> web.Response:
        return json_response(_held(store))

    async def receive(read: Read) -> dict[str, Any]:
        try:
            await store.receive(read)
        except WrongBaseError as error:
            raise RequestError(str(error), 409) from error
        except (DeltaError, asyncio.IncompleteReadError) as error:
            raise RequestError(f"not a package that can be applied: {error}") from error
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise RequestError(f"there is no room in {store.home}: {error}", 507) from error
        return _held(store)

    async def put_version(request: web.Request) -> web.Response:
        body = PackageBody(request.content, request.content_length or 0)
        try:
            with body.coming_beside(coming):
                if not (below := await body.route()):
                    return json_response(await receive(body.read_exactly))
                if api_key is None:
                    raise RequestError("this mirror has no key, so it passes nothing on", 403)
                return json_response(await pass_on_and_receive(body, below, receive, api_key))
        except (DeltaError, asyncio.IncompleteReadError) as error:
            raise RequestError(f"not a package that can be applied: {error}") from error

    coming = set[PackageBody]()
    key = [require_key(api_key)] if api_key else []
    app = web.Application(middlewares=[boundary(lambda error: {"error": {"message": error.message}}), *key])
    app.router.add_get("/health", health)
    app.router.add_get("/version", get_version)
    app.router.add_put("/version", put_version)
    return app


def _held(store: MirrorStore) -> dict[str, Any]:
    newest = store.newest
    if newest is None:
        return NOTHING_HELD
    version = int(newest.directory.name.split("-")[1])
    return {"version": version, "checksum": newest.checksum, "directory": str(newest.directory)}


async def serve(args: argparse.Namespace, watch: Watch) -> None:
    """Answer until told to stop, and leave nothing behind. Raises ConfigError."""
    check_arguments(args)
    stop, sock = watch.stop_event(), bind(args.host, args.port)
    directory = args.directory or _default_directory(sock.getsockname()[1])
    with MirrorStore(directory, args.num_threads) as store:
        ready = {"event": "ready", "host": args.host, "pid": os.getpid(), "directory": str(store.home)}
        app = build_app(store, key_of(args.api_key_file, MIRROR_KEY))
        await answer_until(stop, app, sock, lambda port: json.dumps({**ready, "port": port}))


def _default_directory(port: int) -> Path:
    base = _RAM if _RAM.is_dir() and os.access(_RAM, os.W_OK) else Path(tempfile.gettempdir())
    return base / f"arl-mirror-{os.getuid()}-{port}"


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    return run_server(lambda watch: serve(args, watch), args.parent_pid)


if __name__ == "__main__":
    sys.exit(main())
