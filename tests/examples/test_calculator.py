"""The calculator: exact on arithmetic, and an error for the model on everything else."""

import contextlib
import time

import pytest
from calculator import calculator
from hypothesis import given
from hypothesis import strategies as st

from arl.api.errors import ToolError


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2 + 3 * 4", "14"),
        ("-( -( 7 - 10 ) )", "-3"),
        ("1920 / 60", "32"),
        ("7 // 2", "3"),
        ("-7 % 5", "3"),
        ("2 ** 10", "1024"),
        ("gcd(207, 483)", "69"),
        ("lcm(4, 6, 10)", "60"),
        ("0.1 + 0.2", "0.3"),
        ("1 / 3 * 3", "1"),
        ("1 / 3", "0.3333333333333333"),
        ("123456789 * 987654321", "121932631112635269"),
    ],
)
def test_arithmetic_is_exact(expression: str, result: str) -> None:
    assert calculator(expression) == result


BROKEN = ("", "12 +", "12lcm", "0680 / 2", "(" * 199, "lambda: 1", "True + 1")
UNREADABLE = (*BROKEN, "__import__('os').system('true')", "().__class__", "[x for x in (1, 2)]")


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        *((unreadable, "cannot read") for unreadable in UNREADABLE),
        ("x + 1", "only numbers"),
        ("gcd(1.5, 2)", "1.5 is not an integer"),
        ("4 / (2 - 2)", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("2 ** 0.5", "0.5 is not an integer"),
        ("2 ** 65", "exponents are at most 64"),
        ("9 ** 9 ** 9", "exponents are at most 64"),
        ("(9 ** 60) ** 60", "the numbers grow too large"),
        ("9" * 201, "has 201 characters; at most 200"),
        ("9" * 200, "the numbers grow too large"),
        ("open(1)", "only numbers"),
        ("gcd(*(1, 2))", "only numbers"),
    ],
)
def test_anything_but_arithmetic_is_a_tool_error(expression: str, complaint: str) -> None:
    with pytest.raises(ToolError, match=complaint.replace("(", r"\(").replace("*", r"\*")):
        calculator(expression)


@given(st.text(alphabet="0123456789+-*/%(). ,gcdlm", max_size=60) | st.text(max_size=60))
def test_any_text_gets_a_number_or_a_tool_error_at_once(expression: str) -> None:
    began = time.thread_time()
    with contextlib.suppress(ToolError):
        float(calculator(expression))
    assert time.thread_time() - began < 1
