"""Programs on another machine: RemoteSandbox, and the server that it speaks to.

    python -m arl.sandbox.remote --host 10.0.0.7 --port 8090 --api-key-file sandbox.key

Anybody with the key can run programs, within the sandbox and its limits. The server has no TLS: put it behind a proxy
that has it, or on a private network.
"""

from __future__ import annotations

import argparse
import base64
import os
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, fields
from typing import Annotated, Any

from aiohttp import web
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from arl.api.errors import RequestTimeoutError, SandboxError, ServerError
from arl.api.workflow import Shared
from arl.sandbox.contract import NO_FILES, Files, Limits, ProgramOutcome, Sandbox, laid_out, not_open
from arl.sandbox.find import find_sandbox
from arl.web.bodies import BodyError, RequestBody, must_be, parse
from arl.web.client import JsonClient
from arl.web.process import add_key_option, answer_until, key_of, run_server
from arl.web.server import bind, body_of, boundary, json_response, require_key
from arl.web.watch import Watch

KEY_VARIABLE = "ARL_SANDBOX_KEY"
"""The environment variable that holds the API key, on both sides; the server also takes it from a file."""
_OUTCOME = TypeAdapter(ProgramOutcome)
_BODY_BYTES = 64 << 20
_MOST = Limits(wall_s=600.0, cpu_s=600.0)
"""The most that a request may ask for, unless flags say otherwise: enough for all unit tests of an answer."""

# The JSON of a remote sandbox: POST /run, as docs/sandbox.md describes it.


def _content(given: Any) -> str | bytes:
    try:
        match given:
            case {"text": str(text)}:
                return text
            case {"base64": str(encoded)}:
                return base64.b64decode(encoded, validate=True)
    except ValueError:
        pass
    raise must_be('{"text": ...} or {"base64": ...}')


Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(gt=0)]


class LimitsAsked(RequestBody):
    wall_s: Seconds | None = None
    cpu_s: Seconds | None = None
    memory_bytes: Count | None = None
    processes: Count | None = None
    output_bytes: Count | None = None
    disk_bytes: Count | None = None
    files: Count | None = None
    open_files: Count | None = None


class RunRequest(RequestBody):
    program: str
    stdin: str = ""
    files: dict[str, Annotated[str | bytes, BeforeValidator(_content)]] = Field(default_factory=dict)
    limits: LimitsAsked = LimitsAsked()

    def limits_within(self, most: Limits) -> Limits:
        """The requested limits; the others are the defaults, cut to `most`. Raises BodyError above `most`."""
        allowed, asked = asdict(most), self.limits.model_dump(exclude_none=True)
        for name, number in asked.items():
            if number > allowed[name]:
                raise BodyError(f"limits.{name} is {number}; this server allows {allowed[name]}", param="limits")
        ordinary = {name: min(number, allowed[name]) for name, number in asdict(Limits()).items()}
        return Limits(**ordinary | asked)


class RemoteSandbox(Shared):
    """Runs programs behind a URL, by the JSON that docs/sandbox.md describes.

        async with RemoteSandbox("http://10.0.0.7:8090", api_key=key) as sandbox:

    api_key: $ARL_SANDBOX_KEY by default.
    limits: for runs that name none; the defaults of Limits unless given. The server refuses limits above its maximum.
    concurrency: requests under way at once.
    timeout_s: the longest that a call may take, including the wait for a place at the server.

    Entering raises SandboxError unless the server answers and accepts the key. Cancelling a call, or leaving, closes
    its connection, and the server then ends the program.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        limits: Limits | None = None,
        concurrency: int = 64,
        timeout_s: float = 300.0,
    ) -> None:
        super().__init__()
        key = api_key or os.environ.get(KEY_VARIABLE, "")
        if not key:
            raise SandboxError(f"a remote sandbox needs the API key of its server: pass api_key= or set {KEY_VARIABLE}")
        self._server = JsonClient(url, api_key=key, max_concurrent=concurrency, timeout_s=timeout_s, retries=0)
        self._limits = limits

    async def _open(self, opened: AsyncExitStack) -> None:
        opened.push_async_callback(self._server.aclose)
        await self._ask("/health")

    async def run(
        self, program: str, *, stdin: str = "", files: Files = NO_FILES, limits: Limits | None = None
    ) -> ProgramOutcome:
        """See Sandbox.run."""
        if not self.is_open:
            raise not_open()
        asked: dict[str, Any] = {"program": program, "stdin": stdin}
        asked["files"] = {path: _as_json(content) for path, content in files.items()}
        if (limits := limits or self._limits) is not None:
            asked["limits"] = asdict(limits)
        told = await self._ask("/run", asked)
        try:
            return _OUTCOME.validate_python(told)
        except ValidationError as error:
            raise SandboxError(f"the sandbox's server answered {told!r:.200}, which is not an outcome") from error

    async def _ask(self, path: str, payload: Mapping[str, Any] | None = None) -> Any:
        try:
            return await self._server.ask(path, payload)
        except (ServerError, RequestTimeoutError) as error:
            raise SandboxError(str(error)) from error


def _as_json(content: str | bytes) -> dict[str, str]:
    return {"text": content} if isinstance(content, str) else {"base64": base64.b64encode(content).decode()}


def application(sandbox: Sandbox, *, api_key: str, limits: Limits) -> web.Application:
    """The server's routes. sandbox: open. limits: the most that a request gets. Raises SandboxError without a key."""
    if not api_key:
        raise SandboxError(f"a sandbox is served only with an API key; set {KEY_VARIABLE}")

    async def run(request: web.Request) -> web.Response:
        asked = parse(RunRequest, await body_of(request))
        within = asked.limits_within(limits)
        if len(asked.files) > within.files:
            raise BodyError(f"files holds {len(asked.files)}; limits.files is {within.files}", param="files")
        try:
            laid_out(asked.program, asked.files, within)
        except SandboxError as error:
            raise BodyError(str(error), param="files") from error
        outcome = await sandbox.run(asked.program, stdin=asked.stdin, files=asked.files, limits=within)
        return json_response(asdict(outcome))

    async def health(_: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    shape = boundary(lambda error: {"error": error.message}, {SandboxError: 500})
    middlewares = [shape, require_key(api_key, open_paths=frozenset())]
    app = web.Application(middlewares=middlewares, client_max_size=_BODY_BYTES)
    app.add_routes([web.post("/run", run), web.get("/health", health)])
    return app


async def _serve(arguments: argparse.Namespace, watch: Watch) -> None:
    stop = watch.stop_event()
    limits = Limits(**{field.name: getattr(arguments, field.name) for field in fields(Limits)})
    async with find_sandbox(arguments.kind, limits=limits, concurrency=arguments.concurrency) as sandbox:
        app = application(sandbox, api_key=key_of(arguments.api_key_file, KEY_VARIABLE) or "", limits=limits)
        sock = bind(arguments.host, arguments.port)
        await answer_until(stop, app, sock, lambda port: f"serving a sandbox on http://{arguments.host}:{port}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m arl.sandbox.remote",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    add_key_option(parser, KEY_VARIABLE)
    parser.add_argument("--port", type=int, default=8090, help="0 takes a free one and prints it")
    parser.add_argument("--kind", choices=("auto", "bubblewrap", "docker", "unsafe"), default="auto")
    parser.add_argument("--concurrency", type=int, help="programs at once (default: one per processor)")
    for name, most in asdict(_MOST).items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=type(most), default=most, help="the most that a request may ask for"
        )
    arguments = parser.parse_args()
    return run_server(lambda watch: _serve(arguments, watch))


if __name__ == "__main__":
    sys.exit(main())
