"""Checks JSON schemas that programs send: servers ignore some keywords, and an answer would then not match."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from arl.web.bodies import BodyError, refused, shown

_TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
_UNENFORCED = frozenset(
    (
        "$dynamicRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if", "maxContains",
        "minContains", "not", "then", "uniqueItems",
    )
)  # fmt: skip
"""Keywords that xgrammar, the servers' usual library, reads and does not enforce (checked with 0.2.7)."""
_NAMED = ("$defs", "definitions", "patternProperties", "properties")
"""Keywords that hold a schema for each of many names."""
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_ONE = ("additionalProperties", "items", "propertyNames", "unevaluatedItems", "unevaluatedProperties")


def checked(where: str, schema: Any, *, is_strict: bool = True) -> Mapping[str, Any]:
    """A schema for a grammar, with its draft left out. where: the field that holds it.

    Raises BodyError for a faulty one and, if is_strict, for one that servers cannot enforce.
    """
    if not isinstance(schema, Mapping):
        raise _wrong(where, f"is {shown(schema)}; it must be a JSON schema, an object")
    for at, part in _parts(where, schema):
        _check(at, part, schema)
        if is_strict:
            _check_enforced(at, part)
    return {name: value for name, value in schema.items() if name not in ("$schema", "$id")}


def _wrong(where: str, reason: str) -> BodyError:
    return BodyError(f"{where} {reason}", param=where)


def _parts(where: str, schema: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every schema within a schema, and its place."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise _wrong(where, f"is {shown(schema)}; it must be a JSON schema: an object, true or false")
    yield where, schema
    for name, value in schema.items():
        at = f"{where}.{name}"
        if name in _NAMED:
            if not isinstance(value, Mapping):
                raise _wrong(at, f"is {shown(value)}; it must be an object with a schema for each name")
            for key, inner in value.items():
                yield from _parts(f"{at}.{key}", inner)
        elif name in _LISTS:
            if not isinstance(value, list) or not value:
                raise _wrong(at, f"is {shown(value)}; it must be a list of schemas")
            for i, inner in enumerate(value):
                yield from _parts(f"{at}[{i}]", inner)
        elif name in _ONE:
            yield from _parts(at, value)


def _check(where: str, part: Mapping[str, Any], root: Mapping[str, Any]) -> None:
    kinds = part.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if not isinstance(kind, str) or kind not in _TYPES:
            raise _wrong(f"{where}.type", f"is {shown(kind)}; it must be one of {', '.join(sorted(_TYPES))}")
    if "$ref" in part:
        _check_reference(f"{where}.$ref", part["$ref"], root)


def _check_enforced(where: str, part: Mapping[str, Any]) -> None:
    if unenforced := sorted(_UNENFORCED & part.keys()):
        raise _unenforced(f"{where}.{unenforced[0]}")
    if "pattern" in part and (bound := next((name for name in ("minLength", "maxLength") if name in part), None)):
        raise _unenforced(f"{where}.{bound}", " beside pattern")
    if "multipleOf" in part and part.get("type") != "integer":
        raise _unenforced(f"{where}.multipleOf", " of numbers that are not integers")
    if len(part.get("allOf", ())) > 1:
        raise _unenforced(f"{where}.allOf", " of several schemas")


def _unenforced(where: str, of: str = "") -> BodyError:
    reason = f"cannot be enforced{of} while the model answers; leave it out, and check it in the program"
    return refused(where, reason, can_be_dropped=True)


def _check_reference(where: str, reference: Any, root: Mapping[str, Any]) -> None:
    target: Any = root
    is_local = isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))
    for name in str(reference).split("/")[1:] if is_local else ():
        name = name.replace("~1", "/").replace("~0", "~")
        target = target.get(name) if isinstance(target, Mapping) else None
    if not is_local or target is None:
        raise _wrong(where, f'is {shown(reference)}, which is not in the schema; refer as in "#/$defs/name"')
