"""The keywords of JSON schemas that the grammars' library ignores are those that arl says it ignores."""

import json
from typing import Any

import pytest
import xgrammar

from arl.api.grammar import unenforced
from arl.engine.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
COMPILER = xgrammar.GrammarCompiler(
    xgrammar.TokenizerInfo.from_huggingface(
        TOKENIZER, vocab_size=len(TOKENIZER), stop_token_ids=[TOKENIZER.eos_token_id]
    )
)
TEXT = {"type": "string"}
X = {"x": {"type": "integer"}}
DEFS = {"$defs": {"text": TEXT}}


def takes(schema: dict[str, Any], value: Any) -> bool:
    """Whether decoding by the schema can say the value; a schema that does not compile is refused, and takes none."""
    try:
        matcher = xgrammar.GrammarMatcher(COMPILER.compile_json_schema(json.dumps(schema)))
    except RuntimeError:
        return False
    ids = [*TOKENIZER.encode(json.dumps(value), add_special_tokens=False), TOKENIZER.eos_token_id]
    return all(map(matcher.accept_token, ids))


BROKEN: list[tuple[dict[str, Any], Any, list[str]]] = [
    ({**TEXT, "pattern": "a+"}, "b", []),
    ({**TEXT, "minLength": 2, "maxLength": 3}, "b", []),
    ({**TEXT, "format": "date"}, "b", []),
    ({**TEXT, "format": "secret"}, "b", ["format"]),
    ({**TEXT, "pattern": "a+", "format": "date"}, "2020-01-01", ["format"]),
    ({**TEXT, "format": "date", "minLength": 20}, "2020-01-01", ["minLength"]),
    ({**TEXT, "pattern": "a+", "maxLength": 1}, "aa", ["maxLength"]),
    ({"type": ["string", "null"], "pattern": "a+"}, "b", []),
    ({"type": ["string", "integer"], "minimum": 3}, 1, []),
    ({"pattern": "a+"}, "b", ["pattern"]),
    ({"format": "date"}, "b", ["format"]),
    ({"minLength": 3}, "b", ["minLength"]),
    ({"type": "integer", "minimum": 3}, 1, []),
    ({"type": "number", "exclusiveMaximum": 3}, 3, []),
    ({"type": "integer", "multipleOf": 3}, 4, []),
    ({"type": "integer", "multipleOf": 2000}, 4, ["multipleOf"]),
    ({"type": "number", "multipleOf": 3}, 4, ["multipleOf"]),
    ({"maximum": 3}, 9, ["maximum"]),
    ({"properties": X, "required": ["x"]}, {}, []),
    ({"additionalProperties": {"type": "integer"}}, {"y": "z"}, []),
    ({"patternProperties": {"^a": TEXT}, "additionalProperties": False}, {"b": 1}, []),
    ({"required": ["x"]}, {}, ["required"]),
    ({"type": "object", "required": ["x"]}, {}, ["required"]),
    ({"type": "object", "properties": {}, "required": ["x"]}, {}, ["required"]),
    ({"type": "object", "properties": {"y": {}}, "required": ["x"]}, {}, []),
    ({"type": "object", "propertyNames": {**TEXT, "pattern": "a+"}}, {"b": 1}, []),
    ({"type": "object", "properties": X, "propertyNames": {"enum": ["x"]}}, {"y": 1}, []),
    ({"propertyNames": {**TEXT, "pattern": "a+"}}, {"b": 1}, ["propertyNames"]),
    ({"type": "object", "additionalProperties": True, "minProperties": 1}, {}, []),
    ({"type": "object", "properties": {"x": {}, "y": {}}, "maxProperties": 1}, {"x": 1, "y": 1}, []),
    ({"minProperties": 1}, {}, ["minProperties"]),
    ({"properties": {"x": {}, "y": {}}, "dependentRequired": {"x": ["y"]}}, {"x": 1}, ["dependentRequired"]),
    ({"items": {"type": "integer"}}, ["x"], []),
    ({"prefixItems": [{"type": "integer"}]}, ["x"], []),
    ({"type": "array", "items": {}, "minItems": 1}, [], []),
    ({"minItems": 1}, [], ["minItems"]),
    ({"type": "array", "items": {}, "uniqueItems": True}, [1, 1], ["uniqueItems"]),
    ({"type": "array", "items": {}, "contains": TEXT}, [1], ["contains"]),
    ({"enum": ["a", "b"], "pattern": "a"}, "b", ["pattern"]),
    ({**TEXT, "const": "b", "minLength": 2}, "b", ["minLength"]),
    ({"$ref": "#/$defs/text", "maxLength": 1, **DEFS}, "bb", ["maxLength"]),
    ({"$ref": "#/$defs/text", "enum": ["a"], **DEFS}, "b", ["$ref"]),
    ({"anyOf": [TEXT], "maxLength": 1}, "bb", ["maxLength"]),
    ({"anyOf": [TEXT], "oneOf": [{"type": "integer"}, TEXT]}, "b", ["oneOf"]),
    ({"allOf": [TEXT, {"maxLength": 1}]}, "bb", ["allOf"]),
    ({"allOf": [{**TEXT, "maxLength": 1}]}, "bb", []),
    ({"type": "object", "properties": X, "required": ["x"], "anyOf": [{"properties": X}]}, {}, ["anyOf"]),
    ({"not": TEXT}, "b", ["not"]),
    ({"if": TEXT, "then": {"const": "a"}, "else": {}}, "b", ["else", "if", "then"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "value", "named"), BROKEN)
def test_what_a_schema_forbids_is_not_said_or_the_keyword_is_named(
    schema: dict[str, Any], value: Any, named: list[str]
) -> None:
    """A schema that is followed names nothing, so that no schema is refused in vain."""
    assert list(unenforced(schema)) == named
    assert takes(schema, value) == bool(named), "the library ignores other keywords than arl says"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "format": "int64", "pattern": "a"},
        {"anyOf": [TEXT, {"type": "null"}], "default": None, "title": "A"},
        {"enum": ["a"], **TEXT},
        {"$ref": "#/$defs/text", "description": "a text", **DEFS},
        {"type": "object", "anyOf": [{"properties": X}], "required": [], "properties": {}},
        {"type": "object", "propertyNames": TEXT, "additionalProperties": {}},
    ],
)
def test_keywords_that_limit_nothing_are_not_named(schema: dict[str, Any]) -> None:
    assert unenforced(schema) == {}
