"""Tools for agents: a tool from a typed Python function, and tool calls read from a model's text.

Calls are written as Qwen and Hermes write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>. Whatever is
wrong with a call is told to the model, as the call's result; only an exception that a tool did not foresee is raised.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError, validate_call

from arl.api.errors import ToolError

__all__ = ["MalformedCall", "Tool", "ToolCall", "ToolError", "acall_tools", "parse_tool_calls"]

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that could be read: which tool, with which arguments."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MalformedCall:
    """A call that could not be read; `reason` is written for the model."""

    reason: str


def parse_tool_calls(text: str) -> list[ToolCall | MalformedCall]:
    """The calls in `text`, in order; an unclosed last one counts. Empty when the model called nothing."""
    return [_parse_call(body) for body in _CALL.findall(text)]


def _parse_call(body: str) -> ToolCall | MalformedCall:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return MalformedCall(reason="a tool call must be one JSON object")
    match call:
        case {"name": str(name), "arguments": dict(arguments)}:
            return ToolCall(name=name, arguments=arguments)
    return MalformedCall(reason='a tool call needs "name", a string, and "arguments", an object')


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """Something a model may call. `spec` is what chat templates take: OpenAI's form, with a JSON schema."""

    name: str
    spec: Mapping[str, Any]
    function: Callable[..., Any]

    @classmethod
    def from_function(cls, function: Callable[..., Any]) -> Tool:
        """A tool named, described and typed as the function, sync or async, is. A sync one must be quick: it runs on
        the event loop.

        Raises ToolError when the function has no docstring or an argument without a type.
        """
        name = getattr(function, "__name__", type(function).__name__)
        description = inspect.getdoc(function)
        if not description:
            raise ToolError(f"the function {name} has no docstring; the model needs one to know what the tool does")
        for parameter in inspect.signature(function).parameters.values():
            if parameter.annotation is parameter.empty:
                raise ToolError(f"argument {parameter.name!r} of {name} has no type; annotate it")
        spec = {"name": name, "description": description, "parameters": _parameters(function)}
        return cls(name=name, spec={"type": "function", "function": spec}, function=validate_call(function))

    async def acall(self, arguments: Mapping[str, Any]) -> str:
        """Run the tool and return its result as text; a ToolError or arguments of wrong types as `error: ...`."""
        try:
            result = self.function(**arguments)
            if inspect.isawaitable(result):
                result = await result
        except ToolError as error:
            return f"error: {error}"
        except ValidationError as error:
            return f"error: {_first_complaint(error)}"
        return str(result)


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    adapter: TypeAdapter[Any] = TypeAdapter[Any](function)  # pyright: ignore[reportArgumentType]  (it takes functions)
    schema = adapter.json_schema()
    properties = {name: {k: v for k, v in prop.items() if k != "title"} for name, prop in schema["properties"].items()}
    return {"type": "object", "properties": properties, "required": schema.get("required", [])}


def _first_complaint(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"argument {'.'.join(str(part) for part in first['loc'])}: {first['msg']}"


async def acall_tools(calls: Sequence[ToolCall | MalformedCall], tools: Sequence[Tool]) -> list[dict[str, str]]:
    """Answer each call, one after another, with a message of role `tool`."""
    by_name = {tool.name: tool for tool in tools}
    messages: list[dict[str, str]] = []
    for call in calls:
        if isinstance(call, MalformedCall):
            content = f"error: {call.reason}"
        elif call.name not in by_name:
            content = f"error: there is no tool {call.name!r}; there is {', '.join(sorted(by_name))}"
        else:
            content = await by_name[call.name].acall(call.arguments)
        messages.append({"role": "tool", "content": content})
    return messages
