"""Chat messages: the form that templates take, and keys that are equal for equal histories."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import Any, cast

from arl.api.errors import ModelError
from arl.api.images import Image
from arl.workflow.content import content_of, with_read_images

Message = Mapping[str, Any]
"""A chat message: `role`, `content`, and other fields of the role (`tool_calls`, for instance). The content is a text,
or parts: texts, and images in the forms that content.py reads."""

ToolSpecs = Sequence[Mapping[str, Any]]
"""Tools in OpenAI's form: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


def normalised(message: Message) -> dict[str, Any]:
    """A copy in one form: text, or parts with Images, as `content_of` has it; objects instead of JSON arguments.

    Missing content is an empty string, or None beside tool calls. Other fields that are None are left out. Raises as
    content_of does.
    """
    content = content_of(message)
    copied: dict[str, Any] = {
        name: content if name == "content" else plain(value) for name, value in message.items() if value is not None
    }
    copied["content"] = content
    calls = copied.pop("tool_calls", None)
    if calls:
        copied["content"] = copied["content"] or None
        copied["tool_calls"] = [_with_object(call) for call in calls]
    return copied


def text_content(message: Message) -> str:
    """The content of a message without images as one string. Raises ModelError for one with images."""
    content = content_of(message)
    if not isinstance(content, str):
        raise ModelError("a message's content has an image where only text can stand")
    return content


def plain(value: Any) -> Any:
    """A copy in which every mapping is a dict and every sequence a list."""
    if type(value) is str:
        return value
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in cast("Sequence[Any]", value)]
    return value


def arguments_of(given: Any) -> Any:
    """A call's arguments as an object, read from JSON if need be. Broken JSON is returned as it is."""
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
    """The key of an empty history: equal for the same tools in the same order."""
    return blake2b(_json(tools), digest_size=16).digest() if tools else _OF_NO_TOOLS


def history_key(before: bytes, messages: Iterable[Message]) -> bytes:
    """The key of a history that continues with `messages`. before: the key of its beginning.

    Ids of calls, the layout of their JSON, the model's thinking, and None for an empty text make no difference.
    """
    key = before
    for message in messages:
        key = blake2b(key + _identity(message), digest_size=16).digest()
    return key


class HistoryKeys:
    """The keys of a history up to each message. It remembers the last history: programs send the whole of it again."""

    def __init__(self) -> None:
        self._last: tuple[bytes, list[tuple[Any, bytes]]] = (b"", [])

    def of(self, messages: Sequence[Message], tools: ToolSpecs) -> list[bytes]:
        """For each message, the key of the history that ends with it."""
        begin = key = tools_key(tools)
        known_begin, known = self._last  # at once: another thread may replace it
        known = known if known_begin == begin else []
        same = sum(1 for _ in takewhile(lambda pair: pair[0][0] == pair[1], zip(known, messages, strict=False)))
        made = known[:same]
        key = made[-1][1] if made else begin
        for message in map(with_read_images, messages[same:]):
            key = history_key(key, [message])
            copy = plain(message)
            made.append((copy if _is_text(copy) else None, key))
        self._last = begin, made
        return [key for _, key in made]


def _is_text(value: Any) -> bool:
    """Whether all in it is text or an Image, and equal only to what is the same: 1 equals True."""
    if isinstance(value, dict | list):
        items = cast("Iterable[Any]", value.values() if isinstance(value, dict) else value)
        return all(map(_is_text, items))
    return value is None or isinstance(value, str | Image)


def _identity(message: Message) -> bytes:
    role, content, shown = str(message["role"]), content_of(message), list[str]()
    if not isinstance(content, str):
        parts = [("text", part["text"]) if "text" in part else ("image", part["image"].digest) for part in content]
        content, shown = "", [word for part in parts for word in part]
    calls: list[Any] = []
    if role == "assistant":
        content = content.strip()
        functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
        calls = [[function.get("name"), arguments_of(function.get("arguments"))] for function in functions]
    parts = [part.encode(errors="replace") for part in (role, content, str(message.get("name") or ""), *shown)]
    return b"".join(len(part).to_bytes(8) + part for part in parts) + (_json(calls) if calls else b"")


def _json(value: Any) -> bytes:
    return json.dumps(plain(value), sort_keys=True, default=str).encode()


_OF_NO_TOOLS = blake2b(_json(()), digest_size=16).digest()
