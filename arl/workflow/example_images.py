"""An example's images, from their column to their places in its messages.

{"question": "<image> or <image>: which has more dots?", "images": [a, b]}   each marker is a place
{"question": "How many dots?", "image": a}                                   without markers, before the text
{"messages": [{"role": "user", "content": [{"type": "image"}, ...]}], "images": [a]}   a part without its image, too
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from arl.api.errors import DatasetError, ImageError
from arl.api.images import Image
from arl.workflow.content import has_source, holds_image, image_part, text_part
from arl.workflow.messages import Message

IMAGE_COLUMNS = ("images", "image")
"""The columns in which examples have images."""
MARKER = "<image>"


def with_images(
    data: Mapping[str, Any], messages: Sequence[Message], columns: Sequence[str] = IMAGE_COLUMNS
) -> list[Message]:
    """The messages of an example, with its images in their places, which nothing else may be.

    columns: the first of these that the example has holds an image or a list of images, as Image.of takes them.
    Messages without places that have images of their own stay as they are. Raises DatasetError if there are fewer or
    more places than images, and ImageError, both with the example's text.
    """
    column = next((name for name in columns if data.get(name) is not None), None)
    sources = [] if column is None else _listed(data[column])
    about = f"the example that begins {_begin_of(messages)!r}"
    if not sources and any(_is_place(part) for message in messages for part in _parts(message)):
        raise DatasetError(
            f"{about} has a part of type image without an image, and no image for it in "
            f"{' or '.join(map(repr, columns)) or 'a column (image_columns is empty)'}; give each place its image"
        )
    num_places = sum(map(_num_places, messages))
    if not sources or (not num_places and any(map(holds_image, messages))):
        return list(messages)
    images = [_read(source, f"image {number} of {about} (column {column!r})") for number, source in enumerate(sources)]
    if not num_places:
        return _before_text(messages, images)
    if num_places != len(images):
        raise DatasetError(
            f"{about} has {len(images)} images (column {column!r}), and {num_places} places for them ({MARKER} in its "
            "texts, or parts of type image); it needs one for each, or none: then images come before the text"
        )
    left = iter(images)
    return [_filled(message, left) for message in messages]


def has_marker(messages: Sequence[Message]) -> bool:
    """Whether texts that an assistant does not say have places for images."""
    return any(MARKER in (_text_of(part) or "") for m in messages if m["role"] != "assistant" for part in _parts(m))


def _listed(given: Any) -> list[Any]:
    if isinstance(given, list | tuple):
        return list(cast("Sequence[Any]", given))
    is_column = getattr(getattr(given, "dtype", None), "kind", "") == "O"  # a list, as pandas has it
    return list(given) if is_column else [given]


def _read(source: Any, what: str) -> Image:
    try:
        return Image.of(source)
    except ImageError as error:
        raise ImageError(f"{what}: {error}") from error


def _before_text(messages: Sequence[Message], images: Sequence[Image]) -> list[Message]:
    """All images at the beginning of what the user says first."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise DatasetError(f"an example has {len(images)} images, and no message of a user to show them in")
    shown = [*map(image_part, images), *_parts(messages[first])]
    return [*messages[:first], {**messages[first], "content": shown}, *messages[first + 1 :]]


def _filled(message: Message, images: Iterator[Image]) -> Message:
    if not _num_places(message):
        return message
    return {**message, "content": [part for given in _parts(message) for part in _shown(given, images)]}


def _shown(part: Any, images: Iterator[Image]) -> Iterator[Any]:
    """The part, with images in its places."""
    if _is_place(part):
        yield image_part(next(images))
        return
    text = _text_of(part)
    if text is None or MARKER not in text:
        yield part
        return
    for number, piece in enumerate(text.split(MARKER)):
        if number:
            yield image_part(next(images))
        if piece:
            yield text_part(piece)


def _num_places(message: Message) -> int:
    if message["role"] == "assistant":
        return 0
    return sum(1 if _is_place(part) else (_text_of(part) or "").count(MARKER) for part in _parts(message))


def _parts(message: Message) -> list[Any]:
    content = message.get("content")
    return list(content) if isinstance(content, list | tuple) else [text_part(content)] if content else []


def _is_place(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image" and not has_source(part)


def _text_of(part: Any) -> str | None:
    text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
    return text if isinstance(text, str) else None


def _begin_of(messages: Sequence[Message]) -> str:
    texts = (_text_of(part) for message in messages if message["role"] != "system" for part in _parts(message))
    return next(filter(None, texts), "")[:60]
