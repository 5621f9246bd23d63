"""Programs on another machine, which serves its own sandbox: `python -m arl.sandbox.serve`."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from arl.api.errors import RequestTimeoutError, SandboxError, ServerError
from arl.api.workflow import Shared
from arl.sandbox.contract import NO_FILES, Files, Limits, ProgramOutcome, not_open
from arl.web.bodies import BodyError, RequestBody, must_be
from arl.web.client import JsonClient

KEY_VARIABLE = "ARL_SANDBOX_KEY"
"""The environment variable that holds the API key, on both sides."""
_OUTCOME = TypeAdapter(ProgramOutcome)

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
    """The limits named by a request."""

    wall_s: Seconds | None = None
    cpu_s: Seconds | None = None
    memory_bytes: Count | None = None
    processes: Count | None = None
    output_bytes: Count | None = None
    disk_bytes: Count | None = None
    files: Count | None = None
    open_files: Count | None = None


class RunRequest(RequestBody):
    """The arguments of Sandbox.run."""

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
        self._is_open = False

    async def _open(self) -> None:
        try:
            await self._ask("/health")
        except BaseException:
            await self._server.aclose()
            raise
        self._is_open = True

    async def _close(self) -> None:
        self._is_open = False
        await self._server.aclose()

    async def run(
        self, program: str, *, stdin: str = "", files: Files = NO_FILES, limits: Limits | None = None
    ) -> ProgramOutcome:
        """As Sandbox.run."""
        if not self._is_open:
            raise not_open()
        asked: dict[str, Any] = {"program": program, "stdin": stdin}
        asked["files"] = {path: _as_json(content) for path, content in files.items()}
        if (limits := limits or self._limits) is not None:
            asked["limits"] = asdict(limits)
        told = await self._ask("/run", asked)
        try:
            return _OUTCOME.validate_python(told)
        except ValidationError as error:
            raise SandboxError(f"the sandbox's server answered {told!r:.200}, which is no outcome") from error

    async def _ask(self, path: str, payload: Mapping[str, Any] | None = None) -> Any:
        try:
            return await self._server.ask(path, payload)
        except (ServerError, RequestTimeoutError) as error:
            raise SandboxError(str(error)) from error


def _as_json(content: str | bytes) -> dict[str, str]:
    return {"text": content} if isinstance(content, str) else {"base64": base64.b64encode(content).decode()}
