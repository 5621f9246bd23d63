"""Supervised fine-tuning on a train engine: the warm start before reinforcement learning."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch

from arl.algorithm.aggregation import weigh_tokens
from arl.algorithm.losses import SFTLoss
from arl.api.engine import TrainEngine
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
    result and start reinforcement learning on a new engine. Raises DatasetError on a malformed demonstration.
    """
    sequences = [to_sequence(f"demonstration {index}", example) for index, example in enumerate(examples)]
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


def to_sequence(name: str, example: Demonstration) -> TrainSequence:
    """A demonstration as the engine takes it. Raises DatasetError, which calls it by `name`."""
    token_ids, loss_mask = example
    if len(token_ids) != len(loss_mask):
        raise DatasetError(f"{name} has {len(token_ids)} token_ids and {len(loss_mask)} loss_mask entries")
    if not any(loss_mask) or loss_mask[0]:
        raise DatasetError(f"{name} must train at least one token, and never its first, which has no context")
    return TrainSequence(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        loss_mask=torch.tensor(loss_mask, dtype=torch.bool),
        versions=torch.full((len(token_ids),), NOT_SAMPLED),
    )
