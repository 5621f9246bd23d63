"""Chat messages: the form that templates take, out of the forms in which programs give them; and keys that are equal
for equal histories.

"What is this?"                                              a text
[{"type": "image", "image": Image}, {"type": "text", ...}]   texts and images
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import Any, cast

from arl.api.errors import ImageError, ModelError
from arl.api.images import Image

Message = Mapping[str, Any]
"""A chat message: `role`, `content`, and other fields of the role (`tool_calls`, for instance). The content is a text,
or parts: texts, and images in the forms that `content_of` reads."""

ToolSpecs = Sequence[Mapping[str, Any]]
"""Tools in OpenAI's form: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

Content = str | list[dict[str, Any]]
"""A text; or parts of type "text", and of type "image" with an `Image`, at least one."""

_SOURCES = ("image", "image_url", "url", "path", "base64", "source")
"""Fields of a part that hold its image: transformers', OpenAI's and Anthropic's."""
_SHOWN = ("image", "image_url", "base64", "video", "video_url", "audio", "audio_url", "input_audio", "file")
"""Fields that hold what can be shown. A text may come from a `url`, a `path` or a `source`; these have no text."""
_BESIDE = {"type", "text", "detail", "cache_control"}
"""Fields beside it that change nothing of what the model sees."""


def content_of(message: Mapping[str, Any]) -> Content:
    """The message's content. A message without images has a text, whose parts are joined by newlines.

    Image files are read, if they are not Images already. Raises ModelError for parts of other types, and for an image
    in what an assistant says; ImageError as Image.of does.
    """
    given: Any = message.get("content")
    if given is None or isinstance(given, str):
        return given or ""
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        raise ModelError(
            f"a message's content is a {type(given).__name__}; it must be text, or a list of parts of type text or "
            "image"
        )
    parts = [_part(part) for part in cast("Sequence[Any]", given)]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    if message.get("role") == "assistant":
        raise ModelError("an assistant's message has an image, and models say texts alone; leave the image out of it")
    return parts


def with_read_images(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its images as Images, whose files may change from now on; without images, the message itself."""
    content = message.get("content")
    if content is None or isinstance(content, str) or isinstance(read := content_of(message), str):
        return message
    return {**message, "content": read}


def images_in(messages: Iterable[Mapping[str, Any]]) -> list[Image]:
    """The images of messages, in order; those that are not read yet are left out."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in cast("list[Any]", content))
    found = (part.get("image") for part in parts if isinstance(part, dict))
    return [image for image in found if isinstance(image, Image)]


def holds_image(message: Mapping[str, Any]) -> bool:
    """Whether its content has an image, read or not."""
    content = message.get("content")
    parts = cast("Sequence[Any]", content) if isinstance(content, list | tuple) else ()
    return any(isinstance(part, Mapping) and not _is_text(part) and has_source(part) for part in parts)


def has_source(part: Mapping[str, Any]) -> bool:
    """Whether one of its fields can hold an image."""
    return any(part.get(name) is not None for name in _SOURCES)


def texts_of(message: Mapping[str, Any]) -> list[str]:
    """The texts of a message, without its images."""
    content = content_of(message)
    return [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def image_part(image: Image) -> dict[str, Any]:
    return {"type": "image", "image": image}


def _is_text(part: Mapping[str, Any]) -> bool:
    return isinstance(part.get("text"), str) and part.get("type") not in ("image", "image_url")


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return text_part(part)
    if not isinstance(part, Mapping):
        raise ModelError(f"a message's content has a part of type {type(part).__name__!r}; it must be text or an image")
    given = {name: value for name, value in cast("Mapping[str, Any]", part).items() if value is not None}
    kind = given.get("type")
    if _is_text(given):
        if beside := [name for name in _SHOWN if name in given]:
            raise ModelError(
                f"a part of a message's content has text and {' and '.join(beside)}; the model sees one after the "
                "other, so give each a part of its own"
            )
        return text_part(given["text"])
    sources = [name for name in _SOURCES if name in given]
    if kind not in ("image", "image_url", None) or not (sources or kind):
        raise ModelError(
            f"a message's content has a part of type {kind!r}; only text and images can be shown to the model"
        )
    if len(sources) != 1 or given.keys() - _BESIDE - {*sources}:
        raise ImageError(
            f"an image part has the fields {', '.join(given)}; give its image in one of {', '.join(_SOURCES)}, and "
            "nothing that changes its size: scale the image itself"
        )
    return image_part(Image.of(_source(sources[0], given[sources[0]])))


def _source(field: str, value: Any) -> Any:
    """What Image.of takes."""
    if field == "image_url" and isinstance(value, Mapping):
        return cast("Mapping[str, Any]", value).get("url")
    if field == "source":
        source: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {}
        if source.get("type") == "url":
            return source.get("url")
        if source.get("type") != "base64":
            raise ImageError(
                f"an image's source is of type {source.get('type')!r}; it must be base64 with data, or url"
            )
        field, value = "base64", source.get("data")
    if field != "base64":
        return value
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise ImageError(f"an image's base64 cannot be read: {error}") from error


def normalised(message: Message, place: int | None = None) -> dict[str, Any]:
    """A copy in one form: text, or parts with Images, as `content_of` has it; calls with arguments that are mappings;
    thinking as `reasoning_content`. place: of the message, for errors.

    Missing content is an empty string; beside tool calls None stays. Other fields that are None are left out. Raises as
    content_of does, and ModelError for arguments that are no JSON object, thinking that is no text, and function_call.
    """
    if type(message) is dict and message.keys() == {"role", "content"} and type(message["content"]) is str:
        return message.copy()  # most messages are so
    where = "a message" if place is None else f"message {place}"
    copied: dict[str, Any] = {name: plain(value) for name, value in message.items() if value is not None}
    copied["content"] = content_of(message)
    for name in ("reasoning_content", "thinking", "reasoning"):
        if not isinstance(thinking := copied.pop(name, None) or "", str):
            raise ModelError(f"{where} has {name} that is a {type(thinking).__name__}; thinking must be text")
        if thinking:
            copied.setdefault("reasoning_content", thinking)
    if "function_call" in copied:
        raise ModelError(f"{where} has function_call, which templates leave out; give tool_calls, a list")
    calls = copied.pop("tool_calls", None)
    if calls:
        if message.get("content", "") is None:
            copied["content"] = None
        copied["tool_calls"] = [_normal_call(call, where) for call in calls]
    return copied


def _normal_call(call: Any, where: str) -> dict[str, Any]:
    """A call with its name and arguments in `function`, as templates expect it."""
    made = cast("dict[str, Any]", call) if isinstance(call, dict) else {}
    if not isinstance(function := made.get("function", made), dict) or "name" not in function:
        raise ModelError(f"{where} has a call {call!r:.80}; it must have a function with name and arguments")
    function = cast("dict[str, Any]", function)
    arguments = arguments_of(function.get("arguments"))
    if not isinstance(arguments, dict):
        given = str(function.get("arguments"))[:80]
        raise ModelError(
            f"{where} has a call of {function['name']!r} with the arguments {given!r}; they must be a JSON object, "
            "as a mapping or as text"
        )
    if function is made:
        beside = {name: made[name] for name in made.keys() & {"id", "type"}}
        return {"type": "function", **beside, "function": {"name": made["name"], "arguments": arguments}}
    return {**made, "function": {**function, "arguments": arguments}}


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
    """A call's arguments as a mapping, read from JSON if need be: none for "", null and None. What is no JSON is
    returned as it is."""
    if given is None or given == "":
        return {}
    if not isinstance(given, str):
        return given
    try:
        read = json.loads(given)
    except (ValueError, RecursionError):
        return given
    return {} if read is None else read


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
            made.append((copy if _is_of_texts(copy) else None, key))
        self._last = begin, made
        return [key for _, key in made]


def _is_of_texts(value: Any) -> bool:
    """Whether all in it is text or an Image, and equal only to what is the same: 1 equals True."""
    if isinstance(value, dict | list):
        items = cast("Iterable[Any]", value.values() if isinstance(value, dict) else value)
        return all(map(_is_of_texts, items))
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


# Rows, as columns of JSON and of Arrow hold them


def messages_in(text: str) -> list[Message] | None:
    """The messages of which the text is JSON; None for another text."""
    try:
        read = json.loads(text) if text.lstrip().startswith("[") else None
    except (ValueError, RecursionError):
        return None
    listed = cast("list[Any]", read) if isinstance(read, list) else []
    return listed if listed and all(isinstance(one, dict) and "role" in one for one in listed) else None


def without_padding(messages: Sequence[Message], tools: Any) -> tuple[list[Message], list[dict[str, Any]]]:
    """Messages and tools of a row, without the None that Arrow puts where only another row has a field.

    Arguments keep the None of a name that may be null in the tool's schema; schemas a `default` or `const` of a type
    that may be null. tools, `tool_calls` and `parameters` may be JSON; arguments that are text stay so. Raises
    ModelError, which says where, for anything but lists of objects.
    """
    specs = _objects(tools, "tools")
    kept: dict[Any, set[str]] = {}
    for spec in specs:
        function = _function(spec)
        if isinstance(parameters := function.get("parameters"), str):
            (function["parameters"],) = _objects([parameters], f"parameters of {function.get('name')}")
        kept[function.get("name")] = set(_nullable(function.get("parameters")))
    made: list[Message] = []
    for place, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            read = _objects(calls, f"tool_calls of message {place}")
            names = [kept.get(_function(call).get("name"), ()) for call in read]
            given = [_stripped(call, lambda _, own=own: own) for call, own in zip(read, names, strict=True)]
            message = {**message, "tool_calls": given}
        made.append({name: value for name, value in message.items() if value is not None or name == "content"})
    return made, _stripped(specs, lambda schema: ("default", "const") if _may_be_null(schema) else ())


def _objects(given: Any, where: str) -> list[dict[str, Any]]:
    """Copies of a list's objects. Each of them, and the list itself, may be JSON."""
    try:
        listed = json.loads(given) if isinstance(given, str) else given
        found = [plain(json.loads(one) if isinstance(one, str) else one) for one in cast("Iterable[Any]", listed or ())]
    except (ValueError, TypeError, RecursionError) as error:
        raise ModelError(f"the {where} cannot be read: {error}; give a list of objects, or its JSON") from None
    if isinstance(listed, Mapping) or not all(isinstance(one, dict) for one in found):
        raise ModelError(f"the {where} must be a list of objects, or its JSON, not {given!r:.80}")
    return found


def _stripped(value: Any, kept: Callable[[dict[str, Any]], Container[str]]) -> Any:
    """Without the None of an object's names, but for those that are kept of it. Lists keep theirs."""
    if isinstance(value, list):
        return [_stripped(item, kept) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    given, names = cast("dict[str, Any]", value), kept(value)
    return {name: _stripped(inner, kept) for name, inner in given.items() if inner is not None or name in names}


def _nullable(schema: Any) -> Iterator[str]:
    """The names of properties that may be null, anywhere in a schema."""
    if isinstance(schema, dict):
        given = cast("dict[str, Any]", schema)
        if isinstance(properties := given.get("properties"), dict):
            yield from (name for name, one in cast("dict[str, Any]", properties).items() if _may_be_null(one))
        schema = [*given.values()]
    for inner in cast("list[Any]", schema) if isinstance(schema, list) else ():
        yield from _nullable(inner)


def _may_be_null(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    found = map(cast("dict[str, Any]", schema).get, ("type", "enum", "nullable", "anyOf", "oneOf"))
    kinds, listed, flags, *others = ([] if one is None else one if isinstance(one, list) else [one] for one in found)
    is_named = "null" in kinds or None in listed or True in flags
    return is_named or any(_may_be_null(one) for alternatives in others for one in alternatives)


def _function(given: dict[str, Any]) -> dict[str, Any]:
    """That of a call or a tool, which may be flat."""
    return function if isinstance(function := given.get("function"), dict) else given
