"""Compiled grammars: what a request's grammar allows, in this model's tokens. xgrammar does the work, as in SGLang.

request --> cached? --> compiled on the thread `arl-grammars` --> one Constraint for each sequence

A Constraint knows where its sequence stands in the grammar, and the tokens that a step may sample:

Constraint.fill --> Allowed (one mask for the rows of a step) --> sampler --> Allowed.note, Constraint.accept
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from arl.api.grammar import Grammar, schemas_in, unenforced
from arl.api.sampling_mask import SetTable
from arl.api.version import install_command
from arl.runtime.http.bodies import RequestError

_MAX_CACHED = 256
_MAX_WHITESPACE = 20
"""Characters between two parts of a JSON: a line end and some levels of indentation. Without a bound, a weak model may
write white space until its tokens are used up."""


class Grammars:
    """Compiles grammars for one model, and keeps those that were used last. Belongs to one event loop.

    eos_ids: the tokens that end a response; they are allowed where a grammar may end, and nowhere else.
    """

    def __init__(self, tokenizer: Any | None, vocab_size: int, eos_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._compiler: Any = None
        self._compiled: OrderedDict[Grammar, Future[Any]] = OrderedDict()
        self._compiling = ThreadPoolExecutor(1, "arl-grammars")

    def compiled(self, grammar: Grammar) -> Future[Any]:
        """The grammar as xgrammar's matchers take it; the future fails with RequestError if it cannot be honoured."""
        future = self._compiled.get(grammar)
        if future is None:
            future = self._compiled[grammar] = self._compiling.submit(self._compile, grammar)
            if len(self._compiled) > _MAX_CACHED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return future

    def _compile(self, grammar: Grammar) -> Any:
        try:
            import xgrammar
        except ImportError:
            raise RequestError(
                f"a grammar needs xgrammar: {install_command('structured')}, where the server runs"
            ) from None
        if self._tokenizer is None:
            raise RequestError("a grammar needs a tokenizer, which this model was saved without")
        check_grammar(grammar)
        if self._compiler is None:
            info = xgrammar.TokenizerInfo.from_huggingface(
                self._tokenizer, vocab_size=self._vocab_size, stop_token_ids=self._eos_ids
            )
            # Without xgrammar's own cache, which takes token-level structural tags of different shapes for the same.
            self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        compile_kind: dict[str, Callable[[str], Any]] = {
            "json_schema": partial(self._compiler.compile_json_schema, max_whitespace_cnt=_MAX_WHITESPACE),
            "regex": self._compiler.compile_regex,
            "structural_tag": self._compiler.compile_structural_tag,
        }
        try:
            compiled = compile_kind[grammar.kind](grammar.text)
        except (RuntimeError, ValueError, TypeError) as error:
            raise RequestError(f"the {grammar.kind} cannot be compiled: {_reason(error)}") from None
        bitmask = xgrammar.allocate_token_bitmask(1, self._vocab_size)
        xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(bitmask)
        if not bitmask.any():
            raise RequestError(f"the {grammar.kind} allows no token of this model to begin with: nothing matches it")
        return compiled


def check_grammar(grammar: Grammar) -> None:
    """Raise RequestError for what xgrammar would ignore, or crash on."""
    text = grammar.text if grammar.kind == "regex" else json.dumps(json.loads(grammar.text), ensure_ascii=False)
    if "\0" in text or "\\u0000" in text:
        raise RequestError(f"the {grammar.kind} holds a NUL character, which xgrammar cannot take")
    if grammar.kind == "json_schema":
        check_schema(json.loads(text))
    elif grammar.kind == "structural_tag":
        for schema in _schemas_in(json.loads(text)):
            check_schema(schema)


def check_schema(schema: Any) -> None:
    """Raise RequestError for a constraint that xgrammar would ignore."""
    for part, steps in schemas_in(schema):
        reasons = [f"{keyword} {reason}" for keyword, reason in unenforced(part).items()]
        reasons += [f"{name} is empty" for name in ("anyOf", "oneOf", "allOf") if part.get(name) == []]
        if reasons:
            path = "/".join(("#", *map(str, steps)))
            raise RequestError(f"the JSON schema at {path} cannot be honoured: {'; '.join(reasons)}")


def _schemas_in(tag: Any) -> Iterator[Any]:
    """The JSON schemas within a structural tag."""
    left = [tag]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            yield from (value[name] for name in ("json_schema", "schema") if isinstance(value.get(name), dict))
            left += [one for name, one in value.items() if name not in ("json_schema", "schema")]


def _reason(error: Exception) -> str:
    """xgrammar's own words, without the place in its sources."""
    return str(error).strip().partition(".cc:")[2].partition(": ")[2] or str(error).strip()


class Constraint:
    """One sequence's place in its grammar."""

    def __init__(self, compiled: Any, *, has_end: bool) -> None:
        """has_end: the model has a token that ends a response; without one, the grammar's end is the response's."""
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=not has_end)

    @property
    def has_ended(self) -> bool:
        """Nothing can follow."""
        return self._matcher.is_terminated()

    def fill(self, bitmask: np.ndarray, row: int) -> bool:
        """Write which tokens may come next; False if all may."""
        return self._matcher.fill_next_token_bitmask(bitmask, row)

    def accept(self, token: int) -> bool:
        """Go on behind a token; False if the grammar does not allow it there."""
        return self._matcher.accept_token(token)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Allowed:
    """The ids that the constrained rows of a step may sample."""

    rows: Sequence[int]
    """Their places among the step's rows."""
    bits: np.ndarray
    """uint8[rows, bytes]: a bit for each token, the lowest first."""
    mask: torch.Tensor
    """bool[rows, V], where the logits are."""
    is_whole: Sequence[bool]
    """Whether all tokens are allowed."""
    is_alive: Sequence[bool]
    """Whether any token is."""

    @classmethod
    def of(cls, constraints: Sequence[Constraint | None], size: int, device: Any) -> Allowed:
        """For rows of which at least one has a constraint. size: the model's vocabulary."""
        rows = [row for row, constraint in enumerate(constraints) if constraint is not None]
        bitmask = np.full((len(rows), -(-size // 32)), -1, np.int32)
        is_whole = [not c.fill(bitmask, i) for i, c in enumerate(c for c in constraints if c is not None)]
        bits = bitmask.view(np.uint8)
        mask = np.unpackbits(bits, axis=1, count=size, bitorder="little").view(np.bool_)
        is_alive = [bool(of_row.any()) for of_row in mask]
        return cls(rows=rows, bits=bits, mask=torch.from_numpy(mask).to(device), is_whole=is_whole, is_alive=is_alive)

    def only(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] with minus infinity for what is not allowed. A row in which nothing is keeps its logits."""
        excluded = torch.zeros_like(logits, dtype=torch.bool)
        excluded[self.rows] = ~self.mask & self.mask.any(1, keepdim=True)
        return logits.masked_fill(excluded, -torch.inf)

    def note(self, place: int, sets: SetTable) -> None:
        """Add what the row at this place may sample to its sequence's table."""
        key = self.bits[place].tobytes()
        if self.is_whole[place]:
            sets.add_free()
        elif sets.knows(key):
            sets.add(key)
        else:
            sets.add(key, self.mask[place].nonzero()[:, 0].int().cpu().numpy())
