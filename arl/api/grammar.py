"""What a response must match: servers that decode under a grammar sample only tokens that it allows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal, get_args

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
        if self.kind != "regex":
            self._check_json()

    def _check_json(self) -> None:
        try:
            value = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the text of a grammar of kind {self.kind} is not JSON: {error}") from None
        if not isinstance(value, dict):
            found = f"{self.text:.40}"
            raise ValueError(f"the text of a grammar of kind {self.kind} is {found}; it must be a JSON object")
