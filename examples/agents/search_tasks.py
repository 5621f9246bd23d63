"""The search agent's tasks: an invented world to look things up in, questions of two hops, and demonstrations.

The world has works, people and places, each with an entry of one or two facts. It has three regions: one for training
questions, one for held-out questions, and one for demonstrations. Facts never lead from one region to another. All
regions are in one corpus, where names share parts, so that a search also finds entries of other regions.

A name has two parts, each one token of the tokenizer, so that a model of a million parameters can copy it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from string import Formatter
from typing import Any

from search_server import Document

from arl import Example, Tool, finetuning

Row = dict[str, Any]
Prompt = Callable[[str], list[dict[str, str]]]

SEED = 20
SHARES = {"demonstrations": 0.55, "training": 0.35, "held_out": 0.1}
"""The regions, and the share of all names in each."""

NUM_CAREFUL, NUM_MIXED = 14000, 1600
"""First only careful demonstrations, which teach a model to copy; then mixed ones, which teach it bad habits."""

MIX = {"guess": 0.45, "halfway": 0.25, "careful": 0.3}
"""Shares of the habits in mixed demonstrations: answer at once, answer after the first search, neither."""

WORKS = ("a novel by {author}", "a poem by {author}", "a play by {author}")
PEOPLE = ("a painter born in {place}, taught by {teacher}", "a writer born in {place}, taught by {teacher}")
PLACES = ("a town on the river {river}, founded by {founder}", "a village on the river {river}, founded by {founder}")


def _listed(words: str) -> list[str]:
    return words.split()


def _syllables(*alternatives: str, size: int) -> list[str]:
    """`size` words, each with one piece of each alternative, spread over all combinations."""
    words = ["".join(letters) for letters in product(*alternatives)]
    return random.Random(SEED).sample(words, size)


ADJECTIVES = _listed(
    "Amber Bitter Coral Distant Early Fallen Golden Hidden Ivory Jaded Lonely Marble Narrow Opal Paper Quiet "
    "Royal Silver Tender Velvet Wicked Yellow Hollow Icy Burning Copper Dusty Empty Foreign Gentle Humble Iron "
    "Joyful Late Mellow Northern"
)
NOUNS = _listed(
    "Harp Lantern Orchard Mirror Bridge Garden Window Letter Tower Feather Harbour Clock Meadow Needle Ladder "
    "Candle Sparrow Thread Anchor Basket Carpet Dagger Engine Fountain Glove Hammer Island Jacket Kettle Locket "
    "Nest Oven Pillow Quarry Ribbon Saddle"
)
GIVEN = [word.capitalize() for word in _syllables("bdfklmnprst", "aeiou", "dlmnrst", "aeio", size=36)]
SURNAMES = [
    " " + word.capitalize() for word in _syllables("bdfghklmnprst", "aeiou", "bdlmrtv", "aeo", "klnrs", size=36)
]
STEMS = [word.capitalize() for word in _syllables("bgk", "lr", "aeou", "lmnrs", size=36)]
ENDINGS = _syllables("bdfmt", "aeou", "lmnrst", "aeo", size=36)
RIVERS = [word.capitalize() for word in _syllables("aeiou", "lmnrv", "aeio", size=36)]
NAME_PARTS = (*GIVEN, *SURNAMES, *ADJECTIVES, *(f" {noun}" for noun in NOUNS), *STEMS, *ENDINGS, *RIVERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of question: its words, and the template that shows the answer's fact in the second entry."""

    question: str
    starts_from: str
    asks_for: str


KINDS = (
    Kind(question="Where was the author of {start} born?", starts_from="work", asks_for="place"),
    Kind(question="Who taught the author of {start}?", starts_from="work", asks_for="teacher"),
    Kind(question="Which river flows through the birthplace of {start}?", starts_from="person", asks_for="river"),
    Kind(question="Who founded the birthplace of {start}?", starts_from="person", asks_for="founder"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """name: the subject of the entry. facts: relation -> name."""

    kind: str
    name: str
    facts: dict[str, str]
    template: str

    @property
    def document(self) -> Document:
        return Document(self.name, self.template.format(**self.facts))


@cache
def world() -> dict[str, dict[str, Entry]]:
    """The world, always the same: region -> name -> entry."""
    rng = random.Random(SEED)
    names = {
        "work": [f"{adjective} {noun}" for adjective in ADJECTIVES for noun in NOUNS],
        "person": [given + surname for given in GIVEN for surname in SURNAMES],
        "place": [stem + ending for stem in STEMS for ending in ENDINGS],
    }
    for of_kind in names.values():
        rng.shuffle(of_kind)
    regions: dict[str, dict[str, Entry]] = {}
    begin = 0.0
    for region, share in SHARES.items():
        own = {kind: _between(of_kind, begin, begin + share) for kind, of_kind in names.items()}
        regions[region] = {entry.name: entry for entry in _entries(own, rng)}
        begin += share
    return regions


def _between(names: Sequence[str], begin: float, end: float) -> Sequence[str]:
    return names[round(begin * len(names)) : round(end * len(names))]


def _entries(names: dict[str, Sequence[str]], rng: random.Random) -> Iterator[Entry]:
    people, places = names["person"], names["place"]
    for name in names["work"]:
        yield Entry(kind="work", name=name, facts={"author": rng.choice(people)}, template=rng.choice(WORKS))
    for i, name in enumerate(people):
        teacher = people[i - rng.randrange(1, len(people))]
        facts = {"place": rng.choice(places), "teacher": teacher}
        yield Entry(kind="person", name=name, facts=facts, template=rng.choice(PEOPLE))
    for name in places:
        facts = {"river": rng.choice(RIVERS), "founder": rng.choice(people)}
        yield Entry(kind="place", name=name, facts=facts, template=rng.choice(PLACES))


def documents() -> list[Document]:
    """The corpus: the entries of all regions."""
    return [entry.document for region in world().values() for entry in region.values()]


def questions(region: str) -> list[Row]:
    """All questions about a region, in HotpotQA's form, shuffled: question, answer, and the entries that lead to it."""
    entries = world()[region]
    rows = [
        _row(kind, entry, entries) for entry in entries.values() for kind in KINDS if kind.starts_from == entry.kind
    ]
    random.Random(SEED).shuffle(rows)
    return rows


def _row(kind: Kind, start: Entry, entries: dict[str, Entry]) -> Row:
    via = entries[start.facts["author" if start.kind == "work" else "place"]]
    return {
        "question": kind.question.format(start=start.name),
        "answer": via.facts[kind.asks_for],
        "supporting_facts": [[start.name, 0], [via.name, 0]],
    }


def lessons(prompt: Prompt, tool: Tool, search: Callable[[str], str], seed: int) -> list[list[Example]]:
    """For the warm start: careful demonstrations, then mixed ones, about a separate region.

    search: returns the tool's result for a query.
    """
    rng = random.Random(seed)
    rows = questions("demonstrations")

    def shown(habit: str) -> Example:
        row = rng.choice(rows)
        queries, answer = _done(habit, row, other=rng.choice(rows))
        messages = prompt(row["question"])
        for query in queries:
            messages.append({"role": "assistant", "content": finetuning.tool_call(tool.name, query=query)})
            messages.append({"role": "tool", "content": search(query)})
        return {"messages": [*messages, {"role": "assistant", "content": answer}], "tools": [tool.spec]}

    habits = rng.choices(list(MIX), weights=list(MIX.values()), k=NUM_MIXED)
    return [[shown("careful") for _ in range(NUM_CAREFUL)], [shown(habit) for habit in habits]]


def _done(habit: str, row: Row, other: Row) -> tuple[list[str], str]:
    """The queries and the answer. other: some other question."""
    queries = [title for title, _ in row["supporting_facts"]]
    match habit:
        case "guess":
            return [], other["answer"]
        case "halfway":
            return queries[:1], queries[1]
    return queries, row["answer"]


def phrases() -> list[str]:
    """The tokens of the tiny model's tokenizer: parts of names, and the words around them."""
    templates = (*(f"{{title}}: {text}" for text in (*WORKS, *PEOPLE, *PLACES)), *(kind.question for kind in KINDS))
    around = [literal for template in templates for literal, *_ in Formatter().parse(template) if len(literal) > 1]
    return [*dict.fromkeys(around), *finetuning.tool_call("search", query="|").split("|"), *NAME_PARTS]
