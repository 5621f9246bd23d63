"""The items of the Responses API as messages, and what its parts of text say."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

from arl.workflow.chat_template import Message
from arl.workflow.proxy.calls import RefusedCallError
from arl.workflow.proxy.fields import Fields, shown, wrong

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


class Transcript:
    """Messages out of items. Reasoning, text and function calls that follow one another are one answer of the model."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._answer: dict[str, Any] | None = None

    def add(self, where: str, item: Any) -> None:
        """Raises RefusedCallError, with `where` in it, for an item that cannot be shown to the model."""
        if not isinstance(item, dict):
            raise wrong(where, item, "an object")
        fields = Fields(item)
        match item.get("type", "message"):
            case "message":
                self._add_message(where, fields)
            case "reasoning":
                self._add_reasoning(where, fields)
            case "function_call":
                self._add_call(fields)
            case "function_call_output":
                self._add_output(where, fields)
            case kind:
                raise RefusedCallError(
                    f"{where} is of type {shown(kind)}, which is not known here; there are message, reasoning, "
                    "function_call and function_call_output",
                    param=where,
                    code="unsupported_value",
                )

    def _add_message(self, where: str, fields: Fields) -> None:
        role = _ROLES.get(fields.text("role"))
        if role is None:
            raise wrong(f"{where}.role", fields.value("role"), " or ".join(_ROLES))
        text = text_of(f"{where}.content", fields.value("content", ""), {"input_text", "output_text", "text"})
        if role == "assistant":
            self._answer_without("content", "tool_calls")["content"] = text
        else:
            self._add({"role": role, "content": text})

    def _add_reasoning(self, where: str, fields: Fields) -> None:
        """Thoughts that this server told; those of another model are encrypted, or were summed up."""
        thoughts = text_of(f"{where}.content", fields.value("content", []), {"reasoning_text"})
        if thoughts:
            self._answer_without("reasoning_content", "content", "tool_calls")["reasoning_content"] = thoughts

    def _add_call(self, fields: Fields) -> None:
        call = {"name": fields.text("name"), "arguments": fields.text("arguments", "{}")}
        calls = self._answer_without().setdefault("tool_calls", [])
        calls.append({"id": fields.text("call_id"), "type": "function", "function": call})

    def _add_output(self, where: str, fields: Fields) -> None:
        output = text_of(f"{where}.output", fields.value("output", ""), {"input_text"})
        self._add({"role": "tool", "tool_call_id": fields.text("call_id"), "content": output})

    def _add(self, message: Message) -> None:
        self._answer = None
        self.messages.append(message)

    def _answer_without(self, *names: str) -> dict[str, Any]:
        """The answer that is being put together, or a new one where it has one of these fields already."""
        if self._answer is None or any(self._answer.get(name) for name in names):
            self._answer = {"role": "assistant", "content": ""}
            self.messages.append(self._answer)
        return self._answer


def text_of(where: str, content: Any, kinds: Set[str]) -> str:
    """A string, or parts of text with a space between two. Raises RefusedCallError for parts of other kinds."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, content, "a string or a list of parts")
    return " ".join(_texts(where, content, kinds))


def _texts(where: str, parts: list[Any], kinds: Set[str]) -> Iterable[str]:
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            raise RefusedCallError(
                f"{where}[{i}] is of type {shown(kind)}; the model takes text alone, as {' or '.join(sorted(kinds))}",
                param=f"{where}[{i}]",
                code="unsupported_value",
            )
        yield Fields(part).text("text")
