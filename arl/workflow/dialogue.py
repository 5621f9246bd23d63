"""Dialogue: everything that was said in an episode, as a tree of turns, exact to the token.

    prompt (messages -> tokens)  --engine-->  record (tokens as sampled)  --> prompt (more messages) ...

What the model sampled is kept as the tokens it sampled; what is said after it is tokenized as the chat template renders
it there. Nothing is tokenized twice, so what is trained is what the model saw. A prompt whose messages continue a
recorded turn follows it in the tree. Where the template shows an earlier turn otherwise than when it was said (Qwen3's
drops its thinking once a user speaks again), the model sees another text than before: the prompt then branches off
after the last turn that is still shown as it was. Each path from the root to a leaf is a trajectory (arl.workflow.paths).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

from arl.api.errors import ModelError
from arl.api.types import ModelResponse
from arl.workflow.chat_template import ChatTemplate, Message, ToolSpecs

Rewriting = Literal["branch", "keep", "error"]
"""What becomes of a turn that the template would show otherwise later: the dialogue branches, the sampled tokens stay
in the model's view, or it is an error."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """One answer of the model, and what it saw before it.

    parent: the turn before it in its view. given_ids: what the model saw after that one. output_ids: what it sampled,
    with the token that ended it. response: None for a turn that was demonstrated. text: the answer without its end.
    messages: all that was said, this turn's message the last. tools: what it was shown of tools.
    """

    parent: Turn | None
    given_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    response: ModelResponse | None
    text: str
    messages: tuple[Message, ...]
    tools: ToolSpecs = ()

    @property
    def path(self) -> list[Turn]:
        """From the first turn to this one."""
        return [*self.parent.path, self] if self.parent else [self]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All that the model has seen and said."""
        return tuple(token for turn in self.path for part in (turn.given_ids, turn.output_ids) for token in part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the model is shown next: the tokens of `parent`'s view, then `given_ids`. messages: the same, as messages."""

    parent: Turn | None
    given_ids: tuple[int, ...]
    messages: tuple[Message, ...]
    tools: ToolSpecs = ()

    @property
    def input_ids(self) -> tuple[int, ...]:
        return (*(self.parent.token_ids if self.parent else ()), *self.given_ids)


class Dialogue:
    """The tree. `prompt` changes nothing, so a call that failed may be made again; `record` adds a turn."""

    def __init__(self, template: ChatTemplate, *, rewriting: Rewriting = "branch") -> None:
        self.template = template
        self._rewriting: Rewriting = rewriting
        self._turns: list[Turn] = []
        self._by_history: dict[bytes, Turn] = {}

    @property
    def turns(self) -> tuple[Turn, ...]:
        """In the order in which they were recorded."""
        return tuple(self._turns)

    def prompt(self, messages: Sequence[Message], tools: ToolSpecs = (), *, after: Turn | None = None) -> Prompt:
        """What to show the model when `messages` are all that was said; the last of them are new.

        after: the turn that they continue, where the caller knows; else the last recorded one of which they are a
        continuation, if any. Its messages are taken as they were recorded. Raises ModelError for messages that the
        template does not take, and for rewritten ones where that is to be an error.
        """
        said = after or self._continued(messages, tools)
        if said is None:
            text = self.template.render(messages, tools)
            return Prompt(parent=None, given_ids=self.template.encode(text), messages=tuple(messages), tools=tools)
        messages = (*said.messages, *messages[len(said.messages) :])
        if self._rewriting == "keep":
            return self._kept(said, messages, tools)
        text = self.template.render(messages, tools)
        for turn in reversed(said.path):
            given = self._shown_after(turn, text)
            if given is not None:
                return Prompt(parent=turn, given_ids=given, messages=messages, tools=tools)
            if self._rewriting == "error":
                raise ModelError(
                    f"the chat template rewrites earlier turns: it no longer shows {turn.text[:80]!r} as it was said; "
                    "let the dialogue branch, keep the sampled tokens in view, or choose a template that leaves "
                    "earlier turns alone"
                )
        return Prompt(parent=None, given_ids=self.template.encode(text), messages=messages, tools=tools)

    def record(self, prompt: Prompt, response: ModelResponse, message: Message | None = None) -> Turn:
        """Add what the model answered. message: how it will be shown later, if not as its text in `content`."""
        return self._add(prompt, response.output_ids, response, self.template.text_of(response.output_ids), message)

    def demonstrate(self, prompt: Prompt, text: str) -> Turn:
        """Add an answer to imitate, ended as the template ends turns; it has no logprobs."""
        end = self.template.encode(self.template.end_of_turn)[:1]
        return self._add(prompt, (*self.template.encode(text), *end), None, text, None)

    def forget(self, turn: Turn) -> None:
        """Take back a turn that nobody has seen, such as one whose reader was gone, unless another follows it."""
        if turn not in self._turns or any(other.parent is turn for other in self._turns):
            return
        self._turns.remove(turn)
        key = _last(_keys(turn.messages, turn.tools))
        if self._by_history.get(key) is turn:
            del self._by_history[key]

    def _add(
        self,
        prompt: Prompt,
        output_ids: tuple[int, ...],
        response: ModelResponse | None,
        text: str,
        message: Message | None,
    ) -> Turn:
        messages = (*prompt.messages, message or {"role": "assistant", "content": text})
        turn = Turn(
            parent=prompt.parent,
            given_ids=prompt.given_ids,
            output_ids=output_ids,
            response=response,
            text=text,
            messages=messages,
            tools=prompt.tools,
        )
        self._turns.append(turn)
        self._by_history[_last(_keys(messages, prompt.tools))] = turn
        return turn

    def _continued(self, messages: Sequence[Message], tools: ToolSpecs) -> Turn | None:
        """The turn with the longest history that `messages` begin with."""
        found = None
        for key in _keys(messages, tools):
            found = self._by_history.get(key, found)
        return found

    def _shown_after(self, turn: Turn, text: str) -> tuple[int, ...] | None:
        """The tokens of what `text` has after the turn; None where it shows the turn, or one before it, otherwise."""
        shown = self.template.render(turn.messages, turn.tools, add_generation_prompt=False)
        end = self.template.end_of_turn
        if not shown.endswith(end):
            return None
        spoken = shown[: len(shown) - len(end)]
        return self._unless_ended(turn, text[len(spoken) :]) if text.startswith(spoken + end) else None

    def _kept(self, turn: Turn, messages: tuple[Message, ...], tools: ToolSpecs) -> Prompt:
        """The prompt as if the template left earlier turns alone."""
        first = next((m for m in messages if m["role"] == "user"), {"role": "user", "content": ""})
        after = self.template.after_turn([first], messages[len(turn.messages) :], tools)
        return Prompt(parent=turn, given_ids=self._unless_ended(turn, after), messages=messages, tools=tools)

    def _unless_ended(self, turn: Turn, after: str) -> tuple[int, ...]:
        """The tokens of `after`, which begins with the end of the turn, less that end where the model said it itself."""
        ids = self.template.encode(after)
        return ids[1:] if self.template.ends_turn(turn.output_ids) and self.template.ends_turn(ids[:1]) else ids


def _keys(messages: Sequence[Message], tools: ToolSpecs) -> Iterator[bytes]:
    """A key of each history that ends with an assistant's message, the shortest first."""
    digest = blake2b(_canonical(tools), digest_size=16)
    for message in messages:
        digest.update(_canonical(_identity(message)))
        if message["role"] == "assistant":
            yield digest.digest()


def _last(keys: Iterator[bytes]) -> bytes:
    return list(keys)[-1]


def _identity(message: Message) -> list[Any]:
    """What makes two messages the same: clients send answers back with other ids, and without the model's thinking."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    return [
        message["role"],
        message.get("content") or "",
        [[call.get("name"), _arguments(call.get("arguments"))] for call in calls],
    ]


def _arguments(arguments: Any) -> Any:
    """An object, also where it is JSON in a string, which a client may have written anew."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=_plain).encode() + b"\0"


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else str(value)
