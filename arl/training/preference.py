"""Learning from pairs on a train engine: preferences (DPO, IPO) and reward models (Bradley-Terry)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch

from arl.algorithm.losses.finetuning import Pair, PreferenceLoss, RewardModelLoss, paired
from arl.api.engine import ModelLimits, TokenLoss, TrainEngine
from arl.api.errors import ConfigError, DatasetError
from arl.api.types import TrainSequence
from arl.training.finetuning import Demonstration, is_pair, shuffled_batches, to_sequence, to_tokens

_FORWARDED_AT_ONCE = 1024
"""Sequences whose logprobs are asked for together: an engine brings all of them to its device."""

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
    its weights is held. Order, on_step, versions and errors are as in `finetune`.
    """
    pairs = _whole(_preference(i, preference, engine.limits) for i, preference in enumerate(preferences))
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
    train_preferences. Raises ConfigError for an engine without a value head, and DatasetError as in `finetune`.
    """
    pairs = _whole(_texts(i, texts, engine.limits) for i, texts in enumerate(preferences))
    _check_scores(engine)
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


def _check_scores(engine: TrainEngine) -> None:
    """Raise ConfigError unless the engine's model ends in a value head alone, which is what is exported."""
    engine.forward([], "values")  # raises where there is none
    try:
        engine.forward([], "logprobs")
    except ConfigError:
        return
    raise ConfigError("a reward model has a value head alone, and this engine a policy beside it; use head='value'")


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
        raise DatasetError(
            f"pair {index} is a {type(texts).__name__}; it must be a pair (chosen token_ids, rejected token_ids)"
        )
    return (
        _scored(to_tokens(f"the chosen text of pair {index}", texts[0], limits)),
        _scored(to_tokens(f"the rejected text of pair {index}", texts[1], limits)),
    )


def _scored(token_ids: torch.Tensor) -> TrainSequence:
    """A text with one token behind it, whose value is the text's score."""
    loss_mask = torch.zeros(len(token_ids) + 1, dtype=torch.bool)
    loss_mask[-1] = True
    return TrainSequence(token_ids=torch.cat([token_ids, torch.zeros(1, dtype=torch.int64)]), loss_mask=loss_mask)


def _whole(pairs: Iterable[Pair]) -> list[Pair]:
    """All of them. Raises DatasetError where there is nothing to prefer."""
    known = list(pairs)
    if not known:
        raise DatasetError("there are no pairs to learn from")
    for index, (chosen, rejected) in enumerate(known):
        if torch.equal(chosen.token_ids, rejected.token_ids) and torch.equal(chosen.loss_mask, rejected.loss_mask):
            raise DatasetError(f"pair {index} is twice the same, so that there is nothing to prefer; leave it out")
    return known
