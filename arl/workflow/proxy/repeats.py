"""Calls that an SDK makes again, since it did not read the answer: the one that it did not read is to be forgotten."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from arl.workflow.proxy.calls import Answer


@dataclass(slots=True)
class _Fate:
    """How calls with one and the same body fared: what they were answered, and how many were not."""

    answers: list[Sequence[Answer]] = field(default_factory=list)
    num_unanswered: int = 0


class Repeats:
    """Which answers went to calls of which body. An SDK says that it calls again, but not in place of which call.

    One that got no answer is what it most likely repeats; where there was none, the last that got one.
    """

    def __init__(self) -> None:
        self._fates: defaultdict[bytes, _Fate] = defaultdict(_Fate)

    def answered(self, body: bytes, answers: Sequence[Answer]) -> None:
        self._fates[body].answers.append(answers)

    def unanswered(self, body: bytes) -> None:
        self._fates[body].num_unanswered += 1

    def unread(self, body: bytes) -> Sequence[Answer]:
        """The answers that a call, made again, stands in for."""
        fate = self._fates[body]
        if fate.num_unanswered:
            fate.num_unanswered -= 1
            return ()
        return fate.answers.pop() if fate.answers else ()
