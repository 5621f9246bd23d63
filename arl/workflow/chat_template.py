"""A tokenizer's chat template: messages to text, text to tokens, and the end of an assistant's turn."""

from __future__ import annotations

import json
import marshal
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property, lru_cache
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Any, Literal, cast

from jinja2 import TemplateError

from arl.api.errors import ModelError
from arl.api.images import Image
from arl.api.types import StopReason
from arl.workflow.call_formats import FORMATS, KnownFormat, MalformedCall, ParsedAnswer, ToolCall
from arl.workflow.images import PLACEHOLDER, blind
from arl.workflow.messages import Message, ToolSpecs, images_in, normalised, plain, text_content
from arl.workflow.template_facts import ASKED, SPEC, TemplateFacts, called, facts_of, in_parts, options_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REFUSALS = (TemplateError, TypeError, ValueError, AttributeError, LookupError)
"""The exceptions that a template raises for messages that it does not accept."""
_REMEMBERED, _LONGEST = 256, 20_000
"""Texts, and encodings of texts, that a template remembers; longer ones, in characters, it does not."""
_MARKER = "arl-marks-the-sampled-turn"
_CUT = "\ufdd0"
"""Marks a control token's text as mere text, from within it. Unicode reserves this character for internal use."""

_NEAR = 24
"""Characters before an assistant's header that tell it from others, where a template rewrote what stands before."""
_ENDING = 200
"""More characters than a prompt opens at its end."""


def _is_exact(value: Any) -> bool:
    """Whether it is made of JSON's types, and of none that is derived from one."""
    if type(value) in (dict, list, tuple):
        return all(map(_is_exact, [*value, *value.values()] if type(value) is dict else value))
    return type(value) in (str, int, float, bool, type(None))


class ChatTemplate:
    """Renders and encodes as one tokenizer does. options: passed to its template. Raises ModelError without a template,
    and for an option that the template does not read.

    Only the template writes control tokens: special ones, and those around turns. What messages and tools say is text:
    `render` puts a cut into `<|im_end|>` of a tool's result, and `encode` tokenizes the parts separately. Other texts
    get the tokenizer's own tokens. In what assistants said, only the tokens around turns and the placeholder of images
    become text, because others (Llama's <|python_tag|>) were sampled.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None) -> None:
        if not tokenizer.chat_template:
            raise ModelError(
                f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template; use a chat "
                "(instruct) model, or put the template into chat_template.jinja in the model's directory"
            )
        self.tokenizer = tokenizer
        self.options = dict(options or {})
        self._special = special_tokens(tokenizer)
        self._rendered: dict[tuple[str, bytes, bool, datetime | None], str] = {}
        self._encoded = lru_cache(_REMEMBERED)(self._encode)
        self._roles: dict[tuple[str, bool], Literal["shows", "drops", "refuses"]] = {}
        known = options_of(self._all_sources)
        for name, value in self.options.items():
            if known is not None and name not in known:
                raise ModelError(
                    f"{self._named} reads no option {name!r}; it reads {', '.join(sorted(known)) or 'none'}"
                )
            if isinstance(value, str) and value.lower() in ("true", "false"):
                raise ModelError(f"the option {name} of {self._named} is the text {value!r}; give True or False")

    @property
    def _named(self) -> str:
        return f"the chat template of {self.tokenizer.name_or_path or 'this model'}"

    @property
    def _all_sources(self) -> str:
        given: Any = self.tokenizer.chat_template
        return "\n".join(map(str, given.values())) if isinstance(given, dict) else str(given)

    @cached_property
    def facts(self) -> TemplateFacts:
        """What the template shows, and how, with these options."""
        return facts_of(lambda m, tools, opens: self._text(list(m), list(tools), opens), self._all_sources, self._ends)

    @property
    def _ends(self) -> list[str]:
        return sorted(self._special.values(), key=len, reverse=True)

    @cached_property
    def call_format(self) -> KnownFormat | None:
        """The format that reads back calls as the template writes them; None if none does.

        A template that shows no calls may name a format's tags, or its tokenizer may have them as tokens.
        """
        name, texts = SPEC["function"]["name"], {"type": "string"}
        parameters = {"type": "object", "properties": {"text": texts, "count": {"type": "integer"}}}
        specs = [{"type": "function", "function": {**SPEC["function"], "parameters": parameters}}]
        tools = specs if self.facts.shows_tools else []
        asked = [ToolCall(name=name, arguments={"text": "a b", "count": 2}, id="abcdefgh1")]
        asked.append(ToolCall(name=name, arguments={"text": "c"}, id="abcdefgh2"))
        for calls in (asked, asked[:1]):  # some show one call of a turn alone
            with suppress(ModelError):
                message = {"role": "assistant", "content": "", "tool_calls": [call.as_message for call in calls]}
                words, _ = self.words_of([ASKED], message, tools, self.render([ASKED], tools))
                if found := next((one for one in FORMATS if one.parse(words, specs).calls == tuple(calls)), None):
                    return found
        source = self._all_sources.replace("\\", "")
        known = {str(token) for token in self.tokenizer.added_tokens_decoder.values()}
        return next((one for one in FORMATS if all(mark in source or mark in known for mark in one.marks)), None)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process remembers texts of its own."""
        return ChatTemplate, (self.tokenizer, self.options)

    def with_options(self, options: Mapping[str, Any]) -> ChatTemplate:
        """The same template with these options, which are added to its own or replace them."""
        return template_of(self.tokenizer, {**self.options, **options})

    def render(
        self,
        messages: Iterable[Message],
        tools: ToolSpecs = (),
        *,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
    ) -> str:
        """The messages as text, to encode. now: the time that a template which shows the date shows.

        A message that the template would show in part is a ModelError, as is one that it refuses, with its reason; an
        image without a place in it is an ImageError.
        """
        said = [normalised(message, place) for place, message in enumerate(messages)]
        if self.facts.names_by_id:
            _name_by_id(said)
        num_images, image_id = len(images_in(said)), self.image_token_id
        if num_images and image_id is None:
            raise blind(self.tokenizer, next(message for message in said if images_in([message])))
        shown: list[dict[str, Any]] = []
        for place, message in enumerate(said):
            role = message["role"]
            if len(message) == 2 and role in ("user", "assistant") and not self.facts.takes_parts:
                shown.append(self._as_text(message, by=role))  # there is nothing to fit
                continue
            where = f"message {place}"
            if not self.shows(role, is_first=place == 0):
                raise ModelError(f"{where} is of role {role!r}, which {self._named} leaves out; use another role")
            shown.append(self._as_text(self.facts.fitted(message, where, self._named), by=role))
        specs = [self._as_text(plain(tool)) for tool in tools]
        if specs and not self.facts.shows_tools:
            raise ModelError(f"{self._named} shows no tools; use a model or a template that does")
        text = self._render_texts(shown, specs, add_generation_prompt=add_generation_prompt, now=now)
        if image_id is not None and (num_shown := text.count(PLACEHOLDER)) != num_images:
            raise ModelError(
                f"the model's chat template shows {num_shown} images of messages with {num_images}; it may show "
                "none in messages of some roles (system, tool), so put them into a user's message"
            )
        return text

    def shows(self, role: str, *, is_first: bool = True) -> bool:
        """Whether messages of a role are shown; True if the template refuses them, with a reason of its own."""
        return self._treats(role, is_first) != "drops"

    def takes(self, role: str) -> bool:
        """Whether messages of a role are shown, and not refused."""
        return self._treats(role, is_first=True) == "shows"

    def _treats(self, role: str, is_first: bool) -> Literal["shows", "drops", "refuses"]:
        is_heading, facts = role in ("system", "developer"), self.facts
        key = role, is_first or not is_heading
        if role in ("user", "assistant"):
            return "shows"
        if key not in self._roles:
            said = {"role": role, "content": _MARKER, "name": "arl_tool", "tool_call_id": facts.call_id}
            tried = [[ASKED, *facts.call, said], [ASKED, said]]
            if is_heading:
                tried = [[said, ASKED]] if is_first else [[ASKED, {"role": "assistant", "content": "?"}, said, ASKED]]
            found: list[bool] = []
            for messages in tried:
                asked = [in_parts(m) if facts.takes_parts else m for m in messages]
                with suppress(ModelError):
                    found.append(_MARKER in self._text(asked, [SPEC] if facts.shows_tools else [], True))
            self._roles[key] = "shows" if any(found) else "drops" if found else "refuses"
        return self._roles[key]

    @cached_property
    def image_token_id(self) -> int | None:
        """The placeholder, which the template writes once for each image; None if it shows no images."""
        is_shown = PLACEHOLDER in str(self.tokenizer.chat_template)
        return next((i for i, text in self._special.items() if text == PLACEHOLDER), None) if is_shown else None

    def _render_texts(
        self,
        shown: list[dict[str, Any]],
        specs: list[Any],
        *,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
    ) -> str:
        """As `render`, of messages and tools with cuts. Short texts are remembered: episodes of a group begin alike."""
        from transformers import PreTrainedTokenizerBase

        source = self._source(specs)
        renders = getattr(self.tokenizer.apply_chat_template, "__func__", None)
        is_stock = renders is PreTrainedTokenizerBase.apply_chat_template
        clock = now if "strftime_now" in source else None
        is_dated = clock is None and "strftime_now" in source
        if not is_stock or is_dated or _changes(source) or not _is_exact((shown, specs, self.options)):
            return self._text(shown, specs, add_generation_prompt, clock)
        packed = marshal.dumps((shown, specs), 2)  # equal for what is the same, and for nothing else
        key = source, packed, add_generation_prompt, clock  # the source, because a user may change the template
        text = self._rendered.get(key)
        if text is None:
            text = self._text(shown, specs, add_generation_prompt, clock)
            if len(self._rendered) >= _REMEMBERED:
                self._rendered.clear()
            if len(packed) <= _LONGEST:
                self._rendered[key] = text
        return text

    def _text(
        self, shown: list[dict[str, Any]], specs: list[Any], add_generation_prompt: bool, now: datetime | None = None
    ) -> str:
        options = self.options if now is None else {**self.options, "strftime_now": now.strftime}
        try:
            text = self.tokenizer.apply_chat_template(
                shown, tools=specs or None, tokenize=False, add_generation_prompt=add_generation_prompt, **options
            )
        except _REFUSALS as error:
            raise ModelError(f"the model's chat template does not take these messages: {error}") from error
        return str(text).encode(errors="replace").decode()  # a call's JSON may hold half a surrogate pair

    def _source(self, tools: Sequence[Any]) -> str:
        return str(self.tokenizer.get_chat_template(tools=[dict(tool) for tool in tools] or None))

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a rendered text."""
        return self._encoded(text) if len(text) <= _LONGEST else self._encode(text)

    def _encode(self, text: str) -> tuple[int, ...]:
        parts = text.split(_CUT)
        return tuple(i for part in parts for i in self.tokenizer.encode(part, add_special_tokens=False))

    def encode_said(self, text: str) -> tuple[int, ...]:
        """The tokens of an assistant's words."""
        return self.encode(self.as_said(text))

    def as_said(self, text: str) -> str:
        """An assistant's words as `render` shows them."""
        return self._as_text(text, by="assistant")

    def _as_text(self, said: Any, by: str = "") -> Any:
        """`said`, with cuts in the texts of control tokens. by: the role of the speaker."""
        if isinstance(said, str):
            said = said.replace(_CUT, "\ufffd")
            if not self._added_pattern.search(said):
                return said
            return self._controls.get(by, self._controls[""]).sub(self._cut, said)
        if isinstance(said, Image):
            return True
        if isinstance(said, dict):
            items = cast("dict[Any, Any]", said).items()
            return {self._as_text(name, by): self._as_text(value, by) for name, value in items}
        return [self._as_text(item, by) for item in cast("list[Any]", said)] if isinstance(said, list) else said

    def _cut(self, found: re.Match[str]) -> str:
        """A control token's text, cut so that neither part contains another, if that is possible."""
        text = found[0]
        cuts = ((text[:i], text[i:]) for i in range(1, len(text)))
        return next((_CUT.join(parts) for parts in cuts if not any(map(self._added_pattern.search, parts))), text)

    @cached_property
    def _added_pattern(self) -> re.Pattern[str]:
        return _any_of({*self._special.values(), *map(str, self.tokenizer.added_tokens_decoder.values())})

    @cached_property
    def _controls(self) -> dict[str, re.Pattern[str]]:
        """By role, the texts of control tokens that messages of the role can only spell; those of "" for other roles.

        Those are special tokens, and what the template writes around turns, special or not, and the ends of a text;
        in what users and tools say, also what it writes around calls and results. In what an assistant said, they are
        those among them that make turns or stand for an image. A token that is not special and stands only before an
        assistant's words (GLM's and DeepSeek's </think>) does not end what an assistant said: templates look for it
        there.
        """
        facts, special = self.facts, set(self._special.values())
        said = [{"role": role, "content": _MARKER} for role in ("user", "assistant", "user")]
        try:
            text = self._text([in_parts(m) if facts.takes_parts else m for m in said], [], False)
        except ModelError:
            return {"": _any_of(special), "assistant": _any_of(special)}
        named = (self.tokenizer.bos_token, self.tokenizer.eos_token, self.tokenizer.pad_token, self.tokenizer.unk_token)
        found = [self._added_pattern.findall(part) for part in text.split(_MARKER)]
        turns = {token for part in found for token in part if token.strip()} | {str(token) for token in named if token}
        around = {token for i, part in enumerate(found) if i != 1 for token in part}
        placeholder = set[str]() if self.image_token_id is None else {PLACEHOLDER}
        thought = set(facts.thought or ()) if not facts.shows_fields_alone else set[str]()
        of_calls = set[str]()
        if facts.shows_calls:
            result = {"role": "tool", "name": "arl_tool", "tool_call_id": facts.call_id, "content": _MARKER}
            for number in (1, 2):  # DeepSeek-R1's ends a list of two, and none of one
                calls = [{**message, "tool_calls": message["tool_calls"] * number} for message in facts.call]
                with suppress(ModelError):
                    text = self._text([ASKED, *calls, result, said[1]], [SPEC] if facts.shows_tools else [], False)
                    tags = self._added_pattern.findall(text.rpartition(ASKED["content"])[2])
                    of_calls |= {token for token in tags if token.strip()}
        others = _any_of(special | turns | of_calls - thought)
        own = _any_of(turns & (special | around) - thought | placeholder)
        return {"": _any_of(special | turns), "user": others, "tool": others, "assistant": own}

    def text_of(self, output_ids: Sequence[int], stop_reason: StopReason = "stop") -> str:
        """The sampled text, without the token that ended it."""
        return self.text_until(output_ids, has_ended=self.ends_turn(output_ids, stop_reason))

    def text_until(self, output_ids: Sequence[int], *, has_ended: bool) -> str:
        """As `text_of`. has_ended: whether the last token ended the turn."""
        length = len(output_ids)
        if has_ended:
            ending = self._turn_ending
            length -= len(ending) if ending and tuple(output_ids[-len(ending) :]) == ending else 1
        ids = output_ids[:length]
        decoded = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(decoded)

    def ends_turn(self, output_ids: Sequence[int], stop_reason: StopReason = "stop") -> bool:
        """Whether the model ended its turn with a special token. At a length limit, only the eos token ends it."""
        if not output_ids:
            return False
        is_end = output_ids[-1] == self.tokenizer.eos_token_id
        return is_end or (stop_reason == "stop" and output_ids[-1] in self._special)

    def begins_with_special(self, ids: Sequence[int]) -> bool:
        return bool(ids) and ids[0] in self._special

    @cached_property
    def end_of_turn(self) -> str:
        """The text that the template writes after an assistant's last words. Raises ModelError as after_turn does."""
        return self.after_turn([{"role": "user", "content": "?"}], [], add_generation_prompt=False)

    @cached_property
    def ends_in_special(self) -> bool:
        """Whether the template ends an assistant's turn with a special token. GLM's begins the next turn with one."""
        return self.begins_with_special(self.encode(self.end_of_turn))

    @cached_property
    def turn_end(self) -> str:
        """The text that begins with what ends an assistant's turn: end_of_turn, or for GLM the user's next turn."""
        return (
            self._next_turn
            if not self.ends_in_special and self.begins_with_special(self.encode(self._next_turn))
            else self.end_of_turn
        )

    @cached_property
    def _next_turn(self) -> str:
        return self.after_turn([ASKED], [ASKED], add_generation_prompt=False)

    @cached_property
    def _result_turn(self) -> str:
        """As turn_end, for a turn with calls: GLM's ends with what begins their results."""
        if not self.ends_in_special and self.takes("tool"):
            result = {"role": "tool", "name": "arl_tool", "tool_call_id": "call00000", "content": "?"}
            with suppress(ModelError):
                following = self.after_turn([ASKED], [result], add_generation_prompt=False)
                return following if self.begins_with_special(self.encode(following)) else self.turn_end
        return self.turn_end

    @cached_property
    def _turn_ending(self) -> tuple[int, ...]:
        """The tokens with which a model ends its turn: the first after its words, or all special ones that the template
        writes both at the end of a conversation and before a user's next turn."""
        try:
            ids, following = self.encode(self.turn_end), self.encode(self._next_turn)
        except ModelError:
            return ()
        both = takewhile(
            lambda pair: pair[0] == pair[1] and pair[0] in self._special, zip(ids, following, strict=False)
        )
        return ids[: max(1, len(list(both)) if self.ends_in_special else 1)]

    def end_ids(self, end: str) -> tuple[int, ...]:
        """The tokens of a text after a model's words with which it ends its turn."""
        ids = self.encode(end)
        return self._turn_ending if ids[: len(self._turn_ending)] == self._turn_ending else ids[:1]

    def num_ending(self, ids: Sequence[int]) -> int:
        """How many of the first tokens after a model's words end its turn, if the template ends turns with tokens."""
        if not self.ends_in_special:
            return 0
        ends = (self._turn_ending, self.encode(self._next_turn)[:1])
        return max((len(end) for end in ends if tuple(ids[: len(end)]) == end), default=0)

    def after_turn(
        self,
        before: Sequence[Message],
        messages: Sequence[Message],
        tools: ToolSpecs = (),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The template's text after an assistant's words, before `messages`. Raises ModelError if it alters them."""
        said: dict[str, Any] = {"role": "assistant", "content": _MARKER}
        if self.facts.shows_fields_alone and self.facts.shows_calls and messages and messages[0]["role"] == "tool":
            said = called("", {"arl_key": _MARKER})  # without a call before it, a result may be refused
            said["tool_calls"][0]["id"] = messages[0].get("tool_call_id") or "call00000"
            alone = self.render([*before, said], tools, add_generation_prompt=False)
            text = self.render([*before, said, *messages], tools, add_generation_prompt=add_generation_prompt)
            shared = os.path.commonprefix([alone, text])  # noqa: RUF071 - by letters, as intended
            last = [found.start() for found in self._special_pattern.finditer(shared)]
            return text[last[-1] :] if last else text[len(shared) :]
        text = self.render([*before, said, *messages], tools, add_generation_prompt=add_generation_prompt)
        shown, marker, after = text.rpartition(_MARKER)
        if not marker or _MARKER in shown:
            raise ModelError("the chat template does not show an assistant's message as it is; it cannot be used")
        return after

    def opened_in(self, prompt: str) -> str:
        """What a rendered prompt opens at its end, as "<think>\n"; empty if nothing."""
        thought, end = self.facts.thought, prompt[-_ENDING:]
        return end[end.rindex(thought[0]) :] if thought and end.rstrip().endswith(thought[0]) else ""

    @cached_property
    def _no_words(self) -> str:
        """The content of an empty answer: white space if the template refuses "" (Mistral Small 4's)."""
        with suppress(ModelError):
            self.render([ASKED, {"role": "assistant", "content": ""}, ASKED])
            return ""
        return " "

    def message_of(self, words: str, begun: str, tools: ToolSpecs, given: Message | None = None) -> Message:
        """An answer as later prompts show it. words: as sampled, without their end; begun: their beginning, which the
        prompt has; given: their parts, if they are known.

        The message has the sampled words as content, so nothing is re-rendered. Only a template that shows such words
        differently than fields gets thinking, content and calls in fields.
        """
        if not self.facts.shows_fields_alone:
            return {"role": "assistant", "content": begun + words or self._no_words}
        made: dict[str, Any] = dict(given or {"role": "assistant"})
        if given is None:
            parsed = (
                self.call_format.parse(begun + words, tools)
                if self.call_format
                else ParsedAnswer(content=begun + words)
            )
            thinking, made["content"] = self.facts.split(parsed.content)
            if parsed.reasoning is not None or thinking is not None:
                made["reasoning_content"] = thinking if parsed.reasoning is None else parsed.reasoning
            if calls := [call for call in parsed.calls if isinstance(call, ToolCall)]:
                made["tool_calls"] = [call.as_message for call in calls]
        forms = [made]
        if made.get("tool_calls") and made.get("reasoning_content") and made["content"]:  # gpt-oss: not all at once
            forms.append(
                {**made, "content": "", "reasoning_content": f"{made['reasoning_content']}\n{made['content']}"}
            )
        for form in forms:
            with suppress(ModelError):
                self._text([ASKED, self.facts.fitted(form, "", "")], [SPEC] if self.facts.shows_tools else [], False)
                return form
        return {"role": "assistant", "content": begun + words}

    def words_of(self, before: Sequence[Message], message: Message, tools: ToolSpecs, prompt: str) -> tuple[str, str]:
        """What a model writes to say this assistant's message after `before`, and the text that ends its turn; both to
        encode. prompt: `before`, rendered.

        These are the template's own words, with thinking and tool calls. What the prompt opened is closed before the
        content, whether or not the template shows it again (DeepSeek-R1's does not). Raises ModelError for thinking
        that the template leaves out, and for a message that it does not show as it prompts for one.
        """
        message, opened = normalised(message, len(before)), self.opened_in(prompt)
        if self.facts.thought and (self.facts.thinking_field or opened) and not message.get("reasoning_content"):
            text = text_content(message)
            goes_on = opened and self.facts.thought[1] in text and self.facts.thought[0] not in text
            thinking, content = self.facts.split(text, opened if goes_on else "")
            if thinking is not None:
                message = {**message, "content": content, "reasoning_content": thinking}
        whole = self.render([*before, message], tools, add_generation_prompt=False)
        words = self._words_in(whole, prompt, opened, thinks=bool(message.get("reasoning_content")))
        if words is None:
            if before[-1]["role"] == "user" and [*before] != [ASKED]:  # Mistral's moves the system's message: ask alone
                return self.words_of([ASKED], message, tools, self.render([ASKED], tools))
            raise ModelError(
                f"{self._named} does not show an assistant's message as it prompts for one (the prompt ends with "
                f"{prompt[-40:]!r}); choose the template's options so that both agree"
            )
        end = self._result_turn if message.get("tool_calls") else self.turn_end
        ends = [one.start() for one in self._special_pattern.finditer(words) if not words[one.end() :].strip()]
        if words.endswith(self.end_of_turn) or not ends:
            words = words.removesuffix(self.end_of_turn)
        else:
            words, end = words[: ends[-1]], words[ends[-1] :]  # another special token ends it
        thinking = self.as_said((message.get("reasoning_content") or "").strip("\n"))
        if opened:
            assert self.facts.thought is not None
            opening, closing = self.facts.thought
            if whole.startswith(prompt):
                words = words.removeprefix(opened)
            if words.lstrip().startswith(opening):
                words = words.lstrip().removeprefix(opening)
            if closing not in words:
                words = f"{thinking}\n{closing}\n\n{words.lstrip(chr(10))}"
        if thinking.strip() not in words:
            raise ModelError(
                f"{self._named} leaves out an assistant's thinking (reasoning_content), so it would not be learned; "
                "drop it, or use a template that shows it"
            )
        if "".join(self.as_said(text_content(message)).split()) not in "".join(words.split()):
            raise ModelError(
                f"{self._named} leaves out a part of an assistant's content (thinking in it, perhaps), so it would not "
                "be learned; drop it, or use a template that shows it"
            )
        return words, end

    def _words_in(self, whole: str, prompt: str, opened: str, *, thinks: bool) -> str | None:
        """The last words of a rendering, from what the prompt has opened; None if it does not go on as the prompt does.
        An empty thought at the prompt's end need not be shown again, unless the message thinks."""
        base, tags = prompt.removesuffix(opened), self.facts.thought
        closed = tags and re.search(rf"{re.escape(tags[0])}\s*{re.escape(tags[1])}\s*\Z", base)
        is_closed = closed and not whole.startswith(base) and not thinks
        if closed and is_closed:
            base = base[: closed.start()]
        near = base[-len(self.facts.header) - _NEAR :]  # the end of what was said before, and the header
        begin = len(base) if whole.startswith(base) else whole.rfind(near) + len(near)
        if begin < len(near):
            return None
        return whole[begin:].removeprefix(tags[1]) if tags and is_closed else whole[begin:]

    def after_words(self, said: str, shown: str, *, has_calls: bool = False) -> str | None:
        """The rest of `shown` after the words `said`; None if `shown` does not begin with these words.

        `shown` may have the words as they were said, or as the template writes them: with different white space and, if
        has_calls, with the JSON of calls written differently. Missing or additional words do not match.
        """
        if self.facts.answer_opening and shown.startswith(self.facts.answer_opening) and not said:
            return None
        for words in (said, self._as_text(said, by="assistant")):
            if not shown.startswith(words):
                continue
            rest = shown[len(words) :]
            is_special = rest.startswith(tuple(self._special.values()))
            if is_special or (rest.startswith(self.end_of_turn) and self.turn_end == self.end_of_turn):
                return rest
        finds = self._special_pattern.finditer(shown)
        if (end := next((found.start() for found in finds if found.group() not in said), None)) is None:
            return None
        read = self._parts if has_calls else self._letters
        return shown[end:] if read(shown[:end]) == read(said) else None

    def _letters(self, text: str) -> str:
        """A text without white space and special tokens."""
        return "".join(self._special_pattern.sub("", text.replace(_CUT, "")).split())

    def _parts(self, text: str) -> Any:
        """The thinking, the text and the calls of an answer, however their JSON is written; unreadable calls are text,
        and half of a surrogate pair is U+FFFD, as programs get them."""
        text = text.replace(_CUT, "")
        parsed = self.call_format.parse(text) if self.call_format else ParsedAnswer(content=text)
        calls = [call for call in parsed.calls if isinstance(call, ToolCall)]
        unread = [call.text for call in parsed.calls if isinstance(call, MalformedCall)]
        read = [[c.name, dict(c.arguments), c.id if c.id in text else ""] for c in calls]  # others are made up
        said = ["".join(part.split()) for part in (parsed.reasoning or "", "".join([parsed.content, *unread]))]
        parts = json.dumps([said, read], sort_keys=True, ensure_ascii=False)
        return parts.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        return _any_of(self._special.values())


def _name_by_id(messages: Iterable[dict[str, Any]]) -> None:
    """Give calls, and the results that answer them, ids that hold the name and a number: "functions.NAME:0". Results
    without an id answer the calls without one, in order."""
    ids, unnamed, number = dict[Any, str](), list[str](), 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            name, given = call["function"]["name"], call.get("id")
            if not re.fullmatch(rf"(?:functions\.)?{re.escape(name)}:\d+", str(given)):
                call["id"] = f"functions.{name}:{number}"
                ids[given] = call["id"]
                unnamed += [call["id"]] if given is None else []
            number += 1
        if message["role"] == "tool" and (answered := message.get("tool_call_id")) in ids:
            message["tool_call_id"] = unnamed.pop(0) if answered is None and unnamed else ids[answered]


@lru_cache(maxsize=64)
def _changes(source: str) -> bool:
    """Whether a template may render the same messages differently."""
    return any(word in source for word in ("random", "lipsum"))


def template_of(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None) -> ChatTemplate:
    """A ChatTemplate, the same one again for the conversations of one tokenizer: to make it costs more than a prompt.

    A tokenizer that has got other tokens or another template meanwhile gets a new one.
    """
    given = dict(options or {})
    try:
        key = json.dumps(given)
    except (TypeError, ValueError):
        return ChatTemplate(tokenizer, given)
    if json.loads(key) != given:  # a tuple, for instance, which JSON does not have
        return ChatTemplate(tokenizer, given)
    tokens = (str(len(tokenizer)), *tokenizer.special_tokens_map.values(), *tokenizer.all_special_tokens)
    return _shared(tokenizer, str(tokenizer.chat_template), tokens, key)


def call_format_of(tokenizer: PreTrainedTokenizerBase) -> KnownFormat:
    """The format in which a tokenizer's chat template shows calls. Raises ModelError for an unknown one."""
    template: Any = tokenizer.chat_template
    if found := template_of(tokenizer).call_format if template else None:
        return found
    raise ModelError(
        f"the chat template of {tokenizer.name_or_path or 'this tokenizer'} asks for tool calls in an unknown form "
        f"(known: {', '.join(map(repr, FORMATS))}); pass call_format=, one of these or an object with "
        "parse(text, tools) -> ParsedAnswer"
    )


@lru_cache(maxsize=8)
def _shared(tokenizer: PreTrainedTokenizerBase, source: str, tokens: tuple[str, ...], options: str) -> ChatTemplate:
    return ChatTemplate(tokenizer, json.loads(options))


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """id -> text. all_special_ids does not list every special token: for Llama it leaves out <|eom_id|>."""
    added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return dict(zip(tokenizer.all_special_ids, map(str, tokenizer.all_special_tokens), strict=True)) | added


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds the longest of these texts."""
    named = sorted({text for text in texts if text})
    return re.compile(_tree(named) if named else "(?!)")


def _tree(texts: Sequence[str]) -> str:
    """Matches one of these sorted texts. Shared beginnings stand once: Gemma has 6,000 tokens that begin with `<`, and
    each `<` of a long page would be compared with all of them."""
    groups = groupby(filter(None, texts), key=lambda text: text[0])
    branches = [_branch(list(group)) for _, group in groups]
    joined = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})" if branches else ""
    return f"(?:{joined})?" if branches and "" in texts else joined


def _branch(texts: Sequence[str]) -> str:
    """Matches one of these texts, which begin alike. Their shared part, perhaps thousands of letters, stands once."""
    shared = os.path.commonprefix(texts)  # noqa: RUF071 - by letters, as intended
    return re.escape(shared) + _tree([text[len(shared) :] for text in texts])


def encode_once(tokenizer: PreTrainedTokenizerBase, text: str, rest: str = "") -> list[int]:
    """The text's tokens, after those with which the tokenizer begins texts, unless it begins with them already, as a
    rendered chat does. rest: what follows, and is not encoded; it counts if the text is empty."""
    ends = [tokenizer.eos_token_id]
    begin = tokenizer.encode("")
    begin = begin[:-1] if begin[-1:] == ends else begin  # some tokenizers end texts
    ids, beginning = (tokenizer.encode(one, add_special_tokens=False) for one in (text, text or rest))
    return ids if beginning[: len(begin)] == begin else [*begin, *ids]
