"""Anthropic's messages, made of content blocks, as chat templates take messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from arl.workflow.chat_template import Message
from arl.workflow.proxy.calls import RefusedCallError
from arl.workflow.proxy.fields import Fields, shown, wrong

HARMLESS = frozenset(("cache_control",))
"""What any block, tool or request may have, and what changes no answer."""


def messages_of(fields: Fields) -> list[Message]:
    """`system` and `messages`. Raises RefusedCallError for what the model cannot be shown."""
    system = text_of("system", fields.value("system", ""))
    made: list[Message] = [{"role": "system", "content": system}] if system else []
    given = fields.items("messages")
    if not given:
        raise RefusedCallError("messages is empty; it must be a list of messages", param="messages")
    for i, message in enumerate(given):
        made += _messages(f"messages[{i}]", message)
    if made[-1]["role"] == "assistant":
        raise RefusedCallError(
            "the last message is the assistant's; the beginning of an answer cannot be given here, so end with the "
            "user's",
            param="messages",
            code="unsupported_value",
        )
    return made


def _messages(where: str, message: Any) -> Iterator[Message]:
    if not isinstance(message, dict):
        raise wrong(where, message, "an object with a role and a content")
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        raise wrong(f"{where}.content", content, "a string or a list of blocks")
    match message.get("role"):
        case "user":
            yield from _users(f"{where}.content", blocks)
        case "assistant":
            yield _assistants(f"{where}.content", blocks)
        case "system":
            yield {"role": "system", "content": text_of(f"{where}.content", blocks)}
        case role:
            raise wrong(f"{where}.role", role, "user or assistant")


def _users(where: str, blocks: list[Any]) -> Iterator[Message]:
    """Results of tools, each a message, and then what the user says beside them."""
    said: list[str] = []
    for i, block in enumerate(blocks):
        fields, kind = _block(f"{where}[{i}]", block)
        if kind == "tool_result":
            yield _result(f"{where}[{i}]", fields)
        elif kind == "text":
            said.append(fields.text("text"))
        else:
            raise _unknown(f"{where}[{i}]", kind, "text and tool_result")
        fields.finish(HARMLESS, {"citations": ({"enabled": False},)})
    if said or not blocks:
        yield {"role": "user", "content": " ".join(said)}


def _result(where: str, fields: Fields) -> Message:
    content = text_of(f"{where}.content", fields.value("content", ""))
    if fields.flag("is_error") and not content.startswith("error"):
        content = f"error: {content}"
    return {"role": "tool", "tool_call_id": fields.text("tool_use_id"), "content": content}


def _assistants(where: str, blocks: list[Any]) -> Message:
    """What the model thought, said and called. Thinking that was redacted cannot be shown to it again."""
    said: list[str] = []
    message: dict[str, Any] = {"role": "assistant"}
    for i, block in enumerate(blocks):
        fields, kind = _block(f"{where}[{i}]", block)
        match kind:
            case "text":
                said.append(fields.text("text"))
            case "thinking":
                message["reasoning_content"] = fields.text("thinking")
            case "tool_use":
                message.setdefault("tool_calls", []).append(_call(fields))
            case _:
                raise _unknown(f"{where}[{i}]", kind, "text, thinking and tool_use")
        fields.finish(HARMLESS | {"signature", "citations", "caller"}, {})
    return {**message, "content": " ".join(said)}


def _call(fields: Fields) -> Message:
    function = {"name": fields.text("name"), "arguments": json.dumps(fields.mapping("input"), ensure_ascii=False)}
    return {"id": fields.text("id"), "type": "function", "function": function}


def text_of(where: str, content: Any) -> str:
    """A string, or blocks of text with a space between two."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, content, "a string or a list of text blocks")
    texts: list[str] = []
    for i, block in enumerate(content):
        fields, kind = _block(f"{where}[{i}]", block)
        if kind != "text":
            raise _unknown(f"{where}[{i}]", kind, "text alone")
        texts.append(fields.text("text"))
    return " ".join(texts)


def _block(where: str, block: Any) -> tuple[Fields, str]:
    if not isinstance(block, dict):
        raise wrong(where, block, "a block: an object with a type")
    fields = Fields(block)
    return fields, fields.text("type")


def _unknown(where: str, kind: str, known: str) -> RefusedCallError:
    return RefusedCallError(
        f"{where} is of type {shown(kind)}; the model can be shown {known}", param=where, code="unsupported_value"
    )
