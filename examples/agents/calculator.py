"""A calculator that is safe for a model's input: exact arithmetic in a small language, with limits on everything."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from fractions import Fraction

from arl import ToolError

MAX_LENGTH = 200
MAX_EXPONENT = 64
MAX_BITS = 512

_READABLE = re.compile(r"(?:[a-z]+|\d+(?![a-z])|[-+*/%().,\s])*")
"""No quotes, no underscores, no letters right after a digit. Python parses the rest without a warning."""

_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: lambda a, b: a % b,
    ast.Pow: lambda a, b: _power(a, b),
}
_FUNCTIONS: dict[str, Callable[..., int]] = {"gcd": math.gcd, "lcm": math.lcm}


def calculator(expression: str) -> str:
    """Evaluate arithmetic: + - * / // % **, parentheses, gcd(a, b), lcm(a, b)."""
    if len(expression) > MAX_LENGTH:
        raise ToolError(f"the expression has {len(expression)} characters; at most {MAX_LENGTH} are allowed")
    if not _READABLE.fullmatch(expression):
        raise ToolError(f"cannot read {expression!r}")
    try:
        return _written(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError(f"cannot read {expression!r}") from None
    except ZeroDivisionError:
        raise ToolError("division by zero") from None


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(Fraction(str(number)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _bounded(_OPERATORS[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _bounded(Fraction(_FUNCTIONS[name](*(_integer(_value(arg)) for arg in args))))
    raise ToolError(f"only numbers, + - * / // % **, parentheses and {', '.join(_FUNCTIONS)} are understood")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if abs(_integer(exponent)) > MAX_EXPONENT:
        raise ToolError(f"exponents are at most {MAX_EXPONENT}")
    return Fraction(base ** _integer(exponent))


def _integer(value: Fraction) -> int:
    if value.denominator != 1:
        raise ToolError(f"{_written(value)} is not an integer")
    return value.numerator


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ToolError("the numbers grow too large")
    return value


def _written(value: Fraction) -> str:
    """Integers and short decimals exactly, other fractions as the nearest decimal."""
    if value.denominator == 1:
        return str(value.numerator)
    try:
        return repr(float(value))
    except OverflowError:
        raise ToolError("the numbers grow too large") from None
