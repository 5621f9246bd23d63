"""What a model sees in a packed row: its vision tower makes vectors of the images, which replace their placeholders.

    images --ImageProcessor--> patches [P, D] --tower--> vectors [V, H] --one for each placeholder--> input embeddings
                                                    |
                                                    +--> Qwen3-VL: more vectors [V, H], added after early layers

Each distinct image of a microbatch goes through the tower once, however many of its sequences show it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, PreTrainedModel

from arl.algorithm.flat_sequences import FlatSequences, runs
from arl.api.errors import ImageError
from arl.api.images import Image
from arl.api.types import NOT_SAMPLED
from arl.data.image_processor import ImageProcessor, sees_images

VISION_ATTENTION = "arl_flash_segments"
"""The `attn_implementation` under which transformers knows `segment_attention`. To those with "flash" in their name it
gives all images at once and tells where each begins; others it would call once for each image or window."""

_plans: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""`_plan_of` by the tensor of the segments' bounds: a tower's layers share it, and reading it waits for the GPU."""


def segment_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """query, key, value [1, H, P, D] -> ([1, P, H, D], no weights). Each patch sees its own segment.

    cu_seq_lens_q: int32[S + 1], where the segments (images, or windows of them) begin, and P. Segments of one length
    are computed together.
    """
    batches, order, inverse = _plan_of(cu_seq_lens_q)
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]  # [P, H, D], as they are in memory
    if order is not None:
        rows = [x.index_select(0, order) for x in rows]
    outputs: list[torch.Tensor] = []
    start = 0
    for count, length in batches:
        q, k, v = (x[start : start + count * length].unflatten(0, (count, length)).transpose(1, 2) for x in rows)
        outputs.append(F.scaled_dot_product_attention(q, k, v, scale=scaling).transpose(1, 2).flatten(0, 1))
        start += count * length
    output = torch.cat(outputs)
    return (output if inverse is None else output.index_select(0, inverse))[None], None


def _plan_of(bounds: torch.Tensor) -> tuple[list[tuple[int, int]], torch.Tensor | None, torch.Tensor | None]:
    """Segments by length: (number of segments, their length); int64[P], the patches in that order, and its inverse.
    None: they lie so."""
    if (plan := _plans.get(bounds)) is None:
        lengths = bounds.diff().long().cpu()
        by_length = lengths.argsort(stable=True)
        order = inverse = None
        if (by_length.diff() < 0).any():
            starts = lengths.cumsum(0) - lengths
            places = runs(starts[by_length], lengths[by_length])
            order, inverse = (x.to(bounds.device) for x in (places, places.argsort()))
        batches = [(count, length) for length, count in sorted(Counter(lengths.tolist()).items())]
        plan = _plans[bounds] = batches, order, inverse
    return plan


AttentionInterface.register(VISION_ATTENTION, segment_attention)


def vision_tower(model: nn.Module) -> PreTrainedModel | None:
    """The part of the model that sees, with what projects its output to the language model's size; None without one."""
    return getattr(getattr(model, "model", None), "visual", None)


def image_processor(model: str | Path) -> ImageProcessor | None:
    """None if the model sees nothing. Raises ModelError."""
    return ImageProcessor(model) if sees_images(model) else None


class RowImages:
    """The images of a microbatch, and where its row shows them. Their pixels are read when the row is computed.

    It is no dataclass: FSDP would look for tensors in all of it.
    """

    def __init__(
        self, processor: ImageProcessor, images: Sequence[Image], row_vectors: torch.Tensor, device: torch.device
    ) -> None:
        """row_vectors: int64[T], for each token of the row the number of its vector, counted over all images; -1 for a
        token that is none of an image's."""
        self.images = tuple(images)
        self._processor = processor
        is_placeholder = row_vectors >= 0
        self.vectors = row_vectors[is_placeholder].to(device)
        """int64[K]: the vector of each placeholder of the row."""
        self.places = is_placeholder.nonzero()[:, 0].to(device)
        """int64[K]: where it lies, ascending."""
        self.is_placeholder = is_placeholder[None].to(device)
        """bool[1, T]"""

    def pixels(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Patches float32[P, D], and each image's grid of them, int64[N, 3]."""
        pixels = [self._processor.pixels(image) for image in self.images]
        return torch.from_numpy(np.concatenate([p.values for p in pixels])), torch.tensor([p.grid for p in pixels])


class NoImages:
    """The images of a row without any, which runs the tower all the same, as other ranks do: collectives must match."""


def images_of_row(
    flat: FlatSequences, needed: torch.Tensor, row: torch.Tensor, processor: ImageProcessor, device: torch.device
) -> tuple[RowImages | None, torch.Tensor]:
    """The row's images, if it has any, and its positions, int64[3, 1, T].

    needed: int64[S], how many first tokens of each sequence the row needs. row: int64[T], the place of each of the
    row's tokens among those of `flat`.
    """
    firsts: dict[Image, int] = {}  # the number of each image's first vector
    vectors = torch.full((len(flat.token_ids),), -1)
    positions = torch.empty(3, len(vectors), dtype=torch.int64)
    num_vectors = 0
    columns = flat.starts[:-1].tolist(), flat.lengths, needed.tolist(), flat.images
    for start, length, count, images in zip(*columns, strict=True):
        seen = [placed for placed in images if placed.start < count]
        positions[:, start : start + length] = torch.from_numpy(processor.positions(length, seen))
        for placed in seen:
            size = placed.stop - placed.start
            first = firsts.setdefault(placed.image, num_vectors)
            num_vectors = max(num_vectors, first + size)
            vectors[start + placed.start : start + placed.stop] = torch.arange(first, first + size)
    images = RowImages(processor, tuple(firsts), vectors[row], device) if firsts else None
    return images, positions[:, None, row].to(device)


def check_images(flat: FlatSequences, model: str | Path, processor: ImageProcessor | None) -> None:
    """Raise ImageError unless each trained sequence has a placeholder for each of its images' vectors, and no others.

    A placeholder that the model itself wrote is a token as any other, as it was when it was sampled. processor: of a
    model that sees.
    """
    if processor is None:
        if flat.images:
            raise ImageError(f"sequences have images, and {model} has no vision tower that arl knows")
        return
    tokens = flat.token_ids.numpy()
    is_sampled = (flat.loss_mask | (flat.columns["versions"] != NOT_SAMPLED)).numpy()
    for start, length, images in zip(flat.starts.tolist(), flat.lengths, flat.images or [()] * len(flat), strict=False):
        own = slice(start, start + length)
        if not flat.loss_mask[own].any():
            continue
        is_word = is_sampled[own].copy()
        for placed in images:
            is_word[placed.start : placed.stop] = False
        processor.check(np.where(is_word, -1, tokens[own]), images)


def decoder_inputs(model: PreTrainedModel, input_ids: torch.Tensor, images: RowImages | NoImages) -> dict[str, Any]:
    """The decoder's arguments instead of input_ids [1, T]. A frozen tower keeps nothing for the backward pass."""
    embeddings = model.get_input_embeddings()(input_ids)
    tower = vision_tower(model)
    assert tower is not None, "images were checked"
    if isinstance(images, NoImages):  # the smallest image
        config: Any = tower.config
        side = config.spatial_merge_size
        size = config.in_channels * config.temporal_patch_size * config.patch_size**2
        patches, grids = torch.zeros(side**2, size), torch.tensor([[1, side, side]])
    else:
        patches, grids = images.pixels()
    is_trained = any(p.requires_grad for p in tower.parameters())
    with torch.set_grad_enabled(is_trained and torch.is_grad_enabled()):
        seen = tower(patches.to(input_ids.device), grid_thw=grids.to(input_ids.device))
    # [V, H] for the embeddings, then for early layers.
    vectors: torch.Tensor = seen.pooler_output
    deeper: list[torch.Tensor] = list(getattr(seen, "deepstack_features", None) or ())
    if isinstance(images, NoImages):
        nothing = sum((part.sum() for part in deeper), vectors.sum()) * 0
        return {"inputs_embeds": embeddings + nothing.to(embeddings.dtype)}
    placed = vectors[images.vectors].to(embeddings.dtype)
    arguments: dict[str, Any] = {"inputs_embeds": embeddings.index_copy(1, images.places, placed[None])}
    if deeper:
        arguments["visual_pos_masks"] = images.is_placeholder
        arguments["deepstack_visual_embeds"] = [part[images.vectors] for part in deeper]
    return arguments
