"""A tokenizer's chat template: messages to text, text to tokens, and the end of an assistant's turn."""

from __future__ import annotations

import json
import marshal
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

from jinja2 import TemplateError

from arl.api.errors import ModelError
from arl.api.images import Image
from arl.api.types import StopReason
from arl.workflow.images import PLACEHOLDER, blind
from arl.workflow.messages import Message, ToolSpecs, images_in, normalised, plain, text_content

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REFUSALS = (TemplateError, TypeError, ValueError, AttributeError, KeyError)
"""The exceptions that a template raises for messages that it does not accept."""
_REMEMBERED, _LONGEST = 256, 20_000
"""Texts, and encodings of texts, that a template remembers; longer ones, in characters, it does not."""
_THOUGHTS = "<think>"
_MARKER = "arl-marks-the-sampled-turn"
_CUT = "\ufdd0"
"""Marks a control token's text as mere text, from within it. Unicode reserves this character for internal use."""
_WORD = re.compile(r"\w+")
_NO_SPACE = re.compile(r"\S+")


def _is_exact(value: Any) -> bool:
    """Whether it is made of JSON's types, and of none that is derived from one."""
    if type(value) in (dict, list, tuple):
        return all(map(_is_exact, [*value, *value.values()] if type(value) is dict else value))
    return type(value) in (str, int, float, bool, type(None))


class ChatTemplate:
    """Renders and encodes as one tokenizer does. options: passed to its template. Raises ModelError without one.

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
        self._options = dict(options or {})
        self._special = _special_tokens(tokenizer)
        self._rendered: dict[tuple[str, bytes, bool], str] = {}
        self._encoded = lru_cache(_REMEMBERED)(self._encode)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process remembers texts of its own."""
        return ChatTemplate, (self.tokenizer, self._options)

    def with_options(self, options: Mapping[str, Any]) -> ChatTemplate:
        """The same template with these options, which are added to its own or replace them."""
        return template_of(self.tokenizer, {**self._options, **options})

    def render(self, messages: Iterable[Message], tools: ToolSpecs = (), *, add_generation_prompt: bool = True) -> str:
        """The messages as text, to encode. If the template refuses them, raises ModelError with its message; for images
        without a place in it, ImageError."""
        said = [normalised(message) for message in messages]
        num_images, image_id = len(images_in(said)), self.image_token_id
        if num_images and image_id is None:
            raise blind(self.tokenizer, next(message for message in said if images_in([message])))
        shown = [self._as_text(message, by=message["role"]) for message in said]
        specs = [self._as_text(plain(tool)) for tool in tools]
        source = self._source(specs)
        if specs and "tools" not in source:
            raise ModelError("the model's chat template shows no tools; use a model or a template that does")
        if "tool_calls" not in source and any("tool_calls" in message for message in shown):
            raise ModelError(
                "the model's chat template shows no tool_calls; use one that does, or put calls into content"
            )
        text = self._render_texts(shown, specs, add_generation_prompt=add_generation_prompt)
        if image_id is not None and (num_shown := text.count(PLACEHOLDER)) != num_images:
            raise ModelError(
                f"the model's chat template shows {num_shown} images of messages with {num_images}; it may show "
                "none in messages of some roles (system, tool), so put them into a user's message"
            )
        return text

    @cached_property
    def image_token_id(self) -> int | None:
        """The placeholder, which the template writes once for each image; None if it shows no images."""
        is_shown = PLACEHOLDER in str(self.tokenizer.chat_template)
        return next((i for i, text in self._special.items() if text == PLACEHOLDER), None) if is_shown else None

    def _render_texts(
        self, shown: list[dict[str, Any]], specs: list[Any], *, add_generation_prompt: bool = True
    ) -> str:
        """As `render`, of messages and tools with cuts. Short texts are remembered: episodes of a group begin alike."""
        from transformers import PreTrainedTokenizerBase

        source = self._source(specs)
        renders = getattr(self.tokenizer.apply_chat_template, "__func__", None)
        is_stock = renders is PreTrainedTokenizerBase.apply_chat_template
        if not is_stock or _changes(source) or not _is_exact((shown, specs, self._options)):
            return self._text(shown, specs, add_generation_prompt)
        packed = marshal.dumps((shown, specs), 2)  # equal for what is the same, and for nothing else
        key = source, packed, add_generation_prompt  # the source, because a user may change the template
        text = self._rendered.get(key)
        if text is None:
            text = self._text(shown, specs, add_generation_prompt)
            if len(self._rendered) >= _REMEMBERED:
                self._rendered.clear()
            if len(packed) <= _LONGEST:
                self._rendered[key] = text
        return text

    def _text(self, shown: list[dict[str, Any]], specs: list[Any], add_generation_prompt: bool) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                shown, tools=specs or None, tokenize=False, add_generation_prompt=add_generation_prompt, **self._options
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
            return self._controls[by == "assistant"].sub(self._cut, said)
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
    def _controls(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """The texts of control tokens, and of those among them that make turns or stand for an image.

        Those that make turns are what the template writes around turns, special or not, and the ends of a text. A token
        that is not special and stands only before an assistant's words (GLM's and DeepSeek's </think>) does not end
        what an assistant said: templates look for it there.
        """
        roles = ("user", "assistant", "user")
        special = set(self._special.values())
        try:
            text = self._render_texts(
                [{"role": role, "content": _MARKER} for role in roles], [], add_generation_prompt=False
            )
        except ModelError:
            return _any_of(special), _any_of(special)
        named = (self.tokenizer.bos_token, self.tokenizer.eos_token, self.tokenizer.pad_token, self.tokenizer.unk_token)
        found = [self._added_pattern.findall(part) for part in text.split(_MARKER)]
        turns = {token for part in found for token in part if token.strip()} | {str(token) for token in named if token}
        around = {token for i, part in enumerate(found) if i != 1 for token in part}
        placeholder = set[str]() if self.image_token_id is None else {PLACEHOLDER}
        return _any_of(special | turns), _any_of(turns & (special | around) | placeholder)

    def text_of(self, output_ids: Sequence[int], stop_reason: StopReason = "stop") -> str:
        """The sampled text, without the token that ended it."""
        return self.text_until(output_ids, has_ended=self.ends_turn(output_ids, stop_reason))

    def text_until(self, output_ids: Sequence[int], *, has_ended: bool) -> str:
        """As `text_of`. has_ended: whether the last token ended the turn."""
        ids = output_ids[:-1] if has_ended else output_ids
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
        """The text whose first token ends an assistant's turn: end_of_turn, or for GLM the user's next turn."""
        user = {"role": "user", "content": "?"}
        following = "" if self.ends_in_special else self.after_turn([user], [user], add_generation_prompt=False)
        return following if self.begins_with_special(self.encode(following)) else self.end_of_turn

    def after_turn(
        self,
        before: Sequence[Message],
        messages: Iterable[Message],
        tools: ToolSpecs = (),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The template's text after an assistant's words, before `messages`. Raises ModelError if it alters them."""
        said = {"role": "assistant", "content": _MARKER}
        text = self.render([*before, said, *messages], tools, add_generation_prompt=add_generation_prompt)
        shown, marker, after = text.rpartition(_MARKER)
        if not marker or _MARKER in shown:
            raise ModelError("the chat template does not show an assistant's message as it is; it cannot be used")
        return after

    def words_of(self, before: Sequence[Message], message: Message, tools: ToolSpecs, prompt: str) -> tuple[str, str]:
        """What a model writes to say this assistant's message after `before`, and the text that ends its turn; both to
        encode. prompt: `before`, rendered.

        These are the template's own words, with thinking and tool calls. A template that opens the thinking in the
        prompt and leaves it out of what was said (DeepSeek-R1's) does not show them: then they are the content as it
        is. Raises ModelError if such a message has more than content.
        """
        whole = self.render([*before, message], tools, add_generation_prompt=False)
        if whole.startswith(prompt):
            words = whole[len(prompt) :]
            ends = [one.start() for one in self._special_pattern.finditer(words) if not words[one.end() :].strip()]
            if words.endswith(self.end_of_turn) or not ends:
                return words.removesuffix(self.end_of_turn), self.turn_end
            return words[: ends[-1]], words[ends[-1] :]  # another special token ends it
        if message.get("tool_calls") or message.get("reasoning_content"):
            raise ModelError(
                "the chat template does not show an assistant's message as it prompts for one; give the message as "
                "content alone, with the thinking and the calls as the model writes them"
            )
        words = text_content(message)
        if prompt.rstrip().endswith(_THOUGHTS) and words.lstrip().startswith(_THOUGHTS):
            words = words.lstrip().removeprefix(_THOUGHTS).lstrip("\n")
        return self._as_text(words, by="assistant"), self.turn_end

    def after_words(self, said: str, shown: str, *, has_calls: bool = False) -> str | None:
        """The rest of `shown` after the words `said`; None if `shown` does not begin with these words.

        `shown` may have the words as they were said, or as the template writes them: with different white space and, if
        has_calls, with the JSON of calls formatted and ordered differently. Missing or additional words do not match.
        """
        for words in (said, self._as_text(said, by="assistant")):
            if not shown.startswith(words):
                continue
            rest = shown[len(words) :]
            is_special = rest.startswith(tuple(self._special.values()))
            if is_special or rest.startswith(self.end_of_turn):  # which not every template has
                return rest
        finds = self._special_pattern.finditer(shown)
        if (end := next((found.start() for found in finds if found.group() not in said), None)) is None:
            return None
        unit = _WORD if has_calls else _NO_SPACE
        alike = self._pieces(shown[:end], unit) == self._pieces(said, unit)
        return shown[end:] if alike else None

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        return _any_of(self._special.values())

    def _pieces(self, text: str, unit: re.Pattern[str]) -> list[str]:
        """The matches of `unit` besides special tokens: all words sorted, or all but white space joined."""
        pieces = unit.findall(self._special_pattern.sub(" ", text.replace(_CUT, "")))
        return sorted(pieces) if unit is _WORD else ["".join(pieces)]


@lru_cache(maxsize=64)
def _changes(source: str) -> bool:
    """Whether a template may render the same messages differently."""
    return any(word in source for word in ("strftime_now", "random", "lipsum"))


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


@lru_cache(maxsize=8)
def _shared(tokenizer: PreTrainedTokenizerBase, source: str, tokens: tuple[str, ...], options: str) -> ChatTemplate:
    return ChatTemplate(tokenizer, json.loads(options))


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
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
