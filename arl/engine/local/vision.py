"""The images of requests: read and checked before the model thread gets a request, then seen by the model's tower.

    files --reading threads--> pixels, positions --> the request's View --> Tower --> vectors [1 + D, n, hidden]

n: an image's placeholders. vectors[0] stands in the place of their embeddings, and vectors[1 + i] is added to the
output of layer i. D is 0 for Qwen2.5-VL; Qwen3-VL's layers see the tower's middle layers, too (DeepStack, 2406.04334).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from arl.api.errors import ImageError
from arl.api.images import Image, PlacedImage
from arl.data.image_processor import ImageProcessor
from arl.engine.frames import GONE, FramedImage
from arl.engine.local.adapters import Adapter, LoadedAdapters
from arl.runtime.http.bodies import RequestError

T = TypeVar("T")

PART = "model.visual."
"""The beginning of the names of the tower's modules and parameters."""
_VECTOR_BYTES = 1 << 30
_FILE_BYTES = 512 << 20
_NUM_THREADS = 4


@dataclass(frozen=True, slots=True, eq=False)
class ShownImages:
    """What a step's placeholders stand for."""

    places: torch.Tensor
    """int64[M]: theirs among the step's tokens, ascending."""
    vectors: torch.Tensor
    """[1 + D, M, hidden]"""

    def within(self, start: int, stop: int) -> ShownImages | None:
        """The part that belongs to the tokens start..stop-1, which it counts from 0; None if nothing does."""
        is_within = (self.places >= start) & (self.places < stop)
        if not is_within.any():
            return None
        return ShownImages(self.places[is_within] - start, self.vectors[:, is_within])


class Tower:
    """Computes each image once for each version of the weights. Belongs to the model thread; only `processor` and
    `knows` may be used from others."""

    def __init__(
        self, model: Any, processor: ImageProcessor, adapters: LoadedAdapters, share_operations: Callable[[int], None]
    ) -> None:
        """share_operations: called before work on so many tokens."""
        self.processor = processor
        self.num_computed = 0
        """How many images the tower has computed so far."""
        self._model = model.model
        self._adapters = adapters
        self._share_operations = share_operations
        self._device = next(model.parameters()).device
        self.depth = len(getattr(model.config.vision_config, "deepstack_visual_indexes", None) or ())
        """D"""
        self._kept: OrderedDict[tuple[str, str], torch.Tensor] = OrderedDict()
        """By the digest and the adapter's key."""
        self._num_bytes = 0

    def knows(self, image: Image) -> bool:
        """Whether the model's own vectors of an image are kept. The answer may be old."""
        return (image.digest, "") in self._kept

    @torch.inference_mode()
    def vectors(self, image: Image, adapter: Adapter | None) -> torch.Tensor:
        """[1 + D, n, hidden]. Sets the adapters of the next step."""
        if adapter is not None and not any(name.startswith(PART) for name in adapter.layers):
            adapter = None
        key = image.digest, adapter.key if adapter is not None else ""
        if (known := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return known
        self._adapters.use([(adapter, 1)], self._device)
        self.num_computed += 1
        pixels = self.processor.pixels(image)
        self._share_operations(len(pixels.values))
        values, grid = torch.from_numpy(pixels.values).to(self._device), torch.tensor([pixels.grid])
        seen = self._model.get_image_features(values, grid.to(self._device), return_dict=True)
        deep = [layer[0] for layer in getattr(seen, "deepstack_features", None) or ()]
        made = self._kept[key] = torch.stack([seen.pooler_output[0], *deep])
        self._num_bytes += made.nbytes
        while self._num_bytes > _VECTOR_BYTES and len(self._kept) > 1:
            self._num_bytes -= self._kept.popitem(last=False)[1].nbytes
        return made

    def forget(self) -> None:
        """The weights have changed."""
        self._kept.clear()
        self._num_bytes = 0


class View:
    """Images among the tokens of a sequence, which `check_images` has found to be right."""

    def __init__(self, images: Sequence[PlacedImage], processor: ImageProcessor) -> None:
        self.images = images
        self.placeholder = processor.image_token_id
        end = images[-1].stop
        positions = processor.positions(end + 1, images)
        self._positions = positions[:, :end]
        self.end = end
        """Behind the last image."""
        self.shift = int(positions[0, end]) - end
        """What the position of a token from `end` on adds to its index."""

    def marked(self, token_ids: Sequence[int]) -> list[int]:
        """The tokens, with a number for each image in the place of its placeholders: prefixes with different images
        have different tokens, and those with equal ones the same."""
        marked = list(token_ids)
        for placed in self.images:
            marked[placed.start : placed.stop] = [-1 - int(placed.image.digest, 16)] * (placed.stop - placed.start)
        return marked

    def positions(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """int64[3, stop - start]: time, row and column of the tokens start..stop-1."""
        after = np.arange(max(start, self.end), max(stop, self.end)) + self.shift
        return np.concatenate([self._positions[:, start:stop], np.broadcast_to(after, (3, len(after)))], axis=1)

    def parts(self, start: int, stop: int) -> Iterator[tuple[Image, int, int, int]]:
        """The parts of images among the tokens start..stop-1: the image, the index of the part's first token, and the
        first and the last (excluded) of the image's placeholders that it has."""
        for placed in self.images:
            first, last = max(placed.start, start), min(placed.stop, stop)
            if first < last:
                yield placed.image, first, first - placed.start, last - placed.start


def check_images(processor: ImageProcessor, token_ids: np.ndarray, images: Sequence[PlacedImage]) -> None:
    """Raise ImageError unless the tokens have a placeholder for each vector of these images, and no others.

    A model can sample the placeholder's token; then it is a token like others. But those between <|vision_start|> and
    <|vision_end|> belong to an image that was forgotten.
    """
    is_word = token_ids == processor.image_token_id
    for start, stop in _tagged(token_ids, processor):
        if stop < len(token_ids) and token_ids[stop] == processor.vision_end_token_id:
            is_word[start:stop] = False
    for placed in images:
        is_word[placed.start : placed.stop] = False
    processor.check(np.where(is_word, -1, token_ids), images)


def _tagged(ids: np.ndarray, processor: ImageProcessor) -> list[list[int]]:
    """(start, stop) of the placeholders after each <|vision_start|>, in order."""
    starts = np.flatnonzero((ids[:-1] == processor.vision_start_token_id) & (ids[1:] == processor.image_token_id)) + 1
    stops = np.flatnonzero(np.append(ids != processor.image_token_id, True))
    return np.stack([starts, stops[np.searchsorted(stops, starts)]], 1).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class SentImage:
    image: Future[Image]
    place: Sequence[int]
    """Its placeholders: (start, stop)."""


class ArrivedImages:
    """Reads requests' images; those of frames are kept by digest, so that a client sends each once.

    Belongs to the event loop. tower: the model's, None for a model of texts.
    """

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
            places = _tagged(np.asarray(input_ids), self._seeing().processor)
            if len(places) < len(files):  # told before any is read, as that may take long
                raise RequestError(
                    f"the tokens have placeholders for {len(places)} images, and {len(files)} were given"
                )
        whole = ("data:", "http://", "https://")
        urls = (file if file.startswith(whole) else f"data:;base64,{file}" for file in files)
        return [SentImage(image=self._read(url), place=place) for url, place in zip(urls, places, strict=False)]

    def framed(self, sent: FramedImage) -> SentImage:
        """Raises RequestError, with status GONE for an image that is not kept any more."""
        image, num_bytes = self._kept.pop(sent.digest, (None, 0))
        if image is not None and image.done() and image.exception() is not None:
            image = None  # another client may have sent it wrongly
            self._num_bytes -= num_bytes
        if image is None:
            if not sent.data:
                raise RequestError(f"the image {sent.digest.hex()[:12]} is not kept any more", GONE)
            image, num_bytes = self._read(sent.data, sent.digest.hex()), len(sent.data)
            self._num_bytes += num_bytes
        self._kept[sent.digest] = image, num_bytes
        while self._num_bytes > _FILE_BYTES and len(self._kept) > 1:
            self._num_bytes -= self._kept.popitem(last=False)[1][1]
        return SentImage(image=image, place=(sent.start, sent.stop))

    def view(self, input_ids: Any, images: Sequence[SentImage]) -> Future[View] | None:
        """Fails with RequestError if the images do not fit the tokens. Raises RequestError for tokens without them."""
        if (tower := self._tower) is None:
            return None
        ids = np.asarray(input_ids)

        def work() -> View:
            placed = [PlacedImage(image=one.image.result(), start=one.place[0], stop=one.place[1]) for one in images]
            check_images(tower.processor, ids, placed)
            for one in placed:
                _prepare(tower, one.image)
            return View(placed, tower.processor)

        if images:
            return self._reading.submit(_refused_in_words, work)
        _refused_in_words(lambda: check_images(tower.processor, ids, ()))
        return None

    def _read(self, file: str | bytes, digest: str | None = None) -> Future[Image]:
        tower = self._seeing()

        def work() -> Image:
            image = Image.of(file)
            if digest not in (None, image.digest):
                raise ImageError(f"an image has the digest {image.digest[:12]}, and was sent as {digest:.12}")
            _prepare(tower, image)
            return image

        return self._reading.submit(_refused_in_words, work)

    def _seeing(self) -> Tower:
        """Raises RequestError for a model of texts."""
        if self._tower is None:
            raise RequestError("this server's model takes no images; serve a vision-language model, or send text alone")
        return self._tower


def _prepare(tower: Tower, image: Image) -> None:
    """Compute its pixels here, to be found by the tower, which may have forgotten an image since it was read."""
    if not tower.knows(image):
        tower.processor.pixels(image)


def _refused_in_words(work: Callable[[], T]) -> T:
    try:
        return work()
    except ImageError as error:
        raise RequestError(str(error)) from error
