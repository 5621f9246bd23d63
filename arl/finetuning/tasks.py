"""What differs between `arl sft`, `arl dpo` and `arl rm`: the examples of a row, the minibatch, the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from arl.algorithm.batch import weigh_tokens
from arl.algorithm.losses.supervised import PreferenceLoss, RewardModelLoss, SFTLoss, paired
from arl.api.engine import Head, ModelLimits, PackedTokens, TokenLoss, TokenOutputs, TrainEngine
from arl.api.finetuning_config import DPOConfig, FinetuneConfig, RMConfig
from arl.api.train_sequence import TOKEN_FIELDS, TrainSequence
from arl.finetuning.chats import to_demonstrations, to_preferences, to_texts
from arl.finetuning.demonstrations import to_sequence
from arl.finetuning.pairs import to_preference_pair, to_text_pair

if TYPE_CHECKING:
    from arl.algorithm.losses.supervised import Pair

_AT_ONCE = 512
"""Examples of one forward call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuningTask:
    """One way to fine-tune."""

    name: str
    head: Head
    loss: TokenLoss
    read: Callable[..., list[Any]]
    """Rows and a tokenizer -> examples: one of the functions of chats.py."""
    sequences: Callable[[int, Any, ModelLimits], Sequence[TrainSequence]]
    """An example, whose number errors name -> its one or two sequences. Raises DatasetError."""
    minibatch: Callable[[Sequence[Any]], list[TrainSequence]]
    """The sequences of several examples -> theirs together, weighed for the loss."""
    has_reference: bool = False
    """Whether the loss compares with the logprobs of the start model."""


def task_of(config: FinetuneConfig) -> FinetuningTask:
    """The task that the settings ask for."""
    match config:
        case DPOConfig():
            return _dpo(config)
        case RMConfig():
            loss = RewardModelLoss(center=config.center)
            return FinetuningTask(
                name="rm", head="value", loss=loss, read=to_texts, sequences=to_text_pair, minibatch=paired
            )
        case _:
            return _sft()


def _sft() -> FinetuningTask:
    return FinetuningTask(
        name="sft",
        head="policy",
        loss=SFTLoss(),
        read=to_demonstrations,
        sequences=lambda i, example, limits: (to_sequence(f"demonstration {i}", example, limits),),
        minibatch=lambda members: weigh_tokens([sequence for (sequence,) in members]),
    )


def _dpo(config: DPOConfig) -> FinetuningTask:
    loss = PreferenceLoss(
        kind=config.kind,
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        mean_logprobs=config.mean_logprobs,
        sft=config.sft,
    )
    return FinetuningTask(
        name="dpo",
        head="policy",
        loss=loss,
        read=to_preferences,
        sequences=to_preference_pair,
        minibatch=paired,
        has_reference=True,
    )


class Examples:
    """The examples of a task, compact until they are trained: five bytes a token."""

    def __init__(self, task: FinetuningTask, examples: Sequence[Any], limits: ModelLimits) -> None:
        """Raises DatasetError, which names the first example that cannot be trained."""
        self._task, self._examples, self._limits = task, examples, limits
        self._references: list[tuple[torch.Tensor, ...]] = []
        for index in range(len(examples)):
            self._plain(index)

    def __len__(self) -> int:
        return len(self._examples)

    def refer_to(self, engine: TrainEngine) -> None:
        """Keep the engine's logprobs as the reference's."""
        for part in self._parts():
            members = [self._plain(index) for index in part]
            found = iter(engine.forward([sequence for member in members for sequence in member]))
            self._references += [tuple(next(found) for _ in member) for member in members]

    def minibatch(self, indices: Sequence[int]) -> list[TrainSequence]:
        return self._task.minibatch([self._sequences(index) for index in indices])

    def evaluate(self, engine: TrainEngine) -> dict[str, float]:
        """The loss over all examples, and its metrics, under the engine's weights."""
        totals, whole = dict[str, float](), 0.0
        for part in self._parts():
            sequences = self.minibatch(part)
            means = _means(engine, sequences, self._task)
            is_paired = len(sequences) > len(part)
            weight = float(len(part) if is_paired else sum(int(one.loss_mask.sum()) for one in sequences))
            whole += weight
            for name, value in means.items():
                totals[name] = totals.get(name, 0.0) + weight * value
        return {name: total / whole for name, total in totals.items()}

    def _parts(self) -> list[range]:
        return [range(i, min(i + _AT_ONCE, len(self))) for i in range(0, len(self), _AT_ONCE)]

    def _sequences(self, index: int) -> Sequence[TrainSequence] | Pair:
        plain = self._plain(index)
        if not self._references:
            return plain
        return [replace(s, reference_logprobs=r) for s, r in zip(plain, self._references[index], strict=True)]

    def _plain(self, index: int) -> Sequence[TrainSequence]:
        return self._task.sequences(index, self._examples[index], self._limits)


def _means(engine: TrainEngine, sequences: Sequence[TrainSequence], task: FinetuningTask) -> dict[str, float]:
    """The loss of a minibatch and its weighted metrics, without a gradient: the very functions of training."""
    found = engine.forward(sequences, "values" if task.head == "value" else "logprobs")
    flat = torch.cat([row[s.loss_mask] for row, s in zip(found, sequences, strict=True)])
    fields: dict[str, torch.Tensor] = {
        name: torch.cat([getattr(s, name)[s.loss_mask] for s in sequences]) for name in TOKEN_FIELDS
    }
    counts = torch.tensor([int(s.loss_mask.sum()) for s in sequences])
    units = torch.tensor([s.unit for s in sequences])
    number = torch.arange(len(sequences))
    tokens = PackedTokens(
        **fields,
        sequence_ids=number.repeat_interleave(counts),
        unit_ids=torch.where(units < 0, number, units).repeat_interleave(counts),
    )
    nothing = torch.zeros_like(flat)
    is_value = task.head == "value"
    outputs = TokenOutputs(
        logprobs=nothing if is_value else flat, entropy=nothing, values=flat if is_value else nothing
    )
    losses = task.loss(outputs, tokens)
    weighed = {"loss": losses.loss, **losses.weighted}
    return {name: float((value.double() * tokens.loss_weights.double()).sum()) for name, value in weighed.items()}
