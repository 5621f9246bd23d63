"""A grammar says at once what is wrong with it."""

from typing import Any

import pytest

from arl import Grammar


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"kind": "ebnf", "text": "root ::= 'a'"}, "the kind of a grammar is 'ebnf'; it must be one of"),
        ({"kind": "json_schema", "text": {"type": "object"}}, "is dict; it must be a str: json.dumps"),
        ({"kind": "regex", "text": ""}, "the text of a grammar is empty"),
        ({"kind": "json_schema", "text": "{"}, "the text of a grammar of kind json_schema is not JSON: Expecting"),
        ({"kind": "structural_tag", "text": "[1]"}, r"of kind structural_tag is \[1\]; it must be a JSON object"),
        ({"kind": "json_schema", "text": "[" * 100_000}, "of kind json_schema is not JSON"),
    ],
)
def test_a_text_that_is_no_such_grammar_is_an_error_that_says_why(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Grammar(**fields)
