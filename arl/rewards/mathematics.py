"""Answers to mathematical problems, compared as mathematics by math-verify, in worker processes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from arl.api.errors import RewardError
from arl.api.types import Example
from arl.rewards.answers import last_boxed, references
from arl.rewards.pool import RewardPool
from arl.rewards.score import Score, shown
from arl.rewards.untrusted import guard_evaluation, limit_memory, require

_TAIL = 2000
"""Characters at the end of an answer without a box in which its last expression is looked for."""


def math_reward(
    *, column: str = "answer", timeout_s: float = 5.0, workers: int = 2
) -> RewardPool[[str, Example], Score]:
    r"""1.0 where the answer equals the reference mathematically, else 0.0: `\frac{1}{2}`, `0.5` and `2/4` are the same.

        reward = WeightedReward({"correct": (1.0, math_reward()), ...})

    The answer is what the last `\boxed{...}` holds; without one, what follows `####`; without that, the last expression
    of the text. column: where the example has its reference (text, LaTeX, gsm8k's `... #### 42`, or a list of several).
    timeout_s: the longest a comparison may take, from when a worker begins it.

    An answer that takes longer or kills its worker, such as 9**9**9**9, is wrong, and does not fail its episode: the
    model wrote it, and would otherwise be trained on all but its worst answers. `killed` in the metrics counts these.
    Raises RewardError where math-verify is not installed or the example has no reference.
    """
    require("math_verify", "math-verify", "rewards")
    killed = Score(0.0, metrics={"killed": 1.0})
    return RewardPool(
        MathEquality(column=column), timeout_s=timeout_s, workers=workers, prepare=prepare, if_killed=killed
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MathEquality:
    """What the workers of math_reward do; without time limit."""

    column: str = "answer"

    def __call__(self, answer: str, data: Example) -> Score:
        expected = references(data, self.column)
        is_right = any(is_equal(answer, reference) for reference in expected)
        return Score(float(is_right), metrics={"killed": 0.0})


def is_equal(answer: str, reference: str) -> bool:
    """Whether the answer that the text ends with is the reference. Raises RewardError for an unreadable reference."""
    from math_verify import verify

    boxed = last_boxed(answer)
    said = boxed if boxed is not None else answer.rpartition("####")[2].strip() if "####" in answer else None
    wanted = last_boxed(reference)
    if said is not None and said == (reference if wanted is None else wanted):
        return True
    gold = _parsed(reference if "$" in reference or wanted is not None else rf"\boxed{{{reference}}}")
    if not gold:
        raise RewardError(f"the reference answer {shown(reference)} is no mathematics that math-verify can read")
    found = _parsed(rf"\boxed{{{said}}}" if said is not None else answer[-_TAIL:])
    return bool(found) and verify(gold, found, timeout_seconds=None)


def prepare() -> None:
    """In a new worker: load what is slow to load. math-verify's own timers, which need signals, are not used."""
    import math_verify  # noqa: F401

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timers are not used
    guard_evaluation("math_verify", "latex2sympy2_extended")
    limit_memory()


def _parsed(text: str) -> list[Any]:
    from math_verify import parse

    return parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
