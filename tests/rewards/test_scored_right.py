"""Answers to rows in the shapes of datasets (pairs/*.yaml): what must score, and what must not."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from arl.api.errors import RewardError
from arl.rewards import ChoiceMatch, InTag, MathEquality, Score
from arl.rewards.mathematics import is_equal


def rows(name: str) -> list[dict[str, Any]]:
    return yaml.safe_load((Path(__file__).parent / "pairs" / f"{name}.yaml").read_text())


@pytest.mark.parametrize(
    ("name", "reward"),
    [
        ("gsm8k", MathEquality()),
        ("math", MathEquality(column="solution")),
        ("answer_tags", MathEquality(extract=InTag("answer"))),
    ],
)
def test_right_answers_score_and_wrong_ones_do_not(name: str, reward: MathEquality) -> None:
    missed = list[tuple[str, str]]()
    for row in rows(name):
        reward.check_example(row["example"])
        for said, score in (("right", 1.0), ("wrong", 0.0)):
            missed += [(said, answer) for answer in row[said] if reward(answer, row["example"]).value != score]
    assert missed == []


async def test_the_right_choice_scores_and_no_other() -> None:
    missed = list[tuple[str, str]]()
    for row in rows("choices"):
        reward = ChoiceMatch(column=row.get("column", "answer"))
        reward.check_example(row["example"])
        for said, score in (("right", 1.0), ("wrong", 0.0)):
            missed += [(said, answer) for answer in row[said] if await reward(answer, row["example"]) != score]
    assert missed == []


@pytest.mark.parametrize(
    "reference", ["forty two", "answer is 10000", "36 cm^2", "7:30 PM", "no solution", "July 4", "", "He has 4. Or 5."]
)
def test_a_reference_of_prose_is_refused_by_name(reference: str) -> None:
    for refused in (MathEquality().check_example, lambda data: MathEquality()("4", data)):
        with pytest.raises(RewardError, match=f"{re.escape(repr(reference))} is not mathematics.*with ExactMatch"):
            refused({"answer": reference})


@pytest.mark.parametrize(
    "reference",
    [
        "2x + 3",
        "(B)",
        "yes",
        "A",
        "12 apples",
        "5 km",
        "xyz",
        "2pi",
        r"\sin x",
        "log 2",
        "x=2 or x=3",
        r"\text{no solution}",
    ],
)
def test_a_reference_word_for_word_scores(reference: str) -> None:
    MathEquality().check_example({"answer": reference})
    for answer in (reference, rf"\boxed{{{reference}}}", f"The answer is {reference}.", f"Thus\n#### {reference}"):
        assert is_equal(answer, reference), answer
    assert not is_equal(f"The answer is not {reference}.", reference)


def test_words_are_compared_as_text_not_as_products_of_letters() -> None:
    assert is_equal(r"\boxed{\text{dog}}", "dog")
    assert not is_equal("god", "dog")
    assert not is_equal(r"\boxed{\text{not}\ \text{even}}", r"\text{even}")


@pytest.mark.parametrize(
    ("example", "what"),
    [
        ({"answer": 4, "choices": ["a", "b"]}, "has 4, which is none of the choices"),
        ({"answer": "2", "choices": ["a", "b"]}, "has '2', which is none of the choices"),
        ({"answer": True, "choices": ["a", "b"]}, "has True, which is none"),
        ({"choices": ["a", "b"]}, "has None, which is none .*the columns 'choices'"),
        ({"answer": "A", "choices": "ab"}, "must be a list of 1 to 26 texts"),
        ({"answer": "A", "choices": {"label": ["A"], "text": ["a", "b"]}}, "of equal lengths"),
        ({"answer": "A", "choices": {"label": ["A", "A"], "text": ["a", "b"]}}, "of equal lengths"),
    ],
)
def test_an_example_without_its_right_choice_is_refused(example: dict[str, Any], what: str) -> None:
    with pytest.raises(RewardError, match=what):
        ChoiceMatch().check_example(example)


@pytest.mark.parametrize("reference", [r"x \equiv 2 \pmod 3", r"A \cup B", "1/0", r"2 \pmod 5"])
def test_a_reference_that_math_verify_cannot_read_is_refused_before_training_and_counted_in_it(reference: str) -> None:
    data, reward = {"answer": reference}, MathEquality()
    with pytest.raises(RewardError, match="cannot be read by math-verify, so only the same text would equal it"):
        reward.check_example(data)
    for answer, value in ((rf"\boxed{{{reference.replace(' ', '')}}}", 1.0), (r"\boxed{7}", 0.0), ("", 0.0)):
        score = reward(answer, data)
        assert (score.value, score.metrics["unreadable_reference"]) == (value, 1.0)


def test_an_answer_for_which_the_scorer_raises_scores_zero_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*args: object) -> None:
        raise RecursionError

    monkeypatch.setattr("arl.rewards.mathematics._expression", raises)
    assert MathEquality()("5", {"answer": "4"}) == Score(
        0.0, metrics={"killed": 0.0, "unreadable": 1.0, "unreadable_reference": 0.0}
    )


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        (r"(6.63\times10^{-34}, 1)", r"(1.6\times10^{-19}, 1)", False),
        (r"1.2\times10^{-20}x", r"3.4\times10^{-20}x", False),
        (r"\frac{1.6}{10^{19}}", r"1.6\times10^{-19}", True),
        (r"10^{-20}", r"10^{-19}", False),
        ("0.000167", r"\frac{1}{6000}", False),
        ("0.000166667", r"\frac{1}{6000}", True),
        ("0.016667", r"\frac{1}{60}", True),
    ],
)
def test_tiny_numbers_are_compared_by_their_digits(answer: str, reference: str, right: bool) -> None:
    assert is_equal(answer, reference) == right


@pytest.mark.parametrize(
    "said",
    [
        r"\fbox{B}",
        r"\boxed{\textbf{(B)}}",
        r"\boxed{\textbf{\text{(B)}}}",
        r"\boxed{\mathrm{B}}",
        r"\mathbf{B}",
        r"\boxed{\textbf{(B) }7}",
        r"\boxed{\textbf{(B)}\ 7}",
    ],
)
async def test_fonts_around_a_choice_are_not_part_of_it(said: str) -> None:
    assert await ChoiceMatch()(said, {"choices": ["4", "7"], "answer": "B"}) == 1.0
