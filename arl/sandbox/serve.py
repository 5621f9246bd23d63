"""A small server that runs programs in this machine's sandbox, for RemoteSandbox on others.

    ARL_SANDBOX_KEY=... python -m arl.sandbox.serve --host 10.0.0.7 --port 8090

Whoever knows the key can run programs, within the sandbox and its limits. There is no TLS: put it behind a proxy that
has it, or on a network of your own. A request whose connection is closed ends its program.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import asdict, fields

from aiohttp import web

from arl.api.errors import SandboxError
from arl.sandbox.contract import Limits, Sandbox
from arl.sandbox.find import find_sandbox
from arl.sandbox.remote import KEY_VARIABLE, outcome_to_json, request_from_json

_BODY_BYTES = 64 << 20
_MOST = Limits(wall_s=600.0, cpu_s=600.0)
"""What a request may ask for unless flags say otherwise: the tests of an answer run for as long as each of them may."""
_log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application(sandbox: Sandbox, *, api_key: str, limits: Limits) -> web.Application:
    """The server's routes. sandbox: open already. limits: the most that a request may ask for. Raises SandboxError for
    an empty key."""
    if not api_key:
        raise SandboxError(f"a sandbox is served only with an API key; set {KEY_VARIABLE}")
    expected = f"Bearer {api_key}".encode()

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        sent = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(sent, expected):
            return web.json_response({"error": "the API key is missing or wrong"}, status=401)
        try:
            return await handler(request)
        except web.HTTPException as refusal:
            return web.json_response({"error": refusal.reason}, status=refusal.status)

    async def run(request: web.Request) -> web.Response:
        try:
            asked = request_from_json(await request.json(), limits)
        except (SandboxError, json.JSONDecodeError, UnicodeDecodeError) as refusal:
            return web.json_response({"error": str(refusal)}, status=400)
        try:
            outcome = await sandbox.run(asked.program, stdin=asked.stdin, files=asked.files, limits=asked.limits)
        except SandboxError as failure:
            _log.exception("a program could not be run")
            return web.json_response({"error": str(failure)}, status=500)
        return web.json_response(outcome_to_json(outcome))

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app = web.Application(middlewares=[guard], client_max_size=_BODY_BYTES)
    app.add_routes([web.post("/run", run), web.get("/health", health)])
    return app


async def serve(app: web.Application, host: str, port: int, started: Callable[[int], None]) -> None:
    """Serve until cancelled; `started` is told the port."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        started(runner.addresses[0][1])
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


async def _main(arguments: argparse.Namespace) -> None:
    limits = Limits(**{field.name: getattr(arguments, field.name) for field in fields(Limits)})
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    async with find_sandbox(arguments.kind, limits=limits, concurrency=arguments.concurrency) as sandbox:
        app = application(sandbox, api_key=os.environ.get(KEY_VARIABLE, ""), limits=limits)
        await serve(
            app,
            arguments.host,
            arguments.port,
            lambda port: print(f"serving a sandbox on http://{arguments.host}:{port}", flush=True),  # noqa: T201
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8090, help="0 takes a free one, and says which")
    parser.add_argument("--kind", choices=("auto", "bubblewrap", "docker", "unsafe"), default="auto")
    parser.add_argument("--concurrency", type=int, help="programs at once; one per processor unless given")
    for name, most in asdict(_MOST).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(most), default=most, help="the most for a request")
    try:
        asyncio.run(_main(parser.parse_args()))
    except asyncio.CancelledError:
        pass
    except SandboxError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
