"""A call of the model, the form of its answer, its answers, and the settings that all calls of an endpoint share.

request --protocol--> ChatCall --EpisodeSession--> CallAnswers --protocol--> response or stream

A form is a format of a structural tag, which xgrammar, SGLang and vLLM share: JSON by a schema, a regular expression,
calls of tools. The model may think before the form begins.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from arl.api.errors import ArlError, ConfigError, ImageError, PromptTooLongError
from arl.api.grammar import Grammar, schemas_in, unenforced
from arl.api.images import Image
from arl.api.types import ModelResponse, SamplingParams
from arl.runtime.http.bodies import BodyError, RequestError, refused, shown, wrong
from arl.workflow.call_formats import CallFormat, CallSyntax, ToolCall, call_format_of
from arl.workflow.chat_template import ChatTemplate
from arl.workflow.dialogue import Prompt, Rewriting, Turn
from arl.workflow.messages import Content, Message, ToolSpecs, image_part, text_part

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

MAX_SEED = (1 << 31) - 1
"""The largest seed that every server takes."""
ONLY_SAMPLED = "arl asks servers for the logprobs of the sampled tokens alone, as training needs no others"
LOW_DETAIL = "is low: images are seen at the size that the model's image processor gives them; scale them down yourself"
"""Why the endpoint refuses a field."""
_THINK, _END_OF_THINK = "<think>", "</think>"
_ANY_TEXT = {"type": "any_text"}
_TAIL = 8
"""This many of a prompt's last tokens hold a <think> or a </think> at its end."""
_CLIENTS_FIELDS = ("temperature", "top_p", "top_k", "min_p", "seed")

Count = Annotated[int, Field(ge=1)]
Form = Mapping[str, Any]
"""A format of a structural tag."""
Reasoning = Literal["apart", "inline"]
"""The place of the model's thinking in an answer: `reasoning_content`, or `content` with the tags."""
Thinking = Literal["open", "possible", "none"]
"""Of an answer: open: the prompt began it; possible: the model may begin it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Whether an answer calls tools."""

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] | None = None
    """The only tools that it may call; None: all."""
    is_named: bool = False
    """The program named the one tool to call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A program's requirements for an answer's form."""

    output: Form | None = None
    """The form of the text, if the answer is one."""
    where: str = "response_format"
    """The field with the output's form."""
    choice: ToolChoice = ToolChoice()
    strict: frozenset[str] = frozenset()
    """The tools whose calls must match their schemas."""
    only_one: bool = False
    """At most one call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenText:
    """The text or tokens that a completion continues."""

    prompt: str | tuple[int, ...]
    adds_special_tokens: bool = True
    """Begin a text with what the tokenizer puts before texts, such as a token of the beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A program's call of the model."""

    messages: Sequence[Message]
    """The whole history, as chat templates take it."""
    sampling: SamplingParams
    tools: ToolSpecs = ()
    """The tools that the model may call, in OpenAI's form."""
    n: int = 1
    """How many answers to sample at once."""
    asked: Asked
    form: Form | None = None
    """The form of the answer, after its thinking; None: it is free."""
    template_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options of the chat template, in addition to the endpoint's."""
    prefill: str = ""
    """The beginning of the answer, which the model continues."""
    thinking_budget: int | None = None
    """At most this many tokens of thinking; None: any number."""
    text: GivenText | None = None
    """A text to continue unchanged, in place of messages."""

    def without_grammar(self, reason: str) -> BodyError:
        """The error for an engine that cannot decode under the grammar of this call; it names the field at fault."""
        choice = self.asked.choice
        if choice.mode == "required" or choice.names:
            field = "tool_choice"
        elif self.asked.output:
            field = self.asked.where
        else:
            field = "tools" if self.form else "thinking"
        return refused(field, f"cannot be honoured here: {reason}", can_be_dropped=field != "tools")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledTool:
    """A tool that an answer calls."""

    id: str
    name: str
    arguments: str
    """A JSON object, as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """The parts of a sampled text."""

    content: str
    reasoning: str | None
    """The text within <think>; None if there is none."""
    tool_calls: tuple[CalledTool, ...]
    finish_reason: Literal["stop", "length", "tool_calls"]

    @property
    def message(self) -> dict[str, Any]:
        """The answer as an assistant's message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["content"] = self.content or None
            message["tool_calls"] = [tool_call(call.id, call.name, call.arguments) for call in self.tool_calls]
        return message


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallAnswer:
    """One answer to a call, recorded as a turn."""

    turn: Turn
    spoken: Spoken
    num_prompt_tokens: int

    @property
    def response(self) -> ModelResponse:
        assert self.turn.response is not None, "a program's turns are sampled"
        return self.turn.response


class RefusedCallError(RequestError, ArlError):
    """The call is answered with an HTTP error. param: the field at fault; code: OpenAI's name for the error."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, status)
        self.param = param
        self.code = code


class EpisodeOverError(RefusedCallError):
    """The episode ended before the call was answered."""

    def __init__(self) -> None:
        super().__init__("the episode that this key was made for is over", status=401, code="invalid_api_key")


# What protocols read.


def content_of(where: str, content: Any, part: Callable[[str, Any], str | Image], separator: str) -> Content:
    """A string, or parts that `part` reads, given the place and the value of each: as one text if all are texts.

    Raises BodyError for anything else.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, content, "a string or a list of text parts")
    return content_of_parts([part(f"{where}[{i}]", one) for i, one in enumerate(content)], separator)


def content_of_parts(parts: Sequence[str | Image], separator: str) -> Content:
    """One text if all parts are texts; else all of them in their order."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return separator.join(texts)
    return [text_part(part) if isinstance(part, str) else image_part(part) for part in parts]


def sent_image(where: str, url: Any) -> Image:
    """The image of a data URL. Raises BodyError for other addresses: the endpoint fetches nothing, reads no files."""
    if not isinstance(url, str) or not url.startswith("data:"):
        reason = "nothing is fetched here; send the image itself, as a data URL (data:image/png;base64,...)"
        raise refused(where, f"is {shown(url)}, and {reason}")
    try:
        return Image.of(url)
    except ImageError as error:
        raise BodyError(f"{where} cannot be shown: {error}", param=where) from error


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call in OpenAI's form. arguments: JSON."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def openai_choice(given: Any) -> ToolChoice:
    """The `tool_choice` of OpenAI's protocols. Raises BodyError."""
    match given:
        case "auto" | "none" | "required":
            return ToolChoice(mode=given)
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return ToolChoice(mode="required", names=(name,), is_named=True)
        case {"type": "allowed_tools"}:
            match given.get("allowed_tools", given):
                case {"mode": "auto" | "required" as mode, "tools": list(tools)}:
                    return ToolChoice(mode=mode, names=tuple(map(_name, tools)))
    raise wrong(
        "tool_choice", given, '"auto", "none", "required", {"type": "function", ...} or {"type": "allowed_tools", ...}'
    )


def _name(tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name
    raise wrong("tool_choice", tool, "a function of tools, as in {type, name}")


def json_schema(where: str, schema: Any, *, is_strict: bool = True) -> Form:
    """JSON that matches a schema. where: the field that holds it. Servers compile it, and refuse a faulty one.

    A keyword that servers would ignore, so that an answer might not match, is left out unless is_strict. Raises
    BodyError for such a keyword, and for a schema that is not an object.
    """
    if not isinstance(schema, Mapping):
        raise wrong(where, schema, "a JSON schema, an object")
    made = deepcopy(dict(schema))
    for part, steps in schemas_in(made):
        for name, reason in unenforced(part).items():
            if is_strict:
                path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in (*steps, name))
                reason = f"{reason}; leave it out, and check it in the program"
                raise refused(f"{where}{path}", reason, can_be_dropped=True)
            del part[name]
    return {"type": "json_schema", "json_schema": {name: made[name] for name in made if name not in ("$schema", "$id")}}


def text_form(where: str, kind: Literal["text", "json_object", "json_schema"], schema: Any) -> Form | None:
    """The form of a text that OpenAI's protocols name by its kind. where: the field with the schema."""
    if kind == "text":
        return None
    return json_schema(where, schema) if kind == "json_schema" else json_schema(where, {"type": "object"})


def one_of(forms: Sequence[tuple[str, Form]]) -> tuple[str, Form | None]:
    """The only form asked for, with its field. Raises BodyError if several fields ask for one."""
    if len(forms) > 1:
        first, second = forms[0][0], forms[1][0]
        raise BodyError(f"{second} contradicts {first}: both ask for a form of the answer; send one", param=second)
    return forms[0] if forms else ("response_format", None)


def grammar_of(form: Form | None, thinking: Thinking, budget: int | None) -> Grammar | None:
    """The grammar of an answer: thinking, if the model thinks, and then the form. None if the answer is free.

    budget: at most this many tokens of thinking, after which the model must close it; None: any number.
    """
    if form is None and (thinking == "none" or budget is None):
        return None
    if thinking == "none":
        match form:  # these need no structural tag
            case {"type": "json_schema", "json_schema": schema}:
                return Grammar(kind="json_schema", text=json.dumps(schema))
            case {"type": "regex", "pattern": pattern}:
                return Grammar(kind="regex", text=pattern)
        whole = form
    else:
        form = form or _ANY_TEXT
        content = _ANY_TEXT if budget is None else {**_ANY_TEXT, "max_tokens": budget}
        begin = "" if thinking == "open" else _THINK
        thought = {"type": "tag", "begin": begin, "content": content, "end": _END_OF_THINK}
        whole = {"type": "sequence", "elements": [thought, {"type": "regex", "pattern": r"\s{0,4}"}, form]}
        if thinking == "possible" and budget is None:  # with a budget, text that thinks or not would escape the limit
            whole = {"type": "or", "elements": [whole, form]}
    return Grammar(kind="structural_tag", text=json.dumps({"type": "structural_tag", "format": whole}))


@dataclass(kw_only=True, eq=False, repr=False)
class CallPolicy:
    """The settings of one endpoint, which OpenAIProxy explains: how it samples, renders prompts and reads answers."""

    tokenizer: PreTrainedTokenizerBase = field(kw_only=False)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    overrides_sampling: bool = False
    reasoning: Reasoning = "apart"
    context_length: int | None = None
    call_format: CallFormat | None = None
    template_options: Mapping[str, Any] | None = None
    rewriting: Rewriting = "branch"
    unsupported: Literal["refuse", "ignore"] = "refuse"
    constrains_strict_tools: bool = False

    def __post_init__(self) -> None:
        if self.unsupported not in ("refuse", "ignore"):
            raise ConfigError(f'unsupported is {self.unsupported!r}; it must be "refuse" or "ignore"')
        self.template = ChatTemplate(self.tokenizer, self.template_options)
        self._warned = set[tuple[str, str]]()
        """The paths and fields that were warned of."""

    def warn(self, path: str, field: str, reason: str) -> None:
        """Warn of a field that is ignored, once for each path."""
        place = path, re.sub(r"\[\d+\]", "[]", field)
        if place not in self._warned:
            self._warned.add(place)
            log.warning("%s: %s. It is ignored here and in later calls.", path, reason)

    def call(
        self,
        messages: Sequence[Message],
        tools: ToolSpecs,
        asked: Asked,
        *,
        n: int = 1,
        template_options: Mapping[str, Any] | None = None,
        prefill: str = "",
        thinking_budget: int | None = None,
        text: GivenText | None = None,
        **sampling: Any,
    ) -> ChatCall:
        """A call. sampling: fields of SamplingParams, None if not named. Raises BodyError for unusable values, and
        ModelError for tools if the model's call format is unknown."""
        if not self.constrains_strict_tools:
            asked = replace(asked, strict=frozenset[str]())
        try:
            sampled = replace(self.sampling, **{name: value for name, value in sampling.items() if value is not None})
        except ValueError as error:
            raise BodyError(str(error), param=str(error).partition(" ")[0]) from error
        if self.overrides_sampling:
            sampled = replace(sampled, **{name: getattr(self.sampling, name) for name in _CLIENTS_FIELDS})
        return ChatCall(
            messages=messages,
            tools=tools if asked.choice.mode != "none" else (),
            sampling=sampled,
            n=n,
            asked=asked,
            form=self._form_of(asked, tools),
            template_options=template_options or {},
            prefill=prefill,
            thinking_budget=thinking_budget,
            text=text,
        )

    def _form_of(self, asked: Asked, tools: ToolSpecs) -> Form | None:
        """The form of an answer, without thinking; None if it is free. Raises BodyError for what cannot be honoured."""
        chosen = asked.choice
        _check_names(chosen, tools)
        if chosen.mode == "none" or not tools:
            return asked.output
        call_format = self._call_format
        is_forced = chosen.mode == "required"
        if not (is_forced or asked.output or chosen.names is not None or asked.strict):
            return None
        where = "tool_choice" if is_forced or chosen.names is not None else asked.where if asked.output else "strict"
        syntax = getattr(call_format, "syntax", None)
        if not isinstance(syntax, CallSyntax):
            why = f"the model calls tools in the format {call_format!r}, which does not say how calls are written"
            raise refused(where, f"cannot be honoured here: {why} (syntax)", can_be_dropped=True)
        tags: list[dict[str, Any]] = []
        for i, function in enumerate(tool["function"] for tool in tools):
            if chosen.names is None or function["name"] in chosen.names:
                schema, is_strict = function.get("parameters") or {"type": "object"}, function["name"] in asked.strict
                form = json_schema(f"tools[{i}].parameters", schema, is_strict=is_strict)
                tags.append(syntax.tag(function["name"], {**form["json_schema"], "type": "object"}))
        calls = syntax.calls(tags, only_one=asked.only_one)
        if is_forced:
            return calls
        if asked.output:
            return {"type": "or", "elements": [calls, asked.output]}
        if not syntax.trigger:
            why = f"nothing tells the beginning of a call in the model's format, {call_format!r}, from other text"
            raise refused(where, f"cannot be honoured here: {why}", can_be_dropped=True)
        return syntax.text_with_calls(tags, only_one=asked.only_one)

    def template_with(self, options: Mapping[str, Any]) -> ChatTemplate:
        """The template with a call's options. Raises BodyError for an option that is not the template's."""
        settings = inspect.signature(type(self.tokenizer).apply_chat_template).parameters
        for name in options.keys() & settings:
            where = f"chat_template_kwargs.{name}"
            raise refused(where, "is a setting of the tokenizer, not a variable of the chat template; leave it out")
        return self.template.with_options(options) if options else self.template

    def within_context(self, sampling: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """Ask for no more tokens than fit. Raises PromptTooLongError if none fits."""
        if self.context_length is None:
            return sampling
        room = self.context_length - num_prompt_tokens
        if room < 1:
            raise PromptTooLongError(
                f"the messages are {num_prompt_tokens} tokens, and the model's context is {self.context_length}"
            )
        return replace(sampling, max_new_tokens=min(room, sampling.max_new_tokens))

    def thinking_of(self, prompt: Prompt, call: ChatCall) -> Thinking:
        """How the answer to a prompt begins. A prompt may end with <think>, or with </think> to have no thinking."""
        if call.text is not None or _THINK not in str(self.tokenizer.chat_template):
            return "none"
        given = prompt.given_ids[: len(prompt.given_ids) - prompt.num_prefilled]
        end = str(self.tokenizer.decode(list(given[-_TAIL:]))).rstrip()
        if end.endswith(_THINK):
            if call.prefill:
                reason = "end with an assistant's message, but the chat template begins the answer with <think>, within"
                raise refused("messages", f"{reason} which it would stand; end with a user's message")
            return "open"
        is_possible = not end.endswith(_END_OF_THINK) and not call.prefill and self.reasoning == "apart"
        return "possible" if is_possible else "none"

    def spoken(self, text: str, response: ModelResponse, call: ChatCall, *, is_thinking: bool) -> Spoken:
        """The parts of a sampled text, as the program receives them. is_thinking: the prompt has opened <think>."""
        stops = [at for stop in call.sampling.stop if (at := text.find(stop)) >= 0]
        said, reasoning = text[: min(stops, default=len(text))], None
        if self.reasoning == "apart" and call.text is None:
            head, tag, rest = said.partition(_THINK)
            if tag and not head.strip():
                said, is_thinking = rest, True
            if is_thinking:
                thought, _, said = said.partition(_END_OF_THINK)
                reasoning, said = thought.strip("\n"), said.lstrip("\n")
        said, calls = self._calls(said, call) if call.tools else (said, ())
        ended = "stop" if response.stop_reason == "stop" else "length"  # an aborted answer is as incomplete
        return Spoken(
            content=said, reasoning=reasoning, tool_calls=calls, finish_reason="tool_calls" if calls else ended
        )

    def token_texts(self, response: ModelResponse) -> list[str]:
        """The text of each sampled token."""
        return [str(self.tokenizer.decode([token])) for token in response.output_ids]

    @property
    def _call_format(self) -> CallFormat:
        return self.call_format or call_format_of(self.tokenizer)

    def _calls(self, said: str, call: ChatCall) -> tuple[str, tuple[CalledTool, ...]]:
        """The text outside tool calls, and the calls. An answer with an unreadable call stays text."""
        parsed = self._call_format.parse(said)
        read = [one for one in parsed.calls if isinstance(one, ToolCall)]
        if len(read) < len(parsed.calls) or not read:
            return said, ()
        called = [
            CalledTool(id=one.id, name=one.name, arguments=json.dumps(one.arguments, ensure_ascii=False))
            for one in read
        ]
        return parsed.content, tuple(called[:1] if call.asked.only_one else called)


def _check_names(choice: ToolChoice, tools: ToolSpecs) -> None:
    known = [tool["function"]["name"] for tool in tools]
    if choice.mode == "required" and not tools:
        reason = "asks for a call, but there are no tools"
    elif choice.names == ():
        reason = "allows no tool; name at least one"
    elif unknown := [name for name in choice.names or () if name not in known]:
        reason = f"names {shown(unknown[0])}, which is not among the tools: {', '.join(known) or 'none'}"
    else:
        return
    raise BodyError(f"tool_choice {reason}", param="tool_choice")
