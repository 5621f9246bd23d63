"""math_reward: whether an answer equals the reference as mathematics, by math-verify in worker processes.

math-verify reads LaTeX. It reads other text as a product: "forty two" as a product of letters, "16 3" as a product of
numbers. This module decides which text math-verify gets, and refuses references that it would misread.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import floor
from typing import Any

from arl.api.errors import RewardError
from arl.api.types import Example
from arl.rewards.answers import TEXT_MODE, Extract, bare, last_boxed, references, stated
from arl.rewards.pool import RewardPool
from arl.rewards.score import Score, shown
from arl.rewards.scorers import NOTHING_COUNTED, guard_evaluation, limit_memory, require

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timers are not used

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
    Otherwise the model would be trained on all answers except its worst. The metric `killed` counts such answers,
    `unreadable` those for which math-verify raises, `unreadable_reference` those to a reference that math-verify cannot
    read: only the same text equals it. Examples looked at before training may have no such reference (check_example).
    Raises RewardError if math-verify is not installed, or if the example's reference is missing or in prose.
    """
    require("math_verify", "math-verify", "rewards")
    killed = Score(0.0, metrics=NOTHING_COUNTED | {"killed": 1.0})
    equality = MathEquality(column=column, extract=extract)
    return RewardPool(equality, timeout_s=timeout_s, workers=workers, prepare=_prepare, if_killed=killed)


@dataclass(frozen=True, slots=True, kw_only=True)
class MathEquality:
    """The function that math_reward's workers run."""

    column: str = "answer"
    extract: Extract | None = None

    def check_example(self, data: Example) -> None:
        for reference in references(data, self.column):
            if not is_read(reference):
                raise RewardError(
                    f"the reference answer {shown(reference)} cannot be read by math-verify, so only the same text "
                    "would equal it; leave such examples out, or compare it as text, with ExactMatch"
                )

    def __call__(self, answer: str, data: Example) -> Score:
        expected = references(data, self.column)
        metrics = NOTHING_COUNTED | {"unreadable_reference": float(not all(map(is_read, expected)))}
        text = self.extract(answer) if self.extract else answer
        try:
            is_right = text is not None and any(is_equal(text, reference) for reference in expected)
        except Exception:  # noqa: BLE001 - whatever sympy raises for an answer; a reference has been read by now
            is_right, metrics["unreadable"] = False, 1.0
        return Score(float(is_right), metrics=metrics)


def is_equal(text: str, reference: str) -> bool:
    """Whether the text's answer equals the reference. Raises RewardError for a reference in prose."""
    from math_verify import verify
    from math_verify.grader import get_pct_val
    from sympy import Number

    wanted, said = readable(reference), stated(text)
    said = text if said is None else said
    gold = _gold(wanted)
    if bare(said) == bare(wanted) or not gold:
        return _squeezed(said) == _squeezed(wanted)
    found = _expression(_MODULO.sub("", said))
    if isinstance(gold[0], Number):
        found = [one for one in found if _is_worked_out(one)]
    percents, gold_percents = ([get_pct_val(one) for one in side] for side in (found, gold))
    if any(percents) != any(gold_percents):  # 12.5% is 0.125, and is written for 12.5
        found, gold = ([*side, *filter(None, of)] for side, of in ((found, percents), (gold, gold_percents)))
    rounding, precision = _precision([*gold, *found])
    return verify(gold, found, rounding, precision, allow_set_relation_comp=True, timeout_seconds=None)


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


def is_read(reference: str) -> bool:
    """Whether math-verify or a comparison of text reads the reference. Raises RewardError for prose."""
    wanted = readable(reference)
    return _is_text(wanted) or bool(_gold(wanted))


_MODULO = re.compile(r"\\pmod\s*(?:\{[^{}]*\}|\w)|\(\s*(?:\\?mod|\\bmod)\s*\w+\s*\)")
"""What follows a congruence. math-verify would read a product of m, o and d, or leave the modulus out."""


@lru_cache(1024)
def _gold(wanted: str) -> list[Any]:
    """The reference as math-verify reads it; empty if it does not, or if it is no value, such as 1/0."""
    from sympy import nan, zoo

    try:
        found = [] if _is_text(wanted) or _MODULO.search(wanted) else _parsed(_latex(wanted))
        return [] if any(one.has(nan, zoo) for one in found) else found
    except Exception:  # noqa: BLE001 - whatever sympy raises
        return []


def _squeezed(text: str) -> str:
    return re.sub(r"\{(\w)\}", r"\1", "".join(bare(text).split()))


def _precision(expressions: list[Any]) -> tuple[int, int]:
    """The decimals and digits to compare to: of numbers below 0.001, six significant digits instead of six decimals."""
    from sympy import log

    sizes = [abs(number.evalf(3)) for one in expressions for number in _numbers(one)]
    smallest = min((size for size in sizes if size.is_positive and size.is_finite), default=1)
    leading = min(-floor(log(smallest, 10).evalf(3)), 1000)  # decimals up to the first that is not 0
    return (leading + 5 if leading > 3 else 6), max(15, leading + 10)


def _numbers(expression: Any) -> Iterator[Any]:
    """The largest parts that are numbers."""
    if getattr(expression, "is_number", False):
        yield expression
    else:
        for part in getattr(expression, "args", ()):
            yield from _numbers(part)


_TEXT = re.compile(rf"{TEXT_MODE}\{{[^{{}}]*\}}")
_WORD = re.compile(r"[^\W\d_]{3,}(?:[-'][^\W\d_]+)*|[^\W\d_]{2}")


def _is_text(wanted: str) -> bool:
    """Whether the reference is one word, or words in LaTeX's text mode. A single letter may be a variable."""
    word = bare(wanted)
    is_marked = _TEXT.fullmatch(wanted.strip("$")) and not re.fullmatch(r"-?[\d.,]+", word)
    return len(word) > 1 and bool(is_marked or _WORD.fullmatch(word))


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


_DELIMITERS = re.compile(r"^(?:\\?\$|\\\(|\\\[|\\approx\b|[\s*`#=\u2248\u20ac\u00a3])+|(?:\$|\\\)|\\\]|[\s*`.,;:])+$")
_FUNCTIONS = r"pi|a?(?:sin|cos|tan)h?|arc(?:sin|cos|tan)|cot|sec|csc|log|ln|exp"
_AS_LATEX: Sequence[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = (
    (re.compile(r"\\!|\\(?:left|right)(?![a-zA-Z])"), ""),
    (re.compile(r"(?<!\\)\\[,;: ]|\\q?quad(?![a-zA-Z])|~"), " "),
    (re.compile(r"(?<![\d./}])(\d+) (\d+)/(\d+)(?![\d./])"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"(?<=\d)[eE]([+-]?\d+)(?![\d.])"), r"\\cdot 10^{\1}"),
    (re.compile(rf"(?<![\\a-zA-Z])({_FUNCTIONS})(?![a-zA-Z])"), r"\\\1 "),
    (re.compile(r"(?<=[\w)])\*\*(?=[\w(])"), "^"),
    (re.compile(r"\u221a ?(\d+|[a-zA-Z])"), r"\\sqrt{\1}"),
    (re.compile(r"\\[lr]angle(?![a-zA-Z])"), lambda bracket: "(" if bracket[0] == r"\langle" else ")"),
    (re.compile(r"\\bmod(?![a-zA-Z])"), r"\\mod"),
    (re.compile(r"\\varnothing(?![a-zA-Z])"), r"\\emptyset"),
    (re.compile(r"(?<![\\a-zA-Z])oo(?![a-zA-Z])"), r"\\infty "),
    (re.compile(r"(?<![\d.])(\d*)\.(\d*)\\overline\{(\d+)\}"), lambda number: _recurring(*number.groups())),
)
"""Spaces, mixed numbers, powers, roots and functions as plain text writes them; and LaTeX that math-verify misreads."""
_SIGNS = str.maketrans(
    {"\u2212": "-", "\u03c0": r"\pi ", "\u00b7": r"\cdot ", "\u221e": r"\infty ", "\u00b0": r"^\circ "}
)
_THOUSANDS = re.compile(r"(?<![\d.,] )(?<![\d.,])[1-9]\d{0,2}(?: \d{3})+(?![\d ])")


def _recurring(whole: str, fixed: str, period: str) -> str:
    r"""`0.1\overline{6}` as the fraction 15/90."""
    before = int(whole + fixed or "0")
    return rf"\frac{{{int(whole + fixed + period) - before}}}{{{10 ** len(fixed) * (10 ** len(period) - 1)}}}"


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
        from math_verify import parse

        prose = text[-_TAIL:]
        if before := re.search(r"[\d.,]*\d\D*$", prose):
            sentence = re.split(r"[.!?]\s", prose[before.start() :])[0]
            if _DOUBTFUL.search(prose[: before.start()]) or _DENIED.search(sentence):
                return []
        return parse(prose, fallback_mode="no_fallback", parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    if _DENIED.search(latex) or _SIDE_BY_SIDE.search(_without_commands(latex)):
        return []
    return _parsed(latex)


def _parsed(latex: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    boxed = rf"\boxed{{{latex}}}"
    return parse(boxed, [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def _is_worked_out(expression: Any) -> bool:
    """Whether it is a number, and not a calculation that yields one, such as the question's own."""
    from sympy import Add, Mod, Mul, Number

    for _ in range(2):  # of x = 3 and of 1 + 2 = 3, take the right-hand side
        expression = getattr(expression, "_unsorted_args", (expression,))[-1]
        expression = getattr(expression, "rhs", expression)
    products = expression.atoms(Mul)
    return not expression.has(Add, Mod) and not any(
        sum(isinstance(factor, Number) and factor != -1 for factor in product.args) > 1 for product in products
    )


def _prepare() -> None:
    """Load slow modules in a new worker. math-verify's own timers need signals, so they stay off."""
    import math_verify  # noqa: F401

    guard_evaluation("math_verify", "latex2sympy2_extended")
    limit_memory()
