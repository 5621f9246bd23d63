"""The long agent's tasks: books of many pages with treasures among their words, and demonstrations of reading them.

A word is one token of the tiny model's tokenizer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

from arl import Compaction, Example, TinyShape, Tool, finetuning

Row = dict[str, Any]

QUESTION = "Which treasures are in the book?"
NOTHING, NO_MORE = "nothing", "There are no more pages."
TREASURES = ("amber", "coral", "gold", "jade", "opal", "pearl", "ruby", "silver")
THINGS = (
    *("apple", "bell", "boat", "bread", "candle", "chair", "clock", "cup"),
    *("door", "flour", "hat", "kettle", "ladder", "letter", "map", "needle"),
)

NUM_CAREFUL, NUM_MIXED = 900, 250
"""Books in the demonstrations: first careful readers, who note every treasure; then mixed ones, with bad habits."""
RIGHT = 0.12
"""The share of right notes by careless readers. Their other notes are a word that they remember, treasure or not."""
HASTY = 0.15
"""The share of careless readers that answer before the last page."""
PER_CONTEXT = 3
"""The pages that the tiny model's context has room for."""


class Book:
    """The pages of one episode, read one after another."""

    def __init__(self, pages: Sequence[str]) -> None:
        self._left = iter(pages)

    def next_page(self) -> str:
        """Turn the page, and read it."""
        return next(self._left, NO_MORE)


TOOL = Tool.from_function(Book([]).next_page)


def book(rng: random.Random, num_pages: int, words: int) -> Row:
    """A book of so many pages, of so many words each, with a treasure on two pages of five."""
    pages = [rng.choices(THINGS, k=words) for _ in range(num_pages)]
    treasures = rng.sample(TREASURES, min(len(TREASURES), max(1, num_pages * 2 // 5)))
    for page, treasure in zip(rng.sample(pages, len(treasures)), treasures, strict=True):
        page[rng.randrange(words)] = treasure
    shown = [" ".join(page) for page in pages]
    return {"question": QUESTION, "answer": treasures_in(shown), "pages": shown}


def books(seed: int, size: int, num_pages: int, words: int) -> list[Row]:
    rng = random.Random(seed)
    return [book(rng, num_pages, words) for _ in range(size)]


def treasures_in(texts: Sequence[str]) -> list[str]:
    """Each once, in the order of the alphabet."""
    words = {word for text in texts for word in re.findall("[a-z]+", text.lower())}
    return [treasure for treasure in TREASURES if treasure in words]


class Teacher:
    """Demonstrates readers, context by context."""

    def __init__(self, system: str, compaction: Compaction, num_pages: int, words: int, seed: int) -> None:
        self._system, self._compaction = system, compaction
        self._num_pages, self._words = num_pages, words
        self._rng = random.Random(seed)

    def lessons(self) -> list[list[Example]]:
        """Careful readers, then mixed ones."""
        return [
            [context for _ in range(size) for context in self._contexts(is_careful=is_careful)]
            for size, is_careful in ((NUM_CAREFUL, True), (NUM_MIXED, False))
        ]

    def _contexts(self, *, is_careful: bool) -> Iterator[Example]:
        """All contexts of one episode."""
        pages, notes = book(self._rng, self._num_pages, self._words)["pages"], ""
        hasty_at = self._rng.randrange(len(pages)) if not is_careful and self._rng.random() < HASTY else len(pages)
        num_read = 0
        while True:
            now, pages = pages[:PER_CONTEXT], pages[PER_CONTEXT:]
            if num_read + len(now) > hasty_at:
                read = now[: hasty_at - num_read]
                yield self._shown(notes, read, noted([notes, *read]))
                return
            if len(now) < PER_CONTEXT:
                yield self._shown(notes, [*now, NO_MORE], noted([notes, *now]))
                return
            summary = self._summary(notes, now, is_careful=is_careful)
            yield self._shown(notes, now, summary, self._compaction.instruction)
            notes, num_read = summary, num_read + len(now)

    def _summary(self, notes: str, now: Sequence[str], *, is_careful: bool) -> str:
        if is_careful or self._rng.random() < RIGHT:
            return noted([notes, *now])
        return self._rng.choice(" ".join(now).split())

    def _shown(self, notes: str, read: Sequence[str], said: str, asked: str = "") -> Example:
        """said: the answer, or what was asked for after the pages: a summary."""
        task: list[Any] = [{"role": "system", "content": self._system}, {"role": "user", "content": QUESTION}]
        messages = self._compaction.begun(task, notes) if notes else task
        for page in read:
            messages.append({"role": "assistant", "content": finetuning.tool_call(TOOL.name)})
            messages.append({"role": "tool", "content": page})
        if asked:
            messages.append({"role": "user", "content": asked})
        return {"messages": [*messages, {"role": "assistant", "content": said}], "tools": [TOOL.spec]}


def noted(texts: Sequence[str]) -> str:
    """A note of the treasures in the texts."""
    return " ".join(treasures_in(texts)) or NOTHING


def phrases() -> list[str]:
    """The tokens of the tiny model's tokenizer."""
    return [NO_MORE, NOTHING, *TREASURES, *THINGS]


def shape(context_length: int) -> TinyShape:
    """The tiny model's."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "head_dim": 16, "initializer_range": 0.12}
    return TinyShape(**sizes, context_length=context_length)
