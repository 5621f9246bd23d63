"""Supervised fine-tuning on a train engine: the warm start before reinforcement learning."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from arl.algorithm.aggregation import weigh_tokens
from arl.algorithm.losses import SFTLoss
from arl.api.engine import ModelLimits, TrainEngine
from arl.api.errors import DatasetError
from arl.api.types import NOT_SAMPLED, TrainSequence

ItemT = TypeVar("ItemT")

Demonstration = tuple[Sequence[int], Sequence[int]]
"""(token_ids, loss_mask) of equal length; the mask is 1 on the tokens to learn, never on the first."""


def finetune(
    engine: TrainEngine,
    examples: Iterable[Demonstration],
    *,
    epochs: int = 1,
    batch_size: int = 32,
    seed: int = 0,
    on_step: Callable[[int, Mapping[str, float]], None] | None = None,
) -> dict[str, float]:
    """Train on demonstrations, one optimizer step for each batch_size of them; returns the last step's metrics.

    The order is shuffled anew each epoch and depends on `seed` alone; an epoch's last batch may be smaller. Each
    step's loss is the mean negative log-likelihood of its batch's trained tokens. on_step is called with the step's
    number (from 1) and its metrics, on the calling thread. The engine's version counts these steps too: export the
    result and start reinforcement learning on a new engine. Raises DatasetError, before anything is trained, naming
    the first demonstration that is malformed, that the model cannot be given, or that has nothing to learn.
    """
    sequences = [to_sequence(f"demonstration {i}", example, engine.limits) for i, example in enumerate(examples)]
    if not sequences:
        raise DatasetError("there are no demonstrations to fine-tune on")
    metrics: dict[str, float] = {}
    for step, batch in enumerate(shuffled_batches(sequences, epochs, batch_size, seed), start=1):
        metrics = engine.train_batch([weigh_tokens([batch], "token_mean")], SFTLoss())
        if on_step is not None:
            on_step(step, metrics)
    return metrics


def shuffled_batches(items: Sequence[ItemT], epochs: int, batch_size: int, seed: int) -> Iterator[list[ItemT]]:
    """All items once in each epoch, in an order of its own; an epoch's last batch may be smaller."""
    if epochs < 1 or batch_size < 1:
        raise ValueError(f"epochs is {epochs} and batch_size is {batch_size}; both must be at least 1")
    shuffle = random.Random(seed)
    for _ in range(epochs):
        order = shuffle.sample(items, len(items))
        for start in range(0, len(order), batch_size):
            yield order[start : start + batch_size]


def to_sequence(name: str, example: Demonstration, limits: ModelLimits) -> TrainSequence:
    """A demonstration as the engine takes it. Raises DatasetError, which calls it by `name`."""
    if not is_pair(example):
        raise DatasetError(f"{name} is a {type(example).__name__}; it must be a pair (token_ids, loss_mask)")
    token_ids, loss_mask = to_tokens(name, example[0], limits), _integers(name, "loss_mask", example[1])
    if len(token_ids) != len(loss_mask):
        raise DatasetError(
            f"{name} has {len(token_ids)} token_ids and {len(loss_mask)} loss_mask entries; give each one"
        )
    if (place := _first((loss_mask != 0) & (loss_mask != 1))) is not None:
        raise DatasetError(
            f"{name} has {int(loss_mask[place])} in its loss_mask at position {place}; 1 marks a token to learn, and 0 "
            "any other"
        )
    if not loss_mask.any():
        raise DatasetError(f"{name} has nothing to learn: its loss_mask is 0 throughout; leave it out, or mark tokens")
    if loss_mask[0]:
        raise DatasetError(f"{name} cannot learn its first token, which has no context; set loss_mask[0] to 0")
    return TrainSequence(
        token_ids=token_ids,
        loss_mask=loss_mask.bool(),
        versions=torch.full((len(token_ids),), NOT_SAMPLED),
    )


def to_tokens(name: str, token_ids: Sequence[int], limits: ModelLimits) -> torch.Tensor:
    """int64[T], at least one. Raises DatasetError for what the model cannot be given."""
    tokens = _integers(name, "token_ids", token_ids)
    if limits.context_length is not None and len(tokens) > limits.context_length:
        raise DatasetError(
            f"{name} has {len(tokens)} tokens, and the model's context {limits.context_length}; shorten it, or leave "
            "it out"
        )
    if (place := _first((tokens < 0) | (tokens >= limits.vocab_size))) is not None:
        raise DatasetError(
            f"{name} has token {int(tokens[place])} at position {place}, and the model knows 0 to "
            f"{limits.vocab_size - 1}; make tokens with the model's own tokenizer"
        )
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
        raise DatasetError(f"the {field} of {name} must be a sequence of integers, and are {found}")
    return tensor.long()


def _first(is_wrong: torch.Tensor) -> int | None:
    """Where bool[T] is first true."""
    places = is_wrong.nonzero()
    return int(places[0]) if len(places) else None
