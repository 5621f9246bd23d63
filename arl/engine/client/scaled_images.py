"""Images as SGLang and vLLM get them: as PNG, of the size to which the model's image processor scales them.

    image --Pillow, as in the trainer--> pixels of that size --PNG, without loss--> a server, which scales nothing

Left to themselves, these servers scale with torchvision, and SGLang decodes JPEG on a GPU. Both round otherwise than
Pillow, so that the model would see another image than in training. See docs/vllm_protocol.md.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property

from arl.api.images import Image, PlacedImage
from arl.vision.processor import ImageProcessor

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
