"""Tiny models that see, and sequences with images."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from engine.fsdp.train_sequences import VOCABULARY, random_sequences
from PIL import Image as Pictures
from torch import nn
from transformers import AutoModelForImageTextToText, PreTrainedModel

from arl.algorithm.batch import weigh_tokens
from arl.api.images import Image, PlacedImage
from arl.api.train_engine import TrainSequence
from arl.data.image_processor import ImageProcessor
from arl.engine.tiny import (
    TinyShape,
    TinyVision,
    VisionFamily,
    tiny_vision_model,
    tiny_vision_tokenizer,
    write_tiny_vision_model,
)

FAMILIES: tuple[VisionFamily, ...] = ("qwen2_5_vl", "qwen3_vl")
_SHAPE = TinyShape(
    hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, initializer_range=0.2
)
_VISION = TinyVision(hidden_size=32, intermediate_size=48, depth=3, max_pixels=64 * 128)


def write_seeing_model(directory: Path, family: VisionFamily, dtype: torch.dtype = torch.float32) -> Path:
    """A model with random norms and biases, too: they begin as ones and zeros, which would hide mistakes. The head of a
    Qwen2.5-VL is its own, and that of a Qwen3-VL is tied to the embedding."""
    write_tiny_vision_model(directory, shape=_SHAPE, vision=_VISION, family=family)
    model = tiny_vision_model(tiny_vision_tokenizer(), _SHAPE, _VISION, family=family)
    torch.manual_seed(0)
    if family == "qwen2_5_vl":
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False
        model = type(model)(model.config)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, mean=parameter[0].item(), std=0.3)
    model.to(dtype).save_pretrained(directory)
    return directory


def load_seeing_twin(directory: Path) -> PreTrainedModel:
    """The model as transformers runs it by itself, with attention in plain operations."""
    return AutoModelForImageTextToText.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32
    ).eval()


def noise(width: int, height: int, seed: int = 0) -> Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.of(Pictures.fromarray(pixels))


ONE, SAME_SIZE, WIDE, TALL = noise(40, 25), noise(40, 25, 1), noise(120, 64), noise(20, 70)

Part = int | Image
"""So many random tokens, or an image between two tokens."""


def sequence_of(processor: ImageProcessor, *parts: Part, seed: int = 0, trained: int = 6) -> TrainSequence:
    """Text and images, then an answer of so many trained tokens. Text is the same for a seed of `texts`."""
    tokens, images = list[int](), list[PlacedImage]()
    texts = np.random.default_rng(7)
    for part in parts:
        if isinstance(part, Image):
            count = processor.num_placeholders(part)
            images.append(PlacedImage(image=part, start=len(tokens) + 1, stop=len(tokens) + 1 + count))
            tokens += [3, *[processor.image_token_id] * count, 4]
        else:
            tokens += texts.integers(0, VOCABULARY, part).tolist()
    answer = np.random.default_rng(seed).integers(0, VOCABULARY, trained).tolist()
    token_ids = torch.tensor(tokens + answer)
    mask = torch.arange(len(token_ids)) >= len(tokens)
    random = torch.Generator().manual_seed(seed)
    behavior = -6 + torch.randn(len(token_ids), generator=random)
    return TrainSequence(
        token_ids=token_ids,
        loss_mask=mask,
        behavior_logprobs=behavior * mask,
        proximal_logprobs=(behavior + 0.3 * torch.randn(len(token_ids), generator=random)) * mask,
        advantages=torch.randn(1, generator=random) * mask,
        versions=torch.where(mask, 0, -1),
        temperature=0.8,
        images=tuple(images),
    )


def seeing_sequences(processor: ImageProcessor) -> list[TrainSequence]:
    """Groups whose prompts differ in an image's content alone, two images, an image of a later turn, the same image
    at another place, one after the last trained token, and texts."""
    return weigh_tokens([*_groups(processor), *random_sequences(3)])


def _groups(processor: ImageProcessor) -> Iterator[TrainSequence]:
    for seed in range(2):
        yield sequence_of(processor, 9, ONE, 5, seed=seed)
        yield sequence_of(processor, 9, SAME_SIZE, 5, seed=seed)
    yield sequence_of(processor, 9, ONE, 5, WIDE, 4, seed=2)
    yield sequence_of(processor, 9, ONE, 5, TALL, 4, seed=3)
    yield sequence_of(processor, 12, TALL, ONE, seed=4)
    yield sequence_of(processor, 12, TALL, ONE, seed=5)
    yield _followed(processor)


def _followed(processor: ImageProcessor) -> TrainSequence:
    """An answer, and after it a prompt with an image that nothing trained follows."""
    whole = sequence_of(processor, 9, ONE, 6, WIDE, 3, seed=6)
    mask = torch.arange(len(whole)) == whole.images[0].stop + 3
    return TrainSequence(
        token_ids=whole.token_ids,
        loss_mask=mask,
        behavior_logprobs=-5.0 * mask,
        proximal_logprobs=-5.2 * mask,
        advantages=1.0 * mask,
        versions=torch.where(mask, 0, -1),
        images=whole.images,
    )


def digests(sequences: Sequence[TrainSequence]) -> set[str]:
    return {placed.image.digest for sequence in sequences for placed in sequence.images}
