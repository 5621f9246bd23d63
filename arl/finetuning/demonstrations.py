"""Supervised fine-tuning on demonstrations: their checks, their batches, and the loop."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from arl.algorithm.batch import weigh_tokens
from arl.algorithm.losses.supervised import SFTLoss
from arl.api.engine import ModelLimits, TokenLoss, TrainEngine
from arl.api.errors import DatasetError
from arl.api.images import PlacedImage, placement_flaw
from arl.api.train_sequence import TrainSequence
from arl.api.types import NOT_SAMPLED

ItemT = TypeVar("ItemT")

Demonstration = tuple[Sequence[int], Sequence[int]] | tuple[Sequence[int], Sequence[int], Sequence[PlacedImage]]
"""(token_ids, loss_mask) of equal length. The mask is 1 on the tokens to learn, never on the first token. A third part,
if there is one, is the images at the placeholders among token_ids."""

OnStep = Callable[[int, Mapping[str, float]], None]
"""Called with each step's number, from 1, and its metrics."""


def finetune(
    engine: TrainEngine,
    examples: Iterable[Demonstration],
    *,
    epochs: int = 1,
    batch_size: int = 32,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> dict[str, float]:
    """Train on demonstrations, one optimizer step per batch; return the last step's metrics.

    A step's loss is the mean negative log-likelihood of its batch's trained tokens. Each epoch shuffles the examples by
    `seed`; its last batch may be smaller. The engine's version counts these steps, so export the result and start
    reinforcement learning on a new engine. Raises DatasetError before training; it names the first demonstration that
    is malformed, does not fit the model or has nothing to learn.
    """
    sequences = [to_sequence(f"demonstration {i}", example, engine.limits) for i, example in enumerate(examples)]
    if not sequences:
        raise DatasetError("there are no demonstrations to fine-tune on")
    batches = shuffled_batches(sequences, epochs, batch_size, seed)
    return train_minibatches(engine, map(weigh_tokens, batches), SFTLoss(), on_step)


def train_minibatches(
    engine: TrainEngine, minibatches: Iterable[list[TrainSequence]], loss: TokenLoss, on_step: OnStep | None
) -> dict[str, float]:
    """One optimizer step for each minibatch. Returns the last step's metrics."""
    metrics: dict[str, float] = {}
    for step, minibatch in enumerate(minibatches, start=1):
        metrics = engine.train_batch([minibatch], loss)
        if on_step is not None:
            on_step(step, metrics)
    return metrics


def write_model(engine: TrainEngine, directory: Path) -> None:
    """Write the engine's weights as a Hugging Face directory, whole or not at all."""
    snapshot = engine.snapshot()
    try:
        snapshot.write(directory)
    finally:
        snapshot.release()


def shuffled_batches(items: Sequence[ItemT], epochs: int, batch_size: int, seed: int) -> Iterator[list[ItemT]]:
    """All items once per epoch, shuffled anew. An epoch's last batch may be smaller."""
    if epochs < 1 or batch_size < 1:
        raise ValueError(f"epochs is {epochs} and batch_size is {batch_size}; both must be at least 1")
    shuffle = random.Random(seed)
    for _ in range(epochs):
        order = shuffle.sample(items, len(items))
        for start in range(0, len(order), batch_size):
            yield order[start : start + batch_size]


def to_sequence(name: str, example: Demonstration, limits: ModelLimits) -> TrainSequence:
    """Convert a demonstration. Raises DatasetError, which refers to it by `name`."""
    if not is_pair(example[:2] if isinstance(example, tuple | list) and len(example) == 3 else example):
        raise DatasetError(f"{name} is a {type(example).__name__}; it must be a pair (token_ids, loss_mask)")
    images = tuple(example[2]) if len(example) == 3 else ()
    if images and (flaw := placement_flaw(images, len(example[0]))):
        raise DatasetError(f"{name}: {flaw}")
    token_ids, loss_mask = to_tokens(name, example[0], limits), _integers(name, "loss_mask", example[1])
    if len(token_ids) != len(loss_mask):
        raise DatasetError(f"{name} has {len(token_ids)} token_ids and {len(loss_mask)} loss_mask entries; match them")
    if (place := _first((loss_mask != 0) & (loss_mask != 1))) is not None:
        wrong = f"{int(loss_mask[place])} in its loss_mask at position {place}"
        raise DatasetError(f"{name} has {wrong}; 1 marks a token to learn, and 0 any other")
    if not loss_mask.any():
        raise DatasetError(f"{name} has nothing to learn: its loss_mask is 0 throughout; leave it out, or mark tokens")
    if loss_mask[0]:
        raise DatasetError(f"{name} cannot learn its first token, which has no context; set loss_mask[0] to 0")
    versions = torch.full((len(token_ids),), NOT_SAMPLED)
    return TrainSequence(token_ids=token_ids, loss_mask=loss_mask.bool(), versions=versions, images=images)


def to_tokens(name: str, token_ids: Sequence[int], limits: ModelLimits) -> torch.Tensor:
    """int64[T], at least one. Raises DatasetError for tokens that the model cannot take."""
    tokens = _integers(name, "token_ids", token_ids)
    if limits.context_length is not None and len(tokens) > limits.context_length:
        limit = f"the model's context of {limits.context_length}"
        raise DatasetError(f"{name} has {len(tokens)} tokens, more than {limit}; shorten it, or leave it out")
    if (place := _first((tokens < 0) | (tokens >= limits.vocab_size))) is not None:
        known = f"the model's tokens are 0 to {limits.vocab_size - 1}; use its own tokenizer"
        raise DatasetError(f"{name} has token {int(tokens[place])} at position {place}, but {known}")
    return tokens


def is_pair(value: object) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _integers(name: str, field: str, values: Any) -> torch.Tensor:
    """int64[T], at least one."""
    try:
        tensor = values.cpu() if isinstance(values, torch.Tensor) else torch.tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DatasetError(f"the {field} of {name} must be a sequence of integers: {error}") from None
    if tensor.ndim == 1 and not len(tensor):
        raise DatasetError(f"{name} has no {field}; leave it out")
    if tensor.ndim != 1 or tensor.is_floating_point() or tensor.is_complex():
        found = f"{tensor.dtype} of shape {list(tensor.shape)}"
        raise DatasetError(f"the {field} of {name} must be a sequence of integers, not {found}")
    return tensor.long()


def _first(is_wrong: torch.Tensor) -> int | None:
    """The first index where bool[T] is true."""
    places = is_wrong.nonzero()
    return int(places[0]) if len(places) else None
