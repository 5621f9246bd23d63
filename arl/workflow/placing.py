"""Where images lie among a prompt's tokens.

    messages --template--> <|vision_start|><|image_pad|><|vision_end|>   one placeholder for each image
             --placed-->   as many as the model needs for an image of its size, and PlacedImages

The image processor comes from the directory of the tokenizer, when the first image is placed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from arl.api.errors import ImageError, ModelError
from arl.api.images import Image, PlacedImage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from arl.data.image_processor import ImageProcessor

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
