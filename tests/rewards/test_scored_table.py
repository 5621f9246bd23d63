"""The table of docs/rewards.md: `python tests/rewards/test_scored_table.py` writes it, the test compares it."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

from arl.rewards import ChoiceMatch, MathEquality

PAIRS = Path(__file__).parent / "pairs" / "table.txt"
PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"
HEAD = "| | answer | reference | score | |\n|---|---|---|---|---|\n"


def rows() -> Iterator[tuple[str, str, str, int, str]]:
    kind = ""
    for line in PAIRS.read_text().splitlines()[1:]:
        if line.startswith("# "):
            kind = line[2:]
            continue
        answer, reference, *note = line.split(" ;; ")
        example = {"answer": reference}
        given = ChoiceMatch()(answer, example) if kind == "ChoiceMatch" else None
        score = MathEquality()(answer, example).value if given is None else asyncio.run(given)
        yield kind, answer, reference, int(score), "".join(note)


def table() -> str:
    lines, before = [HEAD], ""
    for kind, answer, reference, score, note in rows():
        shown = (f"`{text}`".replace("|", r"\|") for text in (answer, reference))
        lines.append(f"| {kind if kind != before else ''} | {' | '.join(shown)} | {score} | {note} |\n")
        before = kind
    return "".join(lines)


def test_the_page_has_the_scores_as_they_are() -> None:
    assert table() in PAGE.read_text()


def test_a_score_that_is_not_right_says_what_would_be() -> None:
    noted = [row for row in rows() if row[4]]
    assert [row for row in noted if not row[4].startswith(f"{1 - row[3]}: ")] == []


def test_no_answer_of_one_pair_makes_the_scorer_raise_for_the_reference_of_another() -> None:
    pairs = [(answer, reference) for _, answer, reference, _, _ in rows()]
    for (answer, _), (_, reference) in zip(pairs, [*pairs[7:], *pairs[:7]], strict=True):
        assert MathEquality()(answer, {"answer": reference}).metrics["unreadable"] == 0.0, (answer, reference)


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(HEAD)
    _, end, after = rest.partition("\n\n")
    PAGE.write_text(before + table() + end[1:] + after)
