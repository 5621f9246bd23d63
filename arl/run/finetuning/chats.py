"""Rows of datasets as examples to fine-tune on: chats through the model's own chat template, and plain text.

| row | becomes |
|---|---|
| `messages`, perhaps `tools` | demonstrations in which each of the assistant's turns is learned |
| `prompt`, `completion` | a demonstration in which the completion is learned |
| `text` | a demonstration in which everything is learned |
| `prompt`, `chosen`, `rejected` | a preference, to learn from or for a reward model |

A row may have images, in its messages or in a column `images` or `image`, as examples of agents have them.

A turn is learned after the prompt that the model would get for it. So a conversation whose template rewrites earlier
turns (Qwen3's drops their thinking) becomes several demonstrations.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from arl.api.errors import DatasetError, ImageError, ModelError
from arl.api.types import Example
from arl.run.finetuning.examples import Demonstration, Preference
from arl.workflow.chat_template import ChatTemplate, template_of
from arl.workflow.conversation import paths_of
from arl.workflow.dialogue import Dialogue, Rewriting, images_of
from arl.workflow.example_images import IMAGE_COLUMNS, with_images
from arl.workflow.messages import Message, ToolSpecs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from arl.api.images import PlacedImage

log = logging.getLogger(__name__)

MadeT = TypeVar("MadeT", Demonstration, Preference)
TooLong = Literal["error", "drop"]
"""The treatment of a row of more than max_tokens: it is an error, or left out and counted. No row is cut."""


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


def _made(
    rows: Iterable[Example],
    read: Callable[[Example], list[MadeT]],
    max_tokens: int | None,
    too_long: TooLong,
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
        length = max(map(_length, examples))
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


def _length(example: Demonstration | Preference) -> int:
    if isinstance(example, Preference):
        return max(len(example.chosen[0]), len(example.rejected[0]))
    return len(example[0])


class _Reader:
    """Turns rows into tokens as one tokenizer does. Raises DatasetError and ModelError, which do not name the row."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None) -> None:
        self._tokenizer = tokenizer
        self._template: ChatTemplate | None = template_of(tokenizer, options) if tokenizer.chat_template else None

    def demonstrations(self, row: Example) -> list[Demonstration]:
        match row:
            case {"messages": messages}:
                found = self._said([], with_images(row, _messages("messages", messages)), _tools(row))
            case {"prompt": prompt, "completion": completion}:
                prompt = _seen(row, prompt)
                found = self._answered(prompt, completion, "completion", _tools(row), "branch")
            case {"text": str(text)}:
                _check_shows_all(row)
                found = [self._plain("", text)]
            case _:
                raise _unknown(row, "`messages`, or `prompt` and `completion`, or `text`")
        if not found or not all(1 in one[1] for one in found):
            raise DatasetError("there is nothing to learn: the assistant says nothing; leave the row out")
        return found

    def preferences(self, row: Example) -> list[Preference]:
        match row:
            case {"chosen": chosen, "rejected": rejected}:
                prompt = row.get("prompt")
            case _:
                raise _unknown(row, "`chosen` and `rejected`, and perhaps `prompt`")
        if prompt is None:
            prompt, chosen, rejected = _shared(chosen, rejected)
        prompt, tools = _seen(row, prompt), _tools(row)
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
        return self._said(_messages("prompt", prompt, "user"), _messages(name, answer, "assistant"), tools, rewriting)

    def _plain(self, prompt: str, answer: str) -> Demonstration:
        """Texts end to end. The tokenizer begins the prompt as it begins texts."""
        end = [] if self._tokenizer.eos_token_id is None else [int(cast("int", self._tokenizer.eos_token_id))]
        said = [*self._tokenizer.encode(answer, add_special_tokens=False), *end]
        given = self._tokenizer.encode(prompt)
        if end and given[-1:] == end:  # some tokenizers end texts
            given = given[:-1]
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
        for path in paths_of(dialogue.turns):
            turns = [((turn.given_ids, False), (turn.output_ids, turn in path.owned)) for turn in path.turns]
            made.append(_demonstration([part for turn in turns for part in turn], images_of(path.turns)))
        return made


def _demonstration(parts: Sequence[tuple[Sequence[int], bool]], images: Sequence[PlacedImage] = ()) -> Demonstration:
    """The tokens of the parts, end to end, and the mask: which parts are learned. Compact: five bytes a token."""
    token_ids, loss_mask = array("i"), array("b")
    for ids, is_learned in parts:
        token_ids.extend(ids)
        loss_mask.extend([is_learned] * len(ids))
    return (token_ids, loss_mask, images) if images else (token_ids, loss_mask)


def _seen(row: Example, prompt: Any) -> Any:
    """The prompt with the images of the row's column."""
    if all(row.get(name) is None for name in IMAGE_COLUMNS):
        return prompt
    return with_images(row, _messages("prompt", prompt, "user"))


def _check_shows_all(row: Example) -> None:
    if column := next((name for name in IMAGE_COLUMNS if row.get(name) is not None), None):
        raise DatasetError(
            f"it has `text`, which shows no images, and `{column}`; give `messages` or a `prompt` for the images, or "
            "rename the column with columns="
        )


def _messages(name: str, given: Any, role: str | None = None) -> list[Message]:
    """The messages of a column. role: of a text; None for a column that must hold messages."""
    if isinstance(given, str) and role is not None:
        return [{"role": role, "content": given}]
    if isinstance(given, Mapping):
        given = [given]
    if not isinstance(given, Sequence) or isinstance(given, str):
        texts = "" if role is None else ", or a text"
        raise DatasetError(f"`{name}` is a {type(given).__name__}; it must be a list of messages{texts}")
    for place, message in enumerate(cast("Sequence[Any]", given)):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DatasetError(
                f"`{name}` has {message!r:.80} at position {place}; each message must be a dict with `role` and "
                "`content`, such as {'role': 'user', 'content': '...'}"
            )
    return [cast("Message", message) for message in cast("Sequence[Any]", given)]


def _tools(row: Example) -> ToolSpecs:
    """The tools that the conversation shows."""
    tools = row.get("tools") or ()
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise DatasetError(f"`tools` is a text, but not JSON: {error}") from None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in cast("Sequence[Any]", tools)):
        raise DatasetError("`tools` must be a list of specifications, or its JSON: {'type': 'function', ...}")
    return cast("ToolSpecs", tools)


def _shared(chosen: Any, rejected: Any) -> tuple[list[Message], list[Message], list[Message]]:
    """The messages with which both conversations begin, and the rest of each. The last message is an answer."""
    both = _messages("chosen", chosen), _messages("rejected", rejected)
    length = 0
    while length < min(map(len, both)) - 1 and both[0][length] == both[1][length]:
        length += 1
    if length == 0:
        raise DatasetError("`chosen` and `rejected` begin differently, so they have no prompt; give a `prompt`")
    return both[0][:length], both[0][length:], both[1][length:]


def _unknown(row: Example, wanted: str) -> DatasetError:
    has = ", ".join(f"`{name}`" for name in row) or "no columns"
    return DatasetError(f"it has {has}, but needs {wanted}; rename columns, or compute them, with columns=")
