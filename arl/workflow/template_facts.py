"""What a chat template shows, and how: found by rendering messages with markers, once for each template.

Nothing here depends on the names of models. A template that gets two forms of the same message (an empty content as ""
or None, arguments as a mapping or as text) shows by its answers which one it needs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, meta, nodes

from arl.api.errors import ModelError

Render = Callable[[Sequence[dict[str, Any]], Sequence[dict[str, Any]], bool], str]
"""(messages, tools, add_generation_prompt) -> text, as the template writes it. Raises ModelError."""

THINKING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names of the field of an assistant's message that holds its thinking. arl uses the first one."""
THINK_TAGS = ("<think>", "</think>")
_THOUGHTS = (THINK_TAGS, ("[THINK]", "[/THINK]"))
"""Tags of thinking that a template without such a field may name."""
_TAG = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]|◁[^◁▷\s]+▷")
_ASK, _SAY, _THINK, _TOOL, _KEY, _VALUE = "arl-asks", "arl-says", "arl-thinks", "arl_tool", "arl_key", "arl-value"
_GIVEN = {
    "messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now",
    "bos_token", "eos_token", "pad_token", "unk_token",
}  # fmt: skip
"""Variables that are not options: transformers sets them."""

ASKED = {"role": "user", "content": _ASK}
SPEC = {
    "type": "function",
    "function": {
        "name": _TOOL,
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}, "required": [_KEY]},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFacts:
    """The answers of one template, with the options that it was asked with."""

    options: frozenset[str] | None
    """The options that it reads; None if its source cannot be analysed."""
    takes_parts: bool
    """Contents must be lists of parts: the template drops or refuses a content that is text."""
    shows_tools: bool
    empty_contents: tuple[str | None, ...]
    """Of "" and None, the contents beside tool calls with which it shows the calls alone; empty: it shows no calls."""
    shows_content_beside_calls: bool
    """It shows both of a message with content and calls."""
    shows_many_calls: bool
    """It shows all calls of a message, or refuses several; gpt-oss's shows the first alone."""
    call_id: str
    """An id with which it shows a call: any of nine characters; or, if it shows the id in place of the name (Kimi K2),
    one that holds the name."""
    takes_text_arguments: bool
    """Arguments of calls must be JSON text: it fails on a mapping, or shows Python's form of it."""
    thinking_field: str | None
    """The field of THINKING_FIELDS that it shows; None: none."""
    thought: tuple[str, str] | None
    """What stands before and after thinking, without white space; None if it knows no thinking."""
    header: str
    """What begins an assistant's turn, without what is opened within it."""
    opened: str
    """What the generation prompt opens at its end, for the model to close: "<think>\\n"; empty if nothing."""
    answer_opening: str
    """What the model writes before an answer without thinking: gpt-oss's final channel. Usually empty."""
    shows_fields_alone: bool
    """Sampled words cannot come back as an assistant's content: the template shows them otherwise than the thinking,
    the content and the calls in fields of their own."""

    @property
    def names_by_id(self) -> bool:
        return _TOOL in self.call_id

    @property
    def shows_calls(self) -> bool:
        return bool(self.empty_contents)

    @property
    def call(self) -> list[dict[str, Any]]:
        """An assistant's message with a call, in the template's form; none if it shows no calls."""
        given = "{}" if self.takes_text_arguments else {}
        return [called(self.empty_contents[0], given, self.call_id)] if self.shows_calls else []

    def fitted(self, message: Mapping[str, Any], where: str, template: str) -> dict[str, Any]:
        """A normalised message in the form that the template shows whole. Raises ModelError if it shows a part alone.

        where, template: names of the message and of the template, for errors.
        """
        content, calls, thinking = message["content"], message.get("tool_calls"), message.get("reasoning_content")
        made = dict(message)
        made.pop("reasoning_content", None)
        if calls:
            if not self.shows_calls:
                raise ModelError(
                    f"{where} has tool_calls, which {template} leaves out; use a template that shows them, or put calls"
                    " into content"
                )
            if len(calls) > 1 and not self.shows_many_calls:
                raise ModelError(f"{where} has {len(calls)} tool_calls, and {template} shows the first alone")
            if content and not self.shows_content_beside_calls:
                raise ModelError(f"{where} has content and tool_calls, and {template} shows one of them alone")
            if not content and content not in self.empty_contents:
                content = self.empty_contents[0]
            if self.takes_text_arguments:
                functions = [call["function"] for call in calls]
                texts = [json.dumps(function["arguments"], ensure_ascii=False) for function in functions]
                made["tool_calls"] = [
                    {**call, "function": {**function, "arguments": text}}
                    for call, function, text in zip(calls, functions, texts, strict=True)
                ]
        if thinking and self.thinking_field:
            made[self.thinking_field] = thinking
        elif thinking and self.thought is None:
            raise ModelError(
                f"{where} has thinking (reasoning_content), which {template} leaves out; drop it, or put it into "
                "content"
            )
        elif thinking and self.thought and not (calls and not self.shows_content_beside_calls):
            content = f"{self.thought[0]}\n{thinking}\n{self.thought[1]}\n\n{content or ''}"
        made["content"] = content
        return in_parts(made) if self.takes_parts else made

    def split(self, text: str, opened: str = "") -> tuple[str | None, str]:
        """The thinking of an answer, None without any, and the rest. opened: what the prompt has opened."""
        said = opened + text
        tags = [self.thought] if self.thought else []
        for opening, closing in [*tags, THINK_TAGS] if self.thinking_field else tags:
            if said.lstrip().startswith(opening):
                thinking, _, rest = said.lstrip().removeprefix(opening).partition(closing)
                rest = rest.removeprefix(self.header).lstrip("\n" if not self.answer_opening else None)
                return thinking.strip("\n"), rest.removeprefix(self.answer_opening)
        return None, said.lstrip().removeprefix(self.answer_opening) if self.answer_opening else said

    def with_think_tags(self, words: str, message: Mapping[str, Any]) -> str:
        """The words, or for models with other tags or channels the thinking in <think> tags and the content."""
        if self.thought in (None, THINK_TAGS) and not self.answer_opening:
            return words
        thinking, content = message.get("reasoning_content"), message["content"] or ""
        if not self.shows_fields_alone:
            thinking, content = self.split(words)
        return f"{THINK_TAGS[0]}\n{thinking}\n{THINK_TAGS[1]}\n\n{content}" if thinking else content


def called(
    content: str | None, arguments: Mapping[str, Any] | str, call_id: str = "call00000", **more: Any
) -> dict[str, Any]:
    """An assistant's message with a call of SPEC's tool. call_id: of nine characters, which some templates demand."""
    call = {"id": call_id, "type": "function", "function": {"name": _TOOL, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call], **more}


def facts_of(render: Render, source: str, special: Iterable[str]) -> TemplateFacts:
    """Ask a template. source: of the template; special: the texts of the tokenizer's special tokens."""
    takes_parts = False

    def shown(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = (), *, opens: bool = False) -> str:
        """What the template makes of the messages; empty if it refuses them."""
        if takes_parts:
            messages = [in_parts(message) for message in messages]
        try:
            return render(messages, tools, opens)
        except ModelError:
            return ""

    if _ASK not in shown([ASKED]):
        takes_parts = True
        takes_parts = _ASK in shown([ASKED])
    prompt, arguments = shown([ASKED], opens=True), {_KEY: _VALUE}
    forms = [
        (content, is_text, call_id)
        for call_id in ("call00000", f"functions.{_TOOL}:0")
        for is_text in (False, True)
        for content in ("", None)
        if _shows_call(
            shown([ASKED, called(content, json.dumps(arguments) if is_text else arguments, call_id)], [SPEC])
        )
    ]
    takes_text, call_id = forms[0][1:] if forms else (False, "")
    contents = tuple(content for content, *form in forms if form == [takes_text, call_id])
    call = called(contents[0], json.dumps(arguments) if takes_text else arguments, call_id) if contents else None
    both = shown([ASKED, {**call, "content": _SAY}], [SPEC]) if call else ""
    twice = shown([ASKED, {**call, "tool_calls": call["tool_calls"] * 2}], [SPEC]) if call else ""
    said = {"role": "assistant", "content": _SAY}
    told = [message for message in (said, call) if message]
    thoughtful = ((name, {**m, name: _THINK}) for name in THINKING_FIELDS for m in told)
    field, thinks = next(((f, m) for f, m in thoughtful if _THINK in shown([ASKED, m], [SPEC])), (None, None))
    end = shown([ASKED, said]).rpartition(_SAY)[2].strip()
    thought = _tags(shown([ASKED, thinks], [SPEC]), shown([ASKED], [SPEC], opens=True), end) if thinks else None
    if thought is None:
        thought = next((tags for tags in _THOUGHTS if tags[0] in source or tags[1] in source), None)
    opened = prompt[prompt.rindex(thought[0]) :] if thought and prompt.rstrip().endswith(thought[0]) else ""
    base = prompt.removesuffix(opened)
    answer = shown([ASKED, said])
    opening = answer[len(base) : answer.find(_SAY)] if answer.startswith(base) else ""
    ends = tuple(special)
    following = [[], [ASKED], [{"role": "tool", "name": _TOOL, "tool_call_id": call_id, "content": "arl-result"}]]
    following.append([*following[2], said, ASKED])

    def comes_back(message: dict[str, Any]) -> bool:
        """Whether the template shows a message as it shows the same words as its content."""
        before = shown([ASKED], [SPEC], opens=True).removesuffix(opened)
        whole, after = shown([ASKED, message], [SPEC]), shown([ASKED, said], [SPEC]).partition(_SAY)[2]
        if not whole.startswith(before):
            return True  # it cannot be compared
        words = whole[len(before) :]
        end = after if after and words.endswith(after) else next((e for e in ends if words.endswith(e)), "")
        as_content = {"role": "assistant", "content": words.removesuffix(end)}
        tails = following if "tool_calls" in message else following[:2]
        both = (("".join(shown([ASKED, m, *tail], [SPEC]).split()) for m in (message, as_content)) for tail in tails)
        return all(fields == content for fields, content in both)

    return TemplateFacts(
        options=options_of(source),
        takes_parts=takes_parts,
        shows_tools=_TOOL in shown([ASKED], [SPEC]),
        empty_contents=contents,
        shows_content_beside_calls=_SAY in both and _VALUE in both,
        shows_many_calls=twice.count(_VALUE) != 1,
        call_id=call_id,
        takes_text_arguments=takes_text,
        thinking_field=field,
        thought=thought,
        header=base[len(shown([ASKED])) :] if base.startswith(shown([ASKED])) else "",
        opened=opened,
        answer_opening="" if thought and thought[1] in opening else opening.strip(),
        shows_fields_alone=not all(comes_back(message) for message in (*told, thinks) if message),
    )


def in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its text as a list of one part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}] if isinstance(content, str) else content}


def options_of(source: str) -> frozenset[str] | None:
    """The variables that a template's source reads and does not set itself; those that it sets where they are not
    defined count. None if jinja2 cannot parse it."""
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:  # transformers' own tags mark what an assistant says
        tree = environment.parse(re.sub(r"\{%-?\s*(?:end)?generation\s*-?%\}", "", source))
    except TemplateSyntaxError:
        return None
    checks = ((node.node, node.name) for node in tree.find_all((nodes.Test, nodes.Filter)))
    of_names = ("defined", "undefined", "default")
    asked = {node.name for node, check in checks if check in of_names and isinstance(node, nodes.Name)}
    asked -= {argument.name for macro in tree.find_all(nodes.Macro) for argument in macro.args}
    stored = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    return frozenset(meta.find_undeclared_variables(tree) - _GIVEN - (stored - asked))


def _shows_call(text: str) -> bool:
    """Whether a rendering shows the call with its arguments as such, and no content."""
    said = text.rpartition(_ASK)[2]
    is_escaped = f'\\"{_KEY}' in said or f"'{_KEY}'" in said
    return _TOOL in said and _VALUE in said and not is_escaped and "None" not in said and "null" not in said


def _tags(text: str, prompt: str, end: str) -> tuple[str, str] | None:
    """What stands around the thinking in a rendering; None if nothing does. prompt: what the model would get before it;
    end: what the template writes after an assistant's words."""
    before, _, after = text.partition(_THINK)
    close = _TAG.search(after)
    begun = before[len(prompt) :].strip() if before.startswith(prompt) else ""
    tags = list(_TAG.finditer(before))
    opening = begun or (before[tags[-1].start() :].strip() if tags else "")
    is_bare = not begun and close is not None and end.startswith(close[0])
    return (opening, close[0]) if opening and close and not is_bare else None
