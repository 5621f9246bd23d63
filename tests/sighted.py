"""Tiny models that see, prompts with images for them, and what plain transformers says of these."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import reference
import torch
from PIL import Image as Pictures
from reference import chosen
from torch import nn
from transformers import AutoModelForImageTextToText

from arl.api.images import Image, PlacedImage
from arl.data.image_processor import ImageProcessor
from arl.engine.tiny import (
    IMAGE_PAD,
    TinyShape,
    TinyVision,
    VisionFamily,
    tiny_vision_tokenizer,
    write_tiny_vision_model,
)

SEEING_FAMILIES: tuple[VisionFamily, ...] = ("qwen2_5_vl", "qwen3_vl")
START, END = 268, 269
TWIN = 255
"""A token with the embedding of the placeholder. Plain transformers takes every placeholder for a part of an image, so
it is shown this one where a model sampled the placeholder."""
SEEING_SHAPE = TinyShape(
    hidden_size=64, intermediate_size=96, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, context_length=512,
    initializer_range=0.3,
)  # fmt: skip
SEEING_WIDE = replace(SEEING_SHAPE, hidden_size=128, head_dim=32, context_length=8192)
"""For every kind of server: vLLM's attention on a CPU takes no heads of 16."""
SEEING_VISION = TinyVision(hidden_size=32, intermediate_size=48, depth=3)
WIDE_VISION = TinyVision(depth=3, patch_size=14)
"""For every kind of server: SGLang's Qwen2.5-VL takes patches of another size for vectors, which need no tower, and its
Qwen3-VL loads no layer whose width is not a multiple of 64."""

Part = Sequence[int] | Image
Placed = tuple[PlacedImage, ...]


def write_sighted(
    directory: Path,
    family: VisionFamily,
    seed: int = 0,
    shape: TinyShape = SEEING_SHAPE,
    vision: TinyVision = SEEING_VISION,
) -> Path:
    """A model whose norms and biases, which begin as ones and zeros, are random numbers."""
    write_tiny_vision_model(directory, shape=shape, vision=vision, seed=seed, family=family)
    model: Any = AutoModelForImageTextToText.from_pretrained(directory)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
        elif parameter.dim() == 2:  # as large as those of texts: what is seen must matter
            nn.init.trunc_normal_(parameter.data, std=shape.initializer_range, generator=generator)
    embeddings = model.get_input_embeddings().weight.data
    embeddings[TWIN] = embeddings[tiny_vision_tokenizer().get_vocab()[IMAGE_PAD]]
    model.save_pretrained(directory)
    return directory


def noise(width: int, height: int, seed: int) -> Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.of(Pictures.fromarray(pixels))


def laid_out(processor: ImageProcessor, *parts: Part) -> tuple[list[int], Placed]:
    """The tokens of texts and images, each image between its two tags."""
    tokens, placed = list[int](), list[PlacedImage]()
    for part in parts:
        if isinstance(part, Image):
            start, count = len(tokens) + 1, processor.num_placeholders(part)
            placed.append(PlacedImage(image=part, start=start, stop=start + count))
            tokens += [START, *[processor.image_token_id] * count, END]
        else:
            tokens += part
    return tokens, tuple(placed)


class SeeingReference(reference.Reference):
    """What plain transformers says of sequences with images. It sees `images` until told otherwise."""

    def __init__(self, directory: Path, tolerance: float = 1e-4) -> None:
        """tolerance: how far a server's logprobs may be from these."""
        super().__init__(AutoModelForImageTextToText.from_pretrained(directory).eval())
        self.processor = ImageProcessor(directory)
        self.images: Placed = ()
        self.tolerance = tolerance

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
        tokens = torch.tensor([[*prompt, *output]])
        types = torch.zeros_like(tokens, dtype=torch.int32)
        for placed in self.images:
            types[0, placed.start : placed.stop] = 1
        tokens[(tokens == self.processor.image_token_id) & (types == 0)] = TWIN
        seen: dict[str, Any] = {}
        if self.images:
            pixels = [self.processor.pixels(placed.image) for placed in self.images]
            seen["pixel_values"] = torch.from_numpy(np.concatenate([one.values for one in pixels]))
            seen["image_grid_thw"] = torch.tensor([one.grid for one in pixels])
        self.model.model.rope_deltas = None
        logits = self.model(input_ids=tokens, mm_token_type_ids=types, use_cache=False, **seen).logits
        return logits[0, len(prompt) - 1 : -1].float()

    def seeing(self, images: Placed) -> "SeeingReference":
        self.images = images
        return self

    def logprobs_of(
        self, images: Placed, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0
    ) -> torch.Tensor:
        return chosen(self.seeing(images).logits(prompt, output) / temperature, output)
