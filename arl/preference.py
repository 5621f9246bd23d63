"""Learning from pairs on a train engine: preferences (DPO, IPO) and reward models (Bradley-Terry)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from arl.algorithm.losses.preference import Pair, PreferenceLoss, RewardModelLoss, paired
from arl.api.engine import TokenLoss, TrainEngine
from arl.api.errors import DatasetError
from arl.api.types import TrainSequence
from arl.sft import Demonstration, shuffled_batches, to_sequence

OnStep = Callable[[int, Mapping[str, float]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Two answers to one prompt, each as (token_ids, loss_mask) with the prompt in it; the mask is 1 on the answer."""

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
    """DPO or IPO (`loss`; DPO with beta 0.1 if not given), one optimizer step for each batch_size pairs; returns the
    last step's metrics.

    The reference is the model as it is when this begins: its logprobs of all pairs are computed first, and no copy of
    its weights is held. Order, on_step and versions are as in `finetune`. Raises DatasetError on a malformed pair.
    """
    pairs = [
        (
            to_sequence(f"the chosen answer of pair {i}", p.chosen),
            to_sequence(f"the rejected one of pair {i}", p.rejected),
        )
        for i, p in enumerate(preferences)
    ]
    _check(pairs)
    pairs = _with_reference(engine, pairs)
    return _train(engine, pairs, loss or PreferenceLoss(), epochs, batch_size, seed, on_step)


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
    """Fit scores to pairs (chosen token_ids, rejected token_ids), each a prompt with its answer.

    engine: one of head "value". Its `export` is a Hugging Face sequence-classification model of one label, whose score
    of a text is that of the last token; SGLang and the embedded server serve it at /classify. The rest is as in
    train_preferences. Raises ConfigError for an engine without a value head.
    """
    pairs = [(_scored(i, chosen), _scored(i, rejected)) for i, (chosen, rejected) in enumerate(preferences)]
    _check(pairs)
    engine.forward([], "values")  # raises ConfigError where the engine has no value head
    return _train(engine, pairs, loss or RewardModelLoss(), epochs, batch_size, seed, on_step)


def _train(
    engine: TrainEngine,
    pairs: Sequence[Pair],
    loss: TokenLoss,
    epochs: int,
    batch_size: int,
    seed: int,
    on_step: OnStep | None,
) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for step, batch in enumerate(shuffled_batches(pairs, epochs, batch_size, seed), start=1):
        metrics = engine.train_batch([paired(batch)], loss)
        if on_step is not None:
            on_step(step, metrics)
    return metrics


def _with_reference(engine: TrainEngine, pairs: Sequence[Pair]) -> list[Pair]:
    logprobs = iter(engine.forward([sequence for pair in pairs for sequence in pair]))
    return [
        (replace(chosen, reference_logprobs=next(logprobs)), replace(rejected, reference_logprobs=next(logprobs)))
        for chosen, rejected in pairs
    ]


def _scored(index: int, token_ids: Sequence[int]) -> TrainSequence:
    """A text with one token behind it, whose value is the text's score."""
    if not token_ids:
        raise DatasetError(f"pair {index} has an empty text, which has no score")
    loss_mask = torch.zeros(len(token_ids) + 1, dtype=torch.bool)
    loss_mask[-1] = True
    return TrainSequence(token_ids=torch.tensor([*token_ids, 0], dtype=torch.int64), loss_mask=loss_mask)


def _check(pairs: Sequence[Pair]) -> None:
    if not pairs:
        raise DatasetError("there are no pairs to learn from")
