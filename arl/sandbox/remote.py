"""Programs on another machine, which serves its own sandbox: `python -m arl.sandbox.serve`."""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, cast, get_args

from arl.api.errors import SandboxError
from arl.api.workflow import Shared
from arl.sandbox.contract import NO_FILES, EndedBy, Files, Limits, Outcome

if TYPE_CHECKING:
    import aiohttp


# The JSON of a remote sandbox: POST /run, as docs/sandbox.md describes it.


_LIMITS = {limit.name for limit in fields(Limits)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What Sandbox.run is called with."""

    program: str
    stdin: str = ""
    files: Files = field(default_factory=lambda: NO_FILES)
    limits: Limits | None = None


def request_to_json(request: Request) -> dict[str, Any]:
    encoded: dict[str, Any] = {"program": request.program, "stdin": request.stdin}
    encoded["files"] = {path: _content_to_json(content) for path, content in request.files.items()}
    if request.limits is not None:
        encoded["limits"] = asdict(request.limits)
    return encoded


def request_from_json(body: Any, most: Limits) -> Request:
    """The request, with the ordinary limits where it names none, as far as `most` allows them.

    Raises SandboxError, which names what is missing, unknown, of the wrong type, or beyond `most`.
    """
    given = _mapping(body, "the request", {"program", "stdin", "files", "limits"})
    files, limits = given.get("files", {}), given.get("limits")
    if not isinstance(files, Mapping):
        raise SandboxError(f"files is {files!r:.100}; it must be an object of paths")
    return Request(
        program=_text(given.get("program"), "program"),
        stdin=_text(given.get("stdin", ""), "stdin"),
        files={path: _content_from_json(path, content) for path, content in cast("dict[str, Any]", files).items()},
        limits=_limits({} if limits is None else limits, most),
    )


def outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    return asdict(outcome)


def outcome_from_json(body: Any) -> Outcome:
    """Raises SandboxError for what is no outcome."""
    try:
        outcome = Outcome(**body)
    except TypeError as error:
        raise SandboxError(f"the sandbox's server answered {body!r:.200}, which is no outcome") from error
    if outcome.ended_by not in get_args(EndedBy):
        raise SandboxError(f"the sandbox's server says that a program was ended by {outcome.ended_by!r}")
    return outcome


def _limits(given: Any, most: Limits) -> Limits:
    allowed = asdict(most)
    numbers = _mapping(given, "limits", _LIMITS)
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int if not name.endswith("_s") else int | float):
            raise SandboxError(f"limits.{name} is {number!r:.100}; it must be a number")
        if number > allowed[name]:
            raise SandboxError(f"limits.{name} is {number}; this server allows {allowed[name]}")
    ordinary = {name: min(number, allowed[name]) for name, number in asdict(Limits()).items()}
    return Limits(**{**ordinary, **numbers})


def _mapping(given: Any, name: str, known: set[str]) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise SandboxError(f"{name} is {given!r:.100}; it must be an object")
    given = cast("dict[str, Any]", given)
    if unknown := set(given) - known:
        raise SandboxError(f"{name} has {sorted(unknown)}; it can have {sorted(known)}")
    return given


def _text(given: Any, name: str) -> str:
    if not isinstance(given, str):
        raise SandboxError(f"{name} is {given!r:.100}; it must be a string")
    return given


def _content_to_json(content: str | bytes) -> dict[str, str]:
    return {"text": content} if isinstance(content, str) else {"base64": base64.b64encode(content).decode()}


def _content_from_json(path: str, given: Any) -> str | bytes:
    match given:
        case {"text": str(text)}:
            return text
        case {"base64": str(encoded)}:
            try:
                return base64.b64decode(encoded, validate=True)
            except binascii.Error as error:
                raise SandboxError(f"files[{path!r}].base64 is not base64: {error}") from error
        case _:
            raise SandboxError(f'files[{path!r}] must be {{"text": ...}} or {{"base64": ...}}')


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
