"""Chat messages as people and SDKs write them, and the one form in which templates take them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, cast

from arl.api.errors import ModelError

Message = Mapping[str, Any]
"""A chat message as templates take it: `role`, `content`, and what else a role has (`tool_calls`, for instance)."""

ToolSpecs = Sequence[Mapping[str, Any]]
"""Tools in OpenAI's form: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


def normalised(message: Message) -> dict[str, Any]:
    """A copy as templates take messages, which nobody else holds.

    Content is one string: text parts are joined by line breaks, and none is an empty one, but beside tool calls, where
    it is None as in OpenAI's protocol. Arguments of calls are objects, also where they came as JSON. Fields that are
    None, and an empty `tool_calls`, are left out. Raises ModelError for parts that are no text.
    """
    copied = {name: plain(value) for name, value in message.items() if value is not None}
    copied["content"] = text_content(message)
    calls = copied.pop("tool_calls", None)
    if calls:
        copied["content"] = copied["content"] or None
        copied["tool_calls"] = [_with_object(call) for call in calls]
    return copied


def text_content(message: Message) -> str:
    """The message's content as one string. Raises ModelError for parts that are no text."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise ModelError(f"a message's content is a {type(content).__name__}; it must be text, or parts of type text")
    texts: list[str] = []
    for part in cast("Sequence[Any]", content):
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ModelError(f"a message's content has a part of type {kind!r}; only text can be shown to the model")
        texts.append(text)
    return "\n".join(texts)


def plain(value: Any) -> Any:
    """A copy in which every mapping is a dict and every sequence a list."""
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in cast("Sequence[Any]", value)]
    return value


def arguments_of(given: Any) -> Any:
    """A call's arguments as an object, also where they are JSON in a string; as they are where that is broken."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError):
        return given


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments_of(function.get("arguments"))}}


def tools_key(tools: ToolSpecs) -> bytes:
    """Where a history begins: the same for the same tools, in the same order."""
    return blake2b(_json(tools), digest_size=16).digest()


def history_key(before: bytes, messages: Iterable[Message]) -> bytes:
    """A key of a history that goes on with `messages`, given that of what is before: equal for what counts as the same.

    Clients send answers back with other ids, with the JSON of arguments laid out anew, without the model's thinking,
    and with None or an empty text for no content: those are the same. Any other text is another.
    """
    key = before
    for message in messages:
        key = blake2b(key + _identity(message), digest_size=16).digest()
    return key


def _identity(message: Message) -> bytes:
    role, content = str(message["role"]), text_content(message)
    calls: list[Any] = []
    if role == "assistant":
        content = content.strip()
        calls = [_call_identity(call) for call in message.get("tool_calls") or ()]
    parts = [part.encode(errors="replace") for part in (role, content, str(message.get("name") or ""))]
    return b"".join(len(part).to_bytes(8) + part for part in parts) + (_json(calls) if calls else b"")


def _call_identity(call: Mapping[str, Any]) -> list[Any]:
    function = call.get("function", call)
    return [function.get("name"), arguments_of(function.get("arguments"))]


def _json(value: Any) -> bytes:
    return json.dumps(plain(value), sort_keys=True, default=str).encode()
