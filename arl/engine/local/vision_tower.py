"""A model's vision tower: what it makes of an image, computed once for each image and version of the weights.

    image --ImageProcessor--> pixels --tower--> vectors [1 + D, n, hidden]     n: the image's placeholders
                                                  |    \\__ vectors[1 + i] is added to the output of layer i
                                                  +__ vectors[0] stands in the place of the placeholders' embeddings

D is 0 for Qwen2.5-VL; Qwen3-VL's layers see the tower's middle layers, too (DeepStack, 2406.04334).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from arl.api.images import Image
from arl.data.image_processor import FAMILIES, ImageProcessor
from arl.engine.local.adapters import Adapter, LoadedAdapters
from arl.engine.local.model_threads import TOKENS_FOR_A_THREAD, ModelThreads

PART = "model.visual."
"""The beginning of the names of the tower's modules and parameters."""

_KEPT_BYTES = 1 << 30


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
    """Belongs to one thread at a time; only `processor` may be used from others."""

    def __init__(self, model: Any, processor: ImageProcessor, adapters: LoadedAdapters, threads: ModelThreads) -> None:
        self.processor = processor
        self.num_computed = 0
        """How many images the tower has computed so far."""
        self._model = model.model
        self._adapters = adapters
        self._threads = threads
        self._device = next(model.parameters()).device
        self.depth = len(getattr(model.config.vision_config, "deepstack_visual_indexes", None) or ())
        """D"""
        self._kept: OrderedDict[tuple[str, str], torch.Tensor] = OrderedDict()
        self._num_bytes = 0

    def knows(self, image: Image) -> bool:
        """Whether the model's own vectors of an image are kept. Any thread may ask: the answer may be old."""
        return (image.digest, "") in self._kept

    @torch.inference_mode()
    def vectors(self, image: Image, adapter: Adapter | None) -> torch.Tensor:
        """[1 + D, n, hidden]. Sets the adapters of the next step."""
        is_adapted = adapter is not None and any(name.startswith(PART) for name in adapter.layers)
        key = image.digest, adapter.key if adapter is not None and is_adapted else ""
        if (known := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return known
        self._adapters.use([(adapter if is_adapted else None, 1)], self._device)
        made = self._kept[key] = self._compute(image)
        self._num_bytes += made.nbytes
        while self._num_bytes > _KEPT_BYTES and len(self._kept) > 1:
            self._num_bytes -= self._kept.popitem(last=False)[1].nbytes
        return made

    def _compute(self, image: Image) -> torch.Tensor:
        self.num_computed += 1
        pixels = self.processor.pixels(image)
        self._threads.share_operations(len(pixels.values) >= 2 * TOKENS_FOR_A_THREAD)
        values, grid = torch.from_numpy(pixels.values).to(self._device), torch.tensor([pixels.grid])
        seen = self._model.get_image_features(values, grid.to(self._device), return_dict=True)
        deep = [layer[0] for layer in getattr(seen, "deepstack_features", None) or ()]
        return torch.stack([seen.pooler_output[0], *deep])

    def forget(self) -> None:
        """The weights have changed."""
        self._kept.clear()
        self._num_bytes = 0


def is_sighted(config: Any) -> bool:
    """Whether a model of this configuration has a tower that arl knows."""
    return config.model_type in FAMILIES


def shown_of(parts: Sequence[tuple[int, torch.Tensor]]) -> ShownImages | None:
    """parts: for each image or part of one, the place of its first placeholder among the step's, and its vectors."""
    if not parts:
        return None
    places = [torch.arange(first, first + vectors.shape[1]) for first, vectors in parts]
    vectors = torch.cat([vectors for _, vectors in parts], 1)
    return ShownImages(torch.cat(places).to(vectors.device), vectors)
