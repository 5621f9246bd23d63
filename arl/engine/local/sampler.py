"""From logits to tokens: grammars, filters, draws and stop strings, vectorised over the batch.

    request's grammar --thread `arl-grammars`--> compiled --> one Constraint for each sequence
    Constraint.fill --> Allowed (one mask for the rows of a step) --> BatchSampler --> Allowed.note, Constraint.accept

xgrammar compiles, as in SGLang. Each sequence draws from a separate random stream, indexed by the token's position. So
its samples depend only on its seed and its text, and not on the rest of the batch or on interruptions.
"""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from arl.api.grammar import Grammar, schemas_in, unenforced
from arl.api.sampling_mask import SetTable
from arl.api.types import SamplingParams
from arl.api.version import install_command
from arl.runtime.http.bodies import RequestError

_MAX_CACHED = 256
_MAX_WHITESPACE = 20
"""Characters between two parts of a JSON: a line end and some levels of indentation. Without a bound, a weak model may
write white space until its tokens are used up."""

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB

_LIKELIEST = 1024
"""If a filter may keep fewer tokens, this many of the likeliest are examined first."""


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
            said = str(error).strip()
            reason = said.partition(".cc:")[2].partition(": ")[2] or said  # without the place in xgrammar's sources
            raise RequestError(f"the {grammar.kind} cannot be compiled: {reason}") from None
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
        left = [json.loads(text)]
        while left:
            value = left.pop()
            if isinstance(value, list):
                left += value
            elif isinstance(value, dict):
                for name, one in value.items():
                    if name not in ("json_schema", "schema"):
                        left.append(one)
                    elif isinstance(one, dict):
                        check_schema(one)


def check_schema(schema: Any) -> None:
    """Raise RequestError for a constraint that xgrammar would ignore."""
    for part, path in schemas_in(schema):
        reasons = [f"{keyword} {reason}" for keyword, reason in unenforced(part).items()]
        reasons += [f"{name} is empty" for name in ("anyOf", "oneOf", "allOf") if part.get(name) == []]
        if reasons:
            at = "/".join(("#", *map(str, path)))
            raise RequestError(f"the JSON schema at {at} cannot be honoured: {'; '.join(reasons)}")


class Constraint:
    """One sequence's place in its grammar."""

    def __init__(self, compiled: Any, *, has_end: bool) -> None:
        """has_end: the model has a token that ends a response; without one, the grammar's end is the response's."""
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=not has_end)

        self.fill: Callable[[np.ndarray, int], bool] = self._matcher.fill_next_token_bitmask
        """(bitmask, row): write which tokens may come next; False if all may."""
        self.accept: Callable[[int], bool] = self._matcher.accept_token
        """Go on behind a token; False if the grammar does not allow it there."""

    @property
    def has_ended(self) -> bool:
        """Nothing can follow."""
        return self._matcher.is_terminated()


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


def uniforms(streams: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) on a grid of 2^-32, one for each (stream, position); both uint64.

    SplitMix64 (Steele, Lea and Flood 2014) at an index, so that no state is carried.
    """
    z = streams + positions * np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(32)) * 2.0**-32


def random_stream(seed: int | None) -> int:
    """The stream of a request's seed; a fresh one without a seed."""
    if seed is None:
        return random.getrandbits(64)
    z = (seed + _GOLDEN) & (2**64 - 1)
    z = ((z ^ (z >> 33)) * 0xFF51AFD7ED558CCD) & (2**64 - 1)
    z = ((z ^ (z >> 33)) * 0xC4CEB9FE1A85EC53) & (2**64 - 1)
    return z ^ (z >> 33)


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """A token for each of B rows, and what it was drawn among."""

    tokens: list[int]
    logprobs: list[float]
    """Under logits / temperature and the row's grammar, before top_k, top_p and min_p."""
    kept_logprobs: list[float]
    """After these, if the row's kept ids are noted; else the same."""
    kept: dict[int, np.ndarray]
    """For each row whose kept ids are noted and that top_k, top_p or min_p narrow: the ids, int32, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Filter:
    """The limits on which tokens may be sampled: top_k int64[B, 1], top_p and min_p float32[B, 1], or [1, 1] for
    all."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> Filter | None:
        if not any(p.is_filtered for p in params):
            return None
        top_k = [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]
        top_p = [p.top_p if p.top_p < 1 else 2.0 for p in params]  # rounding must not cut the tail where top_p is off
        return cls(
            top_k=torch.tensor(top_k, device=device)[:, None],
            top_p=torch.tensor(top_p, device=device)[:, None],
            min_p=torch.tensor([float(p.min_p) for p in params], device=device)[:, None],
        )

    def apply(self, probs: torch.Tensor) -> torch.Tensor:
        """probs [B, V] with 0 for the filtered tokens; not normalised. The most likely token always stays.

        Most rows keep few tokens, which need no sorting of all: only rows that keep all of the likeliest get it.
        """
        filtered = torch.zeros_like(probs)
        ordered, token_ids = probs.topk(min(_LIKELIEST, probs.shape[-1]))
        kept = self._keeps(ordered)
        filtered.scatter_(1, token_ids, ordered * kept)
        if kept.shape[1] < probs.shape[1] and len(rows := kept[:, -1].nonzero()[:, 0]):
            ordered, token_ids = probs[rows].sort(dim=-1, descending=True)
            kept = self._of(rows)._keeps(ordered)
            filtered[rows] = torch.zeros_like(ordered).scatter_(1, token_ids, ordered * kept)
        return filtered

    def _keeps(self, ordered: torch.Tensor) -> torch.Tensor:
        """A mask of the likeliest tokens that stay, from their probabilities in descending order."""
        mass_before = ordered.cumsum(-1) - ordered
        ranks = torch.arange(ordered.shape[-1], device=ordered.device)
        return (ranks < self.top_k) & (mass_before <= self.top_p) & (ordered >= ordered[:, :1] * self.min_p)

    def _of(self, rows: torch.Tensor) -> Filter:
        if len(self.top_k) == 1:
            return self
        return Filter(top_k=self.top_k[rows], top_p=self.top_p[rows], min_p=self.min_p[rows])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchSampler:
    """The sampling parameters of a batch, as columns; made anew when the batch's members change."""

    temperature: torch.Tensor | None
    """float32[B, 1], or [1, 1] for all; None where all are 1."""
    greedy: torch.Tensor | None
    """bool[B], or [1] for all; None if no sequence is greedy."""
    is_all_greedy: bool
    filter: Filter | None
    noted: Sequence[int]
    """The rows whose kept ids are noted, of those that the filter narrows."""
    streams: np.ndarray

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        streams: Sequence[int],
        vocab_size: int,
        device: torch.device,
        notes: Sequence[bool] = (),
    ) -> BatchSampler:
        """notes: whether each row's kept ids are noted; empty: none are."""
        noted = [row for row, is_noted in enumerate(notes) if is_noted and params[row].is_filtered]
        if len({(p.temperature, p.top_k, p.top_p, p.min_p) for p in params}) == 1:
            params = params[:1]  # columns of one row serve all
        temperatures = [p.logprob_temperature for p in params]
        greedy = [p.temperature == 0 for p in params]
        return cls(
            temperature=None
            if all(t == 1 for t in temperatures)
            else torch.tensor(temperatures, dtype=torch.float32, device=device)[:, None],
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            is_all_greedy=all(greedy),
            filter=Filter.of(params, vocab_size, device),
            noted=noted,
            streams=np.array(streams, dtype=np.uint64),
        )

    def sample(self, logits: torch.Tensor, positions: Sequence[int], allowed: Allowed | None = None) -> Samples:
        """One token for each row of logits [B, V].

        positions: where in its sequence each sampled token will stand. allowed: what constrained rows may sample.
        """
        logits = logits.float() if allowed is None else allowed.only(logits.float())
        scaled = logits if self.temperature is None else logits / self.temperature
        logprobs = scaled.log_softmax(-1)
        filtered: torch.Tensor | None = None
        if self.is_all_greedy:
            tokens = logits.argmax(-1)
        else:
            probs = logprobs.exp()
            if self.filter is not None:
                probs = self.filter.apply(probs)
                filtered = probs[self.noted] if self.noted else None
            tokens = self._draw(probs, positions)
            if self.greedy is not None:
                tokens = torch.where(self.greedy, logits.argmax(-1), tokens)
        chosen = logprobs.gather(1, tokens[:, None])[:, 0]
        before = chosen.tolist()
        if filtered is None:
            return Samples(tokens=tokens.tolist(), logprobs=before, kept_logprobs=before, kept={})
        chosen[self.noted] -= filtered.sum(-1).log()
        is_kept = filtered > 0
        ids = is_kept.nonzero()[:, 1].int().cpu().numpy()
        kept = dict(zip(self.noted, np.split(ids, is_kept.sum(-1).cumsum(0).tolist()[:-1]), strict=True))
        among = chosen.clamp(max=0).tolist()
        return Samples(tokens=tokens.tolist(), logprobs=before, kept_logprobs=among, kept=kept)

    def _draw(self, probs: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """Invert the cumulative distribution in token order, so that filters of other rows cannot change a draw."""
        cumulative = probs.cumsum(-1, dtype=torch.float64)
        u = torch.from_numpy(uniforms(self.streams, np.array(positions, dtype=np.uint64)))
        targets = u.to(probs.device)[:, None] * cumulative[:, -1:]
        # NaN logits land past the end: their logprob reports them, but such an index would kill a GPU.
        return torch.searchsorted(cumulative, targets, right=True)[:, 0].clamp_(max=probs.shape[-1] - 1)


class StopStrings:
    """Finds stop strings that end within the newest token, wherever token boundaries fall."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}
        """What each token reads on its own."""

    def find(self, output_ids: Sequence[int], stop: Sequence[str]) -> str | None:
        """The first of `stop` in the text of the newest tokens, or None. Called after each token."""
        token = output_ids[-1]
        if (piece := self._pieces.get(token)) is None:
            piece = self._pieces[token] = self._decode([token])
        # A token on its own may lose its spaces (empty or stripped pieces) or hold a part of a character (U+FFFD).
        is_clear = piece and "\ufffd" not in piece
        if is_clear and not any(string[-1] in piece or string[-1].isspace() for string in stop):
            return None
        # A token adds at least one byte of text, so these hold any match that the newest token completes.
        num_tokens = max(len(string.encode()) for string in stop) + 1
        tail = self._decode(output_ids[-num_tokens:])
        return next((string for string in stop if string in tail), None)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
