"""Tools: from a typed function, called with what a model wrote, answering what it can read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arl.workflow.tools import MalformedCall, Tool, ToolCall, ToolError, acall_tools, parse_tool_calls


def divide(dividend: int, divisor: int = 2) -> str:
    """Divide one number by another."""
    if divisor == 0:
        raise ToolError("division by zero")
    return str(dividend // divisor)


async def fetch(page: str) -> str:
    """Fetch a page."""
    return f"<{page}>"


DIVIDE, FETCH = Tool.from_function(divide), Tool.from_function(fetch)


async def answer(text: str) -> list[str]:
    return [message["content"] for message in await acall_tools(parse_tool_calls(text), [DIVIDE, FETCH])]


def test_a_tool_is_described_as_its_function_is() -> None:
    assert DIVIDE.spec == {
        "type": "function",
        "function": {
            "name": "divide",
            "description": "Divide one number by another.",
            "parameters": {
                "type": "object",
                "properties": {"dividend": {"type": "integer"}, "divisor": {"type": "integer", "default": 2}},
                "required": ["dividend"],
            },
        },
    }


def test_calls_are_read_in_order_from_the_text_around_them() -> None:
    text = 'First <tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call> then\n'
    text += '<tool_call>{"name": "b", "arguments": {}}</tool_call>.'
    assert parse_tool_calls(text) == [ToolCall(name="a", arguments={"x": 1}), ToolCall(name="b", arguments={})]


def test_text_without_a_call_has_none() -> None:
    assert parse_tool_calls('{"name": "a", "arguments": {}}') == []


@pytest.mark.parametrize(
    "body",
    [
        "",
        "nonsense",
        "[]",
        '{"name": "a"}',
        '{"name": 3, "arguments": {}}',
        '{"name": "a", "arguments": "x"}',
        "[" * 9999,
    ],
)
def test_a_malformed_call_is_one_that_says_why(body: str) -> None:
    (call,) = parse_tool_calls(f"<tool_call>{body}</tool_call>")
    assert isinstance(call, MalformedCall)
    assert call.reason.startswith("a tool call ")


@given(st.text())
def test_whatever_stands_in_a_call_is_read_without_an_error(body: str) -> None:
    assert parse_tool_calls(f"<tool_call>{body}</tool_call>")


def test_a_call_that_was_not_closed_counts() -> None:
    assert parse_tool_calls('<tool_call>{"name": "a", "arguments": {}}') == [ToolCall(name="a", arguments={})]


async def test_calls_of_sync_and_async_tools_are_answered_in_order() -> None:
    text = '<tool_call>{"name": "divide", "arguments": {"dividend": 9}}</tool_call>'
    text += '<tool_call>{"name": "fetch", "arguments": {"page": "home"}}</tool_call>'
    assert await answer(text) == ["4", "<home>"]


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        ('{"name": "divide", "arguments": {"dividend": 1, "divisor": 0}}', "error: division by zero"),
        ('{"name": "divide", "arguments": {"dividend": "one"}}', "error: argument dividend: Input should be"),
        ('{"name": "divide", "arguments": {}}', "error: argument dividend: Missing"),
        ('{"name": "divide", "arguments": {"dividend": 1, "x": 1}}', "error: argument x: Unexpected"),
        ('{"name": "multiply", "arguments": {}}', "error: there is no tool 'multiply'; there is divide, fetch"),
        ("nonsense", "error: a tool call must be one JSON object"),
    ],
)
async def test_what_is_wrong_with_a_call_is_told_to_the_model(call: str, complaint: str) -> None:
    (content,) = await answer(f"<tool_call>{call}</tool_call>")
    assert content.startswith(complaint)


async def test_an_exception_that_a_tool_did_not_foresee_fails_the_episode() -> None:
    def broken(x: int) -> int:
        """Break."""
        raise KeyError(x)

    with pytest.raises(KeyError):
        await Tool.from_function(broken).acall({"x": 1})


def test_a_function_that_says_too_little_is_no_tool() -> None:
    def silent(x: int) -> int:
        return x

    def untyped(x) -> int:  # pyright: ignore[reportMissingParameterType]
        """Return it."""
        return x

    with pytest.raises(ToolError, match="silent has no docstring"):
        Tool.from_function(silent)
    with pytest.raises(ToolError, match="'x' of untyped has no type"):
        Tool.from_function(untyped)
