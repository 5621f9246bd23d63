"""What a message says: a text, or texts and images in their order, out of the forms in which programs give them.

"What is this?"                                              a text
[{"type": "image", "image": Image}, {"type": "text", ...}]   texts and images
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from arl.api.errors import ImageError, ModelError
from arl.api.images import Image

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
    if field == "base64":
        return _decoded(value)
    if field == "source":
        return _of_source(value)
    return value


def _of_source(value: Any) -> Any:
    source: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {}
    match source.get("type"):
        case "base64":
            return _decoded(source.get("data"))
        case "url":
            return source.get("url")
        case kind:
            raise ImageError(f"an image's source is of type {kind!r}; it must be base64 with data, or url")


def _decoded(value: Any) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise ImageError(f"an image's base64 cannot be read: {error}") from error
