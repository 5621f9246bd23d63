"""The embedded inference server: `python -m arl.engine.local --model DIR --port N`.

It speaks SGLang's HTTP protocol. For whoever starts it as a child:

- When it answers requests it prints one line to stdout, and nothing else ever:
  `{"event": "ready", "host": "127.0.0.1", "port": 41237, "pid": 4711, "model": "/models/m", "weight_version": "0"}`.
  `--port 0` takes a free port; the line says which.
- It logs to stderr. What cannot be served (no such model, a port in use, no API key on an open address) is one
  sentence there and exit code 2.
- When the model thread dies of an error, which is in the log, so does the server, with exit code 1.
- SIGTERM and SIGINT stop it, with exit code 0: running requests are aborted and answered with what they have.
- `--parent-pid PID` ties its life to that process: it stops when PID is gone, however PID ended.
- It listens on 127.0.0.1 unless `--host` says otherwise; any other address needs an API key, by `--api-key` or the
  environment variable ARL_SERVER_API_KEY (which other users of the machine cannot read from the process list).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from arl.api.errors import ArlError, ConfigError, ModelError
from arl.web.listening import bind, is_loopback, watch_parent

if TYPE_CHECKING:
    from aiohttp import web

    from arl.engine.local.endpoint import Inflight
    from arl.engine.local.scheduler import Scheduler

log = logging.getLogger("arl.engine.local")

_DIED = 1
_BAD_START = 2
_SHUTDOWN_S = 2.0


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m arl.engine.local", description="Serve a model to arl.")
    add = parser.add_argument
    add("--model", required=True, help="a Hugging Face model directory")
    add("--port", type=int, default=0, help="0 (the default) takes a free one")
    add("--host", default="127.0.0.1", help="the address to listen on")
    add("--api-key", default=os.environ.get("ARL_SERVER_API_KEY"), help="what clients must send as a bearer token")
    add("--served-model-name", help="the name in /v1/models; the model directory when not given")
    add("--device", default="cpu", help="the torch device of the model: cpu, cuda, cuda:0, ...")
    add("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    add("--num-threads", type=int, default=1, help="CPU threads of the model")
    add("--max-running-requests", type=int, default=128, help="sequences decoded at once; more wait")
    add("--context-length", type=int, help="longest prompt plus response in tokens; the model's own when not given")
    add("--weight-version", default="default", help="the name of the weights that are loaded at the start")
    add("--update-timeout-s", type=float, default=120.0, help="longest time to wait for a trainer's weights")
    add("--parent-pid", type=int, help="stop when this process is gone")
    return parser.parse_args(argv)


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse what can be refused before anything heavy is imported. Raises ConfigError or ModelError."""
    model = Path(args.model)
    if not model.is_dir():
        raise ModelError(
            f"--model is {args.model!r}, which is not a directory; give a local Hugging Face model directory"
        )
    if not (model / "config.json").is_file():
        raise ModelError(
            f"--model is {args.model!r}, which holds no config.json; it is not a Hugging Face model directory"
        )
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port is {args.port}; it must be between 0 (any free port) and 65535")
    for name in ("num_threads", "max_running_requests", "context_length", "update_timeout_s"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be above 0")
    if not args.api_key and not is_loopback(args.host):
        raise ConfigError(
            f"--host is {args.host}, which other machines can reach; give --api-key KEY too, or listen on 127.0.0.1"
        )


def load_scheduler(args: argparse.Namespace, inflight: Inflight) -> Scheduler:
    """The model, ready to be started. Raises ModelError where it cannot be loaded."""
    from arl.engine.local.scheduler import Scheduler, SchedulerSettings

    settings = SchedulerSettings(
        device=args.device,
        dtype=args.dtype,
        num_threads=args.num_threads,
        max_running_requests=args.max_running_requests,
        context_length=args.context_length,
        weight_version=args.weight_version,
    )
    try:
        return Scheduler(args.model, inflight.deliver, settings)
    except ArlError:
        raise
    except Exception as error:  # transformers and safetensors say in many ways that a directory is broken
        log.debug("loading failed", exc_info=True)
        raise ModelError(f"cannot load the model in {args.model}: {error}") from error


async def serve(args: argparse.Namespace, sock: socket.socket) -> int:
    """Load the model, answer until told to stop, and leave nothing running. Returns the exit code."""
    from aiohttp import web

    from arl.engine.local.endpoint import Inflight

    loop = asyncio.get_running_loop()
    stop, died = asyncio.Event(), asyncio.Event()
    inflight = Inflight(loop)
    scheduler = load_scheduler(args, inflight)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if args.parent_pid is not None:
        watch_parent(args.parent_pid, loop, stop)

    def die() -> None:
        died.set()
        stop.set()

    scheduler.start(on_death=lambda: loop.call_soon_threadsafe(die))
    runner = web.AppRunner(
        _application(args, scheduler, inflight),
        handler_cancellation=True,  # a client that goes away ends its handler, which aborts its jobs
        access_log=None,
        shutdown_timeout=_SHUTDOWN_S,
    )
    await runner.setup()
    try:
        await web.SockSite(runner, sock).start()
        port = sock.getsockname()[1]
        ready = {"event": "ready", "host": args.host, "port": port, "pid": os.getpid()}
        sys.stdout.write(json.dumps({**ready, "model": args.model, "weight_version": args.weight_version}) + "\n")
        sys.stdout.flush()
        await stop.wait()
    finally:
        if not died.is_set():
            scheduler.abort(None)
        await runner.cleanup()
        scheduler.close()
    return _DIED if died.is_set() else 0


def _application(args: argparse.Namespace, scheduler: Scheduler, inflight: Inflight) -> web.Application:
    from arl.engine.local.app import build_app
    from arl.engine.local.endpoint import Serving
    from arl.engine.local.protocol import Limits
    from arl.engine.local.text import Text

    serving = Serving(
        scheduler=scheduler,
        inflight=inflight,
        text=Text(scheduler.tokenizer),
        limits=Limits(
            vocab_size=scheduler.model_config.vocab_size,
            context_length=scheduler.context_length,
            has_tokenizer=scheduler.tokenizer is not None,
        ),
        tokenizing=ThreadPoolExecutor(1, "tokenizing"),
        model_path=args.model,
        served_model_name=args.served_model_name or args.model,
    )
    settings = {name: value for name, value in vars(args).items() if name not in ("api_key", "parent_pid")}
    settings |= {"model_path": args.model, "context_length": scheduler.context_length}
    settings |= {"tp_size": 1, "pp_size": 1, "dp_size": 1}  # what clients read of a server that is split over GPUs
    return build_app(serving, ThreadPoolExecutor(1, "updating"), settings, args.api_key)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    try:
        check_arguments(args)
        with bind(args.host, args.port) as sock:
            return asyncio.run(serve(args, sock))
    except ArlError as error:
        sys.stderr.write(f"error: {error}\n")
        return _BAD_START


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread that waits for a trainer which never sends would hold a normal exit until its timeout.
    os._exit(status)
