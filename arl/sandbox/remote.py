"""Programs on another machine, which serves its own sandbox: `python -m arl.sandbox.serve`."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from arl.api.errors import SandboxError
from arl.api.shared import Shared
from arl.sandbox.contract import NO_FILES, Files, Limits, Outcome
from arl.sandbox.wire import Request, outcome_from_json, request_to_json

if TYPE_CHECKING:
    import aiohttp

KEY_VARIABLE = "ARL_SANDBOX_KEY"
"""The environment variable that holds the API key, on both sides."""


class RemoteSandbox(Shared):
    """Runs programs behind a URL, by the JSON that docs/sandbox.md describes.

        async with RemoteSandbox("http://10.0.0.7:8090", api_key=key) as sandbox:

    api_key: $ARL_SANDBOX_KEY unless given. limits: of a run that names none; the ordinary ones unless given. The server
    has a most for each, and refuses what asks for more. concurrency: requests under way at once. timeout_s: the longest
    that a call may take, the time it waits at the server for a place included.

    Entering asks the server whether it is there and knows the key. Raises SandboxError. Leaving, or cancelling a call,
    closes its connection, on which the server ends the program.
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
        self._url = url.rstrip("/")
        self._api_key = api_key or os.environ.get(KEY_VARIABLE, "")
        if not self._api_key:
            raise SandboxError(f"a remote sandbox needs the API key of its server: pass api_key= or set {KEY_VARIABLE}")
        self._limits = limits
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def _open(self) -> None:
        import aiohttp

        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._concurrency),
            headers={"Authorization": f"Bearer {self._api_key}"},
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
        )
        try:
            await self._ask("GET", "/health")
        except BaseException:
            await self._close()
            raise

    async def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def run(
        self, program: str, *, stdin: str = "", files: Files = NO_FILES, limits: Limits | None = None
    ) -> Outcome:
        """As Sandbox.run."""
        request = Request(program=program, stdin=stdin, files=files, limits=limits or self._limits)
        return outcome_from_json(await self._ask("POST", "/run", json.dumps(request_to_json(request))))

    async def _ask(self, method: str, path: str, body: str | None = None) -> object:
        import aiohttp

        if self._session is None:
            raise SandboxError("the sandbox is not open; call it within `async with`")
        url = self._url + path
        try:
            async with self._session.request(
                method, url, data=body, headers={"Content-Type": "application/json"}
            ) as answer:
                said = await answer.json(content_type=None)
        except TimeoutError as timeout:
            raise SandboxError(f"{url} did not answer within timeout_s = {self._timeout_s:g} s") from timeout
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise SandboxError(f"{url} cannot be asked: {error}") from error
        if answer.status != 200:
            reason = said.get("error", said) if isinstance(said, dict) else said
            raise SandboxError(f"{url} answered HTTP {answer.status}: {reason}")
        return said
