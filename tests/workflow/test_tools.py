"""Tools: from a typed function, called with what a model wrote, answering what it can read."""

import asyncio
import functools
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field, ValidationError

from arl.api.errors import ConfigError, ServerError, ToolError
from arl.workflow.call_formats import ToolCall, parse_tool_calls
from arl.workflow.tools import DEFAULT_LIMITS, Tool, ToolLimits, ToolResult, acall_tools, arun_tools


def divide(dividend: int, divisor: int = 2) -> str:
    """Divide one number by another."""
    if divisor == 0:
        raise ToolError("division by zero")
    return str(dividend // divisor)


async def fetch(page: str) -> str:
    """Fetch a page."""
    return f"<{page}>"


DIVIDE, FETCH = Tool.from_function(divide), Tool.from_function(fetch)


@pytest.mark.parametrize(
    ("call", "content"),
    [
        ('{"name": "divide", "arguments": {"dividend": 9}}', "4"),
        ('{"name": "fetch", "arguments": {"page": "home"}}', "<home>"),
        ('{"name": "divide", "arguments": {"dividend": 1, "divisor": 0}}', "error: division by zero"),
        ('{"name": "divide", "arguments": {"dividend": "one"}}', "error: argument dividend: Input should be"),
        ('{"name": "divide", "arguments": {}}', "error: argument dividend: Missing"),
        ('{"name": "divide", "arguments": {"dividend": 1, "x": 1}}', "error: argument x: Unexpected"),
        ('{"name": "multiply", "arguments": {}}', "error: there is no tool 'multiply'; the tools are divide, fetch"),
        ("nonsense", "error: a tool call must be one JSON object"),
    ],
)
async def test_the_model_reads_what_its_call_gave_or_why_it_is_wrong(call: str, content: str) -> None:
    calls = parse_tool_calls(f"<tool_call>{call}</tool_call>")
    (message,) = await acall_tools(calls, [DIVIDE, FETCH])
    assert message["content"].startswith(content)


async def called(tool: Tool, limits: ToolLimits = DEFAULT_LIMITS, **arguments: object) -> ToolResult:
    (result,) = await arun_tools([ToolCall(name=tool.name, arguments=arguments)], [tool], limits)
    return result


def both(function: Callable[[], object]) -> list[Tool]:
    """A tool that runs in a thread, and one that runs in the event loop."""

    async def later() -> object:
        return function()

    later.__doc__ = function.__doc__ = "Do it."
    return [Tool.from_function(function), Tool.from_function(later)]


ERRORS = [KeyError("x"), SystemExit(2), TimeoutError(), StopIteration(), asyncio.CancelledError()]
NOT_OF_ARGUMENTS = ValidationError.from_exception_data("within the tool", [])


@pytest.mark.parametrize("error", [*ERRORS, NOT_OF_ARGUMENTS])
async def test_a_tool_that_raises_is_told_to_the_model_and_logged_once(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error

    kind = "RuntimeError" if isinstance(error, StopIteration) else type(error).__name__
    for tool in both(fail):
        caplog.clear()
        result = await called(tool)
        assert (result.content, result.failure) == (f"error: the tool failed: {kind}", "failed")
        (record,) = caplog.records
        assert tool.name in record.message
        assert record.exc_info


async def test_errors_of_arl_that_are_not_the_models_business_fail_the_episode() -> None:
    async def sample(x: int) -> int:
        """Ask another model."""
        raise ServerError("it is gone")

    calls = [ToolCall(name="sample", arguments={"x": 1}), ToolCall(name="fetch", arguments={"page": "home"})]
    for some in (calls[:1], calls):
        with pytest.raises(ServerError, match="it is gone"):
            await acall_tools(some, [Tool.from_function(sample), FETCH])


async def test_calls_run_at_the_same_time_and_are_answered_in_order() -> None:
    both = asyncio.Barrier(2)
    threads = threading.Barrier(2)

    async def meet(x: int) -> int:
        """Wait for the other."""
        await both.wait()
        return x

    def meet_in_a_thread(x: int) -> int:
        """Wait for the other."""
        threads.wait(60)
        return x

    tools = [Tool.from_function(meet), Tool.from_function(meet_in_a_thread)]
    calls = [ToolCall(name=tool.name, arguments={"x": x}) for tool in tools for x in range(2)]
    messages = await acall_tools(calls, tools)
    assert [message["content"] for message in messages] == ["0", "1", "0", "1"]
    assert [message["tool_call_id"] for message in messages] == [call.id for call in calls]
    names = [(message["role"], message["name"]) for message in messages]
    assert names == [("tool", tool.name) for tool in tools for _ in range(2)]


class Notebook:
    """What one episode's tools share."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    async def write(self, line: str) -> int:
        """Write a line."""
        before = len(self.lines)
        await asyncio.sleep(0)
        self.lines.append(line)
        assert len(self.lines) == before + 1
        return before

    def read(self) -> list[str]:
        """Read all lines."""
        return self.lines


async def test_tools_that_are_methods_of_one_object_follow_one_another_in_the_models_order() -> None:
    book = Notebook()
    tools = [Tool.from_function(book.write), Tool.from_function(book.read)]
    write = [ToolCall(name="write", arguments={"line": line}) for line in "ab"]
    messages = await acall_tools([*write, ToolCall(name="read", arguments={})], tools)
    assert [message["content"] for message in messages] == ["0", "1", '["a","b"]']
    assert Tool.from_function(book.read, parallel=True).owner is None


async def test_each_object_has_its_own_methods_as_tools_and_is_forgotten_after() -> None:
    one, other = Notebook(), Notebook()
    await called(Tool.from_function(one.write), line="x")
    await called(Tool.from_function(other.write), line="y")
    assert (one.lines, other.lines) == (["x"], ["y"])
    known = weakref.ref(one)
    del one
    gc.collect()
    assert known() is None


async def test_a_tool_that_hangs_is_cancelled_or_left_behind_and_the_model_is_told() -> None:
    was_cancelled = asyncio.Event()

    async def hang() -> None:
        """Hang."""
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            was_cancelled.set()
            raise

    release = threading.Event()

    def hang_in_a_thread() -> None:
        """Hang."""
        release.wait(60)

    try:
        for function in (hang, hang_in_a_thread):
            result = await called(Tool.from_function(function), ToolLimits(timeout_s=0.01))
            assert (result.content, result.failure) == ("error: there was no answer within 0.01 s", "refused")
    finally:
        release.set()
    assert was_cancelled.is_set()


async def test_cancelling_an_episode_cancels_its_tools() -> None:
    has_begun, release = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hang() -> None:
        """Hang."""
        loop.call_soon_threadsafe(has_begun.set)
        release.wait(60)

    episode = asyncio.create_task(called(Tool.from_function(hang)))
    await has_begun.wait()
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode
    release.set()


async def test_a_megabyte_is_cut_with_a_note_of_how_much_is_missing() -> None:
    for tool in both(lambda: "é" * 1_000_000):
        result = await called(tool, ToolLimits(max_output_chars=100))
        assert (result.content, result.failure) == ("é" * 100 + "\n[cut here: 999900 more characters]", None)
        assert (await called(tool)).content.startswith("é" * 2000 + "\n[cut here")
        own = Tool.from_function(tool.function, max_output_chars=5)
        assert (await called(own)).content == "é" * 5 + "\n[cut here: 999995 more characters]"


@dataclass
class Point:
    x: float
    tags: set[str]


class Place(BaseModel):
    name: str


class Unprintable:
    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (None, "None"),
        (float("nan"), "nan"),
        ({"x": float("nan"), "é": [1, None, True]}, '{"x":NaN,"é":[1,null,true]}'),
        (Point(x=1.5, tags={"a"}), '{"x":1.5,"tags":["a"]}'),
        ([Place(name="home")], '[{"name":"home"}]'),
        (b"text", "text"),
        (b"\xff\xfe", "[2 bytes that are not text]"),
        ("lone \ud800 half", "lone ? half"),
        ({"x": "\ud800"}, "{'x': '\\ud800'}"),
        ({(1, 2): object}, '{"1,2":'),
        (Unprintable(), "error: the tool failed: ValueError"),
        (iter([1, 2]), "error: the tool failed: TypeError"),
        (threading.Lock(), "error: the tool failed: TypeError"),
        ([Unprintable()], "["),
    ],
)
async def test_whatever_a_tool_returns_is_text_for_the_model(result: object, text: str) -> None:
    for tool in both(lambda: result):
        content = (await called(tool)).content
        assert content.startswith(text)
        content.encode()


async def test_the_model_reads_what_was_left_out_of_its_call() -> None:
    call = ToolCall(name="divide", arguments={"dividend": 9}, complaints=("argument x: it was left out", "and y"))
    (message,) = await acall_tools([call], [DIVIDE])
    assert message["content"] == "note: argument x: it was left out\nnote: and y\n4"


async def test_only_so_many_calls_of_one_turn_are_answered() -> None:
    with pytest.raises(ConfigError, match="timeout_s=0"):
        ToolLimits(timeout_s=0)
    calls = [ToolCall(name="fetch", arguments={"page": str(i)}) for i in range(3)]
    results = await arun_tools(calls, [FETCH], ToolLimits(max_calls=2))
    assert [result.failure for result in results] == [None, None, "refused"]
    assert results[2].content == "error: at most 2 calls are answered in one turn"


PLACE = {"type": "object", "title": "Place", "properties": {"name": {"type": "string"}}, "required": ["name"]}


def travel(
    to: Place,
    by: Literal["train", "foot"] = "train",
    stops: Annotated[list[str] | None, Field(description="where to halt")] = None,
    *,
    km: float,
) -> str:
    """Travel somewhere.

    It takes a while.

    Args:
        to: a place: any,
            near or far
        by (str): how
        stops: overruled

    Returns:
        what was seen
    """
    return f"{to.name} {by} {stops} {km}"


def test_a_schema_has_types_defaults_and_what_the_docstring_says_of_each_argument() -> None:
    spec = Tool.from_function(travel).spec
    about = spec["function"]
    assert (spec["type"], about["name"]) == ("function", "travel")
    assert about["description"] == "Travel somewhere.\n\nIt takes a while.\n\nReturns:\n    what was seen"
    assert about["parameters"] == {
        "type": "object",
        "properties": {
            "to": {"$ref": "#/$defs/Place", "description": "a place: any, near or far"},
            "by": {"type": "string", "enum": ["train", "foot"], "default": "train", "description": "how"},
            "stops": {
                "anyOf": [{"items": {"type": "string"}, "type": "array"}, {"type": "null"}],
                "default": None,
                "description": "where to halt",
            },
            "km": {"type": "number"},
        },
        "required": ["to", "km"],
        "$defs": {"Place": PLACE},
    }


async def test_arguments_are_given_as_the_types_say() -> None:
    assert (await called(Tool.from_function(travel), to={"name": "home"}, km="2")).content == "home train None 2.0"
    result = await called(Tool.from_function(travel), to={}, km=2)
    assert (result.content, result.failure) == ("error: argument to.name: Field required", "refused")


def test_fields_of_sphinx_describe_arguments_too() -> None:
    def walk(to: str, km: int = 1) -> None:
        """Walk.

        :param to: somewhere,
            on foot
        :param int km: how far
        """

    about = Tool.from_function(functools.partial(walk, km=3)).spec["function"]
    assert (about["name"], about["description"]) == ("walk", "Walk.")
    assert about["parameters"]["properties"] == {
        "to": {"type": "string", "description": "somewhere, on foot"},
        "km": {"type": "integer", "default": 3, "description": "how far"},
    }


async def test_a_tool_can_be_made_from_a_schema() -> None:
    async def forward(**arguments: object) -> object:
        return arguments

    tool = Tool.from_schema(forward, name="far", description="Far away.", parameters={"type": "object"})
    assert tool.spec["function"]["parameters"] == {"type": "object"}
    assert (await called(tool, self=1, name="x")).content == '{"self":1,"name":"x"}'


def silent(x: int) -> int:
    return x


def variadic(*all: int) -> None:
    """Take all."""


def strange(x: threading.Thread) -> None:
    """Take a thread."""


def untyped(x) -> int:  # pyright: ignore[reportMissingParameterType]
    """Return it."""
    return x


class Doubler:
    """Only the docstring of its method is for models."""

    def __call__(self, x: int) -> int:
        """Double a number."""
        return 2 * x

    def halve(self, x: int) -> Iterator[int]:
        """Halve it."""
        yield x // 2


class Pager:
    """Turn pages."""

    async def __call__(self, book: str) -> AsyncIterator[str]:
        yield book


def pages(book: str) -> Iterator[str]:
    """Turn pages."""
    yield book


async def later_pages(book: str) -> AsyncIterator[str]:
    """Turn pages."""
    yield book


async def test_an_object_that_can_be_called_has_the_docstring_of_its_call() -> None:
    tool = Tool.from_function(Doubler())
    assert (tool.name, tool.spec["function"]["description"]) == ("Doubler", "Double a number.")
    assert (await called(tool, x=2)).content == "4"


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (silent, "silent has no docstring"),
        (untyped, "'x' of untyped has no type"),
        (variadic, r"argument \*all: int of variadic cannot be given by name"),
        (strange, "the arguments of strange have no JSON schema"),
        (Doubler, "Doubler is a class"),
        (Doubler.halve, "'self' of halve has no type; give the method of an object"),
        (pages, "the tool pages is a generator"),
        (later_pages, "the tool later_pages is a generator"),
        (functools.partial(functools.partial(pages), book="x"), "the tool pages is a generator"),
        (Doubler().halve, "the tool halve is a generator"),
        (Pager(), "the tool Pager is a generator"),
    ],
)
def test_a_function_that_says_too_little_is_no_tool(function: Callable[..., object], reason: str) -> None:
    with pytest.raises(ToolError, match=reason):
        Tool.from_function(function)
