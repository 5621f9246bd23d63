"""The form that a program asks of an answer: JSON by a schema, a regular expression, calls of tools; as a grammar.

Forms are formats of structural tags, which xgrammar, SGLang and vLLM share. The model may think before the form begins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from arl.api.grammar import SCHEMAS_BY_NAME, Grammar, GrammarKind, unenforced
from arl.runtime.http.bodies import BodyError, refused, shown, wrong
from arl.workflow.call_formats import CallSyntax
from arl.workflow.messages import ToolSpecs

Form = Mapping[str, Any]
"""A format of a structural tag."""
_THINK, _END_OF_THINK = "<think>", "</think>"
_SPACE = {"type": "regex", "pattern": r"\s{0,4}"}
_ANY_TEXT = {"type": "any_text"}
_VALUES = ("const", "enum", "default", "examples")
"""Keywords of a schema whose values are data, not schemas."""


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


def json_schema(where: str, schema: Any, *, is_strict: bool = True) -> Form:
    """JSON that matches a schema. where: the field that holds it. Servers compile it, and refuse a faulty one.

    A keyword that servers would ignore, so that an answer might not match, is left out unless is_strict. Raises
    BodyError for such a keyword, and for a schema that is not an object.
    """
    if not isinstance(schema, Mapping):
        raise wrong(where, schema, "a JSON schema, an object")
    made = _enforced(where, schema, is_strict=is_strict)
    return {"type": "json_schema", "json_schema": {name: made[name] for name in made if name not in ("$schema", "$id")}}


def _enforced(where: str, schema: Any, *, is_strict: bool, is_map: bool = False) -> Any:
    """A schema without what is not enforced. is_map: it is an object with a schema for each name."""
    if isinstance(schema, list):
        return [_enforced(f"{where}[{i}]", one, is_strict=is_strict) for i, one in enumerate(schema)]
    if not isinstance(schema, Mapping):
        return schema
    ignored = {} if is_map else unenforced(schema)
    for name, reason in ignored.items() if is_strict else ():
        raise refused(f"{where}.{name}", f"{reason}; leave it out, and check it in the program", can_be_dropped=True)
    return {
        name: value
        if name in _VALUES and not is_map
        else _enforced(f"{where}.{name}", value, is_strict=is_strict, is_map=not is_map and name in SCHEMAS_BY_NAME)
        for name, value in schema.items()
        if name not in ignored
    }


def text_form(where: str, kind: Literal["text", "json_object", "json_schema"], schema: Any) -> Form | None:
    """The form of a text that OpenAI's protocols name by its kind. where: the field with the schema."""
    if kind == "text":
        return None
    return json_schema(where, schema) if kind == "json_schema" else json_schema(where, {"type": "object"})


def regex(where: str, pattern: Any) -> Form:
    if not isinstance(pattern, str) or not pattern:
        raise wrong(where, pattern, "a regular expression")
    return {"type": "regex", "pattern": pattern}


def one_of_texts(where: str, texts: Any) -> Form:
    """One of these texts."""
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise wrong(where, texts, "a list of texts, none of them empty")
    return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in texts]}


def openai_choice(given: Any) -> ToolChoice:
    """The `tool_choice` of OpenAI's protocols. Raises BodyError."""
    match given:
        case "auto" | "none" | "required":
            return ToolChoice(mode=given)
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return ToolChoice(mode="required", names=(name,), is_named=True)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)}}:
            return ToolChoice(mode=mode, names=tuple(map(_name, tools)))
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(tools)}:
            return ToolChoice(mode=mode, names=tuple(map(_name, tools)))
    raise wrong(
        "tool_choice", given, '"auto", "none", "required", {"type": "function", ...} or {"type": "allowed_tools", ...}'
    )


def _name(tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name
    raise wrong("tool_choice", tool, "a function of tools, as in {type, name}")


def form_of(asked: Asked, tools: ToolSpecs, syntax: CallSyntax | None, format_name: str) -> Form | None:
    """The form of an answer, without thinking; None if it is free. Raises BodyError for what cannot be honoured.

    syntax: of the model's calls, if calls in its format can be forced.
    """
    chosen = asked.choice
    _check_names(chosen, tools)
    is_forced = chosen.mode == "required"
    is_bound = is_forced or asked.output or chosen.names is not None or asked.strict
    if chosen.mode == "none" or not tools or not is_bound:
        return asked.output
    where = "tool_choice" if is_forced or chosen.names is not None else asked.where if asked.output else "strict"
    if syntax is None:
        why = f"the model calls tools in the format {format_name}, which does not say how calls are written (syntax)"
        raise refused(where, f"cannot be honoured here: {why}", can_be_dropped=True)
    tags: list[dict[str, Any]] = []
    for i, function in enumerate(tool["function"] for tool in tools):
        if chosen.names is None or function["name"] in chosen.names:
            schema, is_strict = function.get("parameters") or {"type": "object"}, function["name"] in asked.strict
            form = json_schema(f"tools[{i}].parameters", schema, is_strict=is_strict)
            tags.append(syntax.tag(function["name"], {**form["json_schema"], "type": "object"}))
    if is_forced:
        return syntax.calls(tags, only_one=asked.only_one)
    if asked.output:
        return {"type": "or", "elements": [syntax.calls(tags, only_one=asked.only_one), asked.output]}
    if not syntax.trigger:
        why = f"nothing tells the beginning of a call in the model's format, {format_name}, from other text"
        raise refused(where, f"cannot be honoured here: {why}", can_be_dropped=True)
    return syntax.text_with_calls(tags, only_one=asked.only_one)


def _check_names(choice: ToolChoice, tools: ToolSpecs) -> None:
    known = [tool["function"]["name"] for tool in tools]
    reason = ""
    if choice.mode == "required" and not tools:
        reason = "asks for a call, but there are no tools"
    elif choice.names == ():
        reason = "allows no tool; name at least one"
    elif unknown := [name for name in choice.names or () if name not in known]:
        reason = f"names {shown(unknown[0])}, which is not among the tools: {', '.join(known) or 'none'}"
    if reason:
        raise BodyError(f"tool_choice {reason}", param="tool_choice")


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    """The thinking that an answer begins with."""

    is_open: bool = False
    """The prompt began it."""
    is_possible: bool = False
    """The model may begin it."""
    budget: int | None = None
    """At most this many tokens, after which the model must close it; None: any number."""


def grammar_of(form: Form | None, thinking: Thought) -> Grammar | None:
    """The grammar of an answer: thinking, if the model thinks, and then the form. None if the answer is free."""
    can_think = thinking.is_open or thinking.is_possible
    is_limited = can_think and thinking.budget is not None
    if form is None and not is_limited:
        return None
    if not can_think and form and form["type"] in _PLAIN:
        kind, text = _PLAIN[form["type"]]
        return Grammar(kind=kind, text=text(form))
    whole = _after_thinking(form or _ANY_TEXT, thinking) if can_think else form
    return Grammar(kind="structural_tag", text=json.dumps({"type": "structural_tag", "format": whole}))


_PLAIN: Mapping[str, tuple[GrammarKind, Any]] = {
    "json_schema": ("json_schema", lambda form: json.dumps(form["json_schema"])),
    "regex": ("regex", lambda form: form["pattern"]),
}
"""Forms that need no structural tag."""


def _after_thinking(form: Form, thinking: Thought) -> Form:
    limit = {} if thinking.budget is None else {"max_tokens": thinking.budget}
    begin = "" if thinking.is_open else _THINK
    thought = {"type": "tag", "begin": begin, "content": {**_ANY_TEXT, **limit}, "end": _END_OF_THINK}
    thoughtful = {"type": "sequence", "elements": [thought, _SPACE, form]}
    if thinking.is_open or limit:  # a model with a budget thinks: text that thinks or not would escape the limit
        return thoughtful
    return {"type": "or", "elements": [thoughtful, form]}


def one_of(forms: Sequence[tuple[str, Form]]) -> tuple[str, Form | None]:
    """The only form asked for, with its field. Raises BodyError if several fields ask for one."""
    if len(forms) > 1:
        first, second = forms[0][0], forms[1][0]
        raise BodyError(f"{second} contradicts {first}: both ask for a form of the answer; send one", param=second)
    return forms[0] if forms else ("response_format", None)
