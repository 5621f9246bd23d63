"""How models write tool calls: reads an answer into its calls and the text beside them, and writes calls.

| format | models | a call |
|---|---|---|
| HERMES | Qwen2.5, Qwen3, Hermes | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` |
| LLAMA | Llama 3.1 to 4 | `{"name": ..., "parameters": {...}}` alone or after `<|python_tag|>`, joined by `;` |
| LLAMA_PYTHONIC | Llama 4, if asked for | `[f(a=1), g(b="x")]` alone or after `<|python_start|>` |
| QWEN_XML | Qwen3-Coder, 3.5 to 3.8, Nemotron-3 | `<tool_call><function=f><parameter=a>1</parameter>...` |
| SEED | Seed-OSS | `<seed:tool_call><function=f><parameter=a>1</parameter>...` |
| GLM | GLM-4.5 to 5 | `<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>` |
| MINIMAX | MiniMax-M2 | `<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter>...` |
| MUSE | Muse Glimmer | `<atem:function_calls><atem:invoke name="f"><atem:parameter name="a">1...` |
| MISTRAL | Mistral to v7 | `[TOOL_CALLS] [{"name": ..., "arguments": {...}, "id": ...}]`, with or without ids |
| MISTRAL_ARGS | Mistral from v11 | `[TOOL_CALLS]f[ARGS]{...}`, maybe `[CALL_ID]` before `[ARGS]` |
| DEEPSEEK_V3 | DeepSeek V3, R1 | `<tool_call_begin>function<tool_sep>f`, fenced JSON, `<tool_call_end>` |
| DEEPSEEK_V31 | DeepSeek V3.1 | `<tool_call_begin>f<tool_sep>{...}<tool_call_end>` |
| KIMI | Kimi-K2 | `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>` |
| PHI | Phi-4-mini | `<|tool_call|>[{"name": ..., "arguments": {...}}]<|/tool_call|>`, or `functools[...]` |
| COHERE | Command A, R7B | `<|START_ACTION|>[{"tool_call_id", "tool_name", "parameters"}]<|END_ACTION|>` |
| LFM | LFM2, LFM2.5 | `<|tool_call_start|>[f(a=1)]<|tool_call_end|>`, or JSON as HERMES has it for `f(a=1)` |
| GEMMA | Gemma 4 | `<|tool_call>call:f{a:<|"|>text<|"|>,n:1}<tool_call|>` |
| HARMONY | gpt-oss | `<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>` |

Reading never raises. An unreadable call is a MalformedCall, with a reason for the model to read; calls beside it are
read. Text within the model's thinking is never a call. Where a format has no quotes, values get their types from the
tool's schema: `02134` can be a string, `5.0` an integer, `True` is true; lists and objects may be JSON or Python
literals; of a union's types, string comes last. A value of none of its types is left out; the call complains.
A call that the end of the text cuts off is malformed, unless its JSON is complete. Arguments that are an object in a
JSON string are malformed: engines and SDKs would hand programs a string.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from arl.api.types import new_id
from arl.workflow.call_values import DECODER, gemma_text, json_text, shortened, typed, unquoted

if TYPE_CHECKING:
    from arl.workflow.messages import ToolSpecs


def _call_id() -> str:
    return f"call_{new_id()[:24]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A readable call."""

    name: str
    arguments: Mapping[str, Any]
    id: str = field(default_factory=_call_id, compare=False)
    """The model's own where the format has one, else made up here; repeated in the answer."""
    written: str = field(default="", compare=False)
    """The arguments as the model wrote them, if it wrote JSON: `1.50`, `\\u00e9` and the order of keys are kept."""
    complaints: tuple[str, ...] = field(default=(), compare=False)
    """A sentence for the model about each parameter that was left out because its value is not of its type."""

    @property
    def as_message(self) -> dict[str, Any]:
        """In OpenAI's form, as chat templates take it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": dict(self.arguments)}}


@dataclass(frozen=True, slots=True, kw_only=True)
class MalformedCall:
    """An unreadable call."""

    reason: str
    """For the model to read."""
    text: str = field(default="", compare=False)
    """The call as the model wrote it."""
    name: str = field(default="", compare=False)
    """The tool's name, if it could be read."""
    id: str = field(default_factory=_call_id, compare=False)


Call = ToolCall | MalformedCall


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedAnswer:
    """An answer and the calls in it."""

    content: str
    """The text outside of the calls, thinking between tags included."""
    reasoning: str | None = None
    """Thinking that is not in the content, because the format has a channel for it."""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """How a model writes calls, for grammars that let it write nothing else."""

    begin: str
    """Before the arguments of a call. NAME stands for the tool's name, "NAME" for its name as JSON."""
    end: str = ""
    """After them."""
    separator: str = ""
    """Between two calls."""
    opening: str = ""
    """Before the first call."""
    closing: str = ""
    """After the last call."""
    trigger: str = ""
    """The text with which calls begin, and no other text; empty if there is none."""
    style: str = "json"
    """How arguments are written: a style of xgrammar's format json_schema, or another, which cannot be forced."""
    numbered: str = ""
    """If a call has a number after `begin`, the text between this number and the arguments."""

    @property
    def can_be_forced(self) -> bool:
        """Whether grammars can say how arguments are written."""
        return self.style == "json" or self.style.endswith("_xml")

    def before(self, name: str) -> str:
        """What stands before the arguments, or the number, of a call of a tool."""
        return re.sub(r'("?)NAME\1', lambda found: json_text(name) if found[1] else name, self.begin)

    def tag(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The call of one tool as a tag of a structural tag. arguments: their JSON schema."""
        content: dict[str, Any] = {"type": "json_schema", "json_schema": arguments}
        if self.style != "json":  # in these styles, xgrammar takes a list without `items` for an empty one
            fields: Mapping[str, Any] = arguments.get("properties") or {}
            fields = {
                key: {"items": {}, **one} if one == {**one, "type": "array"} else one for key, one in fields.items()
            }
            content |= {"style": self.style, "json_schema": {**arguments, "properties": fields}}
        if self.numbered:
            number = [{"type": "regex", "pattern": "[0-9]+"}, {"type": "const_string", "value": self.numbered}]
            content = {"type": "sequence", "elements": [*number, content]}
        return {"type": "tag", "begin": self.before(name), "content": content, "end": self.end}

    def calls(self, tags: Sequence[Mapping[str, Any]], *, only_one: bool) -> dict[str, Any]:
        """An answer that is one of these calls, or several, and nothing else, as a format of a structural tag."""
        form = {"type": "tags_with_separator", "separator": self.separator, "tags": tags}
        form |= {"at_least_one": True, "stop_after_first": only_one}
        return {"type": "tag", "begin": self.opening, "content": form, "end": self.closing} if self.opening else form

    def text_with_calls(self, tags: Sequence[Mapping[str, Any]], *, only_one: bool) -> dict[str, Any]:
        """Any text, in which each call is one of these."""
        whole = [self.calls(tags, only_one=only_one)] if self.opening else tags
        form = {"type": "triggered_tags", "triggers": [self.trigger], "tags": whole, "at_least_one": False}
        return {**form, "stop_after_first": only_one}


class CallFormat(Protocol):
    """A way to write tool calls. Pass one of your own for a model that has another.

    It may have `syntax`, a CallSyntax, with which calls can be forced, and `thought`, the tags around thinking, if
    these are not `<think>` and `</think>`.
    """

    def parse(self, text: str, tools: ToolSpecs = ()) -> ParsedAnswer:
        """Read an answer, whatever its text; never raise. tools: their schemas give values their types."""
        ...


@dataclass(frozen=True, kw_only=True, repr=False)
class KnownFormat:
    """A format whose calls stand between tags, within any text. Patterns are regular expressions."""

    label: str
    begin: str = "(?!)"
    """The pattern at which a call begins, or a list of calls."""
    end: str = "(?!)"
    """The pattern at which it ends."""
    around: str = "(?!)"
    """The pattern of tags around all calls."""
    thought: tuple[str, str] = ("<think>", "</think>")
    """The tags around thinking."""
    marks: tuple[str, ...]
    """What a chat template names, or its tokenizer has as tokens, if it asks for this format in words alone."""
    syntax: CallSyntax

    def __repr__(self) -> str:
        return self.label

    def parse(self, text: str, tools: ToolSpecs = ()) -> ParsedAnswer:
        """A call ends at its end tag, at the beginning of the next call, or at the end of the text."""
        at = self._end_of_opened_thought(text)
        outside, calls = [text[:at]], list[Call]()
        while (tag := self._tags.search(text, at)) is not None:
            outside.append(text[at : tag.start()])
            at = tag.end()
            if tag.lastgroup == "thought":
                end = text.find(self.thought[1], at)
                at = len(text) if end < 0 else end + len(self.thought[1])
                outside.append(text[tag.start() : at])
            elif tag.lastgroup == "call":
                read, at = self._read(text, at, tools)
                calls += read
                if not read:
                    at = max(at, tag.start() + 1)
                    outside.append(text[tag.start() : at])
        outside.append(text[at:])
        return ParsedAnswer(content="".join(outside).strip() if calls else text, calls=tuple(calls))

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Calls as a model writes them."""
        syntax, written = self.syntax, list[str]()
        for number, call in enumerate(calls):
            count = f"{number}{syntax.numbered}" if syntax.numbered else ""
            written.append(syntax.before(call.name) + count + self._body(call) + syntax.end)
        return syntax.opening + syntax.separator.join(written) + syntax.closing

    def _read(self, text: str, at: int, tools: ToolSpecs) -> tuple[list[Call], int]:
        """The calls after a tag that begins some, and their end."""
        raise NotImplementedError

    def _body(self, call: ToolCall) -> str:
        return call.written or json_text(dict(call.arguments))

    def _malformed(self, why: str, text: str, name: str = "") -> Call:
        example = ToolCall(name=name or "NAME_OF_TOOL", arguments={"parameter": "value"})
        return MalformedCall(reason=f"{why}; a tool call is written as {self.write([example])}", text=text, name=name)

    def _end_of_opened_thought(self, text: str) -> int:
        """The end of thinking that the prompt began; 0 if the prompt began none."""
        opening, closing = self.thought
        end = text.find(closing)
        if end < 0 or opening in text[:end]:
            return 0
        begins = [tag.end() for tag in re.finditer(self.begin, text[:end])]
        calls, after = self._read(text, begins[-1], ()) if begins else ([], 0)
        is_in_call = after > end and any(isinstance(call, ToolCall) for call in calls)
        return 0 if is_in_call else end + len(closing)

    def _bounds(self, text: str, at: int) -> tuple[int, int]:
        """Where a call that reaches `at` ends, and where the text after it begins."""
        edge = self._edges.search(text, at)
        if edge is None:
            return len(text), len(text)
        return edge.start(), edge.end() if edge.lastgroup == "end" else edge.start()

    @cached_property
    def _tags(self) -> re.Pattern[str]:
        return re.compile(f"(?P<thought>{re.escape(self.thought[0])})|(?P<call>{self.begin})|(?P<around>{self.around})")

    @cached_property
    def _edges(self) -> re.Pattern[str]:
        return re.compile(f"(?P<end>{self.end})|{self.begin}|{self.around}")


@dataclass(frozen=True, kw_only=True, repr=False)
class JsonCalls(KnownFormat):
    """Calls with arguments in JSON: objects that have the name, lists of such, or the name before the arguments."""

    head: str = ""
    """The pattern of what stands before the arguments, with groups `name` and, maybe, `id`."""
    keys: tuple[str, str, str] = ("name", "arguments", "id")
    has_short_ids: bool = False
    """Whether templates take ids of nine letters and digits alone."""

    def _read(self, text: str, at: int, tools: ToolSpecs) -> tuple[list[Call], int]:
        head = re.compile(self.head).match(text, at)
        start = _after_space(text, head.end() if head else at)
        stop = after = _end_of_json(text, start)
        if stop == start or self.end != KnownFormat.end:
            stop, after = self._bounds(text, stop)
        body = text[start:stop]
        if head is None:
            calls = [self._malformed("the tool's name is missing", text[at:stop])]
        elif self.head:
            calls = [_object_call(head["name"], body, head.groupdict().get("id"))]
        else:
            calls = [_json_call(part, self.keys) for part in (_elements(body) if body.startswith("[") else [body])]
        if self.has_short_ids:
            calls = [call if _SHORT.fullmatch(call.id) else replace(call, id=_call_id()[5:14]) for call in calls]
        return calls, after


@dataclass(frozen=True, kw_only=True, repr=False)
class LlamaCalls(KnownFormat):
    """JSON objects to the end of the text, joined by `;` or nothing. Without a tag before them, objects of other kinds
    are no calls."""

    def _read(self, text: str, at: int, tools: ToolSpecs) -> tuple[list[Call], int]:
        fence, is_tagged = _FENCE.match(text, at), text[:at].endswith("|>")
        if not is_tagged and not _NAMED.match(text, fence.end() if fence else at):
            whole = text[at : _end_of_json(text, at)]
            if fence or not isinstance(_json_call(whole, _LLAMA_KEYS), ToolCall):
                return [], at
        elif fence:
            why = "a tool call stands alone, without a code fence around it"
            return [MalformedCall(reason=why, text=text[at:])], len(text)
        calls = list[Call]()
        while not calls or text[at:].strip():
            end = _end_of_json(text, at)
            after = _after_space(text, end)
            if end == at or text[after : after + 1] not in ("", ";", "{"):
                return [*calls, _json_call(text[at:], _LLAMA_KEYS)], len(text)
            calls.append(_json_call(text[at:end], _LLAMA_KEYS))
            at = after + (text[after : after + 1] == ";")
        return calls, len(text)


@dataclass(frozen=True, kw_only=True, repr=False)
class XmlCalls(KnownFormat):
    """Calls with a tag for each parameter, whose values have no quotes."""

    head: str
    """The pattern of the tool's name, a group `name`, to the end of its tag."""
    parameter: str
    """The pattern of what stands before a value, with a group `key`."""
    closing: str
    """The pattern of what stands after a value."""
    written: tuple[str, str, str]
    """What a model writes before a key, between it and its value, and after this."""

    def _read(self, text: str, at: int, tools: ToolSpecs) -> tuple[list[Call], int]:
        """A value ends at a closing tag that is followed by a tag; without one, at the next parameter or the end."""
        head, begin = re.compile(self.head).match(text, at), at
        if head is None:
            stop, after = self._bounds(text, at)
            return [self._malformed("the tool's name is missing", text[at:stop])], after
        name, values, between, at = head["name"], list[tuple[str, str]](), "", head.end()
        while (edge := self._inner.search(text, at)) is not None and edge.lastgroup == "key":
            between += text[at : edge.start()].strip()
            closed = self._closed.search(text, edge.end())
            stop = closed or re.compile(self.end).search(text, edge.end())
            if stop is None:
                break
            values.append((edge["key"].strip(), text[edge.end() : stop.start()]))
            at = stop.end() if closed else stop.start()
        between += text[at : edge.start()].strip() if edge else ""
        if edge is None or edge.lastgroup == "key":
            return [self._malformed("the call breaks off before its end", text[begin:], name)], len(text)
        after = edge.end() if edge.lastgroup == "end" else edge.start()
        if between and not values:
            return [self._malformed("the call has no parameters that can be read", text[begin:after], name)], after
        call = _typed_call(name, values, tools)
        if between:
            call = replace(
                call, complaints=(*call.complaints, f"{shortened(between)} is no parameter; it was left out")
            )
        return [call], after

    def _body(self, call: ToolCall) -> str:
        before, between, after = self.written
        texts = {key: value if isinstance(value, str) else json_text(value) for key, value in call.arguments.items()}
        return "".join(before + key + between + text + after for key, text in texts.items())

    @cached_property
    def _inner(self) -> re.Pattern[str]:
        return re.compile(f"(?P<end>{self.end})|{self.parameter}|{self.begin}|{self.around}")

    @cached_property
    def _closed(self) -> re.Pattern[str]:
        parameter, head = (re.sub(r"\?P<\w+>", "?:", pattern) for pattern in (self.parameter, self.head))
        gap, others = r"\s{0,20}", rf"{self.begin}|{self.around}|\Z"
        closed = rf"{self.closing}(?={gap}(?:{parameter}|{self.end}|{others}))"
        follows = rf"(?:(?:{self.begin})(?:{head})\s*)?{parameter}|(?:{self.end})\s*(?:{others})"
        return re.compile(rf"{closed}|\n?(?={gap}(?:{follows}))")


@dataclass(frozen=True, kw_only=True, repr=False)
class ListedCalls(KnownFormat):
    """Calls as `name(key=value, ...)`, in a list or each alone, with values of Python, JSON or Gemma."""

    stands_alone: bool = False
    """Whether a list with text after it is none of calls."""

    def _read(self, text: str, at: int, tools: ToolSpecs) -> tuple[list[Call], int]:
        calls, stop = self._listed(text, at, tools)
        if stop > len(text):  # no bracket ends it: an end tag does, also one within a string
            stop = self._bounds(text, at + 1)[0]
            calls, _ = self._listed(text[:stop], at, tools)
        if self.stands_alone and text[stop:].strip() and not re.compile(rf"\s*(?:{self.end})").match(text, stop):
            return [], at
        return calls, self._bounds(text, stop)[1]

    def _listed(self, text: str, at: int, tools: ToolSpecs) -> tuple[list[Call], int]:
        """The call at `at`, or the list of calls, and where it ends; beyond the text if it breaks off."""
        if not text.startswith("[", at := _after_space(text, at)):
            call, stop = self._one(text, at, tools)
            return [call], stop
        parts, stop = _split(text, at + 1)
        return [self._one(part, 0, tools)[0] for part in parts if part.strip()], stop + 1

    def _one(self, text: str, at: int, tools: ToolSpecs) -> tuple[Call, int]:
        if text.startswith("{", at := _after_space(text, at)):
            stop = _end_of_json(text, at)
            return _json_call(text[at : stop if stop > at else None], _KEYS), stop if stop > at else len(text) + 1
        head = _CALLED.match(text, at)
        parts, stop = _split(text, head.end()) if head else ([], len(text))
        name = head[1] if head else ""
        if stop == len(text):
            why = "the call breaks off before its end" if head else "this is no call"
            return self._malformed(why, text[at:], name), stop + 1
        pairs = [(_KEY.match(part), part) for part in parts if part.strip()]
        values = [(key[1], part[key.end() :].strip()) for key, part in pairs if key]
        if len(values) < len(pairs):
            return self._malformed("an argument has no name", text[at : stop + 1], name), stop + 1
        return _typed_call(name, values, tools, has_quotes=True), stop + 1

    def _body(self, call: ToolCall) -> str:
        if self.syntax.style == "python":
            return ", ".join(f"{key}={value!r}" for key, value in call.arguments.items())
        return gemma_text(dict(call.arguments))[1:-1]


@dataclass(frozen=True, kw_only=True, repr=False)
class HarmonyCalls(KnownFormat):
    """Messages with a channel, a recipient or both: analysis and those to `self` are thinking, those to tools calls."""

    reader: KnownFormat | None = None
    """Reads messages to tools; None if they are JSON."""

    def parse(self, text: str, tools: ToolSpecs = ()) -> ParsedAnswer:
        """A text that begins within a message belongs to the channel that the prompt opened: to analysis, if it ends
        as analysis does."""
        said, thoughts, calls, at = list[str](), list[str](), list[Call](), 0
        edge, start = self._edges.search(text), text.find("<|message|>")
        is_within = start < 0 or (edge is not None and 0 < edge.start() < start)
        if is_within and not re.match(r"\s*(?:<\|(?:start|channel)\|>|to=)", text):
            text = f"{'analysis' if edge and edge[0] == '<|end|>' else ''}<|message|>{text}"
        while (start := text.find("<|message|>", at)) >= 0:
            header, begin = text[at:start], start + len("<|message|>")
            recipient = re.search(r"\bto=([^\s<]+)", header)
            to = recipient[1] if recipient else "user"
            edge = self._edges.search(text, begin if to in ("user", "self") else _end_of_json(text, begin))
            body = text[begin : edge.start() if edge else None]
            at = len(text) if edge is None else edge.start() if edge[0] == "<|start|>" else edge.end()
            if to not in ("user", "self"):
                calls += self.reader.parse(body, tools).calls if self.reader else [self._call(to, body, tools)]
            else:
                (thoughts if "analysis" in header or to == "self" else said).append(body)
        reasoning = "\n".join(thoughts) if thoughts else None
        return ParsedAnswer(content="\n".join(said), reasoning=reasoning, calls=tuple(calls))

    def _body(self, call: ToolCall) -> str:
        return (self.reader._body if self.reader else super()._body)(call)

    def _call(self, recipient: str, body: str, tools: ToolSpecs) -> Call:
        name = recipient.removeprefix("functions.")
        if name != recipient or _schema_of(name, tools) is not None:
            return _object_call(name, body)
        return self._malformed(f"there is no recipient {recipient}", body, name)


_KEYS, _LLAMA_KEYS = ("name", "arguments", "id"), ("name", "parameters", "id")
_SHORT = re.compile("[A-Za-z0-9]{9}")
_SPACE = re.compile(r"\s*")
_NAMED = re.compile(r'\{\s*"name"\s*:')
_NEXT = re.compile(r',\s*(?=\{\s*"\w*name"\s*:)')
_FENCE = re.compile(r"```\w*\s*")
_CALLED = re.compile(r"\s*(?:call:)?([\w.-]+)\s*[({]")
_KEY = re.compile(r'\s*(?:<\|"\|>)?([^\s<>=:"\'()\[\]{},]+)(?:<\|"\|>)?\s*[=:]')
_STRING = r"""(["'])(?:\\.?|(?!\1\s*(?:[,)\]}:]|\Z))[^\\])*+(?:\1|\Z)"""
_TOKEN = re.compile(rf"""<\|"\|>.*?(?:<\|"\|>|\Z)|{_STRING}|[\[({{]|[\])}}]|,""", re.DOTALL)
"""A string as Gemma, Python or JSON write it, quotes within it escaped or not; a bracket; or a comma."""

# fmt: off
HERMES = JsonCalls(
    label="HERMES", marks=("<tool_call>", '"arguments'), begin="<tool_call>", end="</tool_call>",
    syntax=CallSyntax(begin='<tool_call>\n{"name": "NAME", "arguments": ', end="}\n</tool_call>", separator="\n",
                      trigger="<tool_call>"))
LLAMA = LlamaCalls(
    label="LLAMA", marks=("<|python_tag|>",),
    begin=r"<\|python_tag\|>|<\|python_start\|>(?:<\|python_end\|>)?(?=\s*\{)"
          r"|(?:\A|(?<=</think>))\s*(?=(?:```\w*\s*)?\{)",
    syntax=CallSyntax(begin='{"name": "NAME", "parameters": ', end="}", separator="; "))
LLAMA_PYTHONIC = ListedCalls(
    label="LLAMA_PYTHONIC", marks=("<|python_start|>",), stands_alone=True, end=r"<\|python_end\|>",
    begin=r"<\|python_(?:start|tag)\|>|(?:\A|(?<=</think>))\s*(?=\[\s*[A-Za-z_][\w.]*\()",
    syntax=CallSyntax(opening="[", begin="NAME(", end=")", separator=", ", closing="]", style="python"))
LFM = ListedCalls(
    label="LFM", marks=("<|tool_call_start|>",), begin=r"<\|tool_call_start\|>", end=r"<\|tool_call_end\|>",
    syntax=replace(LLAMA_PYTHONIC.syntax, opening="<|tool_call_start|>[", closing="]<|tool_call_end|>"))
GEMMA = ListedCalls(
    label="GEMMA", marks=("<|tool_call>",), begin=r"<\|tool_call>", end=r"<tool_call\|>",
    thought=("<|channel>thought\n", "<channel|>"),
    syntax=CallSyntax(begin="<|tool_call>call:NAME{", end="}<tool_call|>", style="gemma"))
QWEN_XML = XmlCalls(
    label="QWEN_XML", marks=("<tool_call>", "<function=", "<parameter="),
    begin=r"<tool_call>(?:\s*<function=)?|<function=", end=r"(?:</function>\s*)?</tool_call>|</function>",
    head=r"(?P<name>[^<>\n]+)>", parameter=r"<parameter=(?P<key>[^<>\n]+)>\n?", closing=r"\n?</parameter>",
    written=("<parameter=", ">\n", "\n</parameter>\n"),
    syntax=CallSyntax(begin="<tool_call>\n<function=NAME>\n", end="</function>\n</tool_call>", separator="\n",
                      trigger="<tool_call>", style="qwen_xml"))
SEED = replace(
    QWEN_XML, label="SEED", marks=("<seed:tool_call>",), begin=r"<seed:tool_call>(?:\s*<function=)?",
    end=r"(?:</function>\s*)?</seed:tool_call>|</function>", thought=("<seed:think>", "</seed:think>"),
    written=("<parameter=", ">", "</parameter>\n"),
    syntax=CallSyntax(begin="<seed:tool_call>\n<function=NAME>\n", end="</function>\n</seed:tool_call>", separator="\n",
                      trigger="<seed:tool_call>", style="qwen_xml"))
GLM = XmlCalls(
    label="GLM", marks=("<tool_call>", "<arg_key>"), begin="<tool_call>", end="</tool_call>",
    head=r"\s*(?P<name>[^\s<>{}]+)(?=\s|<|\Z)", parameter=r"<arg_key>(?P<key>[^<>]*)</arg_key>\s*<arg_value>",
    closing="</arg_value>", written=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    syntax=CallSyntax(begin="<tool_call>NAME\n", end="</tool_call>", separator="\n", trigger="<tool_call>",
                      style="glm_xml"))
MINIMAX = XmlCalls(
    label="MINIMAX", marks=("<minimax:tool_call>",), around="</?minimax:tool_call>", begin="<invoke name=",
    end="</invoke>", head=r'"?(?P<name>[^<>"\n]+)"?>', parameter=r'<parameter name="?(?P<key>[^<>"\n]+)"?>',
    closing="</parameter>", written=('<parameter name="', '">', "</parameter>\n"),
    syntax=CallSyntax(opening="<minimax:tool_call>\n", begin='<invoke name="NAME">\n', end="</invoke>\n",
                      closing="</minimax:tool_call>", trigger="<minimax:tool_call>", style="minimax_xml"))
MISTRAL = JsonCalls(
    label="MISTRAL", marks=("[TOOL_CALLS]",), begin=r"\[TOOL_CALLS\]", thought=("[THINK]", "[/THINK]"),
    has_short_ids=True,
    syntax=CallSyntax(opening="[TOOL_CALLS] [", begin='{"name": "NAME", "arguments": ', end="}", separator=", ",
                      closing="]", trigger="[TOOL_CALLS]"))
MISTRAL_ARGS = replace(
    MISTRAL, label="MISTRAL_ARGS", marks=("[TOOL_CALLS]", "[ARGS]"),
    head=r"\s*(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?\[ARGS\]",
    syntax=CallSyntax(begin="[TOOL_CALLS]NAME[ARGS]", trigger="[TOOL_CALLS]"))
PHI = JsonCalls(
    label="PHI", marks=("<|tool_call|>",), begin=r"<\|tool_call\|>|functools(?=\[)", end=r"<\|/tool_call\|>",
    syntax=replace(MISTRAL.syntax, opening="<|tool_call|>[", closing="]<|/tool_call|>", trigger="<|tool_call|>"))
COHERE = JsonCalls(
    label="COHERE", marks=("<|START_ACTION|>",), begin=r"<\|START_ACTION\|>", end=r"<\|END_ACTION\|>",
    thought=("<|START_THINKING|>", "<|END_THINKING|>"), keys=("tool_name", "parameters", "tool_call_id"),
    syntax=CallSyntax(opening="<|START_ACTION|>[\n    ", begin='{"tool_name": "NAME", "parameters": ', end="}",
                      separator=",\n    ", closing="\n]<|END_ACTION|>", trigger="<|START_ACTION|>"))
KIMI = JsonCalls(
    label="KIMI", marks=("<|tool_call_argument_begin|>",), around=r"<\|tool_calls_section_(?:begin|end)\|>",
    begin=r"<\|tool_call_begin\|>", end=r"<\|tool_call_end\|>",
    head=r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<>{}:]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>",
    syntax=CallSyntax(opening="<|tool_calls_section_begin|>", begin="<|tool_call_begin|>functions.NAME:",
                      numbered="<|tool_call_argument_begin|>", end="<|tool_call_end|>",
                      closing="<|tool_calls_section_end|>", trigger="<|tool_calls_section_begin|>"))
_BEGIN, _SEP, _END, _ALL, _ALL_END = (
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("call\u2581begin", "sep", "call\u2581end", "calls\u2581begin", "calls\u2581end"))
DEEPSEEK_V3 = JsonCalls(
    label="DEEPSEEK_V3", marks=(_BEGIN, "```json"), around=f"{_ALL}|{_ALL_END}", begin=_BEGIN,
    end=rf"(?:\s*```)?\s*{_END}", head=rf"\s*function{_SEP}(?P<name>[^\s{{`<]+)\s*(?:```(?:json)?)?",
    syntax=CallSyntax(opening=_ALL, begin=f"{_BEGIN}function{_SEP}NAME\n```json\n", end=f"\n```{_END}",
                      separator="\n", closing=_ALL_END, trigger=_ALL))
DEEPSEEK_V31 = replace(
    DEEPSEEK_V3, label="DEEPSEEK_V31", marks=(_BEGIN,), end=_END, head=rf"\s*(?P<name>[^\s{{`<]+)\s*{_SEP}",
    syntax=CallSyntax(opening=_ALL, begin=f"{_BEGIN}NAME{_SEP}", end=_END, closing=_ALL_END, trigger=_ALL))
HARMONY = HarmonyCalls(
    label="HARMONY", marks=("<|channel|>", "commentary"), end=r"<\|(?:end|call|return|start)\|>",
    thought=("<|channel|>analysis<|message|>", "<|end|>"),
    syntax=CallSyntax(begin="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", end="<|call|>",
                      separator="<|start|>assistant"))
_ATEM = XmlCalls(
    label="MUSE", marks=("<atem:function_calls>",), begin="<atem:invoke name=", end="</atem:invoke>",
    head=MINIMAX.head, parameter=MINIMAX.parameter.replace("<", "<atem:", 1), closing="</atem:parameter>",
    written=('<atem:parameter name="', '">', "</atem:parameter>\n"),
    syntax=CallSyntax(begin=' to=NAME<|message|><atem:function_calls>\n<atem:invoke name="NAME">\n', style="atem",
                      end="</atem:invoke>\n</atem:function_calls>", separator="<|eom|><|start|>assistant"))
MUSE = HarmonyCalls(
    label="MUSE", marks=_ATEM.marks, end=r"<\|(?:eom|eot|start)\|>", thought=(" to=self<|message|>", "<|eom|>"),
    syntax=_ATEM.syntax, reader=_ATEM)
FORMATS: tuple[KnownFormat, ...] = (
    SEED, QWEN_XML, GLM, HERMES, LLAMA, MISTRAL_ARGS, MISTRAL, DEEPSEEK_V3, DEEPSEEK_V31, HARMONY, KIMI, MINIMAX, LFM,
    GEMMA, PHI, COHERE, MUSE, LLAMA_PYTHONIC)
# fmt: on


def parse_tool_calls(text: str) -> list[ToolCall | MalformedCall]:
    """The calls in `text`, in order, in the format of Qwen and Hermes. Empty if the model called nothing."""
    return list(HERMES.parse(text).calls)


def _json_call(text: str, keys: tuple[str, str, str]) -> Call:
    """The call that is a JSON object. keys: of the name, the arguments and the id."""
    call = _object(text)
    if isinstance(call, str):
        return MalformedCall(reason=f"a tool call must be one JSON object ({call})", text=text)
    name, given = call.get(keys[0]), [key for key in {keys[1]: 1, "arguments": 1, "parameters": 1} if key in call]
    if not isinstance(name, str) or not given or not isinstance(call[given[0]], dict):
        reason = f'a tool call needs "{keys[0]}", a string, and "{keys[1]}", an object'
        return MalformedCall(reason=reason, text=text, name=name if isinstance(name, str) else "")
    if len(given) > 1:
        reason = (
            f'a tool call has its arguments once, in "{keys[1]}"; this one has {" and ".join(map(json_text, given))}'
        )
        return MalformedCall(reason=reason, text=text, name=name)
    at, written = text.index("{") + 1, ""
    while at:  # read the members again, for the words of the last that has the arguments
        key, at = DECODER.raw_decode(text, _after_space(text, at))
        start = _after_space(text, _after_space(text, at) + 1)
        at = DECODER.raw_decode(text, start)[1]
        written = text[start:at] if key == given[0] else written
        at = _after_space(text, at) + 1 if text[_after_space(text, at)] == "," else 0
    id = call[keys[2]] if isinstance(call.get(keys[2]), str) else ""
    return ToolCall(name=name, arguments=call[given[0]], written=written, id=id or _call_id())


def _object_call(name: str, text: str, id: str | None = None) -> Call:
    """The call of a tool with the arguments that are a JSON object."""
    arguments = _object(text)
    if isinstance(arguments, str):
        reason = f"a tool call's arguments must be one JSON object ({arguments})"
        return MalformedCall(reason=reason, text=text, name=name)
    return ToolCall(name=name, arguments=arguments, written=text.strip(), id=id or _call_id())


def _object(text: str) -> dict[str, Any] | str:
    """The JSON object that a text is, or why it is none."""
    try:
        value = DECODER.decode(text.strip())
    except (ValueError, RecursionError) as error:
        return "nested too deeply" if isinstance(error, RecursionError) else str(error)
    return value if isinstance(value, dict) else f"not {shortened(text.strip())}"


def _typed_call(
    name: str, values: Iterable[tuple[str, str]], tools: ToolSpecs, *, has_quotes: bool = False
) -> ToolCall:
    """A call with values of the types that the tool's schema gives them, and complaints about those of no such type.

    has_quotes: strings have quotes.
    """
    schema = _schema_of(name, tools) or {}
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    arguments, complaints = dict[str, Any](), list[str]()
    for key, text in values:
        try:
            is_string = has_quotes and text.startswith(("'", '"', '<|"|>'))
            arguments[key] = unquoted(text) if is_string else typed(text, properties.get(key), schema)
        except ValueError as error:
            complaints.append(f"argument {key}: {shortened(text)} is not {error}; it was left out")
    return ToolCall(name=name, arguments=arguments, complaints=tuple(complaints))


def _schema_of(name: str, tools: ToolSpecs) -> Mapping[str, Any] | None:
    """The schema of a tool's parameters; None if there is no such tool."""
    functions = [tool.get("function", tool) for tool in tools]
    return next((one.get("parameters") or {} for one in functions if one.get("name") == name), None)


def _split(text: str, at: int) -> tuple[list[str], int]:
    """The parts between commas from `at`, which is within a bracket, and where it closes; len(text) if it does not."""
    parts, depth, begin = list[str](), 0, at
    while token := _TOKEN.search(text, at):
        at = token.end()
        depth += (token[0] in tuple("([{")) - (token[0] in tuple(")]}"))
        if depth < 0 or (depth == 0 and token[0] == ","):
            parts.append(text[begin : token.start()])
            begin = at
        if depth < 0:
            return parts, token.start()
    return [*parts, text[begin:]], len(text)


def _elements(text: str) -> Iterator[str]:
    """The texts of the calls in a JSON list. One that is no JSON ends where the next begins."""
    at = 1
    while (at := _after_space(text, at)) < len(text) and text[at] != "]":
        end = _end_of_json(text, at)
        if end == at:
            after = _NEXT.search(text, at)
            end = after.start() if after else len(text)
        yield text[at:end]
        at = _after_space(text, end)
        at += text.startswith(",", at)


def _end_of_json(text: str, start: int) -> int:
    """The end of the object or list at `start`; `start` itself if there is none."""
    begin = _after_space(text, start)
    try:
        return DECODER.raw_decode(text, begin)[1] if text.startswith(("{", "["), begin) else start
    except (ValueError, RecursionError):
        return start


def _after_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at
