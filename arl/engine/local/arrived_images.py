"""The images of requests, read and checked on a thread of their own before the model thread gets a request.

files of a request --> reading thread: pixels, positions --> the request's View
  |
  +-- of frames: kept by digest, so that a client sends each once
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from arl.api.errors import ImageError
from arl.api.images import Image, PlacedImage
from arl.engine.frames import GONE, FramedImage
from arl.engine.local.tower import Tower
from arl.engine.local.views import View, placed_in_order
from arl.web.bodies import RequestError

_KEPT_BYTES = 512 << 20
_TEXT_MODEL = "this server's model takes no images; serve a vision-language model, or send text alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class SentImage:
    image: Future[Image]
    place: Sequence[int] | None
    """Its placeholders; None: the next ones."""


class ArrivedImages:
    """Belongs to the event loop. tower: the model's, None for a text model."""

    def __init__(self, tower: Tower | None) -> None:
        self._tower = tower
        self._reading = ThreadPoolExecutor(1, "arl-images")
        self._kept: OrderedDict[bytes, tuple[Future[Image], int]] = OrderedDict()
        """By digest, with the number of bytes."""
        self._num_bytes = 0

    def sent(self, files: Sequence[str], places: Sequence[Sequence[int]]) -> list[SentImage]:
        """files: data URLs, or base64. Raises RequestError."""
        if places and len(places) != len(files):
            raise RequestError(f"image_places has {len(places)} entries for {len(files)} of image_data")
        self._check_tower(files)
        urls = (file if file.startswith(("data:", "http:", "https:")) else f"data:;base64,{file}" for file in files)
        images = [self._reading.submit(_read, url) for url in urls]
        placed = zip(images, places or [None] * len(images), strict=True)
        return [SentImage(image=image, place=place) for image, place in placed]

    def framed(self, sent: FramedImage) -> SentImage:
        """Raises RequestError, with status GONE for an image that is not kept any more."""
        self._check_tower([sent])
        place = sent.start, sent.stop
        if (kept := self._kept.get(sent.digest)) is not None:
            self._kept.move_to_end(sent.digest)
            return SentImage(image=kept[0], place=place)
        if not sent.data:
            raise RequestError(f"the image {sent.digest.hex()[:12]} is not kept any more", GONE)
        image = self._reading.submit(_read, sent.data, sent.digest.hex())
        self._kept[sent.digest] = image, len(sent.data)
        self._num_bytes += len(sent.data)
        while self._num_bytes > _KEPT_BYTES and len(self._kept) > 1:
            self._num_bytes -= self._kept.popitem(last=False)[1][1]
        return SentImage(image=image, place=place)

    def view(self, input_ids: Any, images: Sequence[SentImage]) -> Future[View] | None:
        """Fails with RequestError if the images do not fit the tokens. Raises RequestError for tokens without them."""
        if (tower := self._tower) is None:
            return None
        ids = np.asarray(input_ids)
        if images:
            return self._reading.submit(_view, tower, ids, images)
        try:
            tower.processor.check(ids, ())
        except ImageError as error:
            raise RequestError(str(error)) from error
        return None

    def _check_tower(self, images: Sequence[Any]) -> None:
        if images and self._tower is None:
            raise RequestError(_TEXT_MODEL)


def _read(file: str | bytes, digest: str | None = None) -> Image:
    """Raises RequestError."""
    try:
        image = Image.of(file)
    except ImageError as error:
        raise RequestError(str(error)) from error
    if digest not in (None, image.digest):
        raise RequestError(f"an image has the digest {image.digest[:12]}, and was sent as {digest:.12}")
    return image


def _view(tower: Tower, ids: np.ndarray, sent: Sequence[SentImage]) -> View:
    """Runs after the images were read. Their pixels are computed here, to be found by the tower."""
    images = [one.image.result() for one in sent]
    places = [one.place for one in sent if one.place is not None]
    try:
        if places:
            placed = [PlacedImage(image=i, start=a, stop=b) for i, (a, b) in zip(images, places, strict=True)]
        else:
            placed = placed_in_order(ids, images, tower.processor)
        if len(placed) != len(images):
            raise ImageError(f"the tokens have placeholders for {len(placed)} images, and {len(images)} were given")
        tower.processor.check(ids, placed)
        for image in images:
            if not tower.knows(image):
                tower.processor.pixels(image)
        return View(placed, tower.processor)
    except ImageError as error:
        raise RequestError(str(error)) from error
