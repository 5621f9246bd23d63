"""Values that a model writes in tool calls without quotes, read as the types of a JSON schema."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


DECODER = json.JSONDecoder(parse_constant=_refuse)
"""JSON without NaN and infinities."""
_GEMMA = re.compile(r'<\|"\|>(.*?)<\|"\|>|([A-Za-z_][\w.-]*)(?=\s*:)', re.DOTALL)
_UNREADABLE = object()
_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    "null": ("null", (type(None),)),
    "boolean": ("true or false", (bool,)),
    "integer": ("an integer", (int,)),
    "number": ("a number", (int, float)),
    "array": ("a list", (list,)),
    "object": ("an object", (dict,)),
    "string": ("a string", (str,)),
}
"""A type of JSON schema: its name for the model, and its values' types."""


def typed(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """A value by its schema. Raises ValueError, which names the types, for a text that is of none of them."""
    kinds = list(_kinds(schema, root))
    try:
        value = _literal(text.strip(), is_python=bool(kinds))
    except (ValueError, RecursionError):
        value = _UNREADABLE
    if not kinds:
        return text if value is _UNREADABLE else value
    for kind in kinds:
        if kind == "integer" and isinstance(value, float) and value.is_integer():
            return int(value)
        if kind != "string" and isinstance(value, _TYPES[kind][1]) and isinstance(value, bool) == (kind == "boolean"):
            return value
    if "string" in kinds:
        return text
    raise ValueError(" or ".join(_TYPES[kind][0] for kind in kinds))


def _kinds(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Iterator[str]:
    """The types that a schema allows, those of a union's branches in turn; none if it says none."""
    if not isinstance(schema, Mapping) or depth > 5:
        return
    branches = [one for key in ("anyOf", "oneOf", "allOf") for one in _list(schema.get(key))]
    if isinstance(ref := schema.get("$ref"), str):
        found: Any = root
        for part in ref.removeprefix("#/").split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        branches.append(found)
    for branch in branches:
        yield from _kinds(branch, root, depth + 1)
    kinds = schema.get("type")
    yield from (kind for kind in _TYPES if kind == kinds or kind in _list(kinds))
    values = [] if kinds else [schema["const"]] if "const" in schema else _list(schema.get("enum"))
    yield from (kind for one in values for kind, (_, types) in _TYPES.items() if type(one) in types)
    if schema.get("nullable") is True:
        yield "null"


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _literal(text: str, *, is_python: bool) -> Any:
    """A value in JSON; or else a Python literal, or Gemma's. Raises ValueError for what has no JSON."""
    try:
        value = DECODER.decode(text)
    except (ValueError, RecursionError):
        if not is_python:
            raise
        try:
            value = _python(text)
        except ValueError:
            value = DECODER.decode(_GEMMA.sub(lambda found: json_text(found[2] or found[1]), text))
    try:
        return json.loads(json.dumps(value, allow_nan=False))  # a tuple is a list
    except TypeError:
        raise ValueError from None


def unquoted(text: str) -> str:
    """A string of Gemma's or Python's without its quotes, which may be unescaped within it."""
    if text.startswith('<|"|>'):
        return text[5:].removesuffix('<|"|>')
    try:
        value = _python(text)
    except ValueError:
        value = None
    return value if isinstance(value, str) else text[1:-1]


def _python(text: str) -> Any:
    """The value of a Python literal. Raises ValueError for other text."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        raise ValueError from None


def gemma_text(value: Any) -> str:
    """A value as Gemma writes it: strings between tags, keys without quotes."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma_text(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma_text, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json_text(value)


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def shortened(text: str) -> str:
    """The beginning of a text, as a literal."""
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
