"""The JSON of a remote sandbox: POST /run, as docs/sandbox.md describes it.

The request has `program`, and if wanted `stdin`, `files` (path -> {"text": ...} or {"base64": ...}) and `limits`, with
the names of Limits. The answer has the names of Outcome; one that is no 200 has `error`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, cast, get_args

from arl.api.errors import SandboxError
from arl.sandbox.contract import NO_FILES, EndedBy, Files, Limits, Outcome

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
