"""Images on their way to the model: from an example's column into its messages, and among a prompt's tokens.

{"question": "<image> or <image>: which has more dots?", "images": [a, b]}   each marker is a place
{"question": "How many dots?", "image": a}                                   without markers, before the text
{"messages": [{"role": "user", "content": [{"type": "image"}, ...]}], "images": [a]}   a part without its image, too

    messages --template--> <|vision_start|><|image_pad|><|vision_end|>   one placeholder for each image
             --placed-->   as many as the model needs for an image of its size, and PlacedImages

The image processor comes from the directory of the tokenizer, when the first image is placed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from arl.api.errors import DatasetError, ImageError, ModelError
from arl.api.images import Image, PlacedImage
from arl.workflow.messages import Message, has_source, holds_image, image_part, text_part

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from arl.data.image_processor import ImageProcessor

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
    texts = (_text_of(part) for message in messages if message["role"] != "system" for part in _parts(message))
    about = f"the example that begins {next(filter(None, texts), '')[:60]!r}"
    if not sources and any(_is_place(part) for message in messages for part in _parts(message)):
        raise DatasetError(
            f"{about} has a part of type image without an image, and no image for it in "
            f"{' or '.join(map(repr, columns)) or 'a column (image_columns is empty)'}; give each place its image"
        )
    num_places = sum(map(_num_places, messages))
    if not sources or (not num_places and any(map(holds_image, messages))):
        return list(messages)
    images: list[Image] = []
    for number, source in enumerate(sources):
        try:
            images.append(Image.of(source))
        except ImageError as error:
            raise ImageError(f"image {number} of {about} (column {column!r}): {error}") from error
    if not num_places:
        first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
        if first is None:
            raise DatasetError(f"an example has {len(images)} images, and no message of a user to show them in")
        shown = [*map(image_part, images), *_parts(messages[first])]
        return [*messages[:first], {**messages[first], "content": shown}, *messages[first + 1 :]]
    if num_places != len(images):
        raise DatasetError(
            f"{about} has {len(images)} images (column {column!r}), and {num_places} places for them ({MARKER} in its "
            "texts, or parts of type image); it needs one for each, or none: then images come before the text"
        )
    left = iter(images)
    return [
        {**message, "content": [part for given in _parts(message) for part in _shown(given, left)]}
        if _num_places(message)
        else message
        for message in messages
    ]


def has_marker(messages: Sequence[Message]) -> bool:
    """Whether texts that an assistant does not say have places for images."""
    return any(MARKER in (_text_of(part) or "") for m in messages if m["role"] != "assistant" for part in _parts(m))


def _listed(given: Any) -> list[Any]:
    if isinstance(given, list | tuple):
        return list(cast("Sequence[Any]", given))
    is_column = getattr(getattr(given, "dtype", None), "kind", "") == "O"  # a list, as pandas has it
    return list(given) if is_column else [given]


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


PLACEHOLDER = "<|image_pad|>"
"""What the chat templates of arl.data's FAMILIES write for an image: a special token."""


def placed(
    ids: tuple[int, ...], images: Sequence[Image], start: int, tokenizer: PreTrainedTokenizerBase
) -> tuple[tuple[int, ...], tuple[PlacedImage, ...]]:
    """The ids with as many placeholders for each image as it needs, and where the images lie.

    ids: with one placeholder for each image. start: how many tokens come before them. Raises ImageError as
    `processor_of` does, and for an image of a shape that the model cannot see.
    """
    processor = processor_of(tokenizer)
    made: list[int] = []
    found: list[PlacedImage] = []
    for token in ids:
        count = 1
        if token == processor.image_token_id:
            image, begin = images[len(found)], start + len(made)
            count = processor.num_placeholders(image)
            found.append(PlacedImage(image=image, start=begin, stop=begin + count))
        made += [token] * count
    return tuple(made), tuple(found)


def processor_of(tokenizer: PreTrainedTokenizerBase) -> ImageProcessor:
    """The image processor of the tokenizer's model. Raises ImageError for a model that does not see."""
    if not tokenizer.name_or_path:
        raise ImageError(
            "the tokenizer does not say which model it is of, and images need that model's image processor; load it "
            "from the model's directory with arl.load_tokenizer"
        )
    try:
        return _processor(str(tokenizer.name_or_path))
    except ModelError as error:
        raise ImageError(f"the messages have images, and {error}") from error


def check_places_as(tokenizer: PreTrainedTokenizerBase, model: str) -> None:
    """Raise ImageError if the tokenizer's model places images otherwise than the one that is asked.

    model: a directory, or a name on the hub; nothing is checked if it has no image processor that can be loaded.
    """
    if str(tokenizer.name_or_path) == model:
        return
    try:
        needed = _processor(model).placing
    except ModelError:
        return  # said by what loads the model itself
    given = processor_of(tokenizer).placing
    if differing := [name for name in given if given[name] != needed[name]]:
        raise ImageError(
            f"the workflow's tokenizer is of {tokenizer.name_or_path}, whose image processor has "
            f"{', '.join(f'{name}={given[name]}' for name in differing)}; {model}, which is asked, has "
            f"{', '.join(f'{name}={needed[name]}' for name in differing)}, and so other numbers of tokens for an "
            "image. Load the tokenizer from there"
        )


@lru_cache(maxsize=8)
def _processor(model: str) -> ImageProcessor:
    from arl.data.image_processor import ImageProcessor

    return ImageProcessor(model)


def blind(tokenizer: PreTrainedTokenizerBase, message: Mapping[str, Any]) -> ImageError:
    """The error for a message with images to a model without a place for them."""
    is_result = message["role"] == "tool" and message.get("name")
    whose = f"the result of the tool {message['name']!r}" if is_result else f"a message of role {message['role']!r}"
    return ImageError(
        f"{whose} has an image, and the chat template of {tokenizer.name_or_path or 'this model'} has no place for it "
        f"(it does not write {PLACEHOLDER}): it is a model of texts. Use a vision model, such as a Qwen2.5-VL or "
        "Qwen3-VL, or leave images out (image_columns=() of a workflow ignores columns of images, and "
        "images=False of MCPTools those of tools)"
    )
