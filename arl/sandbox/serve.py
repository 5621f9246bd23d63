"""A small server that runs programs in this machine's sandbox, for RemoteSandbox on others.

    ARL_SANDBOX_KEY=... python -m arl.sandbox.serve --host 10.0.0.7 --port 8090

Anybody with the key can run programs, within the sandbox and its limits. The server has no TLS: put it behind a proxy
that has it, or on a private network. Closing a request's connection ends its program.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from dataclasses import asdict, fields
from typing import Any

from aiohttp import web

from arl.api.errors import ArlError, SandboxError
from arl.sandbox.contract import Limits, Sandbox
from arl.sandbox.find import find_sandbox
from arl.sandbox.remote import KEY_VARIABLE, RunRequest
from arl.web.bodies import RequestError, parse
from arl.web.listening import bind, stop_event
from arl.web.server import boundary, json_response, require_key, serving

_BODY_BYTES = 64 << 20
_MOST = Limits(wall_s=600.0, cpu_s=600.0)
"""The most that a request may ask for, unless flags say otherwise: enough for all unit tests of an answer."""


def application(sandbox: Sandbox, *, api_key: str, limits: Limits) -> web.Application:
    """The server's routes. sandbox: already open. limits: the most that a request may ask for.

    Raises SandboxError for an empty key.
    """
    if not api_key:
        raise SandboxError(f"a sandbox is served only with an API key; set {KEY_VARIABLE}")

    async def run(request: web.Request) -> web.Response:
        asked = parse(RunRequest, await request.read())
        within = asked.limits_within(limits)
        outcome = await sandbox.run(asked.program, stdin=asked.stdin, files=asked.files, limits=within)
        return json_response(asdict(outcome))

    async def health(_: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    middlewares = [boundary(_shape, {SandboxError: 500}), require_key(api_key, open_paths=frozenset())]
    app = web.Application(middlewares=middlewares, client_max_size=_BODY_BYTES)
    app.add_routes([web.post("/run", run), web.get("/health", health)])
    return app


def _shape(error: RequestError) -> Any:
    return {"error": error.message}


async def _serve(arguments: argparse.Namespace) -> None:
    limits = Limits(**{field.name: getattr(arguments, field.name) for field in fields(Limits)})
    async with find_sandbox(arguments.kind, limits=limits, concurrency=arguments.concurrency) as sandbox:
        app = application(sandbox, api_key=os.environ.get(KEY_VARIABLE, ""), limits=limits)
        stop = stop_event()
        async with serving(app, bind(arguments.host, arguments.port)) as port:
            print(f"serving a sandbox on http://{arguments.host}:{port}", flush=True)  # noqa: T201
            await stop.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8090, help="0 takes a free one and prints it")
    parser.add_argument("--kind", choices=("auto", "bubblewrap", "docker", "unsafe"), default="auto")
    parser.add_argument("--concurrency", type=int, help="programs at once; one per processor unless given")
    for name, most in asdict(_MOST).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(most), default=most, help="the most for a request")
    try:
        asyncio.run(_serve(parser.parse_args()))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except ArlError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
