"""Images among tokens, as people are shown them: an image is one mark, however many its placeholders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class ImagePlace(Protocol):
    """An image at the tokens [start, stop), which are its placeholders."""

    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        ...


def mark_of(place: ImagePlace) -> str:
    """What stands for an image in a text."""
    (width, height), count = place.size, place.stop - place.start
    return f"[image {width}x{height}, {count} token{'s' * (count != 1)}]"


def text_with_marks(
    token_ids: Sequence[int], images: Sequence[ImagePlace], decode: Callable[[Sequence[int]], str]
) -> str:
    """The text of tokens, with a mark for each image in the place of its placeholders. images: in order."""
    parts, end = list[str](), 0
    for place in images:
        parts += [decode(token_ids[end : place.start]), mark_of(place)]
        end = place.stop
    return "".join([*parts, decode(token_ids[end:])])


def num_drawn(images: Sequence[ImagePlace], most: int) -> int:
    """How many of the first tokens are drawn if `most` marks may be: an image is one, and is drawn whole."""
    for place in images:
        if place.start < most:
            most += place.stop - place.start - 1
    return most
