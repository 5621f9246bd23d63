"""The images of one sequence: where they lie, which positions its tokens have, and what tells its prefixes apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from arl.api.images import Image, PlacedImage
from arl.vision.processor import ImageProcessor


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
    for start, stop in tagged(token_ids, processor):
        if stop < len(token_ids) and token_ids[stop] == processor.vision_end_token_id:
            is_word[start:stop] = False
    for placed in images:
        is_word[placed.start : placed.stop] = False
    processor.check(np.where(is_word, -1, token_ids), images)


def tagged(ids: np.ndarray, processor: ImageProcessor) -> list[list[int]]:
    """(start, stop) of the placeholders after each <|vision_start|>, in order."""
    starts = np.flatnonzero((ids[:-1] == processor.vision_start_token_id) & (ids[1:] == processor.image_token_id)) + 1
    stops = np.flatnonzero(np.append(ids != processor.image_token_id, True))
    return np.stack([starts, stops[np.searchsorted(stops, starts)]], 1).tolist()
