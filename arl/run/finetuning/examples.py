"""From rows of datasets to minibatches, and the loop over a train engine.

rows --to_demonstrations, to_preferences--> token ids and masks --Examples, checked--> minibatch --> train_batch

| a row | becomes |
|---|---|
| `messages`, perhaps `tools` | demonstrations in which each of the assistant's turns is learned |
| `prompt`, `completion` | a demonstration in which the completion is learned |
| `text` | a demonstration in which everything is learned |
| `prompt`, `chosen`, `rejected` | a preference, to learn from or for a reward model |

A row may have images, in its messages or in a column `images` or `image`, as examples of agents have them. A turn is
learned after the prompt that the model would get for it. So a conversation whose template rewrites earlier turns
(Qwen3's drops their thinking) becomes several demonstrations.

| kind | an example | the loss |
|---|---|---|
| sft | a Demonstration | -log p of the tokens that its mask marks |
| dpo | a Preference | PreferenceLoss: DPO, IPO |
| rm | a Preference, whose masks do not count | RewardModelLoss, of a model with a value head |
"""

from __future__ import annotations

import logging
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch

from arl.algorithm.batch import weigh_tokens
from arl.algorithm.losses.preferences import Pair, PreferenceLoss, RewardModelLoss, SFTLoss, paired
from arl.api.errors import DatasetError, ImageError, ModelError
from arl.api.images import PlacedImage, placement_flaw
from arl.api.train_engine import TOKEN_FIELDS, ModelLimits, PackedTokens, TokenOutputs, TrainEngine, TrainSequence
from arl.api.types import NOT_SAMPLED, Example
from arl.workflow.chat_template import ChatTemplate, encode_once, special_tokens, template_of
from arl.workflow.conversation import paths_of
from arl.workflow.dialogue import Dialogue, Rewriting, images_of
from arl.workflow.images import IMAGE_COLUMNS, with_images
from arl.workflow.messages import Message, ToolSpecs, messages_in, without_padding

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Kind = Literal["sft", "dpo", "rm"]
Loss = SFTLoss | PreferenceLoss | RewardModelLoss
LOSSES: Mapping[Kind, type[Loss]] = {"sft": SFTLoss, "dpo": PreferenceLoss, "rm": RewardModelLoss}

Demonstration = tuple[Sequence[int], Sequence[int]] | tuple[Sequence[int], Sequence[int], Sequence[PlacedImage]]
"""(token_ids, loss_mask) of equal length. The mask is 1 on the tokens to learn, never on the first token. A third part,
if there is one, is the images at the placeholders among token_ids."""

TooLong = Literal["error", "drop"]
"""The treatment of a row of more than max_tokens: it is an error, or left out and counted. No row is cut."""

_AT_ONCE = 512
"""Examples of one forward call: the engine brings all of them to its device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Two answers to one prompt. Each includes the prompt; its mask is 1 on the answer alone."""

    chosen: Demonstration
    rejected: Demonstration


MadeT = TypeVar("MadeT", Demonstration, Preference)


def to_demonstrations(
    rows: Iterable[Example],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int | None = None,
    too_long: TooLong = "error",
    template_options: Mapping[str, Any] | None = None,
) -> list[Demonstration]:
    """The input of `finetune`, from rows with `messages`, with `prompt` and `completion`, or with `text`.

    messages: as chat templates take them, with tool calls and thinking (`reasoning_content`). All that the assistant
    says is learned, with the token that ends the turn, but for messages with `weight` 0. `tools`, if the row has them,
    are specifications in OpenAI's form, or their JSON. prompt, completion: lists of messages, or texts of a user and an
    assistant; for a tokenizer without a chat template, plain text that the end-of-text token ends.

    max_tokens: the most tokens of a demonstration. template_options: variables for the chat template. Raises
    DatasetError, which names the row: for one that is too long, that has nothing to learn, or that the template
    refuses; and if no row is left.
    """
    return _made(rows, _Reader(tokenizer, template_options).demonstrations, max_tokens, too_long)


def to_preferences(
    rows: Iterable[Example],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int | None = None,
    too_long: TooLong = "error",
    template_options: Mapping[str, Any] | None = None,
) -> list[Preference]:
    """The input of `finetune` for dpo and rm, from rows with `chosen` and `rejected`, and perhaps `prompt` and `tools`.

    chosen, rejected: lists of messages, or texts. Without `prompt`, both are whole conversations, and the messages with
    which both begin are the prompt. Only what the assistant says after the prompt is learned. The rest is as in
    `to_demonstrations`; a row is too long if either answer is.
    """
    return _made(rows, _Reader(tokenizer, template_options).preferences, max_tokens, too_long)


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
    if kind not in LOSSES:
        raise ValueError(f"kind is {kind!r}; it must be one of {', '.join(LOSSES)}")
    if loss is not None and not isinstance(loss, LOSSES[kind]):
        raise ValueError(f"loss is a {type(loss).__name__}, but kind is {kind}, which has a {LOSSES[kind].__name__}")
    learned = Examples(kind, [*examples], engine.limits)
    if kind == "rm":
        engine.forward([], "values")  # raises ConfigError without a value head
    batches = shuffled_batches(len(learned), epochs, batch_size, seed)
    if kind == "dpo":
        learned.refer_to(engine)
    metrics: dict[str, float] = {}
    for step, batch in enumerate(batches, start=1):
        metrics = engine.train_batch([learned.minibatch(batch)], loss or LOSSES[kind]())
        if on_step is not None:
            on_step(step, metrics)
    return metrics


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


# Rows, through the model's own chat template


def _made(
    rows: Iterable[Example], read: Callable[[Example], list[MadeT]], max_tokens: int | None, too_long: TooLong
) -> list[MadeT]:
    """What `read` makes of the rows that are not too long."""
    if too_long not in ("error", "drop"):
        raise DatasetError(f"too_long is {too_long!r}; it must be 'error' or 'drop'")
    made: list[MadeT] = []
    num_rows = num_dropped = longest = 0
    for index, row in enumerate(rows):
        num_rows += 1
        try:
            examples = read(row)
        except (DatasetError, ModelError, ImageError) as error:
            raise DatasetError(f"row {index}: {error}") from error
        lengths = [
            (len(e.chosen[0]), len(e.rejected[0])) if isinstance(e, Preference) else (len(e[0]),) for e in examples
        ]
        length = max(map(max, lengths))
        if max_tokens is None or length <= max_tokens:
            made += examples
            continue
        if too_long == "error":
            raise DatasetError(
                f"row {index} has {length} tokens, more than max_tokens={max_tokens}; shorten it, raise max_tokens if "
                "the model's context allows it, or leave such rows out with too_long='drop'"
            )
        num_dropped, longest = num_dropped + 1, max(longest, length)
    if num_dropped:
        said = "left out %d of %d rows, which have more than max_tokens=%d tokens (the longest has %d)"
        log.warning(said, num_dropped, num_rows, max_tokens, longest)
    if not made:
        raise DatasetError(f"none of the {num_rows} rows is left to learn from")
    return made


class _Reader:
    """Turns rows into tokens as one tokenizer does. Raises DatasetError and ModelError, which do not name the row."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None) -> None:
        self._tokenizer = tokenizer
        self._template: ChatTemplate | None = template_of(tokenizer, options) if tokenizer.chat_template else None

    def demonstrations(self, row: Example) -> list[Demonstration]:
        tools = _tools(row)
        match row:
            case {"messages": messages}:
                found = self._said([], with_images(row, _messages("messages", messages, tools)), tools)
            case {"prompt": prompt, "completion": completion}:
                found = self._answered(_seen(row, prompt, tools), completion, "completion", tools, "branch")
            case {"text": str(text)}:
                if column := next((name for name in IMAGE_COLUMNS if row.get(name) is not None), None):
                    raise DatasetError(
                        f"it has `text`, which shows no images, and `{column}`; give `messages` or a `prompt` for the "
                        "images, or rename the column with columns="
                    )
                found = [self._plain("", text)]
            case _:
                raise _unknown(row, "`messages`, or `prompt` and `completion`, or `text`")
        if not found or not all(1 in one[1] for one in found):
            raise DatasetError("there is nothing to learn: the assistant says nothing; leave the row out")
        return found

    def preferences(self, row: Example) -> list[Preference]:
        tools = _tools(row)
        match row:
            case {"chosen": chosen, "rejected": rejected}:
                prompt = row.get("prompt")
            case _:
                raise _unknown(row, "`chosen` and `rejected`, and perhaps `prompt`")
        if prompt is None:  # the messages with which both conversations begin; the last message is an answer
            chosen, rejected, length = _messages("chosen", chosen, tools), _messages("rejected", rejected, tools), 0
            while length < min(len(chosen), len(rejected)) - 1 and chosen[length] == rejected[length]:
                length += 1
            if length == 0:
                raise DatasetError("`chosen` and `rejected` begin differently, so they have no prompt; give a `prompt`")
            prompt, chosen, rejected = chosen[:length], chosen[length:], rejected[length:]
        prompt = _seen(row, prompt, tools)
        both = [
            self._answered(prompt, answer, name, tools, "keep")
            for name, answer in (("chosen", chosen), ("rejected", rejected))
        ]
        if not all(both):
            raise DatasetError("there is nothing to compare: the assistant says nothing after the prompt")
        ((chosen_answer,), (rejected_answer,)) = both
        if chosen_answer == rejected_answer:
            raise DatasetError("chosen and rejected are the same, so there is nothing to prefer; leave the row out")
        return [Preference(chosen=chosen_answer, rejected=rejected_answer)]

    def _answered(
        self, prompt: Any, answer: Any, name: str, tools: ToolSpecs, rewriting: Rewriting
    ) -> list[Demonstration]:
        if self._template is None and isinstance(prompt, str) and isinstance(answer, str):
            return [self._plain(prompt, answer)]
        before = _messages("prompt", prompt, tools, "user")
        return self._said(before, _messages(name, answer, tools, "assistant"), tools, rewriting)

    def _plain(self, prompt: str, answer: str) -> Demonstration:
        """Texts end to end. They begin as the tokenizer begins texts, and end with a special token; both once."""
        end = [] if self._tokenizer.eos_token_id is None else [int(cast("int", self._tokenizer.eos_token_id))]
        said = self._tokenizer.encode(answer, add_special_tokens=False)
        last = self._tokenizer.encode(answer.rstrip()[-100:], add_special_tokens=False)[-1:]
        if not special_tokens(self._tokenizer).keys() & last:
            said += end
        given = encode_once(self._tokenizer, prompt, answer)
        return _demonstration([(given or said[:1], False), (said if given else said[1:], True)])

    def _said(
        self, before: Sequence[Message], messages: Sequence[Message], tools: ToolSpecs, rewriting: Rewriting = "branch"
    ) -> list[Demonstration]:
        """Each of the assistant's turns in `messages`, after the prompt that the model gets for it."""
        if self._template is None:
            ChatTemplate(self._tokenizer)  # raises ModelError, which says what to do
        assert self._template is not None
        dialogue, last = Dialogue(self._template, rewriting=rewriting), None
        for place, message in enumerate(messages):
            if message["role"] == "assistant" and message.get("weight") != 0:
                prompt = dialogue.prompt([*before, *messages[:place]], tools, after=last)
                last = dialogue.demonstrate(prompt, message)
        made: list[Demonstration] = []
        for path, learned in paths_of(dialogue.turns):
            turns = [((turn.given_ids, False), (turn.output_ids, turn in learned)) for turn in path]
            made.append(_demonstration([part for turn in turns for part in turn], images_of(path)))
        return made


def _demonstration(parts: Sequence[tuple[Sequence[int], bool]], images: Sequence[PlacedImage] = ()) -> Demonstration:
    """The tokens of the parts, end to end, and the mask: which parts are learned. Compact: five bytes a token."""
    token_ids, loss_mask = array("i"), array("b")
    for ids, is_learned in parts:
        token_ids.extend(ids)
        loss_mask.extend([is_learned] * len(ids))
    return (token_ids, loss_mask, images) if images else (token_ids, loss_mask)


def _seen(row: Example, prompt: Any, tools: ToolSpecs) -> Any:
    """The prompt with the images of the row's column."""
    if all(row.get(name) is None for name in IMAGE_COLUMNS):
        return prompt
    return with_images(row, _messages("prompt", prompt, tools, "user"))


def _messages(name: str, given: Any, tools: ToolSpecs, role: str | None = None) -> list[Message]:
    """The messages of a column, or of its JSON. role: of another text; None for a column that must hold messages."""
    if isinstance(given, str):
        given = messages_in(given) or given
    if isinstance(given, str) and role is not None:
        return [{"role": role, "content": given}]
    if isinstance(given, Mapping):
        given = [given]
    if not isinstance(given, Sequence) or isinstance(given, str):
        texts = "" if role is None else ", or a text"
        raise DatasetError(f"`{name}` is a {type(given).__name__}; it must be a list of messages, or its JSON{texts}")
    for place, message in enumerate(cast("Sequence[Any]", given)):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DatasetError(
                f"`{name}` has {message!r:.80} at position {place}; each message must be a dict with `role` and "
                "`content`, such as {'role': 'user', 'content': '...'}"
            )
    return without_padding(cast("Sequence[Message]", given), tools)[0]


def _tools(row: Example) -> ToolSpecs:
    """The tools that the conversation shows."""
    return without_padding((), row.get("tools") or ())[1]


def _unknown(row: Example, wanted: str) -> DatasetError:
    has = ", ".join(f"`{name}`" for name in row) or "no columns"
    return DatasetError(f"it has {has}, but needs {wanted}; rename columns, or compute them, with columns=")


# Minibatches


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
    token_ids, mask, images = _parts_of(name, example, limits)
    loss_mask = _integers(name, "loss_mask", mask)
    if len(token_ids) != len(loss_mask):
        raise DatasetError(f"{name} has {len(token_ids)} token_ids and {len(loss_mask)} loss_mask entries; match them")
    if len(places := ((loss_mask != 0) & (loss_mask != 1)).nonzero()):
        wrong = f"{int(loss_mask[places[0]])} in its loss_mask at position {int(places[0])}"
        raise DatasetError(f"{name} has {wrong}; 1 marks a token to learn, and 0 any other")
    if not loss_mask.any():
        raise DatasetError(f"{name} has nothing to learn: its loss_mask is 0 throughout; leave it out, or mark tokens")
    if loss_mask[0]:
        raise DatasetError(f"{name} cannot learn its first token, which has no context; set loss_mask[0] to 0")
    versions = torch.full((len(token_ids),), NOT_SAMPLED)
    return TrainSequence(token_ids=token_ids, loss_mask=loss_mask.bool(), versions=versions, images=images)


def _to_scored_text(name: str, example: Demonstration, limits: ModelLimits) -> TrainSequence:
    """The text and one more token, whose value is the text's score."""
    token_ids, _, images = _parts_of(name, example, limits)
    if images:
        raise DatasetError(f"{name} has images, and reward models are trained on texts alone; leave the images out")
    loss_mask = torch.zeros(len(token_ids) + 1, dtype=torch.bool)
    loss_mask[-1] = True
    return TrainSequence(token_ids=torch.cat([token_ids, torch.zeros(1, dtype=torch.int64)]), loss_mask=loss_mask)


def _parts_of(name: str, example: Any, limits: ModelLimits) -> tuple[torch.Tensor, Any, tuple[PlacedImage, ...]]:
    """int64[T] token ids, at least one; the mask as it was given; the images. Raises DatasetError for tokens that the
    model cannot take."""
    if not isinstance(example, tuple | list) or len(example) not in (2, 3):
        raise DatasetError(f"{name} is a {type(example).__name__}; it must be a pair (token_ids, loss_mask)")
    images = tuple(example[2]) if len(example) == 3 else ()
    if images and (flaw := placement_flaw(images, len(example[0]))):
        raise DatasetError(f"{name}: {flaw}")
    tokens = _integers(name, "token_ids", example[0])
    if limits.context_length is not None and len(tokens) > limits.context_length:
        limit = f"the model's context of {limits.context_length}"
        raise DatasetError(f"{name} has {len(tokens)} tokens, more than {limit}; shorten it, or leave it out")
    if len(places := ((tokens < 0) | (tokens >= limits.vocab_size)).nonzero()):
        known = f"the model's tokens are 0 to {limits.vocab_size - 1}; use its own tokenizer"
        raise DatasetError(f"{name} has token {int(tokens[places[0]])} at position {int(places[0])}, but {known}")
    return tokens, example[1], images


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
