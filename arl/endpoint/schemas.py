"""Checks JSON schemas that programs send: servers ignore some keywords, and an answer would then not match."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from arl.api.grammar import SCHEMAS_BY_NAME, unenforced
from arl.web.bodies import BodyError, refused, shown

_TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_ONE = ("additionalProperties", "items", "propertyNames", "unevaluatedItems", "unevaluatedProperties")


def checked(where: str, schema: Any, *, is_strict: bool = True) -> Mapping[str, Any]:
    """A schema for a grammar. where: the field that holds it.

    Raises BodyError for a faulty one. A part that servers cannot enforce is an error too if is_strict, else left out.
    """
    if not isinstance(schema, Mapping):
        raise _wrong(where, f"is {shown(schema)}; it must be a JSON schema, an object")
    for at, part in _parts(where, schema):
        _check(at, part, schema)
        for name, reason in unenforced(part).items() if is_strict else ():
            raise refused(f"{at}.{name}", f"{reason}; leave it out, and check it in the program", can_be_dropped=True)
    return {name: value for name, value in _enforced(schema).items() if name not in ("$schema", "$id")}


def _enforced(schema: Any) -> Any:
    """The schema without what is not enforced."""
    if not isinstance(schema, Mapping):
        return schema
    left_out = unenforced(schema)
    made: dict[str, Any] = {}
    for name, value in schema.items():
        if name in left_out:
            continue
        if name in SCHEMAS_BY_NAME:
            made[name] = {key: _enforced(inner) for key, inner in value.items()}
        elif name in _LISTS:
            made[name] = [_enforced(inner) for inner in value]
        else:
            made[name] = _enforced(value) if name in _ONE else value
    return made


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
        if name in SCHEMAS_BY_NAME:
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


def _check_reference(where: str, reference: Any, root: Mapping[str, Any]) -> None:
    target: Any = root
    is_local = isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))
    for name in str(reference).split("/")[1:] if is_local else ():
        name = name.replace("~1", "/").replace("~0", "~")
        target = target.get(name) if isinstance(target, Mapping) else None
    if not is_local or target is None:
        raise _wrong(where, f'is {shown(reference)}, which is not in the schema; refer as in "#/$defs/name"')
