"""The turns of /v1/completions: a prompt that begins with an earlier prompt and its answer continues that turn."""

from __future__ import annotations

from dataclasses import dataclass

from arl.workflow.dialogue import Dialogue, Prompt, Shown, Turn
from arl.workflow.messages import history_key


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenText:
    """The text or tokens that a completion continues."""

    prompt: str | tuple[int, ...]
    """A text, or tokens."""
    adds_special_tokens: bool = True
    """Begin a text with what the tokenizer puts before texts, such as a token of the beginning."""


class TextDialogue(Dialogue):
    """A tree of turns that were given as text or tokens. Texts that show the whole of a turn keep its tokens."""

    def text_prompt(self, given: GivenText) -> Prompt:
        """The model's next input."""
        found = [(turn, rest) for turn in self.turns if (rest := self._rest(turn, given.prompt)) is not None]
        parent, rest = max(found, key=lambda pair: len(pair[0].token_ids), default=(None, given.prompt))
        tokenizer = self.template.tokenizer
        if isinstance(rest, str):
            is_first = given.adds_special_tokens and parent is None
            ids = tuple(tokenizer.encode(rest, add_special_tokens=is_first)) if rest else ()
        else:
            ids = rest
        text = given.prompt if isinstance(given.prompt, str) else str(tokenizer.decode(list(given.prompt)))
        message = {"role": "user", "content": text}
        return Prompt(
            parent=parent,
            after=parent,
            given_ids=ids,
            new_messages=(message,),
            num_messages=parent.prompt.num_messages + 2 if parent else 1,
            tools=(),
            shown=Shown(text),
            key=history_key(b"text", [message]),
        )

    def _rest(self, turn: Turn, given: str | tuple[int, ...]) -> str | tuple[int, ...] | None:
        """What follows a turn, its end included, in a text or tokens; None if they do not begin with it."""
        if isinstance(given, str):
            whole = turn.prompt.new_messages[0]["content"] + self.template.text_until(turn.output_ids, has_ended=False)
            return given[len(whole) :] if given.startswith(whole) else None
        ids = turn.token_ids
        return given[len(ids) :] if given[: len(ids)] == ids else None
