"""The turns of programs that make prompts themselves and send them as tokens: which turn continues which."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from arl.api.types import ModelResponse
from arl.workflow.chat_template import ChatTemplate
from arl.workflow.dialogue import Prompt, Turn


class TokenTurns:
    """A tree of turns that follow one another by their tokens alone: what the model saw and said is all there is to
    know. A prompt continues the turn whose tokens are its longest beginning; one that continues none is a root."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._turns: list[Turn] = []
        self._by_tokens: dict[bytes, Turn] = {}
        self._lengths: set[int] = set()

    @property
    def turns(self) -> tuple[Turn, ...]:
        """In the order in which they were recorded."""
        return tuple(self._turns)

    def prompt(self, input_ids: Sequence[int]) -> Prompt:
        """What the model is shown: these tokens, and nothing else."""
        parent, start = None, 0
        for length, digest in self._beginnings(input_ids):
            if (turn := self._by_tokens.get(digest)) is not None:
                parent, start = turn, length
        given_ids = tuple(input_ids[start:])
        return Prompt(parent=parent, after=parent, given_ids=given_ids, messages=(), tools=(), shown=None, key=b"")

    def record(self, prompt: Prompt, response: ModelResponse) -> Turn:
        text = self._template.text_of(response.output_ids, response.stop_reason)
        turn = Turn(
            prompt=prompt,
            output_ids=response.output_ids,
            has_ended=self._template.ends_turn(response.output_ids, response.stop_reason),
            response=response,
            text=text,
            message={"role": "assistant", "content": text},
            key=b"",
        )
        self._turns.append(turn)
        token_ids = turn.token_ids
        self._lengths.add(len(token_ids))
        self._by_tokens[_digest(token_ids)] = turn
        return turn

    def forget(self, turn: Turn) -> None:
        """Take back a turn that nobody has seen, unless another follows it."""
        if turn not in self._turns or any(other.parent is turn for other in self._turns):
            return
        self._turns.remove(turn)
        key = _digest(turn.token_ids)
        if self._by_tokens.get(key) is turn:
            del self._by_tokens[key]

    def _beginnings(self, input_ids: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Of the lengths that turns have, the shortest first: a key of the tokens up to there."""
        digest, start = blake2b(digest_size=16), 0
        for length in sorted(self._lengths):
            if length > len(input_ids):
                return
            digest.update(array("q", input_ids[start:length]))
            start = length
            yield length, digest.copy().digest()


def _digest(token_ids: Sequence[int]) -> bytes:
    return blake2b(array("q", token_ids), digest_size=16).digest()
