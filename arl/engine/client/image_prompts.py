"""Images in requests: as each kind of server takes them, and how an answer shows that it understood the prompt.

    ours      <|vision_start|> <|image_pad|> <|image_pad|> <|image_pad|> <|vision_end|>    a placeholder for each vector
    theirs    <|vision_start|> <|image_pad|> <|vision_end|>, and the image                 one, which they expand

The embedded server takes ours. SGLang and vLLM take theirs, and say on request what the prompt has become. See
docs/sglang_protocol.md and docs/vllm_protocol.md.

SGLang and vLLM get images as PNG, without loss, of the size to which the model's image processor scales them. Left to
themselves, these servers scale with torchvision, and SGLang decodes JPEG on a GPU. Both round otherwise than Pillow, so
that the model would see another image than in training.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from arl.api.errors import RefusedRequestError
from arl.api.images import Image, PlacedImage
from arl.data.image_processor import ImageProcessor
from arl.engine.client.server_client import GenerateCall

KEEPS_IMAGES = "SGLANG_VLM_CACHE_SIZE_MB"
"""The environment variable with the size of SGLang's cache of what the tower made of images. No update of the weights
empties it, so that images would be seen with old weights: it has to be 0."""


def num_bytes(images: Sequence[PlacedImage]) -> int:
    return sum(len(placed.image.data) for placed in images)


def embedded_fields(call: GenerateCall) -> dict[str, Any]:
    """What /generate of the embedded server needs besides, for a call with images."""
    return {
        "image_data": [placed.image.data_url for placed in call.images],
        "image_places": [(placed.start, placed.stop) for placed in call.images],
    }


def sglang_fields(call: GenerateCall) -> dict[str, Any]:
    """What /generate of SGLang needs besides and instead. Raises RefusedRequestError."""
    return {
        "input_ids": contracted(call, "SGLang"),
        "image_data": [placed.image.data_url for placed in call.images],
        "return_prompt_token_ids": True,
    }


def vllm_fields(call: GenerateCall) -> dict[str, Any]:
    """What /inference/v1/generate of vLLM needs besides and instead. Raises RefusedRequestError."""
    images = (placed.image for placed in call.images)
    return {
        "token_ids": contracted(call, "vLLM"),
        "content_parts": [{"type": "image_url", "url": image.data_url, "uuid": image.digest} for image in images],
        "return_token_ids": True,
    }


def contracted(call: GenerateCall, program: str) -> np.ndarray:
    """The call's tokens with one placeholder for each image. Raises RefusedRequestError for placeholders without one.

    program: the server's, for the message.
    """
    is_left_out = np.zeros(len(call.input_ids), bool)
    for placed in call.images:
        is_left_out[placed.start + 1 : placed.stop] = True
    ids = call.input_ids[~is_left_out]
    placeholder = call.input_ids[call.images[0].start]
    if (num_others := int((ids == placeholder).sum()) - len(call.images)) > 0:
        raise RefusedRequestError(
            f"the prompt has the placeholder of images, {placeholder}, {num_others} times where no image lies, as a "
            f"model can sample it; {program} would take it for an image"
        )
    return ids


def check_prompt(address: str, body: Mapping[str, Any], call: GenerateCall) -> None:
    """Raise RefusedRequestError unless a server computed the tokens of this call, by its answer.

    An embedded server says how many the prompt had, and has checked them.
    """
    told = body.get("prompt_token_ids")
    count = (body.get("meta_info") or {}).get("prompt_tokens") if told is None else len(told)
    wanted = len(call.input_ids)
    if count == wanted and (told is None or np.array_equal(told, call.input_ids)):
        return
    if count is None:
        raise RefusedRequestError(f"{address} does not say which tokens it computed for a prompt with images")
    what = f"{count} tokens where the prompt has {wanted}" if count != wanted else "other tokens than the prompt has"
    raise RefusedRequestError(
        f"{address} computed {what}, with its {len(call.images)} images: its image processor or the settings of that "
        "(min_pixels, max_pixels) are not those in the model's directory here"
    )


_MOST_KEPT = 128
"""The episodes of a group show the same images, and each turn those of the turns before it."""
_SCALING = ThreadPoolExecutor(2, "arl-scaling")


class ScaledImages:
    """Belongs to the event loop. model: the directory or name of a model that sees."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._kept: OrderedDict[str, Future[Image]] = OrderedDict()
        """By the digests of the images that were scaled."""

    async def of(self, images: Sequence[PlacedImage]) -> tuple[PlacedImage, ...]:
        """The same images, scaled, on the same placeholders. Raises ImageError, ModelError."""
        scaled = [self._begun(placed.image) for placed in images]
        # Others may wait for the same image, so a caller that is cancelled cancels none.
        files = [await asyncio.shield(asyncio.wrap_future(one)) for one in scaled]
        return tuple(replace(placed, image=file) for placed, file in zip(images, files, strict=True))

    def _begun(self, image: Image) -> Future[Image]:
        scaled = self._kept.pop(image.digest, None)
        if scaled is None or (scaled.done() and scaled.exception() is not None):
            scaled = _SCALING.submit(self._scaled, image)
        self._kept[image.digest] = scaled
        while len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return scaled

    def _scaled(self, image: Image) -> Image:
        return self._processor.scaled(image)

    @cached_property
    def _processor(self) -> ImageProcessor:
        return ImageProcessor(self._model)
