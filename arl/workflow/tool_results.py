"""What a model reads of a tool's result: text, or texts and images."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_json

from arl.api.errors import ImageError
from arl.api.images import Image
from arl.workflow.content import Content, image_part, text_part


def content_of_result(result: object, tool: str) -> Content:
    """A tool's result for the model: an Image or a PIL image, a list in which there are some, or text as by `text_of`.

    Raises ImageError, with the tool's name, for an image that cannot be shown, or that lies deeper, and for an array
    of pixels.
    """
    items = _items(result)
    if any(map(_is_pixels, items)):
        raise ImageError(
            f"the tool {tool} returned an array of pixels, which the model would read as numbers; return "
            "PIL.Image.fromarray(array) for an image, or array.tolist() for numbers"
        )
    if any(_hides_image(item) for item in items):
        raise ImageError(
            f"the tool {tool} returned an image within a {type(result).__name__}, of which the model would read the "
            "text alone; return the image itself, or a list of texts and images"
        )
    if not has_images(result):
        return text_of(result)
    try:
        return [image_part(Image.of(item)) if _is_image(item) else text_part(text_of(item)) for item in items]
    except ImageError as error:
        raise ImageError(f"the tool {tool} returned an image that cannot be shown: {error}") from error


def has_images(result: object) -> bool:
    """Whether it is an image, or a list with images."""
    return any(map(_is_image, _items(result)))


def _items(result: object) -> list[object]:
    return cast("list[object]", list(result)) if isinstance(result, list | tuple) else [result]


def _hides_image(item: object) -> bool:
    """Whether an image lies within it."""
    match item:
        case str() | bytes() | int() | float() | None | Image():
            return False
        case Mapping():
            inner = list(cast("Mapping[object, object]", item).values())
        case list() | tuple() | set() | frozenset():
            inner = list(cast("Sequence[object]", item))
        case _ if dataclasses.is_dataclass(item) and not isinstance(item, type):
            inner = [getattr(item, field.name) for field in dataclasses.fields(item)]
        case _:
            return False
    try:
        return any(_is_image(one) or _hides_image(one) for one in inner)
    except RecursionError:  # circular
        return False


def cut_content(content: Content, max_chars: int) -> Content:
    """The content with its first max_chars characters, and all of its images."""
    if isinstance(content, str):
        return cut(content, max_chars)
    left, parts = max_chars, list[dict[str, Any]]()
    for part in content:
        if "text" in part:
            parts.append(text_part(cut(part["text"], max(left, 0))))
            left -= len(part["text"])
        else:
            parts.append(part)
    return parts


def _is_image(result: object) -> bool:
    is_picture = "PIL.Image" in sys.modules and isinstance(result, sys.modules["PIL.Image"].Image)
    return is_picture or isinstance(result, Image)


def _is_pixels(result: object) -> bool:
    """Whether it is an array as environments render their screens: bytes of height x width x channels."""
    shape = getattr(result, "shape", ())
    return str(getattr(result, "dtype", "")) in ("uint8", "torch.uint8") and len(shape) == 3 and shape[2] in (1, 3, 4)


def text_of(result: object) -> str:
    """A tool's result for the model: JSON for mappings, sequences and records, else `str(result)`, which may raise."""
    match result:
        case str():
            return result
        case bytes() | bytearray() | memoryview():
            return _text_of_bytes(bytes(result))
        case Mapping() | list() | tuple() | set() | frozenset() | BaseModel():
            return _json(result)
    is_record = dataclasses.is_dataclass(result) and not isinstance(result, type)
    return _json(result) if is_record else str(result)


def cut(text: str, max_chars: int) -> str:
    """The first max_chars characters of the text, without lone surrogates, and a note of how many are missing."""
    kept = text[:max_chars].encode("utf-8", "replace").decode("utf-8")
    missing = len(text) - max_chars
    return f"{kept}\n[cut here: {missing} more characters]" if missing > 0 else kept


def _text_of_bytes(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return f"[{len(data)} bytes that are not text]"


def _json(result: Any) -> str:
    try:
        return to_json(result, inf_nan_mode="constants", serialize_unknown=True, bytes_mode="base64").decode()
    except (PydanticSerializationError, ValueError, RecursionError):  # circular, or with lone surrogates
        return str(result)
