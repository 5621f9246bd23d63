"""The long agent's tasks: books of many pages, a question about one line of them, and demonstrations.

A name is one token of the tokenizer, so that a model of a million parameters can copy it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from arl import Compaction, Example, TinyShape, Tool, finetuning

Row = dict[str, Any]

NUM_DRILLS, NUM_CAREFUL, NUM_MIXED = 2400, 700, 200
"""The demonstrations: pages with many questions, which teach a model to copy; the books of careful readers; and those of
mixed ones, which teach it bad habits."""
RIGHT, OTHER = 0.5, 0.3
"""A careless reader's summaries: the shares of right ones, and of those with another line. The rest notes nothing."""
HASTY = 0.15
"""The share of careless readers that guess before the last page."""

NOTHING = "nothing"
NO_MORE = "There are no more pages."
LINE = "The {thing} is in {place}."
QUESTION = "Where is the {thing}?"


def _syllables(*alternatives: str, size: int) -> list[str]:
    words = ["".join(letters).capitalize() for letters in product(*alternatives)]
    return random.Random(20).sample(words, size)


THINGS = _syllables("bdfklmnprst", "aeiou", "dlmnrst", "aeio", size=60)
PLACES = _syllables("bgk", "lr", "aeou", "lmnrs", "aeo", "klnrs", size=60)


class Book:
    """The pages of one episode, read one after another."""

    def __init__(self, pages: Sequence[str]) -> None:
        self._left = iter(pages)

    def next_page(self) -> str:
        """Turn the page, and read it."""
        return next(self._left, NO_MORE)


TOOL = Tool.from_function(Book([]).next_page)


def book(rng: random.Random, num_pages: int, lines: int) -> Row:
    """A question, its answer, and the pages of a book with one line that says so."""
    things = (
        rng.sample(THINGS, num_pages * lines) if num_pages * lines <= len(THINGS) else _many(rng, num_pages * lines)
    )
    places = [rng.choice(PLACES) for _ in things]
    said = [LINE.format(thing=thing, place=place) for thing, place in zip(things, places, strict=True)]
    asked = rng.randrange(len(things))
    return {
        "question": QUESTION.format(thing=things[asked]),
        "answer": places[asked],
        "pages": ["\n".join(said[i : i + lines]) for i in range(0, len(said), lines)],
        "thing": things[asked],
    }


def _many(rng: random.Random, size: int) -> list[str]:
    """Names of two parts, for books with more things than names."""
    return [f"{a} {b}" for a, b in rng.sample([*product(THINGS, THINGS)], size)]


def books(seed: int, size: int, num_pages: int, lines: int) -> list[Row]:
    rng = random.Random(seed)
    return [book(rng, num_pages, lines) for _ in range(size)]


class Teacher:
    """Demonstrates readers, context by context."""

    def __init__(self, system: str, compaction: Compaction, num_pages: int, lines: int, seed: int) -> None:
        self._system, self._compaction = system, compaction
        self._num_pages, self._lines = num_pages, lines
        self._rng = random.Random(seed)

    def lessons(self) -> list[list[Example]]:
        """Drills, then careful readers, then mixed ones."""
        return [
            [self._drill() for _ in range(NUM_DRILLS)],
            *(
                [context for _ in range(size) for context in self._contexts(is_careful=is_careful)]
                for size, is_careful in ((NUM_CAREFUL, True), (NUM_MIXED, False))
            ),
        ]

    def _drill(self) -> Example:
        """Two pages, and questions about their lines."""
        row = book(self._rng, 2, self._lines)
        lines = self._rng.sample("\n".join(row["pages"]).splitlines(), 2 * self._lines)
        messages: list[Any] = [
            {"role": "system", "content": self._system},
            {"role": "user", "content": "\n".join(row["pages"])},
        ]
        for line in lines[:6]:
            note = _noted(line)
            messages.append({"role": "user", "content": QUESTION.format(thing=note.split(": ")[0])})
            messages.append({"role": "assistant", "content": note})
        return {"messages": messages, "tools": [TOOL.spec]}

    def _contexts(self, *, is_careful: bool) -> Iterator[Example]:
        """All contexts of one episode."""
        row = book(self._rng, self._num_pages, self._lines)
        pages, notes = [*row["pages"]], ""
        stop = self._rng.randrange(len(pages)) if not is_careful and self._rng.random() < HASTY else -1
        while True:
            now = [pages.pop(0) for _ in range(min(self._rng.choice((1, 2, 2, 2)), len(pages)))]
            is_hasty = len(pages) <= stop
            is_last = not pages and (len(now) < 2 or self._rng.random() < 0.5)
            read = [*now, NO_MORE] if is_last else now
            if is_hasty or is_last:
                answer = _line_in([*now, notes], row) or NOTHING
                guess = f"{row['thing']}: {self._rng.choice(PLACES)}"
                yield self._shown(row, notes, now if is_hasty else read, guess if is_hasty else answer)
                return
            summary = self._summary(row, notes, now, is_careful=is_careful)
            yield self._shown(row, notes, read, self._compaction.instruction, summary)
            notes = summary

    def _summary(self, row: Row, notes: str, now: Sequence[str], *, is_careful: bool) -> str:
        right = _line_in([*now, notes], row) or NOTHING
        chance = self._rng.random()
        if is_careful or chance < RIGHT:
            return right
        return _noted(self._rng.choice("\n".join(now).splitlines())) if chance < RIGHT + OTHER else NOTHING

    def _shown(self, row: Row, notes: str, read: Sequence[str], *said: str) -> Example:
        """said: the answer; or the instruction, and the summary."""
        task: list[Any] = [{"role": "system", "content": self._system}, {"role": "user", "content": row["question"]}]
        messages = self._compaction.begun(task, notes) if notes else task
        for page in read:
            messages.append({"role": "assistant", "content": finetuning.tool_call(TOOL.name)})
            messages.append({"role": "tool", "content": page})
        if len(said) > 1:
            messages.append({"role": "user", "content": said[0]})
        return {"messages": [*messages, {"role": "assistant", "content": said[-1]}], "tools": [TOOL.spec]}


def _line_in(texts: Sequence[str], row: Row) -> str | None:
    """A note of the line that was asked for, if one of the texts has it."""
    line, note = LINE.format(thing=row["thing"], place=row["answer"]), f"{row['thing']}: {row['answer']}"
    return note if any(line in text or note in text for text in texts) else None


def _noted(line: str) -> str:
    thing, place = line.removeprefix("The ").removesuffix(".").split(" is in ")
    return f"{thing}: {place}"


def phrases() -> list[str]:
    """The tokens of the tiny model's tokenizer: the names, and the words around them."""
    return ["The ", " is in ", "Where is the ", ": ", ".\n", NOTHING, NO_MORE, *THINGS, *PLACES]


def shape(context_length: int) -> TinyShape:
    """Of the tiny model."""
    sizes = {
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 24,
        "initializer_range": 0.1,
    }
    return TinyShape(**sizes, context_length=context_length)
