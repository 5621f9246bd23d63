"""What a model's chat template shows, and whether what arl makes of it is what was meant: `arl doctor --template`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from jinja2 import TemplateError

from arl.api.errors import ArlError, ModelError
from arl.api.types import ModelResponse
from arl.run.finetuning.examples import to_demonstrations
from arl.workflow.call_formats import ToolCall
from arl.workflow.chat_template import ChatTemplate
from arl.workflow.dialogue import Dialogue, Turn
from arl.workflow.messages import normalised
from arl.workflow.template_facts import called

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from arl.workflow.messages import Message

_ADD = {
    "name": "add",
    "description": "Adds two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
_TOOLS = [{"type": "function", "function": _ADD}]
_NEAR = 40
"""Characters of a text that are shown around a difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateReport:
    """facts: what the template shows, and how. checks: "yes", or where it first differs. tokens: those of the example,
    each with whether it is trained; the sequences of a conversation that the template rewrites stand one by one."""

    facts: Mapping[str, str]
    checks: Mapping[str, str]
    tokens: Sequence[Sequence[tuple[str, bool]]]

    @property
    def is_whole(self) -> bool:
        """Whether each check that concerns arl says yes. A template may drop earlier turns' thinking, and show no
        calls."""
        return all(answer.startswith(("yes", "-")) for name, answer in self.checks.items() if name != "history extends")


def report_of(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None) -> TemplateReport:
    """Examine a tokenizer's chat template. Raises ModelError without one, and for options that it does not read."""
    template = ChatTemplate(tokenizer, options)
    messages, tools = _example(template)
    demonstrations: list[Any] = []

    def tried(check: Callable[[], str]) -> str:
        try:
            return check()
        except (ArlError, TemplateError, TypeError) as error:
            return f"no: {error}"

    def sft() -> str:
        demonstrations.extend(
            to_demonstrations([{"messages": messages, "tools": tools}], tokenizer, template_options=options)
        )
        return _mask_flaw(template, messages, demonstrations) or "yes"

    checks = {
        "prompt is the template's own": tried(lambda: _own_prompt(template, messages, tools)),
        "history extends": tried(lambda: _extends(template, messages, tools)),
        "calls round trip": tried(lambda: _round_trip(template, messages, tools)),
        "SFT mask": tried(sft),
    }
    texts = [[(str(tokenizer.decode([i])), bool(m)) for i, m in zip(d[0], d[1], strict=True)] for d in demonstrations]
    return TemplateReport(facts=_facts(template), checks=checks, tokens=texts)


def _example(template: ChatTemplate) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A conversation of three turns, with a call and thinking where the template shows them."""
    facts = template.facts
    asked, more = {"role": "user", "content": "What is 2 + 3?"}, {"role": "user", "content": "And 6 times 7?"}

    def thinks(message: dict[str, Any], thinking: str) -> dict[str, Any]:
        thoughtful = {**message, "reasoning_content": thinking}
        with suppress(ModelError):
            template.words_of([asked], thoughtful, [], template.render([asked]))
            return thoughtful if facts.thinking_field else message
        return message

    def says(content: str, thinking: str) -> dict[str, Any]:
        return thinks({"role": "assistant", "content": content}, thinking)

    last = [says("It is 5.", "So five."), more, says("It is 42.", "Multiply them.")]
    if not (facts.shows_calls and template.takes("tool")):
        return [asked, *last], []
    call_id = "functions.add:0" if facts.names_by_id else facts.call_id
    call = called("", {"a": 2, "b": 3}, call_id)
    call["tool_calls"][0]["function"]["name"] = "add"
    result = {"role": "tool", "name": "add", "tool_call_id": call_id, "content": "5"}
    return [asked, thinks(call, "Add them."), result, *last], _TOOLS if facts.shows_tools else []


def _facts(template: ChatTemplate) -> dict[str, str]:
    facts, tokenizer = template.facts, template.tokenizer
    contents = {"": '""', None: "None"}
    roles = [role for role in ("system", "developer", "tool") if template.takes(role)]
    end, begun = template.end_ids(template.turn_end), _beginning(template)
    options = "unknown" if facts.options is None else ", ".join(sorted(facts.options)) or "-"
    return {
        "tools": "yes" if facts.shows_tools else "-",
        "calls": repr(template.call_format) if facts.shows_calls else "-",
        "roles": ", ".join(roles) or "-",
        "images": "-" if template.image_token_id is None else str(tokenizer.decode([template.image_token_id])),
        "thinking": facts.thinking_field or ("in the content" if facts.thought else "-"),
        "content beside calls": " or ".join(contents[one] for one in facts.empty_contents) or "-",
        "arguments": ("text" if facts.takes_text_arguments else "mapping") if facts.shows_calls else "-",
        "prompt opens": repr(facts.opened)[1:-1] or "-",
        "answers begin with": (repr(begun)[1:-1] if begun.strip() else repr(begun)) if begun else "-",
        "turn ends": " ".join(tokenizer.convert_ids_to_tokens(list(end))),
        "answers come back as": "parts" if facts.shows_fields_alone else "words",
        "options": options,
    }


def _beginning(template: ChatTemplate) -> str:
    """What the model writes before an answer without thinking: an empty thought, a channel, a space."""
    asked, said = [{"role": "user", "content": "What is 2 + 3?"}], {"role": "assistant", "content": "5"}
    with suppress(ModelError):
        return template.words_of(asked, said, [], template.render(asked))[0].partition("5")[0]
    return ""


def _own_prompt(template: ChatTemplate, messages: Sequence[dict[str, Any]], tools: list[Any]) -> str:
    """Against the tokenizer alone, which gets the fields that the template reads."""
    added = template.render(messages[:1]) != template.render(messages[:1], add_generation_prompt=False)
    if not added and (begun := _beginning(template)).strip():
        return f"no: add_generation_prompt adds nothing, so the model would have to write {begun!r} itself"
    given: Any = [template.facts.fitted(normalised(message), "", "") for message in messages[:-1]]
    settings: Any = {"add_generation_prompt": True, "tokenize": True, "return_dict": False, **template.options}
    own = template.tokenizer.apply_chat_template(given, tools=tools or None, **settings)
    ours = template.encode(template.render(messages[:-1], tools))
    theirs = cast("list[int]", own)
    if theirs == list(ours):
        return "yes"
    return _difference(str(template.tokenizer.decode(theirs)), str(template.tokenizer.decode(list(ours))))


def _sampled(template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Any]) -> list[Turn]:
    """The turns of a dialogue in which a model says the assistant's messages."""
    dialogue, turns, before = Dialogue(template), list[Turn](), list[Any]()
    for message in messages:
        if message["role"] == "assistant":
            prompt = dialogue.prompt(before, tools, after=turns[-1] if turns else None)
            words, end = template.words_of(prompt.shown_messages, message, tools, prompt.shown.text)
            ids = (*template.encode(words), *template.end_ids(end))
            n = len(ids)
            answer = ModelResponse(
                output_ids=ids, output_logprobs=(0.0,) * n, output_versions=(0,) * n, stop_reason="stop"
            )
            turns.append(dialogue.record(prompt, answer))
            before.append(turns[-1].message)
        else:
            before.append(message)
    return turns


def _extends(template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Any]) -> str:
    """Whether each prompt is the one before, the sampled tokens and new messages."""
    turns = _sampled(template, messages, tools)
    for earlier, turn in pairwise(turns):
        if turn.parent is not earlier:
            before = template.tokenizer.decode(list(earlier.token_ids))
            return _difference(str(before), str(template.tokenizer.decode(list(turn.prompt.input_ids))))
    return "yes"


def _round_trip(template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Any]) -> str:
    """Whether a call that the template writes is read as it was given."""
    if not any("tool_calls" in message for message in messages):
        return "- (it shows no calls)"
    if template.call_format is None:
        return "no: its calls are in a format that arl does not read; pass call_format="
    words = _sampled(template, messages[:2], tools)[0].words
    read = template.call_format.parse(words, _TOOLS).calls
    if [(call.name, call.arguments) for call in read if isinstance(call, ToolCall)] == [("add", {"a": 2, "b": 3})]:
        return "yes"
    return f"no: {words!r} is read as {', '.join(map(repr, read)) or 'no call'}"


def _mask_flaw(template: ChatTemplate, messages: Sequence[Message], demonstrations: Sequence[Any]) -> str:
    """What an assistant said that is not learned once, and what others said that is; empty if all is right. An answer
    without thinking must not be learned within a thought that the prompt opens."""

    def learned(ids: Sequence[int], mask: Sequence[int]) -> str:
        return str(template.tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]))

    whole = "\n".join(learned(*demonstration[:2]) for demonstration in demonstrations)
    for message in messages:
        for text in (message["content"], message.get("reasoning_content")):
            if text and len(text) > 1 and whole.count(text) != int(message["role"] == "assistant"):
                return f"no: {text!r} of the {message['role']} is learned {whole.count(text)} times"
    rows = [{"prompt": "2+2?", "completion": "Four."}]
    (plain,) = to_demonstrations(rows, template.tokenizer, template_options=template.options)
    words = learned(*plain[:2])
    opened, thought = template.opened_in(template.render([{"role": "user", "content": "2+2?"}])), template.facts.thought
    if opened and thought and thought[1] not in words.partition("Four.")[0]:
        return f"no: {words!r} is learned within the thought that the prompt opens"
    return ""


def _difference(first: str, second: str) -> str:
    place = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    begin = max(place - _NEAR, 0)
    return f"no: {first[begin : place + _NEAR]!r} becomes {second[begin : place + _NEAR]!r}"
