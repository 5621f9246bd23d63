"""Training on pairs: preferences (DPO, IPO), and pairs of texts for a reward model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch

from arl.algorithm.losses.supervised import Pair, PreferenceLoss, RewardModelLoss, paired
from arl.api.engine import ModelLimits, TrainEngine
from arl.api.errors import DatasetError
from arl.api.train_sequence import TrainSequence
from arl.finetuning.demonstrations import (
    Demonstration,
    OnStep,
    is_pair,
    shuffled_batches,
    to_sequence,
    to_tokens,
    train_minibatches,
)

_FORWARDED_AT_ONCE = 1024
"""Sequences per forward call: the engine brings all of them to its device."""


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
    pairs = _whole(to_preference_pair(i, preference, engine.limits) for i, preference in enumerate(preferences))
    pairs = with_reference(engine, pairs)
    batches = shuffled_batches(pairs, epochs, batch_size, seed)
    return train_minibatches(engine, map(paired, batches), loss or PreferenceLoss(), on_step)


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
    pairs = _whole(to_text_pair(i, texts, engine.limits) for i, texts in enumerate(preferences))
    engine.forward([], "values")  # raises ConfigError without a value head
    batches = shuffled_batches(pairs, epochs, batch_size, seed)
    return train_minibatches(engine, map(paired, batches), loss or RewardModelLoss(), on_step)


def with_reference(engine: TrainEngine, pairs: Sequence[Pair]) -> list[Pair]:
    sequences = [sequence for pair in pairs for sequence in pair]
    slices = (sequences[i : i + _FORWARDED_AT_ONCE] for i in range(0, len(sequences), _FORWARDED_AT_ONCE))
    logprobs = chain.from_iterable(engine.forward(part) for part in slices)
    return [
        (replace(chosen, reference_logprobs=next(logprobs)), replace(rejected, reference_logprobs=next(logprobs)))
        for chosen, rejected in pairs
    ]


def to_preference_pair(index: int, preference: Preference, limits: ModelLimits) -> Pair:
    if not isinstance(preference, Preference):
        raise DatasetError(f"pair {index} is a {type(preference).__name__}; it must be a Preference")
    return (
        to_sequence(f"the chosen answer of pair {index}", preference.chosen, limits),
        to_sequence(f"the rejected answer of pair {index}", preference.rejected, limits),
    )


def to_text_pair(index: int, texts: tuple[Sequence[int], Sequence[int]], limits: ModelLimits) -> Pair:
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
        is_same = torch.equal(chosen.token_ids, rejected.token_ids) and torch.equal(
            chosen.loss_mask, rejected.loss_mask
        )
        if is_same and chosen.images == rejected.images:
            raise DatasetError(f"pair {index} has twice the same answer, so there is nothing to prefer; leave it out")
    return known
