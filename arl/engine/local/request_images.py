"""The images of requests, read and checked on threads of their own before the model thread gets a request.

files of a request --> reading threads: pixels, positions --> the request's View
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
from arl.engine.local.sequences import View, check_images, tagged
from arl.engine.local.vision_tower import Tower
from arl.runtime.http.bodies import RequestError

_KEPT_BYTES = 512 << 20
_NUM_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SentImage:
    image: Future[Image]
    place: Sequence[int]
    """Its placeholders: (start, stop)."""


class ArrivedImages:
    """Belongs to the event loop. tower: the model's, None for a model of texts."""

    def __init__(self, tower: Tower | None) -> None:
        self._tower = tower
        self._reading = ThreadPoolExecutor(_NUM_THREADS, "arl-images")  # each waits for earlier work alone
        self._kept: OrderedDict[bytes, tuple[Future[Image], int]] = OrderedDict()
        """By digest, with the number of bytes."""
        self._num_bytes = 0

    def sent(self, files: Sequence[str], places: Sequence[Sequence[int]], input_ids: Sequence[int]) -> list[SentImage]:
        """files: data URLs, or base64. places: without any, those after <|vision_start|>. Raises RequestError."""
        if places and len(places) != len(files):
            raise RequestError(f"image_places has {len(places)} entries for {len(files)} of image_data")
        if files and not places:
            places = tagged(np.asarray(input_ids), self._seeing().processor)
            if len(places) < len(files):  # told before any is read, as that may take long
                raise RequestError(
                    f"the tokens have placeholders for {len(places)} images, and {len(files)} were given"
                )
        whole = ("data:", "http://", "https://")
        urls = (file if file.startswith(whole) else f"data:;base64,{file}" for file in files)
        return [SentImage(image=self._read(url), place=place) for url, place in zip(urls, places, strict=False)]

    def framed(self, sent: FramedImage) -> SentImage:
        """Raises RequestError, with status GONE for an image that is not kept any more."""
        place = sent.start, sent.stop
        if (kept := self._kept_image(sent.digest)) is not None:
            return SentImage(image=kept, place=place)
        if not sent.data:
            raise RequestError(f"the image {sent.digest.hex()[:12]} is not kept any more", GONE)
        image = self._read(sent.data, sent.digest.hex())
        self._kept[sent.digest] = image, len(sent.data)
        self._num_bytes += len(sent.data)
        while self._num_bytes > _KEPT_BYTES and len(self._kept) > 1:
            self._num_bytes -= self._kept.popitem(last=False)[1][1]
        return SentImage(image=image, place=place)

    def _kept_image(self, digest: bytes) -> Future[Image] | None:
        """One that could not be read is not kept: another client may have sent it wrongly."""
        image, num_bytes = self._kept.pop(digest, (None, 0))
        if image is None:
            return None
        if image.done() and image.exception() is not None:
            self._num_bytes -= num_bytes
            return None
        self._kept[digest] = image, num_bytes
        return image

    def view(self, input_ids: Any, images: Sequence[SentImage]) -> Future[View] | None:
        """Fails with RequestError if the images do not fit the tokens. Raises RequestError for tokens without them."""
        if (tower := self._tower) is None:
            return None
        ids = np.asarray(input_ids)
        if images:
            return self._reading.submit(_view, tower, ids, images)
        try:
            check_images(tower.processor, ids, ())
        except ImageError as error:
            raise RequestError(str(error)) from error
        return None

    def _read(self, file: str | bytes, digest: str | None = None) -> Future[Image]:
        return self._reading.submit(_image, self._seeing(), file, digest)

    def _seeing(self) -> Tower:
        """Raises RequestError for a model of texts."""
        if self._tower is None:
            raise RequestError("this server's model takes no images; serve a vision-language model, or send text alone")
        return self._tower


def _image(tower: Tower, file: str | bytes, digest: str | None) -> Image:
    """Its pixels are computed here, to be found by the tower. Raises RequestError."""
    try:
        image = Image.of(file)
        if digest not in (None, image.digest):
            raise ImageError(f"an image has the digest {image.digest[:12]}, and was sent as {digest:.12}")
        _prepare(tower, image)
    except ImageError as error:
        raise RequestError(str(error)) from error
    return image


def _view(tower: Tower, ids: np.ndarray, sent: Sequence[SentImage]) -> View:
    placed = [PlacedImage(image=one.image.result(), start=one.place[0], stop=one.place[1]) for one in sent]
    try:
        check_images(tower.processor, ids, placed)
        for one in placed:
            _prepare(tower, one.image)
    except ImageError as error:
        raise RequestError(str(error)) from error
    return View(placed, tower.processor)


def _prepare(tower: Tower, image: Image) -> None:
    """The tower may have forgotten an image since it was read, and its pixels may be gone."""
    if not tower.knows(image):
        tower.processor.pixels(image)
