"""Dialogue: everything that was said in an episode, as a tree of turns, exact to the token.

    prompt (messages -> tokens)  --engine-->  record (tokens as sampled)  --> prompt (more messages) ...

Nothing is tokenized twice, so the model is trained on the tokens that it saw. A prompt that continues a recorded turn
follows it in the tree. If the chat template rewrites earlier turns (Qwen3's drops the thinking once a user speaks
again), the prompt branches off after the last unchanged turn.
"""

from __future__ import annotations

import asyncio
import functools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain
from typing import TYPE_CHECKING, Literal

from arl.api.errors import ModelError
from arl.api.types import ModelResponse
from arl.workflow.chat_template import ChatTemplate
from arl.workflow.images import placed
from arl.workflow.messages import (
    HistoryKeys,
    Message,
    ToolSpecs,
    history_key,
    image_part,
    images_in,
    normalised,
    plain,
    text_part,
    texts_of,
    tools_key,
)
from arl.workflow.template_facts import THINKING_FIELDS

if TYPE_CHECKING:
    from arl.api.images import PlacedImage
    from arl.workflow.turn_columns import Ids, TokenLine

_LONG_PROMPT = 20_000
"""Messages of at least this many characters are rendered and tokenized in a thread, as they take some 10 ms."""
_MESSAGE = 60
"""A message takes as long as this many characters, on top of its text."""
_RENDERING = ThreadPoolExecutor(4, "arl-rendering")

Rewriting = Literal["branch", "keep", "error"]
"""When the template rewrites an earlier turn: branch the dialogue, keep the sampled tokens in view, or raise."""


class Shown:
    """The text that a prompt shows. Of texts that begin with each other, only the longest is kept."""

    def __init__(self, text: str) -> None:
        self.length = len(text)
        self._text: str | Shown = text

    def num_shared(self, other: Shown) -> int:
        """How many characters both begin with."""
        mine, others = self._whole(), other._whole()
        length = min(self.length, other.length)
        if others.startswith(mine if len(mine) == length else mine[:length]):
            return length
        return bisect_left(range(length), True, key=lambda i: mine[: i + 1] != others[: i + 1])

    @property
    def text(self) -> str:
        return self._whole()[: self.length]

    def keep_in(self, longer: Shown) -> None:
        """Keep no copy of a text that the longer one begins with."""
        if isinstance(self._text, str):
            self._text = longer

    def _whole(self) -> str:
        """A text that begins with this one."""
        last = self
        while isinstance(text := last._text, Shown):  # read once: another thread may replace it
            last = text
        if last is not self:
            self._text = last
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The model's next input: the tokens of `parent`'s view, then `given_ids`."""

    parent: Turn | None = field(repr=False)
    after: Turn | None = field(repr=False)
    """The turn that the messages continue: parent, or a later turn if the prompt branches off before that turn."""
    given_ids: tuple[int, ...]
    new_messages: tuple[Message, ...]
    """The messages since the turn `after`."""
    num_messages: int
    """The number of messages said so far."""
    tools: ToolSpecs
    shown: Shown = field(repr=False, compare=False)
    key: bytes
    """Equal for equal histories of messages and tools."""
    num_prefilled: int = 0
    """The last of given_ids are the beginning of the answer, which the model continues."""
    begun: str = ""
    """The beginning of the answer within the prompt: what the template opened ("<think>\\n"), or the prefilled text."""
    images: tuple[PlacedImage, ...] = ()
    """What the model sees at the placeholders of given_ids. Their places are those in input_ids."""
    num_images: int = 0
    """The number of images in the messages said so far."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """Everything said so far, as messages."""
        return self._history(lambda turn: turn.message)

    @property
    def shown_messages(self) -> tuple[Message, ...]:
        """As `messages`, with the answers as later prompts show them."""
        return self._history(lambda turn: turn.shown_message)

    def _history(self, answer: Callable[[Turn], Message]) -> tuple[Message, ...]:
        parts: list[Sequence[Message]] = [self.new_messages]
        turn = self.after
        while turn is not None:
            parts += ((answer(turn),), turn.prompt.new_messages)
            turn = turn.prompt.after
        return tuple(chain.from_iterable(reversed(parts)))

    @property
    def num_routed(self) -> int:
        """How many first tokens of the prompt have routes, from the turns before it."""
        turn = self.parent
        while turn is not None:
            if turn.response is not None and turn.response.routes is not None:
                return len(turn.response.routes) - 1
            turn = turn.parent
        return 0

    @property
    def input_ids(self) -> tuple[int, ...]:
        return (*(self.parent.token_ids if self.parent else ()), *self.given_ids)

    @property
    def all_images(self) -> tuple[PlacedImage, ...]:
        """What the model sees at the placeholders of input_ids, in order."""
        if not self.num_images:
            return ()
        return (*(images_of(self.parent.path) if self.parent else ()), *self.images)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """One answer of the model, and what it saw before it."""

    prompt: Prompt
    output_ids: tuple[int, ...]
    """The sampled tokens, including the token that ended the turn, if any."""
    has_ended: bool
    response: ModelResponse | None
    """None for a demonstrated turn."""
    words: str = field(repr=False)
    """The sampled text, without what ended it."""
    text: str
    """The words; with thinking in <think> tags where the model has other tags or channels, and without calls there."""
    message: Message
    """The answer as a program has it and sends it back: with its thinking and calls apart, or as `shown_message`."""
    shown_message: Message = field(repr=False)
    """The answer as later prompts show it: its words as content, or its parts where the template needs them."""
    key: bytes
    """The prompt's key, continued with the message."""

    @property
    def is_truncated(self) -> bool:
        """Whether a length limit ended it, or left no room for it."""
        return self.response is not None and self.response.stop_reason == "length"

    @property
    def parent(self) -> Turn | None:
        return self.prompt.parent

    @property
    def given_ids(self) -> tuple[int, ...]:
        """The tokens that the model was given after `parent`."""
        return self.prompt.given_ids

    @property
    def messages(self) -> tuple[Message, ...]:
        """Everything said so far; this turn's message is the last."""
        return (*self.prompt.messages, self.message)

    @property
    def shown_messages(self) -> tuple[Message, ...]:
        """As `messages`, with the answers as later prompts show them."""
        return (*self.prompt.shown_messages, self.shown_message)

    @property
    def path(self) -> list[Turn]:
        """From the first turn to this one."""
        path: list[Turn] = [self]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        return path[::-1]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens that the model has seen and sampled."""
        return tuple(chain.from_iterable(part for turn in self.path for part in (turn.given_ids, turn.output_ids)))


def images_of(path: Sequence[Turn]) -> tuple[PlacedImage, ...]:
    """What the model sees at the placeholders on a path that begins at the root, in order."""
    return tuple(chain.from_iterable(turn.prompt.images for turn in path))


def unanswered(prompt: Prompt) -> Turn:
    """The turn for a prompt without room for an answer: truncated, without tokens, and not recorded."""
    nothing = ModelResponse(output_ids=(), output_logprobs=(), output_versions=(), stop_reason="length")
    message = {"role": "assistant", "content": ""}
    return Turn(
        prompt=prompt,
        output_ids=(),
        has_ended=False,
        response=nothing,
        words="",
        text="",
        message=message,
        shown_message=message,
        key=prompt.key,
    )


class Dialogue:
    """The tree. `prompt` changes nothing, so a call can be repeated; `record` adds a turn. Messages are copied."""

    def __init__(self, template: ChatTemplate, *, rewriting: Rewriting = "branch") -> None:
        self.template = template
        self._rewriting: Rewriting = rewriting
        self._turns: list[Turn] = []
        self._by_key: defaultdict[bytes, list[Turn]] = defaultdict(list)
        self._lines: dict[Turn, tuple[TokenLine, int]] = {}
        self._keys = HistoryKeys()
        self._began = datetime.now().replace(second=0, microsecond=0)  # so that dialogues of one minute share texts

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns, in the order in which they were recorded."""
        return tuple(self._turns)

    def prompt(
        self, messages: Sequence[Message], tools: ToolSpecs = (), *, after: Turn | None = None, prefill: str = ""
    ) -> Prompt:
        """The model's next input, given all `messages` of the dialogue; the last of them are new.

        prefill: the beginning of the answer, for the model to continue. It is given, not sampled.

        after: the turn that the messages continue, if the caller knows it; else the last recorded turn that they
        continue, if any. The turn's messages are used as they were recorded. Raises ModelError for messages that the
        template refuses, and for rewritten turns if rewriting is "error"; ImageError for images that cannot be read, or
        that the model does not see.
        """
        said = after or self._continued(messages, tools)
        num_known = said.prompt.num_messages + 1 if said else 0
        new = [normalised(message, place) for place, message in enumerate(messages[num_known:], num_known)]
        is_same = said is not None and (said.prompt.tools == tools or tools_key(said.prompt.tools) == tools_key(tools))
        if said and is_same:
            specs, key = said.prompt.tools, history_key(said.key, new)
        else:
            specs, key = plain(tools), history_key(tools_key(tools), (*said.messages, *new) if said else new)
        text = self.template.render((*said.shown_messages, *new) if said else new, specs, now=self._began)
        num_images = (said.prompt.num_images if said else 0) + len(images_in(new))
        shown = Shown(text)
        parent, given_ids = self._place(said, shown, text)
        if said and parent is not said and self._rewriting != "branch":
            if self._rewriting == "error":
                path = said.path
                first = path[path.index(parent) + 1 if parent else 0]
                raise ModelError(
                    f"the chat template rewrites earlier turns: it no longer shows {first.text[:80]!r} as it was said; "
                    "let the dialogue branch (rewriting='branch'), keep the sampled tokens in view ('keep'), or choose "
                    "a template that leaves earlier turns alone"
                )
            parent, given_ids = said, self._kept(said, new, specs)
        given_ids, images = self._seen(given_ids, parent, said, new) if num_images else (given_ids, ())
        begun = self.template.encode_said(prefill) if prefill else ()
        return Prompt(
            parent=parent,
            after=said,
            given_ids=(*given_ids, *begun) if begun else given_ids,
            new_messages=tuple(new),
            num_messages=num_known + len(new),
            tools=specs,
            shown=Shown(text + self.template.as_said(prefill)) if begun else shown,
            key=key,
            num_prefilled=len(begun),
            begun=self.template.opened_in(text) + prefill,
            images=images,
            num_images=num_images,
        )

    def _seen(
        self, given_ids: tuple[int, ...], parent: Turn | None, said: Turn | None, new: Sequence[Message]
    ) -> tuple[tuple[int, ...], tuple[PlacedImage, ...]]:
        """given_ids with all placeholders of their images, and these: the last ones of the messages."""
        assert self.template.image_token_id is not None, "the template has shown images"
        if not (num_given := given_ids.count(self.template.image_token_id)):
            return given_ids, ()
        images = images_in((*said.messages, *new) if said else new)
        return placed(given_ids, images[-num_given:], self._line_to(parent)[1], self.template.tokenizer)

    async def aprompt(
        self, messages: Sequence[Message], tools: ToolSpecs = (), *, after: Turn | None = None, prefill: str = ""
    ) -> Prompt:
        """As `prompt`; a long one, or one with images, is made on a thread, so that the event loop goes on."""
        is_long = len(messages) * _MESSAGE >= _LONG_PROMPT or images_in(messages)
        if not is_long and sum(_MESSAGE + len(m.get("content") or "") for m in messages) < _LONG_PROMPT:
            return self.prompt(messages, tools, after=after, prefill=prefill)
        call = functools.partial(self.prompt, messages, tools, after=after, prefill=prefill)
        return await asyncio.get_running_loop().run_in_executor(_RENDERING, call)

    def input_array(self, prompt: Prompt) -> Ids:
        """The prompt's input_ids as a read-only int32 array, for the cost of those that were not asked for before."""
        line, length = self._line_to(prompt.parent)
        return line.extended(length, prompt.given_ids).view(length + len(prompt.given_ids))

    def _line_to(self, turn: Turn | None) -> tuple[TokenLine, int]:
        """The tokens that the model has seen and sampled up to the end of a turn, and their number."""
        from arl.workflow.turn_columns import TokenLine

        missing: list[Turn] = []
        while turn is not None and turn not in self._lines:
            missing.append(turn)
            turn = turn.parent
        line, length = self._lines[turn] if turn else (TokenLine(), 0)
        for turn in reversed(missing):
            more = (*turn.given_ids, *turn.output_ids)
            line = line.extended(length, more)
            length += len(more)
            self._lines[turn] = line, length
        return line, length

    def record(self, prompt: Prompt, response: ModelResponse, message: Message | None = None) -> Turn:
        """Add the model's answer. message: the answer as a program has it; unset, as later prompts show it."""
        output_ids, reason = response.output_ids, response.stop_reason
        has_ended = self.template.ends_turn(output_ids, reason)
        text = self.template.text_until(output_ids, has_ended=has_ended)
        return self._add(prompt, output_ids, has_ended, response, text, message)

    def demonstrate(self, prompt: Prompt, said: str | Message) -> Turn:
        """Add an answer to imitate, ended as the template ends turns. It has no logprobs.

        said: the answer word for word, or a message, whose words are those that the template writes for it, with its
        thinking and its tool calls. Raises ModelError as `ChatTemplate.words_of` does.
        """
        if isinstance(said, str):
            end = self.template.end_ids(self.template.turn_end)
            return self._add(prompt, (*self.template.encode_said(said), *end), True, None, said, None)
        words, end_text = self.template.words_of(prompt.shown_messages, said, prompt.tools, prompt.shown.text)
        output_ids = (*self.template.encode(words), *self.template.end_ids(end_text))
        return self._add(prompt, output_ids, bool(end_text), None, words, said)

    def forget(self, turn: Turn) -> None:
        """Remove a turn that nobody has read, unless another follows it."""
        if turn in self._turns and not any(_follows(other, turn) for other in reversed(self._turns)):
            self._turns.remove(turn)
            self._by_key[turn.key].remove(turn)

    def _add(
        self,
        prompt: Prompt,
        output_ids: tuple[int, ...],
        has_ended: bool,
        response: ModelResponse | None,
        words: str,
        message: Message | None,
    ) -> Turn:
        given = message and normalised(message)
        shown = (
            given if given and response is None else self.template.message_of(words, prompt.begun, prompt.tools, given)
        )
        turn = Turn(
            prompt=prompt,
            output_ids=output_ids,
            has_ended=has_ended,
            response=response,
            words=words,
            text=self.template.facts.with_think_tags(words, shown),
            message=given or shown,
            shown_message=shown,
            key=history_key(prompt.key, [given or shown]),
        )
        self._turns.append(turn)
        self._by_key[turn.key].append(turn)
        return turn

    def _continued(self, messages: Sequence[Message], tools: ToolSpecs) -> Turn | None:
        """The turn with the longest history that `messages` begin with; of several the one they name, or else the last.

        They differ in fields that clients need not send back: ids of calls, and thinking, which must match if sent.
        """
        if not self._turns:
            return None
        found: list[Turn] = []
        length = 0
        keys = self._keys.of(messages, tools)
        for number, (message, key) in enumerate(zip(messages, keys, strict=True), start=1):
            if message["role"] == "assistant" and (turns := self._by_key.get(key)):
                alike = [turn for turn in turns if _has_thoughts_of(turn, message)]
                if not alike:
                    break
                found, length = alike, number
        if len(found) < 2:
            return found[0] if found else None
        given = [normalised(message) for message in messages[:length]]

        def num_equal(turn: Turn) -> int:
            return sum(a == b for a, b in zip(turn.messages, given, strict=True))

        return max(reversed(found), key=num_equal)

    def _place(self, said: Turn | None, shown: Shown, text: str) -> tuple[Turn | None, tuple[int, ...]]:
        """The turn, up to `said`, after which the text goes on, and the tokens of the rest of the text."""
        num_shared = said.prompt.shown.num_shared(shown) if said else 0
        if said and num_shared == said.prompt.shown.length:
            said.prompt.shown.keep_in(shown)
        turn = said
        while turn is not None:
            length = turn.prompt.shown.length  # of a text that the text of each later turn on the path begins with
            if length <= num_shared:
                after = self.template.after_words(
                    turn.words, text[length:], has_calls="tool_calls" in turn.shown_message
                )
                if after is not None:
                    return turn, self._unless_ended(turn, after)
            turn = turn.parent
        return None, self.template.encode(text)

    def _kept(self, said: Turn, new: Sequence[Message], tools: ToolSpecs) -> tuple[int, ...]:
        """The tokens of the new messages, as if the template left earlier turns alone."""
        first = next((m for m in (*said.messages, *new) if m["role"] == "user"), {"role": "user", "content": ""})
        if images := images_in(said.messages):  # templates can number them
            first = {**first, "content": [*map(image_part, images), *map(text_part, texts_of(first))]}
        return self._unless_ended(said, self.template.after_turn([first], new, tools))

    def _unless_ended(self, turn: Turn, after: str) -> tuple[int, ...]:
        """The tokens of `after`, without the end of the turn at its beginning if the model sampled one of its own."""
        ids, said = self.template.encode(after), turn.output_ids
        if not turn.has_ended:
            return ids
        same = next((k for k in range(min(len(ids), len(said), 4), 0, -1) if ids[:k] == said[-k:]), 0)
        return ids[same or self.template.num_ending(ids) :]


def _has_thoughts_of(turn: Turn, message: Message) -> bool:
    given = next((str(message[name]).strip() for name in THINKING_FIELDS if message.get(name)), "")
    return not given or given == str(turn.message.get("reasoning_content") or "").strip()


def _follows(turn: Turn, earlier: Turn) -> bool:
    """Whether the earlier turn is part of the turn's history, even if the template rewrote it there."""
    said = turn.prompt.after
    while said is not None and said.prompt.num_messages > earlier.prompt.num_messages:
        said = said.prompt.after
    return earlier in (said, turn.parent)
