"""OpenAI's chat messages and tools, checked, and as chat templates take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from arl.workflow.proxy.calls import RefusedCallError
from arl.workflow.proxy.fields import Fields, shown, wrong

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TEXT_PARTS = {"text": "text", "refusal": "refusal"}
"""Kinds of content that are text, and where they have it."""


def messages_of(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    """The field `messages`. Raises RefusedCallError for what no chat template takes."""
    given = fields.items("messages")
    if not given:
        raise RefusedCallError("messages is empty; it must be a list of messages", param="messages")
    return tuple(_message(f"messages[{i}]", message) for i, message in enumerate(given))


def _message(where: str, message: Any) -> dict[str, Any]:
    """The message with its content as text. What else it has goes to the template, which shows what it knows."""
    if not isinstance(message, dict):
        raise wrong(where, message, "an object with a role and a content")
    role = message.get("role")
    if role not in _ROLES:
        raise wrong(f"{where}.role", role, f"one of {', '.join(_ROLES)}")
    if message.get("function_call"):
        raise RefusedCallError(
            f"{where}.function_call is the older form of calls; use tools", param=where, code="unsupported_value"
        )
    calls = message.get("tool_calls")
    content = text_of(f"{where}.content", message.get("content"), may_be_empty=role == "assistant")
    made = {name: value for name, value in message.items() if value is not None and name != "tool_calls"}
    made |= {"role": _ROLES[role], "content": content}
    if calls:
        made["tool_calls"] = _calls(f"{where}.tool_calls", calls)
    return made


def text_of(where: str, content: Any, *, may_be_empty: bool = False) -> str:
    """Content as one text, a line break between its parts."""
    if isinstance(content, str):
        return content
    if content is None and may_be_empty:
        return ""
    if not isinstance(content, list):
        raise wrong(where, content, "a string or a list of text parts")
    return "\n".join(_part(f"{where}[{i}]", part) for i, part in enumerate(content))


def _part(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(_TEXT_PARTS[kind]) if isinstance(part, dict) and kind in _TEXT_PARTS else None
    if isinstance(text, str):
        return text
    raise RefusedCallError(
        f"{where} is of type {shown(kind)}; the model takes text alone", param=where, code="unsupported_value"
    )


def _calls(where: str, calls: Any) -> list[Mapping[str, Any]]:
    if not isinstance(calls, list):
        raise wrong(where, calls, "a list of calls")
    for i, call in enumerate(calls):
        match call:
            case {"function": {"name": str(), "arguments": str()}}:
                continue
        raise wrong(f"{where}[{i}]", call, 'a call: {"id", "type": "function", "function": {"name", "arguments"}}')
    return calls


def tools_of(fields: Fields) -> Sequence[Mapping[str, Any]]:
    """The tools that the model is shown: none where tool_choice is "none". Raises RefusedCallError."""
    tools = [_tool(f"tools[{i}]", tool) for i, tool in enumerate(fields.items("tools"))]
    choice = fields.value("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise RefusedCallError(
            f'tool_choice is {shown(choice)}; a call cannot be forced here, so it must be "auto" or "none"',
            param="tool_choice",
            code="unsupported_value",
        )
    return tools if choice == "auto" else ()


def _tool(where: str, tool: Any) -> Mapping[str, Any]:
    match tool:
        case {"type": "function", "function": {"name": str(name)} as function} if name:
            parameters = function.get("parameters")
            if parameters is not None and not isinstance(parameters, dict):
                raise wrong(f"{where}.function.parameters", parameters, "a JSON schema")
            return tool
    raise wrong(where, tool, 'a function: {"type": "function", "function": {"name", "description", "parameters"}}')
