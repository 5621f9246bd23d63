"""Transcripts to read: the calls that an episode made, and which tokens the model was given and which it sampled."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby

from rich.text import Text

from arl.api.engine import Sampler
from arl.api.types import NOT_SAMPLED, ModelRequest, ModelResponse, Trajectory

# TimedSampler: a sampler that remembers what it was asked, what it answered, and how long that took.


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCall:
    """One `agenerate`. output_ids: empty where it raised. ended_by: the stop reason, or the name of the error."""

    input_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    elapsed_s: float
    ended_by: str

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.input_ids + self.output_ids


class TimedSampler:
    """Passes requests on to `sampler`. `calls`: in the order in which they ended."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.calls: list[EngineCall] = []

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        began = time.monotonic()
        try:
            response = await self._sampler.agenerate(request)
        except BaseException as error:
            self._note(request, (), began, type(error).__name__)
            raise
        self._note(request, response.output_ids, began, response.stop_reason)
        return response

    def _note(self, request: ModelRequest, output_ids: tuple[int, ...], began: float, ended_by: str) -> None:
        self.calls.append(
            EngineCall(
                input_ids=tuple(request.input_ids),
                output_ids=output_ids,
                elapsed_s=time.monotonic() - began,
                ended_by=ended_by,
            )
        )


Decode = Callable[[Sequence[int]], str]
"""Token ids -> text, special tokens and spaces as they are."""

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What the bytes of a character decode to as long as some are missing."""


class Origin(Enum):
    """Where a token came from: how it is shown, and the brackets around it where there are no colours."""

    GIVEN = ("dim", "", "")
    TRAINED = ("bold green", "⟦", "⟧")
    SAMPLED = ("yellow", "⟪", "⟫")

    @property
    def about(self) -> str:
        return {
            Origin.GIVEN: "given",
            Origin.TRAINED: "sampled",
            Origin.SAMPLED: "sampled, but not trained here",
        }[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """Tokens in the order in which a model saw them, and where each came from."""

    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]


def passage_of(trajectory: Trajectory) -> Passage:
    """Tokens that were sampled, but have loss_mask 0, are trained in another trajectory, or nowhere."""
    return Passage(
        token_ids=trajectory.token_ids,
        origins=tuple(
            Origin.GIVEN if version == NOT_SAMPLED else Origin.TRAINED if trained else Origin.SAMPLED
            for version, trained in zip(trajectory.versions, trajectory.loss_mask, strict=True)
        ),
    )


def passages_of(calls: Sequence[EngineCall]) -> list[Passage]:
    """What an episode that returned nothing had been through: a passage for each call that none continued."""
    ends = [
        call
        for i, call in enumerate(calls)
        if not any(other.input_ids[: len(call.token_ids)] == call.token_ids for other in calls[i + 1 :])
    ]
    return [Passage(token_ids=end.token_ids, origins=_origins(end, calls)) for end in ends]


def _origins(end: EngineCall, calls: Sequence[EngineCall]) -> tuple[Origin, ...]:
    origins = [Origin.GIVEN] * len(end.token_ids)
    for call in calls:
        if end.token_ids[: len(call.token_ids)] == call.token_ids:
            origins[len(call.input_ids) : len(call.token_ids)] = [Origin.TRAINED] * len(call.output_ids)
    return tuple(origins)


def rendered(passage: Passage, decode: Decode, *, brackets: bool) -> Text:
    """brackets: put them around what was sampled, for where there are no colours."""
    text = Text()
    for origin, piece in _pieces(passage, decode):
        style, left, right = origin.value
        shown = visible(piece)
        text.append(f"{left}{shown}{right}" if brackets else shown, style=style)
    return text


def legend(*, brackets: bool) -> Text:
    """What `rendered` means by its colours or brackets."""
    parts = [
        Text(f"{left}{origin.about}{right}" if brackets else origin.about, style=style)
        for origin in Origin
        for style, left, right in [origin.value]
    ]
    return Text(" | ").join(parts)


def _pieces(passage: Passage, decode: Decode) -> list[tuple[Origin, str]]:
    """The text of each run of tokens of one origin.

    What is decoded is all up to its end, as a tokenizer may show a token otherwise where it is the first; a character
    whose bytes lie on both sides of an end belongs to the later side.
    """
    pieces: list[tuple[Origin, str]] = []
    end, seen = 0, 0
    for origin, run in groupby(passage.origins):
        end += len(list(run))
        text = decode(passage.token_ids[:end])
        if end < len(passage.token_ids):
            text = text.rstrip(UNFINISHED)
        pieces.append((origin, text[seen:]))
        seen = max(seen, len(text))
    return pieces


def visible(text: str) -> str:
    """Control characters, which a terminal would obey, as pictures of them; lines and tabs stay."""
    return text.translate(_PICTURES)


_PICTURES = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}
