"""What a response must match: servers that decode under a grammar sample only tokens that it allows."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

GrammarKind = Literal["json_schema", "regex", "structural_tag"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """A grammar, in the forms that SGLang, vLLM and xgrammar share. The whole response matches it, from its first token
    to the end of sequence.

    Raises ValueError for an unknown kind, and for a text that is not of this kind. Servers refuse what they cannot
    compile.
    """

    kind: GrammarKind
    text: str
    """json_schema: a JSON schema; structural_tag: xgrammar's structural tag, both as JSON. regex: an expression."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise ValueError(f"the kind of a grammar is {self.kind!r:.40}; it must be one of {get_args(GrammarKind)}")
        if not isinstance(self.text, str):  # pyright: ignore[reportUnnecessaryIsInstance] - users write it
            raise ValueError(
                f"the text of a grammar is {type(self.text).__name__}; it must be a str: json.dumps(schema)"
            )
        if not self.text:
            raise ValueError("the text of a grammar is empty; leave the grammar out where the response is free")
        if self.kind == "regex":
            return
        try:
            value = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the text of a grammar of kind {self.kind} is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise ValueError(f"the text of a grammar of kind {self.kind} is {self.text:.40}; it must be a JSON object")


_SCHEMAS_BY_NAME = frozenset(("$defs", "definitions", "patternProperties", "properties"))
"""Keywords of a JSON schema that hold a schema for each of many names."""
_VALUES = frozenset(("const", "enum", "default", "examples"))
"""Keywords whose values are data, not schemas."""
_NEVER: Collection[str] = frozenset(
    (
        "$dynamicRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if", "maxContains",
        "minContains", "not", "then", "uniqueItems",
    )
)  # fmt: skip
_FORMATS = (
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "json-pointer", "relative-json-pointer",
    "time", "uri", "uri-reference", "uri-template", "uuid",
)  # fmt: skip
_DIVISORS = range(1, 1025)
_OF_TYPE: Mapping[str, Collection[str]] = {
    "string": ("pattern", "format", "minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "object": (
        "properties", "additionalProperties", "patternProperties", "unevaluatedProperties", "required", "propertyNames",
        "minProperties", "maxProperties",
    ),
    "array": ("items", "prefixItems", "unevaluatedItems", "minItems", "maxItems"),
}  # fmt: skip
"""Keywords that limit the values of one type."""
_SHOWING: Mapping[str, Collection[str]] = {
    "object": ("properties", "additionalProperties", "patternProperties"),
    "array": ("items", "prefixItems"),
}
"""Keywords that show the type of a schema which does not name it."""


def schemas_in(schema: Any) -> Iterator[tuple[dict[str, Any], tuple[str | int, ...]]]:
    """The schema and every schema inside it, each with the keys that lead to it. What is deleted from a schema when it
    comes is not read."""
    left: list[tuple[Any, tuple[str | int, ...], bool]] = [(schema, (), False)]
    while left:
        value, steps, is_map = left.pop()
        if isinstance(value, list):
            left += [(one, (*steps, i), False) for i, one in enumerate(cast("list[Any]", value))]
        elif isinstance(value, dict):
            part = cast("dict[str, Any]", value)
            if not is_map:
                yield part, steps
            left += [
                (one, (*steps, name), not is_map and name in _SCHEMAS_BY_NAME)
                for name, one in part.items()
                if is_map or name not in _VALUES
            ]


def unenforced(schema: Mapping[str, Any]) -> dict[str, str]:
    """The keywords of a JSON schema that a server would ignore without a word -> why. It reads no schemas inside it.

    As of xgrammar 0.2.7, the library of embedded servers, and by default of SGLang and vLLM.
    """
    found: dict[str, str] = dict.fromkeys(sorted(name for name in schema if name in _NEVER), "cannot be enforced")
    if len(_listed(schema.get("allOf"))) > 1:
        found["allOf"] = "cannot be enforced for several schemas; write them as one"
    types: list[str] | None = None  # None: it does not say
    if (named := schema.get("type")) is not None:
        types = [named] if isinstance(named, str) else [kind for kind in _listed(named) if isinstance(kind, str)]
    else:
        types = next(([kind] for kind, names in _SHOWING.items() if any(name in schema for name in names)), None)
    if "multipleOf" in schema and not (types == ["integer"] and schema["multipleOf"] in _DIVISORS):
        found["multipleOf"] = f"cannot be enforced, but for integers, up to {max(_DIVISORS)}"
    limits = _limits(schema, types)
    groups = [[name] for name in ("const", "enum", "$ref") if name in schema]
    groups += [limits] if types and limits else []
    groups += [[name] for name in ("anyOf", "oneOf", "allOf") if name in schema and name not in found]
    first, *others = groups or [[]]
    ignored = [name for group in others for name in group]
    if types is None:
        ignored += limits
    reason = f"cannot be enforced beside {first[0]}" if first else "cannot be enforced without a type"
    found |= dict.fromkeys(ignored, reason)
    if types and first is limits:
        found |= _beside_each_other(schema, limits)
    return found


def _listed(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _limits(schema: Mapping[str, Any], types: Collection[str] | None) -> list[str]:
    """The keywords that limit values of these types."""
    kinds = _OF_TYPE if types is None else {"number" if kind == "integer" else kind for kind in types}
    names = [name for kind, names in _OF_TYPE.items() if kind in kinds for name in names if name in schema]
    return [name for name in names if schema[name] is not True and schema[name] not in ({}, [])]


def _beside_each_other(schema: Mapping[str, Any], limits: Collection[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    if "required" in limits and "properties" not in limits:
        found["required"] = "cannot be enforced without properties"
    of_string = [name for name in _OF_TYPE["string"] if name in limits]
    if "format" in of_string and schema["format"] not in _FORMATS:
        of_string.remove("format")
        found["format"] = "cannot be enforced: it is not a format that servers know"
    if of_string and of_string[0] in ("pattern", "format"):
        found |= dict.fromkeys(of_string[1:], f"cannot be enforced beside {of_string[0]}")
    return found
