"""How models write tool calls: reads an answer into its calls and the text beside them.

| format | models | a call |
|---|---|---|
| HERMES | Qwen2.5, Qwen3 | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` |
| LLAMA | Llama 3.1 to 3.3 | `{"name": ..., "parameters": {...}}` alone or after `<|python_tag|>`, joined by `;` |

Reading never raises. An unreadable call is a MalformedCall, with a reason for the model to read. Text within the
model's thinking (`<think>...</think>`) is never a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from arl.api.errors import ModelError
from arl.api.types import new_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def _call_id() -> str:
    return f"call_{new_id()[:24]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A readable call."""

    name: str
    arguments: Mapping[str, Any]
    id: str = field(default_factory=_call_id, compare=False)
    """Made up here, and repeated in the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MalformedCall:
    """An unreadable call."""

    reason: str
    """For the model to read."""
    text: str = field(default="", compare=False)
    """The call as the model wrote it."""
    id: str = field(default_factory=_call_id, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedAnswer:
    """An answer and the calls in it."""

    content: str
    """The text outside of the calls, thinking included."""
    calls: tuple[ToolCall | MalformedCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """How a model writes a call, for grammars that let it write nothing else: begin, the arguments as JSON, end."""

    begin: str
    """NAME stands for the name of the tool as JSON."""
    end: str
    separator: str
    """Between two calls."""
    trigger: str = ""
    """The text with which every call begins, and no other text; empty if there is none."""

    def tag(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The call of one tool as a tag of a structural tag. arguments: their JSON schema."""
        begin = self.begin.replace("NAME", json.dumps(name, ensure_ascii=False))
        return {
            "type": "tag",
            "begin": begin,
            "content": {"type": "json_schema", "json_schema": arguments},
            "end": self.end,
        }

    def calls(self, tags: Sequence[Mapping[str, Any]], *, only_one: bool) -> dict[str, Any]:
        """An answer that is one of these calls, or several, and nothing else, as a format of a structural tag."""
        form = {"type": "tags_with_separator", "separator": self.separator, "tags": tags}
        return {**form, "at_least_one": True, "stop_after_first": only_one}

    def text_with_calls(self, tags: Sequence[Mapping[str, Any]], *, only_one: bool) -> dict[str, Any]:
        """Any text, in which each call is one of these."""
        form = {"type": "triggered_tags", "triggers": [self.trigger], "tags": tags}
        return {**form, "at_least_one": False, "stop_after_first": only_one}


class CallFormat(Protocol):
    """A way to write tool calls. Pass one of your own for a model that has another.

    It may have `syntax`, a CallSyntax. Without it, calls in this format cannot be forced.
    """

    def parse(self, text: str) -> ParsedAnswer:
        """Read an answer, whatever its text; never raise."""
        ...


class _Hermes:
    syntax = CallSyntax(
        begin='<tool_call>\n{"name": NAME, "arguments": ', end="}\n</tool_call>", separator="\n", trigger="<tool_call>"
    )

    def __repr__(self) -> str:
        return "HERMES"

    def parse(self, text: str) -> ParsedAnswer:
        """A call ends at its closing tag, at the beginning of the next call, or at the end of the text."""
        at = _end_of_opened_thought(text)
        outside, calls = [text[:at]], list[ToolCall | MalformedCall]()
        while (tag := _THOUGHT_OR_CALL.search(text, at)) is not None:
            outside.append(text[at : tag.start()])
            if tag[0] == "<think>":
                at = _end_of_thought(text, tag.end())
                outside.append(text[tag.start() : at])
            else:
                start = tag.end()
                end = _CALL_TAG.search(text, _end_of_object(text, start))  # tags within JSON strings do not count
                calls.append(_call(text[start : end.start() if end else None], argument_keys=("arguments",)))
                at = len(text) if end is None else end.end() if end[0] == "</tool_call>" else end.start()
        outside.append(text[at:])
        content = "".join(outside)
        return ParsedAnswer(content=content.strip() if calls else content, calls=tuple(calls))


class _Llama:
    syntax = CallSyntax(begin='{"name": NAME, "parameters": ', end="}", separator="; ")

    def __repr__(self) -> str:
        return "LLAMA"

    def parse(self, text: str) -> ParsedAnswer:
        """After the tag are calls. An answer without the tag has calls only if it consists of objects with a name."""
        before, _, after = text.partition("<|python_tag|>")
        for content, written in (("", text), (before, after)):
            calls = tuple(_joined(written))
            are_calls = _is_call(written.strip()) and not any(isinstance(call, MalformedCall) for call in calls)
            if are_calls and "<think>" not in content:  # even if their arguments contain tags
                return ParsedAnswer(content=content.strip(), calls=calls)
        thought = _end_of_thoughts(text)
        before, tag, after = text[thought:].partition("<|python_tag|>")
        if tag:
            return ParsedAnswer(content=(text[:thought] + before).strip(), calls=tuple(_joined(after)))
        said = text[thought:].strip()
        if _FENCED.match(said):
            reason = "a tool call stands alone, without a code fence around it"
            return ParsedAnswer(content=text[:thought].strip(), calls=(MalformedCall(reason=reason, text=said),))
        if not _NAMED.match(said) and not _is_call(said):
            return ParsedAnswer(content=text)
        return ParsedAnswer(content=text[:thought].strip(), calls=tuple(_joined(said)))


HERMES: CallFormat = _Hermes()
LLAMA: CallFormat = _Llama()

_THOUGHT_OR_CALL = re.compile(r"<think>|<tool_call>")
_CALL_TAG = re.compile(r"</?tool_call>")
_NAMED = re.compile(r'\{\s*"name"\s*:')
_FENCED = re.compile(r'```\w*\s*\{\s*"name"\s*:')
_SPACE = re.compile(r"\s*")
_LLAMA_KEYS = ("parameters", "arguments")


def call_format_of(tokenizer: PreTrainedTokenizerBase) -> CallFormat:
    """The format that a tokenizer's chat template asks for. Raises ModelError for others; pass a CallFormat then."""
    template: Any = tokenizer.chat_template or ""
    if isinstance(template, Mapping):
        template = template.get("tool_use") or template.get("default") or ""
    if "<tool_call>" in template and re.search(r'\\?"arguments\\?"', template):
        return HERMES
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and re.search(r'\\?"parameters', template)):
        return LLAMA
    raise ModelError(
        f"the chat template of {tokenizer.name_or_path or 'this tokenizer'} asks for tool calls in an unknown form "
        "(known: HERMES, LLAMA); pass call_format=, one of these or an object with parse(text) -> ParsedAnswer"
    )


def parse_tool_calls(text: str) -> list[ToolCall | MalformedCall]:
    """The calls in `text`, in order, in the format of Qwen and Hermes. Empty if the model called nothing."""
    return list(HERMES.parse(text).calls)


def _end_of_object(text: str, start: int) -> int:
    """The end of the object at `start`; `start` itself if there is no object."""
    begin = _after_space(text, start)
    try:
        return _DECODER.raw_decode(text, begin)[1] if text.startswith("{", begin) else start
    except (ValueError, RecursionError):
        return start


def _joined(text: str) -> Iterator[ToolCall | MalformedCall]:
    at = 0
    while True:
        end = _end_of_object(text, at)
        after = _after_space(text, end)
        if end == at or (after < len(text) and text[after] != ";"):
            yield _call(text[at:], argument_keys=_LLAMA_KEYS)
            return
        yield _call(text[at:end], argument_keys=_LLAMA_KEYS)
        at = after + 1
        if not text[at:].strip():
            return


def _call(text: str, argument_keys: tuple[str, ...]) -> ToolCall | MalformedCall:
    try:
        call = _DECODER.decode(text.strip())
    except RecursionError:
        return MalformedCall(reason="a tool call must be one JSON object; this one is nested too deeply", text=text)
    except ValueError as error:
        return MalformedCall(reason=f"a tool call must be one JSON object ({error})", text=text)
    if not isinstance(call, dict):
        return MalformedCall(reason="a tool call must be one JSON object", text=text)
    arguments = next((call[key] for key in argument_keys if key in call), None)
    match call.get("name"), arguments:
        case str(name), dict():
            return ToolCall(name=name, arguments=arguments)
    reason = f'a tool call needs "name", a string, and "{argument_keys[0]}", an object'
    return MalformedCall(reason=reason, text=text)


def _is_call(text: str) -> bool:
    try:
        call = _DECODER.raw_decode(text)[0] if text.startswith("{") else None
    except (ValueError, RecursionError):
        return False
    return isinstance(call, dict) and "name" in call and any(key in call for key in _LLAMA_KEYS)


def _end_of_opened_thought(text: str) -> int:
    """The end of thinking that the prompt began; 0 if the prompt began none."""
    end = text.find("</think>")
    if end < 0 or "<think>" in text[:end]:
        return 0
    call = text.rfind("<tool_call>", 0, end)
    is_in_call = call >= 0 and _end_of_object(text, call + len("<tool_call>")) > end
    return 0 if is_in_call else end + len("</think>")


def _end_of_thought(text: str, start: int) -> int:
    end = text.find("</think>", start)
    return len(text) if end < 0 else end + len("</think>")


def _end_of_thoughts(text: str) -> int:
    at = _end_of_opened_thought(text)
    while text.startswith("<think>", begin := _after_space(text, at)):
        at = _end_of_thought(text, begin)
    return at


def _after_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
