"""The embedded inference server: `python -m arl.engine.local --model DIR --port N`.

It speaks SGLang's HTTP protocol. A program that starts it as a child can rely on this:

- When it is ready for requests it prints one line to stdout, and never anything else:
  `{"event": "ready", "host": "127.0.0.1", "port": 41237, "pid": 4711, "model": "/models/m", "weight_version": "0"}`.
  `--port 0` takes a free port; the line names it.
- It logs to stderr. If it cannot start (no such model, a port in use, no API key on an open address), it says why in
  one sentence there and exits with code 2.
- When an error ends the model thread, the server logs the error and exits with code 1.
- SIGTERM and SIGINT stop it, with exit code 0: it aborts running requests and answers them with their tokens so far.
- `--parent-pid PID` ties its life to that process: it stops when PID is gone, however PID ended.
- A server that has not stopped 5 s later, because its event loop is blocked, ends with code 1 and its tracebacks.
- It listens on 127.0.0.1 unless `--host` says otherwise; any other address needs an API key, by `--api-key-file` or the
  environment variable ARL_SERVER_API_KEY. Other users of the machine can read neither.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from arl.api.errors import ArlError, ConfigError, ModelError
from arl.api.settings.engines import SERVER_KEY
from arl.runtime.http.server import add_key_option, bind, check_address, key_of, run_server, serving
from arl.runtime.processes.parent_watch import Watch

if TYPE_CHECKING:
    from aiohttp import web

    from arl.engine.local.generate import Inflight
    from arl.engine.local.model_thread import Scheduler

log = logging.getLogger("arl.engine.local")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m arl.engine.local", description="Serve a model to arl.")
    add = parser.add_argument
    add("--model", required=True, help="a Hugging Face model directory")
    add("--port", type=int, default=0, help="0 (the default) takes a free one")
    add("--host", default="127.0.0.1", help="the address to listen on")
    add_key_option(parser, SERVER_KEY)
    add("--device", default="cpu", help="the torch device of the model: cpu, cuda, cuda:0, ...")
    add("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    add("--num-threads", type=int, default=1, help="CPU threads of the model")
    add("--max-running-requests", type=int, default=128, help="sequences decoded at once; more wait")
    add("--context-length", type=int, help="longest prompt plus response in tokens; by default the model's own")
    add("--weight-version", default="default", help="the name of the weights that are loaded at the start")
    add("--update-timeout-s", type=float, default=120.0, help="longest time to wait for a trainer's weights")
    add("--parent-pid", type=int, help="stop when this process is gone")
    return parser.parse_args(argv)


def check_arguments(args: argparse.Namespace) -> None:
    """Check the arguments before any heavy import. Raises ConfigError or ModelError."""
    model = Path(args.model)
    if not model.is_dir():
        raise ModelError(f"--model is {args.model!r}, which is not a directory; give a Hugging Face model directory")
    if not (model / "config.json").is_file():
        raise ModelError(f"--model is {args.model!r}, which holds no config.json; give a Hugging Face model directory")
    for name in ("num_threads", "max_running_requests", "context_length", "update_timeout_s"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be above 0")
    check_address(args.host, args.port, key_of(args.api_key_file, SERVER_KEY))


def load_scheduler(args: argparse.Namespace) -> Scheduler:
    """The model, ready to start. Raises ModelError if it cannot be loaded."""
    from arl.engine.local.model_thread import Scheduler

    try:
        return Scheduler(
            args.model,
            device=args.device,
            dtype=args.dtype,
            num_threads=args.num_threads,
            max_running_requests=args.max_running_requests,
            context_length=args.context_length,
            weight_version=args.weight_version,
        )
    except ArlError:
        raise
    except Exception as error:  # transformers and safetensors report a broken directory by many exceptions
        log.debug("loading failed", exc_info=True)
        raise ModelError(f"cannot load the model in {args.model}: {error}") from error


def application(args: argparse.Namespace, inflight: Inflight) -> web.Application:
    from arl.engine.local.app import build_app

    settings = {name: value for name, value in vars(args).items() if name not in ("api_key_file", "parent_pid")}
    settings |= {"model_path": args.model, "context_length": inflight.scheduler.runner.context_length, "tp_size": 1}
    settings |= {"chunked_prefill_size": inflight.scheduler.prefill_tokens}
    return build_app(inflight, settings, key_of(args.api_key_file, SERVER_KEY))


async def run(args: argparse.Namespace, sock: socket.socket, watch: Watch) -> int:
    """Load the model, answer until told to stop, and leave nothing running. Returns the exit code."""
    from arl.engine.local.generate import Inflight

    loop, died = asyncio.get_running_loop(), asyncio.Event()
    gc.disable()  # it would look through all that is imported, several times: a quarter of the start
    try:
        scheduler = load_scheduler(args)
        gc.freeze()  # what was imported and built stays
    finally:
        gc.enable()
    inflight, stop = Inflight(loop, scheduler), watch.stop_event()

    def die() -> None:
        died.set()
        stop.set()

    scheduler.start(inflight.deliver, on_death=lambda: loop.call_soon_threadsafe(die))
    try:
        async with serving(application(args, inflight), sock) as port:
            ready = {"event": "ready", "host": args.host, "port": port, "pid": os.getpid()}
            sys.stdout.write(json.dumps({**ready, "model": args.model, "weight_version": args.weight_version}) + "\n")
            sys.stdout.flush()
            await stop.wait()
            if not died.is_set():
                scheduler.abort(None)
    finally:
        scheduler.close()
    return int(died.is_set())


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)

    async def bind_and_run(watch: Watch) -> int:
        check_arguments(args)
        with bind(args.host, args.port) as sock:
            return await run(args, sock, watch)

    return run_server(bind_and_run, args.parent_pid)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread may wait for a trainer that never sends; a normal exit would wait for that thread's timeout.
    os._exit(status)
