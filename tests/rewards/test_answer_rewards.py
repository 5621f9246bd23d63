"""The ready-made rewards: their scores, and answers that would stop or escape them."""

import re
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import sympy
from pydantic import BaseModel

from arl.api.errors import ConfigError, DatasetError, RewardError
from arl.api.version import install_command
from arl.rewards import (
    ChoiceMatch,
    ExactMatch,
    InTag,
    JsonFormat,
    NumericMatch,
    Score,
    Tags,
    last_boxed,
    last_number,
    matches,
    math_reward,
    reasoning_gym_examples,
    reasoning_gym_reward,
    scorers,
)
from arl.rewards.mathematics import is_equal
from arl.rewards.scorers import NOTHING_COUNTED, GymScore

EQUAL = [
    (r"So $x=\boxed{\frac{1}{2}}$.", "0.5"),
    (r"\boxed{2/4}", r"\frac12"),
    (r"\boxed{3\frac{1}{4}}", r"\frac{13}{4}"),
    ("The answer is 42.", "She had 40 and got 2.\n#### 42"),
    ("so 5*8+2 = 42\n#### 42", "42"),
    ("#### 1,234", "#### 1234"),
    (r"\boxed{1{,}234}", "1234"),
    (r"\boxed{50\%}", "50"),
    (r"\boxed{0.5}", r"50\%"),
    (r"\boxed{\left[0, \frac{1}{2}\right)}", "[0,0.5)"),
    (r"\boxed{(-\infty,2)\cup(3,\infty)}", r"(-\infty, 2) \cup (3, \infty)"),
    (r"\boxed{\{1,2,3\}}", r"\{3,2,1\}"),
    (r"\boxed{5\text{ cm}}", "5"),
    (r"\boxed{\$25}", "25"),
    (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}"),
    (r"\boxed{\text{(B)}}", "B"),
    (r"\boxed{x^2+2x+1}", "(x+1)^2"),
    (r"\boxed{x=3}", "3"),
    (r"\boxed{(3,4)}", "(3, 4)"),
    (r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}", r"\begin{pmatrix}1 & 2\\ 3 & 4\end{pmatrix}"),
    (r"\boxed{1.5\times 10^{3}}", "1500"),
    (r"\boxed{11:30}", "11:30"),
    (r"First \boxed{7}, no: \boxed{8}", "8"),
    (r"The final answer is $\frac{7}{3}$.", r"$\frac73$"),
]
DIFFERENT = [
    (r"\boxed{(0,1)}", "[0,1)"),
    (r"\boxed{\{1,2\}}", r"\{1,2,3\}"),
    (r"\boxed{\text{Evelyn}}", r"\text{Briana}"),
    (r"\boxed{C}", "B"),
    (r"\boxed{(4,3)}", "(3, 4)"),
    (r"\boxed{3.14159}", r"\pi"),
    (r"\boxed{-3}", "3"),
    (r"First \boxed{8}, no: \boxed{7}", "8"),
    (r"\boxed{3,4,5}", "4"),
    (r"\boxed{0.333}", r"\frac13"),
    ("I do not know", "4"),
    (r"\boxed{}", "4"),
    ("", "4"),
]


def test_answers_are_compared_as_mathematics() -> None:
    assert [pair for pair in EQUAL if not is_equal(*pair)] == []
    assert [pair for pair in DIFFERENT if is_equal(*pair)] == []


async def test_an_answer_that_hangs_its_worker_is_wrong_and_the_next_one_is_scored() -> None:
    async with math_reward(timeout_s=2.0, workers=1) as reward:
        killed = NOTHING_COUNTED | {"killed": 1.0}
        assert await reward(r"\boxed{9^{9^{9^{9}}}}", {"answer": "4"}) == Score(0.0, metrics=killed)
        reward._timeout_s = 20.0  # on a busy machine a worker may take a while over its first answer
        assert await reward(r"\boxed{4}", {"answer": "4"}) == Score(1.0, metrics=NOTHING_COUNTED)
        reward._timeout_s = 2.0
        assert await reward("long " * 20_000 + "4", {"answer": "4"}) == Score(1.0, metrics=NOTHING_COUNTED)
        with pytest.raises(RewardError, match=r"no column 'answer' with a reference answer .*'solution'"):
            await reward(r"\boxed{4}", {"solution": "4"})


def test_a_missing_package_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorers.importlib.util, "find_spec", lambda name: None)
    for make in (math_reward, reasoning_gym_reward):
        with pytest.raises(RewardError, match=re.escape(install_command("rewards"))):
            make()
    with pytest.raises(DatasetError, match=re.escape(install_command("rewards"))):
        reasoning_gym_examples("chain_sum", 1)


def test_the_last_number_is_found_in_the_usual_notations() -> None:
    numbers = {"The answer is 42.": "42", "$1,234,567.50 in all": "1234567.50", "7-3=4, so x=-3": "-3"}
    numbers |= {"it falls by 10-3": "3", "\u22125": "-5", "3/4 of it": "0.75", "about 2.5e-3": "0.0025", ".5": "0.5"}
    numbers |= {"1, 2, 3": "3", "12,3456": "3456", "50%": "50"}
    assert {text: last_number(text) for text in numbers} == {text: Decimal(number) for text, number in numbers.items()}
    assert [last_number(text) for text in ("none", "", "1/0")] == [None] * 3


async def test_numbers_match_within_their_tolerance() -> None:
    data = {"answer": "so\n#### 1,000", "other": ["3", 4]}
    for reward, answer, score in [
        (NumericMatch(), "it is $1000.00", 1.0),
        (NumericMatch(), "1000.01", 0.0),
        (NumericMatch(), "no number", 0.0),
        (NumericMatch(tolerance=0.01), "1000.01", 1.0),
        (NumericMatch(relative_tolerance=1e-3), "1001", 1.0),
        (NumericMatch(relative_tolerance=1e-3), "1001.1", 0.0),
        (NumericMatch(column="other"), "4.0", 1.0),
        (NumericMatch(extract=InTag("answer")), "<answer>1000</answer> or 7", 1.0),
    ]:
        assert await reward(answer, data) == score
    with pytest.raises(RewardError, match="the column 'answer' of the example has no number: 'Paris'"):
        NumericMatch().check_example({"answer": "Paris"})
    with pytest.raises(RewardError, match="the column 'answer' of the example has no number: 'Paris'"):
        await NumericMatch()("4", {"answer": "Paris"})
    with pytest.raises(ConfigError, match="tolerance is -1"):
        NumericMatch(tolerance=-1)


async def test_an_exact_match_takes_extractors_and_several_references() -> None:
    data = {"answer": ["New York", "NYC"]}
    assert await ExactMatch()(" New \n York ", data) == 1.0
    assert await ExactMatch()("new york", data) == 0.0
    assert await ExactMatch(ignore_case=True)("nyc", data) == 1.0
    assert await ExactMatch(extract=InTag("answer"))("<answer>x</answer> <answer>NYC</answer>", data) == 1.0
    assert await ExactMatch(extract=last_boxed)(r"\boxed{NYC}", data) == 1.0
    assert await ExactMatch(extract=InTag("answer"))("NYC", data) == 0.0
    with pytest.raises(RewardError, match="'answer' of the example has no reference"):
        await ExactMatch()("NYC", {"answer": []})


def test_a_box_ends_where_its_braces_match() -> None:
    assert last_boxed(r"\boxed{1} then \boxed{\frac{1}{2}} and {3}") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{\{1\}}") == r"\{1\}"
    assert last_boxed(r"\boxed{4} and \boxed{5") == "4"
    assert last_boxed("4") is None


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"$\boxed 7$.", "7"),
        (r"\boxed7", "7"),
        (r"\boxed -1,234.5.", "-1,234.5"),
        (r"\boxed \frac{1}{2}", r"\frac{1}{2}"),
        (r"\boxed {7}", "7"),
        (r"\fbox{E}", "E"),
        (r"\boxed E", "E"),
        (r"\boxed{5} as \boxed asks", "5"),
        (r"\boxed{8} \boxed 7", "7"),
    ],
)
def test_a_box_needs_no_braces_around_a_number_a_letter_or_a_fraction(text: str, box: str) -> None:
    assert last_boxed(text) == box


async def test_tags_must_be_all_there_in_order_with_nothing_beside() -> None:
    reward = Tags("think", "answer")
    assert await reward("<think>hm</think>\n<answer>4</answer>\n", {}) == 1.0
    for answer in (
        "<answer>4</answer>",
        "<answer>4</answer><think>hm</think>",
        "Well. <think>hm</think><answer>4</answer>",
        "<think>hm</think><answer>4</answer> Bye",
        "<think>hm</think><answer> </answer>",
        "<think><answer>3</answer></think><answer>4</answer>",
        "<think>hm<answer>4</answer>",
        "hm</think><answer>4</answer>",
    ):
        assert await reward(answer, {}) == 0.0, answer


async def test_the_prompt_may_have_opened_the_first_tag() -> None:
    reward = Tags("think", "answer", is_first_open=True)
    assert await reward("hm</think><answer>4</answer>", {}) == 1.0
    assert await reward("<think>hm</think><answer>4</answer>", {}) == 0.0
    with pytest.raises(ConfigError, match="give at least one name"):
        Tags()


class Answer(BaseModel):
    value: int


async def test_json_is_checked_against_a_type() -> None:
    reward = JsonFormat(Answer)
    assert await reward('```json\n{"value": 4}\n```', {}) == 1.0
    for answer in ('{"value": "four"}', '{"value": 4', "{}", "", "[" * 100_000):
        assert await reward(answer, {}) == 0.0
    assert await JsonFormat()("[1, 2]", {}) == 1.0
    with pytest.raises(ConfigError, match="no answer can be checked against"):
        JsonFormat(open)


async def test_an_answer_on_which_a_regular_expression_hangs_scores_zero() -> None:
    async with matches(r"(a+)+", timeout_s=1.0) as reward:
        assert await reward("aaa", {}) == Score(1.0, metrics={"killed": 0.0})
        assert await reward("a" * 40 + "!", {}) == Score(0.0, metrics={"killed": 1.0})
    with pytest.raises(ConfigError, match="is not a regular expression"):
        matches("(")


async def test_rewards_on_the_event_loop_are_quick_on_any_answer() -> None:
    """Ten times as long an answer takes some ten times as long, and not a hundred."""
    data = {"answer": "4", "letter": "A"}
    extracting = [ExactMatch(extract=extract) for extract in (last_boxed, InTag("a"))]
    choice = ChoiceMatch(column="letter")
    rewards = [NumericMatch(), *extracting, Tags("a", "b"), JsonFormat(), choice]
    pieces = [
        *"9-}{[ \\",
        "####",
        "#### answer ",
        "(A) ",
        "**",
        "answer is ",
        "1,",
        "1 / ",
        "1e1",
        r"\boxed{",
        r"\boxed \frac{",
        r"\text{",
        "<a>",
        "</a>",
        "```json\n",
        "\n```\n",
    ]
    began = time.process_time()
    for piece in pieces:
        for reward in rewards:
            await reward(piece * (100_000 // len(piece)), data)
    assert time.process_time() - began < 0.1 * len(pieces) * len(rewards)


def test_examples_of_reasoning_gym_differ_and_stay_the_same() -> None:
    datasets = {"chain_sum": {"min_terms": 2, "max_terms": 2}, "gcd": {}}
    held_out = reasoning_gym_examples(datasets, 20, seed=1)
    training = reasoning_gym_examples(datasets, 20, excluding=held_out)
    assert held_out == reasoning_gym_examples(datasets, 20, seed=1)
    assert len({example["question"] for example in (*held_out, *training)}) == 40
    assert [example["metadata"]["source_dataset"] for example in training] == ["chain_sum", "gcd"] * 10
    for given, size, what in [
        ("no_such", 1, "makes no dataset 'no_such'"),
        ({"chain_sum": {"colour": 1}}, 1, "'chain_sum' with {.*'colour': 1"),
        ({"gcd": {"min_value": 2, "max_value": 3}}, 50, "different questions that are not excluded, of 50"),
        ([], 1, "give at least one of each"),
        ("gcd", 0, "give at least one of each"),
    ]:
        with pytest.raises(DatasetError, match=what):
            reasoning_gym_examples(given, size)


async def test_the_scorer_of_an_examples_dataset_scores_and_runs_no_code_of_an_answer(tmp_path: Path) -> None:
    names = ["gcd", "countdown", "spiral_matrix", "prime_factorization", "polynomial_multiplication"]
    examples = reasoning_gym_examples(names, len(names))
    gone = tmp_path / "gone"
    attack = f"__import__('pathlib').Path({str(gone)!r}).touch()"
    attacks = [attack, f"[{attack}]", f"open({str(gone)!r}, 'w')", f"sympify({attack!r})", "exit()", f"sin({attack!r})"]
    async with reasoning_gym_reward(names, timeout_s=10, workers=1) as reward:
        for example in examples:
            assert (await reward(example["answer"], example)).value == 1.0
            for answer in attacks:
                score = await reward(answer, example)
                assert score.value < 0.1
                assert score.metrics["killed"] == 0.0
        assert (await reward("banana", examples[3])).metrics["unreadable"] == 1.0
        for data, what in [
            ({"answer": "4", "metadata": {"source_dataset": "no_such"}}, "makes no dataset 'no_such'"),
        ]:
            with pytest.raises(RewardError, match=what):
                await reward("4", data)
        with pytest.raises(RewardError, match="reasoning-gym did not make it"):
            reward.check_example({"answer": "4"})
    assert not gone.exists()


def test_an_example_that_its_scorer_cannot_read_is_counted() -> None:
    (example,) = reasoning_gym_examples("prime_factorization", 1)
    lost = GymScore()("banana", {**example, "answer": "banana"})
    assert (lost.value, lost.metrics["unreadable_reference"]) == (0.0, 1.0)
    assert GymScore()("banana", example).metrics == {"killed": 0.0, "unreadable": 1.0, "unreadable_reference": 0.0}


def test_answers_are_evaluated_only_as_arithmetic_and_mathematics() -> None:
    check_arithmetic: Any = scorers._check_arithmetic
    check_arithmetic(scorers._tree(" [[1, -2], (0x1f << 2, 'a')] "))
    for source in ("__import__('os')", "().__class__", "[x for x in (1,)]", "lambda: 1", "f'{1}'", "a", "x[0]"):
        with pytest.raises(ValueError, match="neither a literal nor arithmetic"):
            check_arithmetic(scorers._tree(source))
    names = {"sin": sympy.sin, "Symbol": sympy.Symbol, "open": open}
    check: Any = scorers._check_mathematics
    check(scorers._tree("sin(Symbol('x'))**2"), names)
    for source in ("open('f')", "sin('open(1)')", "sin.__class__", "chr(95)", "Symbol(open)", "[y for y in (1,)]"):
        with pytest.raises(ValueError, match="is not mathematics"):
            check(scorers._tree(source), names)
