"""A call of the model, its answers, and the settings that all calls of an endpoint share.

request --protocol--> ChatCall --EpisodeSession.acomplete--> CallAnswers --protocol--> response or stream
"""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from arl.api.errors import ArlError, ConfigError, ImageError, ModelError, PromptTooLongError
from arl.api.images import Image
from arl.api.types import ModelResponse, SamplingParams
from arl.endpoint.answer_forms import Asked, Form, Thought, form_of
from arl.runtime.http.bodies import BodyError, RequestError, refused, shown, wrong
from arl.workflow.call_formats import CallFormat, ToolCall, call_format_of, syntax_of
from arl.workflow.chat_template import ChatTemplate
from arl.workflow.content import Content, image_part, text_part
from arl.workflow.dialogue import Prompt, Rewriting, Turn
from arl.workflow.messages import Message, ToolSpecs

log = logging.getLogger(__name__)

FinishReason = Literal["stop", "length", "tool_calls"]
MAX_SAMPLES = 128
MAX_SEED = (1 << 31) - 1
"""The largest seed that every server takes."""

ALTERS = "tokens sampled under it do not have the policy's logprobs, so training could not follow it"
ONLY_SAMPLED = "arl asks servers for the logprobs of the sampled tokens alone, as training needs no others"
LOW_DETAIL = "is low: images are seen at the size that the model's image processor gives them; scale them down yourself"
"""Why the endpoint refuses a field."""

Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenText:
    """The text or tokens that a completion continues."""

    prompt: str | tuple[int, ...]
    """A text, or tokens."""
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
    finish_reason: FinishReason

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


def usage(answers: Sequence[CallAnswer]) -> dict[str, int]:
    """Prompt tokens, counted once for all answers, and sampled tokens."""
    shown = answers[0].num_prompt_tokens
    sampled = sum(len(answer.response.output_ids) for answer in answers)
    return {"prompt_tokens": shown, "completion_tokens": sampled, "total_tokens": shown + sampled}


_THINK, _END_OF_THINK = "<think>", "</think>"

Reasoning = Literal["apart", "inline"]
"""The place of the model's thinking in an answer: `reasoning_content`, or `content` with the tags."""


def _split_reasoning(text: str, *, is_thinking: bool) -> tuple[str | None, str]:
    """The thinking and the rest of a text. is_thinking: the prompt has opened <think> already."""
    head, tag, rest = text.partition(_THINK)
    if tag and not head.strip():
        text, is_thinking = rest, True
    if not is_thinking:
        return None, text
    thought, _, said = text.partition(_END_OF_THINK)
    return thought.strip("\n"), said.lstrip("\n")


_TAIL = 8
"""This many of a prompt's last tokens hold a <think> or a </think> at its end."""
_CLIENTS_FIELDS = ("temperature", "top_p", "top_k", "min_p", "seed")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallPolicy:
    """The settings of one endpoint: how it samples, renders prompts and reads answers."""

    template: ChatTemplate
    sampling: SamplingParams
    """The parameters that a call does not name."""
    overrides: bool
    """Take temperature, top_p, top_k, min_p and seed from `sampling` whatever calls ask for."""
    rewriting: Rewriting
    reasoning: Reasoning
    context_length: int | None
    """Tokens that the model can hold; None: unknown."""
    call_format: CallFormat | None = None
    """How the model writes tool calls; None: as its chat template says."""
    unsupported: Literal["refuse", "ignore"] = "refuse"
    """What becomes of fields that cannot be honoured: they are refused, or ignored with a warning."""
    warned: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    """The paths and fields that were warned of."""
    constrains_strict_tools: bool = False
    """Whether calls of tools with strict: true are held to their schemas."""

    def __post_init__(self) -> None:
        if self.unsupported not in ("refuse", "ignore"):
            raise ConfigError(f'unsupported is {self.unsupported!r}; it must be "refuse" or "ignore"')

    def warn(self, path: str, field: str, reason: str) -> None:
        """Warn of a field that is ignored, once for each path."""
        place = path, re.sub(r"\[\d+\]", "[]", field)
        if place not in self.warned:
            self.warned.add(place)
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
        """A call. sampling: fields of SamplingParams, None if not named. Raises BodyError for unusable values."""
        if not self.constrains_strict_tools:
            asked = replace(asked, strict=frozenset[str]())
        try:
            syntax, format_name = syntax_of(self._call_format), repr(self._call_format)
        except ModelError as error:  # it is told once the call is made
            syntax, format_name = None, f"unknown to arl ({error})"
        return ChatCall(
            messages=messages,
            tools=tools if asked.choice.mode != "none" else (),
            sampling=self._sampling_of(sampling),
            n=n,
            asked=asked,
            form=form_of(asked, tools, syntax, format_name),
            template_options=template_options or {},
            prefill=prefill,
            thinking_budget=thinking_budget,
            text=text,
        )

    def _sampling_of(self, asked: dict[str, Any]) -> SamplingParams:
        given = {name: value for name, value in asked.items() if value is not None}
        try:
            sampling = replace(self.sampling, **given)
        except ValueError as error:
            param = str(error).partition(" ")[0]
            raise BodyError(str(error), param=param) from error
        if not self.overrides:
            return sampling
        return replace(sampling, **{name: getattr(self.sampling, name) for name in _CLIENTS_FIELDS})

    def template_with(self, options: Mapping[str, Any]) -> ChatTemplate:
        """The template with a call's options. Raises BodyError for an option that is not the template's."""
        if not options:
            return self.template
        settings = inspect.signature(type(self.template.tokenizer).apply_chat_template).parameters
        for name in options.keys() & settings:
            where = f"chat_template_kwargs.{name}"
            raise refused(where, "is a setting of the tokenizer, not a variable of the chat template; leave it out")
        return self.template.with_options(options)

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

    def thinking_of(self, prompt: Prompt, call: ChatCall) -> Thought:
        """How the answer to a prompt begins. A prompt may end with <think>, or with </think> to have no thinking."""
        if call.text is not None or _THINK not in str(self.template.tokenizer.chat_template):
            return Thought()
        given = prompt.given_ids[: len(prompt.given_ids) - prompt.num_prefilled]
        end = str(self.template.tokenizer.decode(list(given[-_TAIL:]))).rstrip()
        is_open = end.endswith(_THINK)
        if call.prefill and is_open:
            reason = (
                "end with an assistant's message, but the chat template begins the answer with <think>, within which"
            )
            raise refused("messages", f"{reason} it would stand; end with a user's message")
        is_possible = not is_open and not end.endswith(_END_OF_THINK) and not call.prefill and self.reasoning == "apart"
        return Thought(is_open=is_open, is_possible=is_possible, budget=call.thinking_budget)

    def spoken(self, text: str, response: ModelResponse, call: ChatCall, *, is_thinking: bool) -> Spoken:
        """The parts of a sampled text, as the program receives them."""
        stops = [at for stop in call.sampling.stop if (at := text.find(stop)) >= 0]
        said, reasoning = text[: min(stops, default=len(text))], None
        if self.reasoning == "apart" and call.text is None:
            reasoning, said = _split_reasoning(said, is_thinking=is_thinking)
        said, calls = self._calls(said, call) if call.tools else (said, ())
        ended = "stop" if response.stop_reason == "stop" else "length"  # an aborted answer is as incomplete
        return Spoken(
            content=said, reasoning=reasoning, tool_calls=calls, finish_reason="tool_calls" if calls else ended
        )

    def token_texts(self, response: ModelResponse) -> list[str]:
        """The text of each sampled token."""
        return [str(self.template.tokenizer.decode([token])) for token in response.output_ids]

    def check_tools(self, call: ChatCall) -> None:
        """Raise ModelError if the model's call format is unknown."""
        if call.tools:
            _ = self._call_format

    @property
    def _call_format(self) -> CallFormat:
        return self.call_format or call_format_of(self.template.tokenizer)

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
