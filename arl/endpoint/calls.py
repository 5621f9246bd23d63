"""A call of the model, the form of its answer, its answers, and the settings that all calls of an endpoint share.

request --protocol--> ChatCall --EpisodeSession--> CallAnswers --protocol--> response or stream

A form is a format of a structural tag, which xgrammar, SGLang and vLLM share: JSON by a schema, a regular expression,
calls of tools. The model may think before the form begins.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from pydantic_core import from_json

from arl.api.errors import ArlError, ConfigError, ImageError, ModelError, PromptTooLongError
from arl.api.grammar import Grammar, schemas_in, unenforced
from arl.api.images import Image
from arl.api.types import ModelResponse, SamplingParams, new_id
from arl.runtime.http.bodies import BodyError, RequestBody, RequestError, check_depth, refused, shown, wrong
from arl.workflow.call_formats import CallFormat, CallSyntax, MalformedCall, ParsedAnswer, ToolCall
from arl.workflow.chat_template import ChatTemplate, call_format_of
from arl.workflow.dialogue import Prompt, Rewriting, Turn
from arl.workflow.messages import Content, Message, ToolSpecs, arguments_of, image_part, text_part
from arl.workflow.template_facts import TemplateFacts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

MAX_SEED = (1 << 31) - 1
"""The largest seed that every server takes."""
ONLY_SAMPLED = "arl asks servers for the logprobs of the sampled tokens alone, as training needs no others"
LOW_DETAIL = "is low: images are seen at the size that the model's image processor gives them; scale them down yourself"
"""Why the endpoint refuses a field."""
_ANY_TEXT = {"type": "any_text"}
_THOUGHT = re.compile(r"\s*<think>\n*(.*?)\n*(?:</think>\n*|\Z)", re.DOTALL)
"""Thinking of a model whose template knows none, as it may have been asked for in the prompt."""
_text = partial(re.compile("[\ud800-\udfff]").sub, "\ufffd")
"""Gives a text without halves of surrogate pairs: JSON can escape them, but no SDK sends them back."""
_DEEPEST = 80
"""How deep arguments may nest, so that a program can send them back: bodies have a limit, too."""
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
    only_one: bool = False
    """At most one call."""


class FunctionTool(RequestBody, ignored=("type",), only={"defer_loading": (False,), "allowed_callers": (["direct"],)}):
    """A tool that the program runs, of any protocol."""

    name: Annotated[str, Field(min_length=1)]
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool = False
    """Its calls must match the schema."""

    @property
    def spec(self) -> Mapping[str, Any]:
        """The form that templates show, the same for all protocols and for arl's own tools."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


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
    """A JSON object, as the model wrote it."""
    complaints: tuple[str, ...] = ()
    """Why it lacks parameters that the model gave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """The parts of a sampled text."""

    content: str
    reasoning: str | None
    """The thinking; None if there is none."""
    tool_calls: tuple[CalledTool, ...]
    malformed_calls: tuple[MalformedCall, ...]
    """Their text stands in content."""
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

    @property
    def faults(self) -> dict[str, Any]:
        """What could not be read of calls, in a field of arl's own, which SDKs pass on; nothing if all could."""
        found = [(call.name, call.text, call.reason) for call in self.malformed_calls]
        found += [(call.name, "", reason) for call in self.tool_calls for reason in call.complaints]
        told = [{"name": _text(name), "text": _text(text), "reason": _text(reason)} for name, text, reason in found]
        return {"malformed_tool_calls": told} if told else {}


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


def tool_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call in OpenAI's form."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def checked_arguments(where: str, given: Any) -> Any:
    """The arguments of a call in a history: a JSON object or its text; none if empty. Raises BodyError for others."""
    if given in (None, "", "null"):
        return "{}"
    if isinstance(arguments_of(given), Mapping):
        return given
    raise wrong(where, given, "a JSON object, as text")


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


def grammar_of(form: Form | None, thinking: Thinking, budget: int | None, facts: TemplateFacts) -> Grammar | None:
    """The grammar of an answer: thinking, if the model thinks, and then the form. None if the answer is free.

    budget: at most this many tokens of thinking, after which the model must close it; None: any number. facts: of the
    template, which knows the tags of thinking.
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
        begin, end = facts.thought or ("", "")
        thought = {"type": "tag", "begin": "" if thinking == "open" else begin, "content": content, "end": end}
        between = {"type": "regex", "pattern": r"\s{0,4}"}
        if facts.answer_opening:  # a channel of its own, in a message of its own
            between = {"type": "const_string", "value": facts.header}
        whole = {"type": "sequence", "elements": [thought, between, form]}
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
        tools: Sequence[FunctionTool],
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
        try:
            sampled = replace(self.sampling, **{name: value for name, value in sampling.items() if value is not None})
        except ValueError as error:
            raise BodyError(str(error), param=str(error).partition(" ")[0]) from error
        if self.overrides_sampling:
            sampled = replace(sampled, **{name: getattr(self.sampling, name) for name in _CLIENTS_FIELDS})
        return ChatCall(
            messages=messages,
            tools=tuple(tool.spec for tool in tools) if asked.choice.mode != "none" else (),
            sampling=sampled,
            n=n,
            asked=asked,
            form=self._form_of(asked, tools, "" if text else self.template.facts.answer_opening),
            template_options=template_options or {},
            prefill=prefill,
            thinking_budget=thinking_budget,
            text=text,
        )

    def _form_of(self, asked: Asked, tools: Sequence[FunctionTool], opening: str) -> Form | None:
        """The form of an answer, without thinking; None if it is free. opening: what the model writes before a text.

        Raises BodyError for what cannot be honoured.
        """
        chosen, output = asked.choice, asked.output
        if output and opening:
            output = {"type": "sequence", "elements": [{"type": "const_string", "value": opening}, output]}
        _check_names(chosen, [tool.name for tool in tools])
        if chosen.mode == "none" or not tools:
            return output
        call_format = self._call_format
        is_forced = chosen.mode == "required"
        strict = {tool.name for tool in tools if tool.strict and self.constrains_strict_tools}
        if not (is_forced or asked.output or chosen.names is not None or strict):
            return None
        where = "tool_choice" if is_forced or chosen.names is not None else asked.where if asked.output else "strict"
        syntax = getattr(call_format, "syntax", None)
        if not isinstance(syntax, CallSyntax) or not syntax.can_be_forced:
            why = f"the model calls tools in the format {call_format!r}, which grammars cannot say"
            raise refused(where, f"cannot be honoured here: {why} (syntax)", can_be_dropped=True)
        tags: list[dict[str, Any]] = []
        for i, tool in enumerate(tools):
            if chosen.names is None or tool.name in chosen.names:
                schema = tool.parameters or {"type": "object"}
                form = json_schema(f"tools[{i}].parameters", schema, is_strict=tool.name in strict)
                tags.append(syntax.tag(tool.name, {**form["json_schema"], "type": "object"}))
        calls = syntax.calls(tags, only_one=asked.only_one)
        if is_forced:
            return calls
        if output:
            return {"type": "or", "elements": [calls, output]}
        if not syntax.trigger:
            why = f"nothing tells the beginning of a call in the model's format, {call_format!r}, from other text"
            raise refused(where, f"cannot be honoured here: {why}", can_be_dropped=True)
        return syntax.text_with_calls(tags, only_one=asked.only_one)

    def template_with(self, options: Mapping[str, Any]) -> ChatTemplate:
        """The template with a call's options. Raises BodyError for an option that is not the template's."""
        for name, value in options.items():
            try:
                self.template.with_options({name: value})
            except ModelError as error:
                raise refused(f"chat_template_kwargs.{name}", f"has no effect: {error}", can_be_dropped=True) from error
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

    def thinking_of(self, facts: TemplateFacts, prompt: Prompt, call: ChatCall) -> Thinking:
        """How the answer to a prompt begins. The prompt may open the thinking, or close it to have none."""
        opened = prompt.begun.removesuffix(call.prefill)
        if call.prefill and (begin := opened.strip() or facts.answer_opening):
            reason = (
                f"end with an assistant's message, but the model's answers begin with {begin}, and this one would not"
            )
            raise refused("messages", f"{reason}; end with a user's message")
        if call.text is not None or facts.thought is None:
            return "none"
        if opened:
            return "open"
        is_closed = prompt.shown.text.rstrip().endswith(facts.thought[1])
        return "none" if is_closed or call.prefill or self.reasoning == "inline" else "possible"

    def spoken(self, text: str, response: ModelResponse, call: ChatCall, template: ChatTemplate, opened: str) -> Spoken:
        """The parts of a sampled text, as the program receives them. opened: the thinking that the prompt began."""
        stops = [at for stop in call.sampling.stop if (at := text.find(stop)) >= 0]
        said, reasoning = text[: min(stops, default=len(text))], None
        if self.reasoning == "apart" and call.text is None:
            reasoning, said = template.facts.split(said, opened)
            if reasoning is None and (found := _THOUGHT.match(said)):
                reasoning, said = found[1], said[found.end() :]
        parsed = self._call_format.parse(said, call.tools) if call.tools else ParsedAnswer(content=said)
        read = [_called(one) if isinstance(one, ToolCall) else one for one in parsed.calls]
        calls = tuple(one for one in read if isinstance(one, CalledTool))
        malformed = tuple(one for one in read if isinstance(one, MalformedCall))
        ids = [one.id for one in calls]
        if len(set(ids)) < len(ids):  # programs tell results apart by them
            calls = tuple(replace(one, id=new_id()[:9]) if one.id in ids[:i] else one for i, one in enumerate(calls))
        if calls or not malformed:  # else it stays text as a whole
            said = "\n".join(filter(None, (parsed.content, *(one.text for one in malformed))))
            reasoning = "\n".join(filter(None, (reasoning, parsed.reasoning))) if parsed.reasoning else reasoning
        ended = "stop" if response.stop_reason == "stop" else "length"  # an aborted answer is as incomplete
        return Spoken(
            content=said,
            reasoning=reasoning,
            tool_calls=calls[:1] if call.asked.only_one else calls,
            malformed_calls=malformed,
            finish_reason="tool_calls" if calls else ended,
        )

    def token_texts(self, response: ModelResponse) -> list[str]:
        """The text of each sampled token."""
        return [str(self.tokenizer.decode([token])) for token in response.output_ids]

    @property
    def _call_format(self) -> CallFormat:
        return self.call_format or call_format_of(self.tokenizer)


def _called(call: ToolCall) -> CalledTool | MalformedCall:
    """The call as SDKs can read it and send it back."""
    try:
        check_depth(call.arguments, _DEEPEST)
        arguments = _text(json.dumps(call.arguments, ensure_ascii=False, allow_nan=False))
    except (ValueError, RecursionError) as error:
        return MalformedCall(name=call.name, reason=f"no program could read the arguments: {error}", text=call.written)
    with suppress(ValueError):
        if isinstance(from_json(call.written), dict):  # the SDKs' parser, which takes no halves of pairs
            arguments = call.written
    return CalledTool(id=_text(call.id), name=_text(call.name), arguments=arguments, complaints=call.complaints)


def _check_names(choice: ToolChoice, known: Sequence[str]) -> None:
    if choice.mode == "required" and not known:
        reason = "asks for a call, but there are no tools"
    elif choice.names == ():
        reason = "allows no tool; name at least one"
    elif unknown := [name for name in choice.names or () if name not in known]:
        reason = f"names {shown(unknown[0])}, which is not among the tools: {', '.join(known) or 'none'}"
    else:
        return
    raise BodyError(f"tool_choice {reason}", param="tool_choice")
