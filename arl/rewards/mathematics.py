"""math_reward: whether an answer equals the reference as mathematics, by math-verify in worker processes.

math-verify reads LaTeX. It reads other text as a product: "forty two" as a product of letters, "16 3" as a product of
numbers. This module decides which text math-verify gets, and refuses references that it would misread.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any

from arl.api.errors import RewardError
from arl.api.types import Example
from arl.rewards.answers import Extract, bare, last_boxed, references, stated
from arl.rewards.pool import RewardPool
from arl.rewards.score import Score, shown
from arl.rewards.scorers import guard_evaluation, limit_memory, require

_TAIL = 2000
"""In prose, only this many characters at the end of an answer are searched for its last expression."""


def math_reward(
    *, column: str = "answer", extract: Extract | None = None, timeout_s: float = 5.0, workers: int = 2
) -> RewardPool[[str, Example], Score]:
    r"""1.0 if the answer equals the reference mathematically, else 0.0: `\frac{1}{2}`, `0.5` and `2/4` are the same.

    The answer is the content of the last `\boxed{...}`, else the text after the last `####` or "the answer is", else
    the whole text, or in prose its last expression. If the reference is a number, a sum or a product is not accepted.
    column: the example's column with the reference (text, LaTeX, gsm8k's `... #### 42`, or a list of several). A
    reference of one word or in `\text{...}` is compared as text.
    extract: finds the part of the text that is searched for the answer, such as InTag("answer").
    timeout_s: the longest a comparison may take, counted from when a worker begins it.

    An answer that takes longer or kills its worker, such as 9**9**9**9, scores 0 and does not fail its episode.
    Otherwise the model would be trained on all answers except its worst. The metric `killed` counts such answers.
    Raises RewardError if math-verify is not installed, or if the example's reference is missing or in prose.
    """
    require("math_verify", "math-verify", "rewards")
    killed = Score(0.0, metrics={"killed": 1.0})
    equality = MathEquality(column=column, extract=extract)
    return RewardPool(equality, timeout_s=timeout_s, workers=workers, prepare=_prepare, if_killed=killed)


@dataclass(frozen=True, slots=True, kw_only=True)
class MathEquality:
    """The function that math_reward's workers run."""

    column: str = "answer"
    extract: Extract | None = None

    def check_example(self, data: Example) -> None:
        for reference in references(data, self.column):
            readable(reference)

    def __call__(self, answer: str, data: Example) -> Score:
        expected = references(data, self.column)
        is_right = any(is_equal(answer, reference, self.extract) for reference in expected)
        return Score(float(is_right), metrics={"killed": 0.0})


def is_equal(answer: str, reference: str, extract: Extract | None = None) -> bool:
    """Whether the text's answer equals the reference. Raises RewardError for an unreadable reference."""
    from math_verify import verify

    wanted = readable(reference)
    text = extract(answer) if extract else answer
    if text is None:
        return False
    said = stated(text)
    if bare(text if said is None else said) == bare(wanted):
        return True
    if _is_text(wanted):
        return False
    gold = _parsed(_latex(wanted))
    if not gold:
        raise RewardError(f"the reference answer {shown(reference)} cannot be read by math-verify")
    found = _expression(text if said is None else said)
    if _is_number(gold[0]):
        found = [one for one in found if _is_worked_out(one)]
    return verify(gold, found, timeout_seconds=None)


def readable(reference: str) -> str:
    """The reference, without its box if it has one. Raises RewardError for prose, because no answer would equal it."""
    boxed = last_boxed(reference)
    wanted = reference.rpartition("####")[2].strip() if boxed is None else boxed
    if not _is_text(wanted) and (not bare(wanted) or _is_prose(_latex(wanted))):
        raise RewardError(
            f"the reference answer {shown(reference)} is not mathematics, which is all that math_reward compares; "
            r"compare it as text, with ExactMatch, or write its words as LaTeX does: 5\text{ cm}, \text{no solution}"
        )
    return wanted


_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mbox)\{[^{}]*\}")
_WORD = re.compile(r"[^\W\d_]{3,}(?:[-'][^\W\d_]+)*|[^\W\d_]{2}")


def _is_text(wanted: str) -> bool:
    """Whether the reference is one word, or words in LaTeX's text mode. A single letter may be a variable."""
    word = bare(wanted)
    return len(word) > 1 and bool(_TEXT.fullmatch(wanted.strip("$")) or _WORD.fullmatch(word))


_PROSE = re.compile(r"[^\W\d_]{4,}|(?<=[\d}]\s)[^\W\d_]{2,}|(?<![^\W_])[^\W\d_]{2,}\s+[^\W\d_]{2,}|\n")


def _is_prose(latex: str) -> bool:
    """Whether words remain after removing LaTeX's commands and the units that math-verify knows."""
    if not _PROSE.search(_without_commands(latex)):
        return False
    from latex2sympy2_extended.latex2sympy2 import normalize_latex
    from math_verify import LatexExtractionConfig

    normalized = normalize_latex(latex, config=LatexExtractionConfig().normalization_config)
    return bool(_PROSE.search(_without_commands(normalized)))


def _without_commands(latex: str) -> str:
    latex = _TEXT.sub(lambda text: ";" if re.search(r"and|or|,", text[0]) else " ", latex)
    return re.sub(r"\\(?:begin|end|operatorname)\*?\{\w*\*?\}|\\[a-zA-Z]+", ";", latex)


_DELIMITERS = re.compile(r"^(?:\\?\$|\\\(|\\\[|[\s*`#=])+|(?:\$|\\\)|\\\]|[\s*`.,;:])+$")
_FUNCTIONS = r"pi|a?(?:sin|cos|tan)h?|arc(?:sin|cos|tan)|cot|sec|csc|log|ln|exp"
_AS_LATEX = (
    (re.compile(r"\\!|\\(?:left|right)(?![a-zA-Z])"), ""),
    (re.compile(r"(?<!\\)\\[,;: ]|\\q?quad(?![a-zA-Z])|~"), " "),
    (re.compile(r"(?<![\d./}])(\d+) (\d+)/(\d+)(?![\d./])"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"(?<=\d)[eE]([+-]?\d+)(?![\d.])"), r"\\cdot 10^{\1}"),
    (re.compile(rf"(?<![\\a-zA-Z])({_FUNCTIONS})(?![a-zA-Z])"), r"\\\1 "),
)
"""Spaces, mixed numbers, powers of ten and functions, as plain text writes them."""
_SIGNS = str.maketrans(
    {
        "\u2212": "-",
        "\u03c0": r"\pi ",
        "\u00d7": r"\times ",
        "\u00b7": r"\cdot ",
        "\u221e": r"\infty ",
        "\u00b0": r"^\circ ",
    }
)
_THOUSANDS = re.compile(r"(?<![\d.,] )(?<![\d.,])[1-9]\d{0,2}(?: \d{3})+(?![\d ])")


def _latex(text: str) -> str:
    """The same text as LaTeX, if it is mathematics, without delimiters."""
    text = _DELIMITERS.sub("", text.translate(_SIGNS))
    for pattern, latex in _AS_LATEX:
        text = pattern.sub(latex, text)
    return _THOUSANDS.sub(lambda number: number[0].replace(" ", ""), text)


_DENIED = re.compile(r"\b(?:not|never|neither|nor|cannot|except|wrong|incorrect)\b|n['\u2019]t\b", re.IGNORECASE)
_DOUBTFUL = re.compile(
    r"(?:\b(?:or|nor|not|never|neither|cannot|except)\b|n['\u2019]t\b)(?:\W+\w+){0,3}\W*$"
    r"|[\w)](?: *[*+\u2212-] +|[*+\u2212-])$",
    re.IGNORECASE,
)
"""The text before a number that is negated, is one of several, or is the last term of an expression."""

_SIDE_BY_SIDE = re.compile(r"(?<![\d_^])\d+(?:\s+|\s*\)?\s*\()\s*\d")
"""Two numbers, which math-verify would add."""


def _expression(text: str) -> list[Any]:
    """The expression in the text: all of it if it is mathematics, else its last expression."""
    latex = _latex(text)
    if "$" in latex or r"\(" in latex or _is_prose(latex):
        return _last_expression(text[-_TAIL:])
    if _DENIED.search(latex) or _SIDE_BY_SIDE.search(_without_commands(latex)):
        return []
    return _parsed(latex)


def _last_expression(prose: str) -> list[Any]:
    from math_verify import parse

    before = re.search(r"[\d.,]*\d\D*$", prose)
    if before:
        sentence = re.split(r"[.!?]\s", prose[before.start() :])[0]
        if _DOUBTFUL.search(prose[: before.start()]) or _DENIED.search(sentence):
            return []
    return parse(prose, fallback_mode="no_fallback", parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def _parsed(latex: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    boxed = rf"\boxed{{{latex}}}"
    return parse(boxed, [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def _is_number(expression: Any) -> bool:
    from sympy import Number

    return isinstance(expression, Number)


def _is_worked_out(expression: Any) -> bool:
    """Whether it is a number, and not a calculation that yields one, such as the question's own."""
    from sympy import Add, Mul, Number

    for _ in range(2):  # of x = 3 and of 1 + 2 = 3, take the right-hand side
        expression = getattr(expression, "_unsorted_args", (expression,))[-1]
        expression = getattr(expression, "rhs", expression)
    products = expression.atoms(Mul)
    return not expression.has(Add) and not any(
        sum(isinstance(factor, Number) and factor != -1 for factor in product.args) > 1 for product in products
    )


def _prepare() -> None:
    """Load slow modules in a new worker. math-verify's own timers need signals, so they stay off."""
    import math_verify  # noqa: F401

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timers are not used
    guard_evaluation("math_verify", "latex2sympy2_extended")
    limit_memory()
