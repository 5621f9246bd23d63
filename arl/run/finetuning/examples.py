"""Examples of the three kinds of fine-tuning, checked and made into minibatches, and the loop over them.

| kind | an example | the loss |
|---|---|---|
| sft | a Demonstration | -log p of the tokens that its mask marks |
| dpo | a Preference | PreferenceLoss: DPO, IPO |
| rm | a Preference, whose masks do not count | RewardModelLoss, of a model with a value head |
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch

from arl.algorithm.batch import weigh_tokens
from arl.algorithm.losses.supervised import Pair, PreferenceLoss, RewardModelLoss, SFTLoss, paired
from arl.api.errors import DatasetError
from arl.api.images import PlacedImage, placement_flaw
from arl.api.train_engine import TOKEN_FIELDS, ModelLimits, PackedTokens, TokenOutputs, TrainEngine, TrainSequence
from arl.api.types import NOT_SAMPLED

Kind = Literal["sft", "dpo", "rm"]
Loss = SFTLoss | PreferenceLoss | RewardModelLoss
LOSSES: Mapping[Kind, type[Loss]] = {"sft": SFTLoss, "dpo": PreferenceLoss, "rm": RewardModelLoss}

Demonstration = tuple[Sequence[int], Sequence[int]] | tuple[Sequence[int], Sequence[int], Sequence[PlacedImage]]
"""(token_ids, loss_mask) of equal length. The mask is 1 on the tokens to learn, never on the first token. A third part,
if there is one, is the images at the placeholders among token_ids."""

_AT_ONCE = 512
"""Examples of one forward call: the engine brings all of them to its device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Two answers to one prompt. Each includes the prompt; its mask is 1 on the answer alone."""

    chosen: Demonstration
    rejected: Demonstration


def finetune(
    engine: TrainEngine,
    examples: Iterable[Demonstration] | Iterable[Preference],
    *,
    kind: Kind = "sft",
    loss: PreferenceLoss | RewardModelLoss | None = None,
    epochs: int = 1,
    batch_size: int = 32,
    seed: int = 0,
    on_step: Callable[[int, Mapping[str, float]], None] | None = None,
) -> dict[str, float]:
    """Train on demonstrations (sft) or preferences (dpo, rm), one optimizer step per batch; return the last metrics.

    loss: the kind's, with settings of its own. sft: the mean negative log-likelihood of a batch's trained tokens. dpo:
    DPO with beta 0.1 if not given. Its reference is the model at the start of the call: its logprobs are computed
    first, and no copy of its weights is held. rm: needs an engine with head "value". Its `export` writes a Hugging Face
    sequence-classification model of one label, which SGLang and the embedded server serve at /classify. A text's score
    is that of its last token.

    Each epoch shuffles the examples by `seed`; its last batch may be smaller. on_step: called with each step's number,
    from 1, and its metrics. The engine's version counts these steps, so export the result and start reinforcement
    learning on a new engine. Raises DatasetError before training, which names the first example that is malformed, does
    not fit the model or has nothing to learn; ConfigError for rm on another head.
    """
    chosen, learned = loss_of(kind, loss), Examples(kind, [*examples], engine.limits)
    if kind == "rm":
        engine.forward([], "values")  # raises ConfigError without a value head
    batches = shuffled_batches(len(learned), epochs, batch_size, seed)
    if kind == "dpo":
        learned.refer_to(engine)
    metrics: dict[str, float] = {}
    for step, batch in enumerate(batches, start=1):
        metrics = engine.train_batch([learned.minibatch(batch)], chosen)
        if on_step is not None:
            on_step(step, metrics)
    return metrics


def loss_of(kind: Kind, loss: Loss | None) -> Loss:
    """The kind's loss. Raises ValueError for one of another kind."""
    if kind not in LOSSES:
        raise ValueError(f"kind is {kind!r}; it must be one of {', '.join(LOSSES)}")
    if loss is not None and not isinstance(loss, LOSSES[kind]):
        raise ValueError(f"loss is a {type(loss).__name__}, but kind is {kind}, which has a {LOSSES[kind].__name__}")
    return loss or LOSSES[kind]()


def shuffled_batches(number: int, epochs: int, batch_size: int, seed: int) -> Iterator[list[int]]:
    """The indices below `number`, once per epoch in a new order. An epoch's last batch may be smaller."""
    if epochs < 1 or batch_size < 1:
        raise ValueError(f"epochs is {epochs} and batch_size is {batch_size}; both must be at least 1")
    shuffle = random.Random(seed)
    orders = (shuffle.sample(range(number), number) for _ in range(epochs))
    return (order[start : start + batch_size] for order in orders for start in range(0, number, batch_size))


def write_model(engine: TrainEngine, directory: Path) -> None:
    """Write the engine's weights as a Hugging Face directory, whole or not at all."""
    snapshot = engine.snapshot()
    try:
        snapshot.write(directory)
    finally:
        snapshot.release()


class Examples:
    """Examples of one kind, as compact as they are given until they are trained."""

    def __init__(self, kind: Kind, examples: Sequence[Any], limits: ModelLimits) -> None:
        """Raises DatasetError, which names the first example that cannot be trained; also if there is none."""
        self._kind, self._examples, self._limits = kind, examples, limits
        self._references: list[tuple[torch.Tensor, ...]] = []
        if not examples:
            raise DatasetError(f"there are no {'demonstrations' if kind == 'sft' else 'pairs'} to learn from")
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
        """The sequences of these examples, weighed for the loss."""
        members = [self._plain(index) for index in indices]
        if self._references:
            members = [
                tuple(replace(s, reference_logprobs=r) for s, r in zip(member, self._references[index], strict=True))
                for index, member in zip(indices, members, strict=True)
            ]
        if self._kind == "sft":
            return weigh_tokens([sequence for (sequence,) in members])
        return paired(cast("list[Pair]", members))

    def evaluate(self, engine: TrainEngine, loss: Loss) -> dict[str, float]:
        """The loss over all examples, and its metrics, under the engine's weights: by the very functions of training,
        without a gradient."""
        totals, whole = dict[str, float](), 0.0
        for part in self._parts():
            sequences = self.minibatch(part)
            masks = [sequence.loss_mask for sequence in sequences]
            counts = torch.tensor([int(mask.sum()) for mask in masks])
            found = engine.forward(sequences, "values" if self._kind == "rm" else "logprobs")
            flat = torch.cat([row[mask] for row, mask in zip(found, masks, strict=True)])
            fields: dict[str, torch.Tensor] = {
                name: torch.cat([getattr(s, name)[s.loss_mask] for s in sequences]) for name in TOKEN_FIELDS
            }
            number = torch.arange(len(sequences))
            units = torch.tensor([s.unit for s in sequences])
            tokens = PackedTokens(
                **fields,
                sequence_ids=number.repeat_interleave(counts),
                unit_ids=torch.where(units < 0, number, units).repeat_interleave(counts),
            )
            losses = loss(TokenOutputs(logprobs=flat, entropy=torch.zeros_like(flat), values=flat), tokens)
            weight = float(counts.sum() if self._kind == "sft" else len(part))
            whole += weight
            for name, value in {"loss": losses.loss, **losses.weighted}.items():
                mean = float((value.double() * tokens.loss_weights.double()).sum())
                totals[name] = totals.get(name, 0.0) + weight * mean
        return {name: total / whole for name, total in totals.items()}

    def _parts(self) -> list[range]:
        return [range(i, min(i + _AT_ONCE, len(self))) for i in range(0, len(self), _AT_ONCE)]

    def _plain(self, index: int) -> tuple[TrainSequence, ...]:
        """The example's sequence, or those of its two answers. Raises DatasetError."""
        example = self._examples[index]
        if self._kind == "sft":
            return (to_sequence(f"demonstration {index}", example, self._limits),)
        if not isinstance(example, Preference):
            raise DatasetError(f"pair {index} is a {type(example).__name__}; it must be a Preference")
        convert = _to_scored_text if self._kind == "rm" else to_sequence
        chosen = convert(f"the chosen answer of pair {index}", example.chosen, self._limits)
        rejected = convert(f"the rejected answer of pair {index}", example.rejected, self._limits)
        fields = ("token_ids", "loss_mask")
        is_same = all(torch.equal(getattr(chosen, field), getattr(rejected, field)) for field in fields)
        if is_same and chosen.images == rejected.images:
            raise DatasetError(f"pair {index} has twice the same answer, so there is nothing to prefer; leave it out")
        return chosen, rejected


def to_sequence(name: str, example: Demonstration, limits: ModelLimits) -> TrainSequence:
    """Convert a demonstration. Raises DatasetError, which refers to it by `name`."""
    given, mask, images = _parts_of(name, example)
    if images and (flaw := placement_flaw(images, len(given))):
        raise DatasetError(f"{name}: {flaw}")
    token_ids, loss_mask = _tokens(name, given, limits), _integers(name, "loss_mask", mask)
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


def _to_scored_text(name: str, example: Demonstration, limits: ModelLimits) -> TrainSequence:
    """The text and one more token, whose value is the text's score."""
    given, _, images = _parts_of(name, example)
    if images:
        raise DatasetError(f"{name} has images, and reward models are trained on texts alone; leave the images out")
    token_ids = _tokens(name, given, limits)
    loss_mask = torch.zeros(len(token_ids) + 1, dtype=torch.bool)
    loss_mask[-1] = True
    return TrainSequence(token_ids=torch.cat([token_ids, torch.zeros(1, dtype=torch.int64)]), loss_mask=loss_mask)


def _parts_of(name: str, example: Any) -> tuple[Any, Any, tuple[PlacedImage, ...]]:
    if not isinstance(example, tuple | list) or len(example) not in (2, 3):
        raise DatasetError(f"{name} is a {type(example).__name__}; it must be a pair (token_ids, loss_mask)")
    return example[0], example[1], tuple(example[2]) if len(example) == 3 else ()


def _tokens(name: str, token_ids: Sequence[int], limits: ModelLimits) -> torch.Tensor:
    """int64[T], at least one. Raises DatasetError for tokens that the model cannot take."""
    tokens = _integers(name, "token_ids", token_ids)
    if limits.context_length is not None and len(tokens) > limits.context_length:
        limit = f"the model's context of {limits.context_length}"
        raise DatasetError(f"{name} has {len(tokens)} tokens, more than {limit}; shorten it, or leave it out")
    if (place := _first((tokens < 0) | (tokens >= limits.vocab_size))) is not None:
        known = f"the model's tokens are 0 to {limits.vocab_size - 1}; use its own tokenizer"
        raise DatasetError(f"{name} has token {int(tokens[place])} at position {place}, but {known}")
    return tokens


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
