"""What a model sees in a packed row: its vision tower makes vectors of the images, which replace their placeholders.

    images --ImageProcessor--> patches [P, D] --tower--> vectors [V, H] --one for each placeholder--> input embeddings
                                                    |
                                                    +--> Qwen3-VL: more vectors [V, H], added after early layers

Each distinct image of a microbatch goes through the tower once, however many of its sequences show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from arl.algorithm.flat_sequences import FlatSequences
from arl.api.errors import ConfigError, ImageError
from arl.api.images import Image
from arl.api.types import NOT_SAMPLED
from arl.engine.fsdp.vision_attention import VISION_ATTENTION
from arl.vision.processor import ImageProcessor, sees_images


def vision_tower(model: nn.Module) -> PreTrainedModel | None:
    """The part of the model that sees, with what projects its output to the language model's size; None without one."""
    return getattr(getattr(model, "model", None), "visual", None)


def let_tower_attend(model: nn.Module) -> None:
    """Give the tower an attention of its own: its patches see each other in both directions, image by image."""
    if (tower := vision_tower(model)) is not None:
        tower.config._attn_implementation = VISION_ATTENTION


def freeze_tower(model: nn.Module, name: str | Path) -> None:
    """Raises ConfigError if the model has no tower."""
    if (tower := vision_tower(model)) is None:
        raise ConfigError(f"train.freeze_vision_tower is set, but {name} has no vision tower; leave it out")
    tower.requires_grad_(False)


def tower_blocks(model: nn.Module) -> list[nn.Module]:
    """The tower's repeated blocks; none without a tower."""
    tower = vision_tower(model)
    return [] if tower is None else list(tower.blocks)  # pyright: ignore[reportArgumentType] (a ModuleList)


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
    """The decoder's arguments instead of input_ids [1, T]."""
    embeddings = model.get_input_embeddings()(input_ids)
    vectors, *deeper = _tower_vectors(model, images, input_ids.device)
    if isinstance(images, NoImages):
        nothing = sum((part.sum() for part in deeper), vectors.sum()) * 0
        return {"inputs_embeds": embeddings + nothing.to(embeddings.dtype)}
    placed = vectors[images.vectors].to(embeddings.dtype)
    arguments: dict[str, Any] = {"inputs_embeds": embeddings.index_copy(1, images.places, placed[None])}
    if deeper:
        arguments["visual_pos_masks"] = images.is_placeholder
        arguments["deepstack_visual_embeds"] = [part[images.vectors] for part in deeper]
    return arguments


def _tower_vectors(model: PreTrainedModel, images: RowImages | NoImages, device: torch.device) -> list[torch.Tensor]:
    """The images' vectors [V, H] for the embeddings, then those for early layers. A frozen tower keeps nothing."""
    tower = vision_tower(model)
    assert tower is not None, "images were checked"
    patches, grids = (part.to(device) for part in (_blank(tower) if isinstance(images, NoImages) else images.pixels()))
    is_trained = any(p.requires_grad for p in tower.parameters())
    with torch.set_grad_enabled(is_trained and torch.is_grad_enabled()):
        seen = tower(patches, grid_thw=grids)
    return [seen.pooler_output, *(getattr(seen, "deepstack_features", None) or ())]


def _blank(tower: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """As RowImages.pixels: the smallest image."""
    config: Any = tower.config
    side = config.spatial_merge_size
    size = config.in_channels * config.temporal_patch_size * config.patch_size**2
    return torch.zeros(side**2, size), torch.tensor([[1, side, side]])
