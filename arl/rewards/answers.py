"""Rewards of 1.0 or 0.0 that compare text or check its form; and extractors, which find the answer in a text.

They run on the event loop, since they take microseconds. Regular expressions, which can run for ever, have a worker.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, cast

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from arl.api.errors import ConfigError, RewardError
from arl.api.types import Example
from arl.rewards.pool import RewardPool
from arl.rewards.score import Score, reported, shown

_DIGITS = r"(?:[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?"
_NUMBER = re.compile(rf"(?P<sign>(?<![\w)])[-\u2212])?\$?(?P<above>{_DIGITS})(?: ?/ ?(?P<below>{_DIGITS}))?")
"""Allows thousands separators and fractions. A minus after a word, a digit or a parenthesis is not a sign."""

Extract = Callable[[str], str | None]
"""Finds the answer in the agent's text; returns None if there is none."""


def last_number(text: str) -> Decimal | None:
    """The last number in the text, such as `1,234.5`, `-3/4` or `2e-5`; `50%` gives 50. None if there is none."""
    last = deque(_NUMBER.finditer(text), maxlen=1)
    if not last:
        return None
    found = last[0]
    try:
        number = _decimal(found["above"]) / _decimal(found["below"]) if found["below"] else _decimal(found["above"])
    except ArithmeticError:  # division by 0, or overflow
        return None
    return number.copy_negate() if found["sign"] else number


_BOX = re.compile(
    r"\\(?:boxed|fbox)\s*(?:\{|(?P<bare>-?\d+(?:[.,/]\d+)*|\\[dt]?frac(?:\s*(?:\d|\{[^{}]*\})){2}|(?<=\s)[A-Za-z]\b))"
    r"|\\.|[{}]",
    re.DOTALL,
)


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, `\fbox{...}` or `\boxed 7`, by matching braces; None without one."""
    opened: list[int | None] = []  # the start of each open box; None for other braces
    start, stop = -1, -1
    for token in _BOX.finditer(text):
        if token["bare"]:
            start, stop = token.span("bare")
        elif token[0].endswith("{") and token[0] != r"\{":
            opened.append(token.end() if len(token[0]) > 1 else None)
        elif token[0] == "}" and opened and (begin := opened.pop()) is not None and begin > start:
            start, stop = begin, token.start()
    return text[start:stop].strip() if start >= 0 else None


_STATED = re.compile(r"\b(?:answer|option|choice)\b(?:[^.:\n]{0,60}?\b(?:is|are)\b|[\s*_]*[:=])[\s*_:]*", re.IGNORECASE)
_STATED_WITHIN = 2000


def stated(text: str) -> str | None:
    """The answer that the text states: its last box, else the text after the last `####` or "the answer is"."""
    if (boxed := last_boxed(text)) is not None:
        return boxed
    _, marked, rest = text.rpartition("####")
    end = rest if marked else text[-_STATED_WITHIN:]
    if last := deque(_STATED.finditer(end), maxlen=1):
        return re.split(r"[.!?](?=\s|$)|\n", end[last[0].end() :], maxsplit=1)[0].strip()
    return rest.strip().partition("\n")[0].strip() if marked else None


TEXT_MODE = r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|mathrm|mbox)"
_FONT = re.compile(rf"(?:{TEXT_MODE}|\\(?:math(?:bf|it|sf|tt)|boldsymbol|bm|emph|underline|fbox))\s*\{{([^{{}}]*)\}}")
_FONTS_WITHIN_FONTS = 3
_SPACE = re.compile(r"\\(?:[ ,;:!]|q?quad\b)|~")
_MARKS = re.compile(r"\\[()]|\\(?:left|right)\b|[$*]")
_ITEM = re.compile(r"(?:(?:option|choice)\s+)?[(\[]?(\w+)[)\]]?[.):]*", re.IGNORECASE)


def bare(text: str) -> str:
    r"""A short text to compare word for word: `(B)`, `B.`, `option B` and `\text{B}` give `B`; `Yes.` gives `yes`."""
    text = unmarked(text)
    item = _ITEM.fullmatch(text)
    text = item[1] if item else text.rstrip(".,;:")
    return text if len(text) == 1 else text.casefold()


def unmarked(text: str) -> str:
    """Without LaTeX's delimiters, LaTeX's and Markdown's fonts, and white space beyond single spaces."""
    for _ in range(_FONTS_WITHIN_FONTS):
        text = _FONT.sub(r"\1", text)
    return " ".join(_MARKS.sub("", _SPACE.sub(" ", text)).split())


@dataclass(frozen=True, slots=True)
class InTag:
    """Extracts the content of the last `<name>...</name>`."""

    name: str

    def __call__(self, text: str) -> str | None:
        _, opened, rest = text.rpartition(f"<{self.name}>")
        content, closed, _ = rest.partition(f"</{self.name}>")
        return content.strip() if opened and closed else None


def references(data: Example, column: str) -> list[str]:
    """The right answers in a column: a value or a list; `... #### 42` gives 42. Raises RewardError without one."""
    if column not in data:
        raise RewardError(
            f"the example has no column {column!r} with a reference answer (it has {', '.join(map(repr, data))}); name "
            f"the one that does, by the reward's column= or by columns={{{column!r}: ...}}"
        )
    given = data[column]
    several = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if not several or any(one is None or isinstance(one, Mapping) for one in several):
        raise RewardError(
            f"the column {column!r} of the example has no reference answer but {shown(given)} (it has the columns "
            f"{', '.join(map(repr, data))}); name the column that does"
        )
    return [str(one).rpartition("####")[2].strip() for one in several]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactMatch:
    """1.0 if the answer is a reference, up to white space."""

    column: str = "answer"
    """The example's column with the reference, or several."""
    extract: Extract | None = None
    """Finds the answer in the text; unset, the whole text is the answer."""
    ignore_case: bool = False

    @reported
    async def __call__(self, answer: str, data: Example) -> float:
        expected = [self._plain(reference) for reference in references(data, self.column)]
        found = self.extract(answer) if self.extract else answer
        return float(found is not None and self._plain(found) in expected)

    def check_example(self, data: Example) -> None:
        references(data, self.column)

    def _plain(self, text: str) -> str:
        text = " ".join(text.split())
        return text.casefold() if self.ignore_case else text


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericMatch:
    """1.0 if the answer's last number is the reference's last number. math_reward understands more than plain text."""

    column: str = "answer"
    """The example's column with the reference, or several."""
    tolerance: float = 0.0
    """The largest difference that counts as equal."""
    relative_tolerance: float = 0.0
    """The same, as a share of the reference. The larger of both limits counts."""
    extract: Extract | None = None
    """Finds the answer in the text; unset, the whole text is searched."""

    def check_example(self, data: Example) -> None:
        self._expected(data)

    def __post_init__(self) -> None:
        if not (self.tolerance >= 0 and self.relative_tolerance >= 0):
            raise ConfigError(
                f"tolerance is {self.tolerance}, relative_tolerance {self.relative_tolerance}; neither may be below 0"
            )

    @reported
    async def __call__(self, answer: str, data: Example) -> float:
        expected = self._expected(data)
        text = self.extract(answer) if self.extract else answer
        found = last_number(text) if text is not None else None
        return float(found is not None and any(self._is_close(found, one) for one in expected))

    def _expected(self, data: Example) -> list[Decimal]:
        numbers = [last_number(reference) for reference in references(data, self.column)]
        if None in numbers:
            raise RewardError(f"the column {self.column!r} of the example has no number: {shown(data[self.column])}")
        return [number for number in numbers if number is not None]

    def _is_close(self, found: Decimal, expected: Decimal) -> bool:
        limit = max(Decimal(self.tolerance), Decimal(self.relative_tolerance) * abs(expected))
        return found == expected or abs(found - expected) <= limit


class Tags:
    """1.0 if the answer consists of these tags only, in this order, each once and not empty.

    is_first_open: the prompt already opened the first tag, since some chat templates end with `<think>`.
    """

    def __init__(self, *names: str, is_first_open: bool = False) -> None:
        if not names or not all(re.fullmatch(r"[\w-]+", name) for name in names):
            raise ConfigError(f"the tags are {names}; give at least one name, such as Tags('think', 'answer')")
        self._names = names
        self._is_first_open = is_first_open

    @reported
    async def __call__(self, answer: str, data: Example) -> float:
        rest = f"<{self._names[0]}>{answer}" if self._is_first_open else answer
        for name in self._names:
            before, opened, rest = rest.partition(f"<{name}>")
            content, closed, rest = rest.partition(f"</{name}>")
            has_tags = any(tag in content for name in self._names for tag in (f"<{name}>", f"</{name}>"))
            if before.strip() or not (opened and closed and content.strip()) or has_tags:
                return 0.0
        return float(not rest.strip())


class JsonFormat:
    """1.0 if the answer is JSON of the given type, with or without a ```json fence."""

    def __init__(self, type: Any = Any) -> None:
        """type: a pydantic model, list[int] and so on."""
        try:
            self._adapter = TypeAdapter[Any](type)
        except PydanticUserError as error:
            raise ConfigError(f"no answer can be checked against {type!r}: {error}") from None

    @reported
    async def __call__(self, answer: str, data: Example) -> float:
        fenced = re.fullmatch(r"\s*```(?:json)?\n(.*)\n```\s*", answer, re.DOTALL)
        try:
            self._adapter.validate_json(fenced[1] if fenced else answer)
        except ValidationError:
            return 0.0
        return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Matches:
    """1.0 if the whole answer fits the pattern; `.` matches line breaks too. Not async: see `matches`."""

    pattern: str
    compiled: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "compiled", re.compile(self.pattern, re.DOTALL))
        except re.error as error:
            raise ConfigError(f"the pattern {self.pattern!r} is not a regular expression: {error}") from None

    def __call__(self, answer: str, data: Example) -> Score:
        return Score(float(self.compiled.fullmatch(answer) is not None), metrics={"killed": 0.0})


def matches(pattern: str, *, timeout_s: float = 1.0, workers: int = 1) -> RewardPool[[str, Example], Score]:
    """A reward of 1.0 if the whole answer fits the regular expression, in a worker process.

    If matching takes longer than timeout_s, the answer scores 0.0, and `killed` is 1.0 in its metrics.
    """
    killed = Score(0.0, metrics={"killed": 1.0})
    return RewardPool(Matches(pattern=pattern), timeout_s=timeout_s, workers=workers, if_killed=killed)


def _decimal(digits: str) -> Decimal:
    return Decimal(digits.replace(",", ""))


_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceMatch:
    r"""1.0 if the answer names the right choice, and no other: `B`, `(b)`, `B) Paris`, `Paris`, `\boxed{B}`.

    The answer is the content of the last box, else the text after the last `####` or "the answer is", else the whole
    text. Prose about several choices names none.
    """

    column: str = "answer"
    """The example's column with the right choice: its label, its index (an int, from 0), or its text."""
    choices: str = "choices"
    """The column with the choices: their texts (A, B, C, ...), or `{"label": [...], "text": [...]}`. If the example has
    no such column, the labels are letters, and only they are compared."""
    extract: Extract | None = None
    """Finds the answer in the text. If it is unset, the whole text is searched."""

    def check_example(self, data: Example) -> None:
        self._right(data)

    @reported
    async def __call__(self, answer: str, data: Example) -> float:
        right, texts = self._right(data)
        text = self.extract(answer) if self.extract else answer
        if text is None:
            return 0.0
        said = stated(text)
        return float(_named(text if said is None else said, texts) == right)

    def _right(self, data: Example) -> tuple[str, Mapping[str, str]]:
        """The right label, and all labels with their texts. Raises RewardError if the example lacks one of them."""
        texts = self._texts(data)
        given = data.get(self.column)
        if isinstance(given, int) and not isinstance(given, bool):
            label = list(texts)[given] if 0 <= given < len(texts) else None
        else:
            label = _named(given, texts) if isinstance(given, str) else None
        if label is None:
            raise RewardError(
                f"the column {self.column!r} of the example has {shown(given)}, which is none of the choices "
                f"{shown(dict(texts))}; it must be a label, an index from 0 or a text (the example has the columns "
                f"{', '.join(map(repr, data))}: name others by column= and choices=)"
            )
        return label, texts

    def _texts(self, data: Example) -> Mapping[str, str]:
        given = data.get(self.choices)
        if given is None:
            return dict.fromkeys(_LETTERS, "")
        if isinstance(given, Mapping):
            table = cast("Mapping[str, Sequence[Any]]", given)
            labels, texts = [str(label) for label in table.get("label", ())], list(table.get("text", ()))
        else:
            texts = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else []
            labels = list(_LETTERS[: len(texts)])
        if not texts or len(labels) != len(texts) or len(set(labels)) < len(labels):
            raise RewardError(
                f"the column {self.choices!r} of the example has {shown(given)}; it must be a list of 1 to 26 texts, "
                'or {"label": [...], "text": [...]} of equal lengths'
            )
        return {label: str(text) for label, text in zip(labels, texts, strict=True)}


_WITH_REST = re.compile(r"(?:(?:option|choice)\s+)?[(\[]?(\w+)[)\]]?[).:,]*\s+(.+)", re.IGNORECASE | re.DOTALL)
_REASON = re.compile(r"(?:because|since)\b", re.IGNORECASE)


def _named(said: str, texts: Mapping[str, str]) -> str | None:
    """The label of the choice that a short text names: by its label, by its text, or by both and perhaps a reason."""
    said = unmarked(said)
    if (label := _label(bare(said), texts)) is not None:
        return label
    with_rest = _WITH_REST.fullmatch(said)
    label = _label(with_rest[1], texts) if with_rest else None
    if with_rest and label and (_REASON.match(with_rest[2]) or _is_text(with_rest[2], texts[label])):
        return label
    named = [label for label, text in texts.items() if _is_text(said, text)]
    return named[0] if len(named) == 1 else None


def _label(said: str, texts: Mapping[str, str]) -> str | None:
    return next((label for label in (said, said.upper()) if label in texts), None)


def _is_text(said: str, text: str) -> bool:
    return bool(text) and bare(said).casefold() == bare(text).casefold()
