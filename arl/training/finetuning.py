"""Training on data: demonstrations (SFT), preferences (DPO, IPO), and pairs for a reward model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import torch

from arl.algorithm.batch import weigh_tokens
from arl.algorithm.losses.supervised import Pair, PreferenceLoss, RewardModelLoss, SFTLoss, paired
from arl.api.engine import ModelLimits, TokenLoss, TrainEngine
from arl.api.errors import DatasetError
from arl.api.train_sequence import TrainSequence
from arl.api.types import NOT_SAMPLED

ItemT = TypeVar("ItemT")

Demonstration = tuple[Sequence[int], Sequence[int]]
"""(token_ids, loss_mask) of equal length. The mask is 1 on the tokens to learn, never on the first token."""

OnStep = Callable[[int, Mapping[str, float]], None]
"""Called with each step's number, from 1, and its metrics."""

_FORWARDED_AT_ONCE = 1024
"""Sequences per forward call: the engine brings all of them to its device."""


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
    return _train(engine, map(weigh_tokens, batches), SFTLoss(), on_step)


def _train(
    engine: TrainEngine, minibatches: Iterable[list[TrainSequence]], loss: TokenLoss, on_step: OnStep | None
) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for step, minibatch in enumerate(minibatches, start=1):
        metrics = engine.train_batch([minibatch], loss)
        if on_step is not None:
            on_step(step, metrics)
    return metrics


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
    if not is_pair(example):
        raise DatasetError(f"{name} is a {type(example).__name__}; it must be a pair (token_ids, loss_mask)")
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
    return TrainSequence(token_ids=token_ids, loss_mask=loss_mask.bool(), versions=versions)


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


# Pairs ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Two answers to one prompt. Each includes the prompt; its mask is 1 on the answer alone."""

    chosen: Demonstration
    rejected: Demonstration


def train_preferences(
    engine: TrainEngine,
    preferences: Iterable[Preference],
    *,
    loss: PreferenceLoss | None = None,
    epochs: int = 1,
    batch_size: int = 32,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> dict[str, float]:
    """Train with DPO or IPO, one optimizer step per batch of pairs; return the last step's metrics.

    loss: DPO with beta 0.1 if not given. The reference is the model at the start of the call: its logprobs are computed
    first, and no copy of its weights is held. Order, on_step, versions and errors are as in `finetune`.
    """
    pairs = _whole(_preference(i, preference, engine.limits) for i, preference in enumerate(preferences))
    pairs = _with_reference(engine, pairs)
    batches = shuffled_batches(pairs, epochs, batch_size, seed)
    return _train(engine, map(paired, batches), loss or PreferenceLoss(), on_step)


def train_reward_model(
    engine: TrainEngine,
    preferences: Iterable[tuple[Sequence[int], Sequence[int]]],
    *,
    loss: RewardModelLoss | None = None,
    epochs: int = 1,
    batch_size: int = 32,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> dict[str, float]:
    """Train a reward model on pairs (chosen token_ids, rejected token_ids), each a prompt with its answer.

    engine: a train engine with head "value", or ConfigError. Its `export` writes a Hugging Face sequence-classification
    model of one label, which SGLang and the embedded server serve at /classify. A text's score is that of its last
    token. The rest is as in `train_preferences`.
    """
    pairs = _whole(_texts(i, texts, engine.limits) for i, texts in enumerate(preferences))
    engine.forward([], "values")  # raises ConfigError without a value head
    batches = shuffled_batches(pairs, epochs, batch_size, seed)
    return _train(engine, map(paired, batches), loss or RewardModelLoss(), on_step)


def _with_reference(engine: TrainEngine, pairs: Sequence[Pair]) -> list[Pair]:
    sequences = [sequence for pair in pairs for sequence in pair]
    slices = (sequences[i : i + _FORWARDED_AT_ONCE] for i in range(0, len(sequences), _FORWARDED_AT_ONCE))
    logprobs = chain.from_iterable(engine.forward(part) for part in slices)
    return [
        (replace(chosen, reference_logprobs=next(logprobs)), replace(rejected, reference_logprobs=next(logprobs)))
        for chosen, rejected in pairs
    ]


def _preference(index: int, preference: Preference, limits: ModelLimits) -> Pair:
    if not isinstance(preference, Preference):
        raise DatasetError(f"pair {index} is a {type(preference).__name__}; it must be a Preference")
    return (
        to_sequence(f"the chosen answer of pair {index}", preference.chosen, limits),
        to_sequence(f"the rejected answer of pair {index}", preference.rejected, limits),
    )


def _texts(index: int, texts: tuple[Sequence[int], Sequence[int]], limits: ModelLimits) -> Pair:
    if not is_pair(texts):
        kind = type(texts).__name__
        raise DatasetError(f"pair {index} is a {kind}; it must be a pair (chosen token_ids, rejected token_ids)")
    return (
        _scored(to_tokens(f"the chosen text of pair {index}", texts[0], limits)),
        _scored(to_tokens(f"the rejected text of pair {index}", texts[1], limits)),
    )


def _scored(token_ids: torch.Tensor) -> TrainSequence:
    """The text and one more token, whose value is the text's score."""
    loss_mask = torch.zeros(len(token_ids) + 1, dtype=torch.bool)
    loss_mask[-1] = True
    return TrainSequence(token_ids=torch.cat([token_ids, torch.zeros(1, dtype=torch.int64)]), loss_mask=loss_mask)


def _whole(pairs: Iterable[Pair]) -> list[Pair]:
    """All pairs. Raises DatasetError without pairs, and for a pair of equal answers."""
    known = list(pairs)
    if not known:
        raise DatasetError("there are no pairs to learn from")
    for index, (chosen, rejected) in enumerate(known):
        if torch.equal(chosen.token_ids, rejected.token_ids) and torch.equal(chosen.loss_mask, rejected.loss_mask):
            raise DatasetError(f"pair {index} has twice the same answer, so there is nothing to prefer; leave it out")
    return known
