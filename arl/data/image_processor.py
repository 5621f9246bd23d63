"""The image side of a model: pixels, placeholders and positions, the same for workflows, servers and the trainer.

Image --transformers' image processor--> pixels [patches, D] --the model's tower--> one vector for each placeholder
  |                                                                                    patches / merge_size^2
  +-- num_placeholders, of its size alone
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from arl.api.errors import ImageError, ModelError
from arl.api.images import Image, PlacedImage, placement_flaw

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""The model types whose images arl knows: the values of model_type in config.json."""

_REMEMBERED_BYTES = 256 << 20
"""Pixels that a processor remembers: the episodes of a group see the same images."""

Grid = tuple[int, int, int]
"""(frames, rows, columns) of an image's patches, before neighbours are merged into placeholders."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pixels:
    """An image as the model's tower takes it."""

    values: npt.NDArray[np.float32]
    """[patches, D]"""
    grid: Grid
    num_placeholders: int


def sees_images(model: str | Path) -> bool:
    """Whether a model is one of FAMILIES. model: a directory or a name on the hub. Raises ModelError."""
    from transformers import AutoConfig

    return _part(AutoConfig, model, "its config").model_type in FAMILIES


class ImageProcessor:
    """A model's image processor. Threads may share it."""

    def __init__(self, model: str | Path) -> None:
        """model: a directory, or a name on the hub, of one of FAMILIES. Raises ModelError."""
        from transformers import AutoConfig, AutoImageProcessor

        self.model = str(model)
        config = _part(AutoConfig, model, "its config")
        if config.model_type not in FAMILIES:
            raise ModelError(
                f"{model} is a {config.model_type}, which takes no images that arl knows; those of "
                f"{', '.join(FAMILIES)} are supported"
            )
        self.image_token_id: int = config.image_token_id
        """The placeholder."""
        self.vision_start_token_id: int = config.vision_start_token_id
        """Stands before the placeholders of an image."""
        self.vision_end_token_id: int = config.vision_end_token_id
        """Stands behind them."""
        self._processor = _part(AutoImageProcessor, model, "its image processor", backend="pil")
        self._merge_size: int = self._processor.merge_size
        self._remembered: OrderedDict[str, Pixels] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def placing(self) -> dict[str, int]:
        """The settings that num_placeholders follows, by name, and the placeholder."""
        limits = self._processor.size
        return {
            "patch_size": self._processor.patch_size,
            "merge_size": self._merge_size,
            "shortest_edge": limits["shortest_edge"],
            "longest_edge": limits["longest_edge"],
            "image_token_id": self.image_token_id,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return ImageProcessor, (self.model,)

    def num_placeholders(self, image: Image) -> int:
        """Without reading its pixels. Raises ImageError for an image of a shape that the model cannot see."""
        return math.prod(self.grid(image)) // self._merge_size**2

    def pixels(self, image: Image) -> Pixels:
        """Raises ImageError, as num_placeholders does."""
        with self._lock:
            if (known := self._remembered.get(image.digest)) is not None:
                self._remembered.move_to_end(image.digest)
                return known
        try:
            made = self._processor(images=[image.picture()], return_tensors="np")
        except ValueError as error:
            raise ImageError(f"{self.model} cannot see {image!r}: {error}") from error
        grid: Grid = tuple(int(n) for n in made["image_grid_thw"][0])  # pyright: ignore[reportAssignmentType] - three
        if grid != (wanted := self.grid(image)):
            raise ImageError(
                f"the image processor of {self.model} makes {grid} patches of {image!r} instead of {wanted}: arl needs "
                "do_resize, and the image sizes of Qwen's processors, in preprocessor_config.json"
            )
        values = np.ascontiguousarray(made["pixel_values"], dtype=np.float32)
        pixels = Pixels(values=values, grid=grid, num_placeholders=len(values) // self._merge_size**2)
        with self._lock:
            if image.digest not in self._remembered:
                self._remembered[image.digest] = pixels
                self._num_bytes += values.nbytes
            while self._num_bytes > _REMEMBERED_BYTES and len(self._remembered) > 1:
                _, oldest = self._remembered.popitem(last=False)
                self._num_bytes -= oldest.values.nbytes
        return pixels

    def scaled(self, image: Image) -> Image:
        """A PNG of the size to which `pixels` scales the image, with the same pixels; the image itself if it is one.

        Raises ImageError, as num_placeholders does, and for an image so narrow that this PNG would be scaled again.
        """
        _, rows, columns = grid = self.grid(image)
        side = self._processor.patch_size
        size = columns * side, rows * side
        if (image.width, image.height) == size and image.kind == "image/png":
            return image
        made = Image.of(image.picture().resize(size, self._processor.resample))
        if self.grid(made) != grid:
            raise ImageError(
                f"SGLang and vLLM would see {image!r} otherwise than {self.model} does here: it is so narrow that they "
                f"would scale it twice, to {size[0]}x{size[1]} and further; pad it"
            )
        return made

    def grid(self, image: Image) -> Grid:
        """Without reading its pixels. Raises ImageError, as num_placeholders does."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        side, limits = self._processor.patch_size, self._processor.size
        bounds = {"min_pixels": limits["shortest_edge"], "max_pixels": limits["longest_edge"]}
        try:
            height, width = smart_resize(image.height, image.width, side * self._merge_size, **bounds)
        except ValueError as error:
            raise ImageError(f"{self.model} cannot see {image!r}: {error}") from error
        return 1, height // side, width // side

    def positions(self, num_tokens: int, images: Sequence[PlacedImage]) -> npt.NDArray[np.int64]:
        """int64[3, T]: the time, row and column of each token, for multimodal rotary positions (2409.12191, section 2).

        A text's three are equal. An image's placeholders lie on its grid, and the text after it goes on after the
        largest of them. So a token's positions depend on the tokens before it alone.
        """
        positions = np.empty((3, num_tokens), np.int64)
        token, position = 0, 0
        for placed in images:
            positions[:, token : placed.start] = np.arange(position, position + placed.start - token)
            position += placed.start - token
            frames, rows, columns = self.grid(placed.image)
            sizes = frames, rows // self._merge_size, columns // self._merge_size
            positions[:, placed.start : placed.stop] = np.indices(sizes).reshape(3, -1) + position
            token, position = placed.stop, position + max(sizes[1:])
        positions[:, token:] = np.arange(position, position + num_tokens - token)
        return positions

    def check(self, token_ids: npt.NDArray[Any] | Sequence[int], images: Sequence[PlacedImage]) -> None:
        """Raise ImageError unless these tokens have a placeholder for each vector of these images, and no others."""
        if flaw := placement_flaw(images, len(token_ids)):
            raise ImageError(flaw)
        is_placeholder = np.asarray(token_ids) == self.image_token_id
        for number, placed in enumerate(images):
            needed, given = self.num_placeholders(placed.image), placed.stop - placed.start
            if given != needed:
                raise ImageError(
                    f"image {number} ({placed.image!r}) has {given} placeholders among the tokens, and {self.model} "
                    f"needs {needed}: another processor placed it. Give the workflow the tokenizer of the model that "
                    "is trained, from a directory with the same settings of the image processor"
                )
            if not is_placeholder[placed.start : placed.stop].all():
                raise ImageError(f"image {number} lies on tokens other than the placeholder {self.image_token_id}")
        if int(is_placeholder.sum()) != sum(placed.stop - placed.start for placed in images):
            raise ImageError(f"the tokens have placeholders ({self.image_token_id}) where no image was given")


def _part(auto_class: Any, model: str | Path, what: str, **options: Any) -> Any:
    try:
        return auto_class.from_pretrained(str(model), **options)
    except Exception as error:  # a broken model directory makes transformers raise almost anything
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelError(f"cannot load {what} from {model}: {reason}") from error
