"""A mirror beside inference servers: `python -m arl.engine.weights.mirror --port N`.

It keeps a copy of the model being trained where the servers of its machine can load it, and brings the copy from
version to version by what changed (package.py); the trainer tells it to, over HTTP. It belongs to one run
at a time. For whoever starts it:

- When it answers requests it prints one line to stdout: `{"event": "ready", "host": "127.0.0.1", "port": 30900,
  "pid": 4711, "directory": "/dev/shm/arl-mirror-0-30900"}`. It logs to stderr; what cannot be is one sentence there
  and exit code 2.
- The copy is in memory unless `--directory` says otherwise: twice the model's size while an update arrives.
- SIGTERM and SIGINT stop it and remove the copy, with exit code 0. After SIGKILL the copy stays, and a mirror that is
  started for the same directory checks it and goes on from there. `--parent-pid PID`: stop when that process is gone.
- It listens on 127.0.0.1 unless `--host` says otherwise; any other address needs a key, by `--api-key` or the
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
import errno
import json
import logging
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from aiohttp import web

from arl.api.errors import ArlError, ConfigError
from arl.engine.weights.mirror_store import MirrorStore, WrongBaseError, replica_version
from arl.engine.weights.package import DeltaError
from arl.web.listening import bind, is_loopback, require_key, watch_parent

_BAD_START = 2
_SHUTDOWN_S = 2.0
_RAM = Path("/dev/shm")

log = logging.getLogger("arl.engine.weights.mirror")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m arl.engine.weights.mirror", description="Keep a model beside its servers."
    )
    add = parser.add_argument
    add("--port", type=int, default=0, help="0 (the default) takes a free one")
    add("--host", default="127.0.0.1", help="the address to listen on")
    add("--api-key", default=os.environ.get("ARL_MIRROR_API_KEY"), help="what clients must send as a bearer token")
    add("--directory", type=Path, help="where the model is kept, for this mirror alone; in /dev/shm when not given")
    add("--num-threads", type=int, default=min(4, os.cpu_count() or 1), help="threads that patch and hash")
    add("--parent-pid", type=int, help="stop when this process is gone")
    return parser.parse_args(argv)


def check_arguments(args: argparse.Namespace) -> None:
    """Raises ConfigError."""
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port is {args.port}; it must be between 0 (any free port) and 65535")
    if args.num_threads <= 0:
        raise ConfigError(f"--num-threads is {args.num_threads}; it must be above 0")
    if not args.api_key and not is_loopback(args.host):
        raise ConfigError(
            f"--host is {args.host}, which other machines can reach; give --api-key KEY too, or listen on 127.0.0.1"
        )


def build_app(store: MirrorStore, api_key: str | None) -> web.Application:
    async def health(request: web.Request) -> web.Response:
        return web.Response()

    async def get_version(request: web.Request) -> web.Response:
        return web.json_response(_held(store))

    async def put_version(request: web.Request) -> web.Response:
        try:
            await store.receive(request.content)
        except WrongBaseError as error:
            return _refusal(409, str(error))
        except (DeltaError, asyncio.IncompleteReadError) as error:
            return _refusal(400, f"not a package that can be applied: {error}")
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return _refusal(507, f"there is no room in {store.home}: {error}")
        return web.json_response(_held(store))

    app = web.Application(middlewares=[require_key(api_key)] if api_key else [])
    app.router.add_get("/health", health)
    app.router.add_get("/version", get_version)
    app.router.add_put("/version", put_version)
    return app


def _refusal(status: int, sentence: str) -> web.Response:
    log.warning("%s", sentence)
    return web.json_response({"error": {"message": sentence}}, status=status)


def _held(store: MirrorStore) -> dict[str, Any]:
    newest = store.newest
    if newest is None:
        return {"version": None, "checksum": None, "directory": None}
    directory = newest.directory
    return {"version": replica_version(directory), "checksum": newest.checksum, "directory": str(directory)}


async def serve(args: argparse.Namespace, sock: socket.socket) -> None:
    """Answer until told to stop, and leave nothing behind."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if args.parent_pid is not None:
        watch_parent(args.parent_pid, loop, stop)
    port = sock.getsockname()[1]
    with MirrorStore(args.directory or _default_directory(port), args.num_threads) as store:
        runner = web.AppRunner(
            build_app(store, args.api_key),
            handler_cancellation=True,  # a trainer that goes away ends its update
            access_log=None,
            shutdown_timeout=_SHUTDOWN_S,
        )
        await runner.setup()
        try:
            await web.SockSite(runner, sock).start()
            ready = {"event": "ready", "host": args.host, "port": port, "pid": os.getpid()}
            sys.stdout.write(json.dumps({**ready, "directory": str(store.home)}) + "\n")
            sys.stdout.flush()
            await stop.wait()
        finally:
            await runner.cleanup()


def _default_directory(port: int) -> Path:
    base = _RAM if _RAM.is_dir() and os.access(_RAM, os.W_OK) else Path(tempfile.gettempdir())
    return base / f"arl-mirror-{os.getuid()}-{port}"


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    try:
        check_arguments(args)
        with bind(args.host, args.port) as sock:
            asyncio.run(serve(args, sock))
    except ArlError as error:
        sys.stderr.write(f"error: {error}\n")
        return _BAD_START
    return 0


if __name__ == "__main__":
    sys.exit(main())
