"""Sampling: exact supports, right frequencies, random streams; where a response stops; what grammars ignore."""

import json
from typing import Any

import numpy as np
import pytest
import torch
import xgrammar
from tiny_qwen import EOS, TOKENIZER, make_job, prompt_of, run_all

from arl.api.grammar import unenforced
from arl.api.types import SamplingParams
from arl.engine.local import sampler
from arl.engine.local.sampler import BatchSampler, Filter, StopStrings, random_stream, uniforms
from arl.engine.local.scheduler import RunningBatch

CPU = torch.device("cpu")


def draw(logits: torch.Tensor, num_draws: int, **params: Any) -> torch.Tensor:
    """Token counts over `num_draws` positions of one seeded stream."""
    drawing = BatchSampler.of([SamplingParams(**params)] * num_draws, [random_stream(5)] * num_draws, len(logits), CPU)
    tokens = drawing.sample(logits.expand(num_draws, -1), list(range(num_draws))).tokens
    return torch.bincount(torch.tensor(tokens), minlength=len(logits))


def plain_support(probs: list[float], top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    """Which tokens may be sampled, one by one from the likeliest down."""
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    kept: set[int] = set()
    mass_before = 0.0
    for rank, token in enumerate(order):
        if (top_k == -1 or rank < top_k) and mass_before <= top_p and probs[token] >= min_p * probs[order[0]]:
            kept.add(token)
        mass_before += probs[token]
    return kept


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 1},
        {"top_k": 3},
        {"top_k": 1 << 70},
        {"top_p": 0.01},
        {"top_p": 0.6},
        {"min_p": 0.3},
        {"min_p": 1.0},
        {"top_k": 4, "top_p": 0.7, "min_p": 0.2},
    ],
)
def test_filters_sample_exactly_the_tokens_that_they_leave(params: dict[str, Any]) -> None:
    probs = torch.tensor([0.05, 0.3, 0.02, 0.2, 0.13, 0.1, 0.17, 0.03])
    counts = draw(probs.log(), 20_000, **params)
    support = plain_support(probs.tolist(), **params)
    assert set(counts.nonzero()[:, 0].tolist()) == support
    kept = torch.tensor([p if token in support else 0.0 for token, p in enumerate(probs.tolist())])
    assert chi_square(counts, kept / kept.sum()) < 30


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    expected = probs * counts.sum()
    return ((counts - expected) ** 2 / expected)[expected > 0].sum().item()


def test_rows_of_a_mixed_batch_are_sampled_as_each_would_be_alone() -> None:
    torch.manual_seed(0)
    kinds = [{}, {"temperature": 0}, {"top_p": 0.5}, {"top_k": 2}, {"temperature": 3.0, "min_p": 0.1}] * 8
    params = [SamplingParams(**kind) for kind in kinds]
    logits = torch.randn(len(params), 30)
    streams = [random_stream(index) for index in range(len(params))]
    positions = list(range(100, 100 + len(params)))
    notes = [row % 3 > 0 for row in range(len(params))]
    together = BatchSampler.of(params, streams, 30, CPU, notes).sample(logits, positions)
    for row in range(len(params)):
        alone = BatchSampler.of([params[row]], [streams[row]], 30, CPU, [notes[row]]).sample(
            logits[row : row + 1], [positions[row]]
        )
        assert alone.tokens == [together.tokens[row]]
        assert alone.logprobs == pytest.approx([together.logprobs[row]], abs=1e-6)
        assert alone.kept_logprobs == pytest.approx([together.kept_logprobs[row]], abs=1e-6)
        kept_together = [ids.tolist() for number, ids in together.kept.items() if number == row]
        assert [ids.tolist() for ids in alone.kept.values()] == kept_together
    assert set(together.kept) == {row for row in range(len(params)) if notes[row] and params[row].is_filtered}


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 5, "top_p": 0.9}])
def test_noted_ids_are_those_that_filters_leave_and_logprobs_are_among_them(filters: dict[str, Any]) -> None:
    torch.manual_seed(1)
    logits = 2 * torch.randn(50, 30)
    params = [SamplingParams(temperature=0.8, **filters)] * 50
    drawing = BatchSampler.of(params, list(map(random_stream, range(50))), 30, CPU, [True] * 50)
    samples = drawing.sample(logits, list(range(50)))
    for row, (token, probs) in enumerate(zip(samples.tokens, (logits / 0.8).softmax(-1), strict=True)):
        support = plain_support(probs.tolist(), **filters)
        assert samples.kept[row].tolist() == sorted(support)
        among = float((probs[token] / probs[sorted(support)].sum()).log())
        assert samples.kept_logprobs[row] <= 0
        assert samples.kept_logprobs[row] == pytest.approx(among, abs=1e-6)
        assert samples.logprobs[row] == pytest.approx(float(probs[token].log()), abs=1e-6)


def test_rows_that_keep_more_than_the_likeliest_are_filtered_as_sorted_rows_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(2)
    probs = (3 * torch.randn(12, 300)).softmax(-1)
    ways = [{"top_p": 0.3}, {"top_p": 0.999}, {"top_k": 4}, {"top_k": 290}, {"min_p": 0.3}, {}]
    together = Filter.of([SamplingParams(**way) for way in ways * 2], 300, CPU)
    assert together is not None
    wanted = together.apply(probs)
    assert (wanted > 0).sum(-1).min() < 20 < 290 <= (wanted > 0).sum(-1).max()
    monkeypatch.setattr(sampler, "_LIKELIEST", 20)
    assert torch.equal(together.apply(probs), wanted)
    for row, way in enumerate(ways):
        if (alone := Filter.of([SamplingParams(**way)], 300, CPU)) is not None:
            assert torch.equal(alone.apply(probs)[row], wanted[row])


def test_random_numbers_of_streams_and_positions_are_uniform_and_unrelated() -> None:
    streams = np.array([random_stream(seed) for seed in range(400)], dtype=np.uint64)[:, None]
    u = uniforms(streams, np.arange(500, dtype=np.uint64)[None])
    assert 0 <= u.min() < 1e-4 < 1 - 1e-4 < u.max() < 1
    counts, _ = np.histogram(u, bins=100, range=(0, 1))
    assert ((counts - 2000) ** 2 / 2000).sum() < 150  # 0.1 % of chi-square with 99 degrees
    assert abs(np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(u[:, :-1].ravel(), u[:, 1:].ravel())[0, 1]) < 0.01


@pytest.mark.parametrize("seed", [-1, 0, 2**63, 2**70])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert 0 <= random_stream(seed) < 2**64
    assert random_stream(seed) == random_stream(seed) != random_stream(seed + 1)


AB, CD, BC = (TOKENIZER.convert_tokens_to_ids(piece) for piece in ("ab", "cd", "bc"))


def ids(text: str) -> list[int]:
    """One token for each byte, whatever could be merged."""
    return [token for character in text for token in TOKENIZER.encode(character)]


def first_stop(tokens: list[int], *stop: str) -> tuple[int, str] | None:
    """After how many tokens generation stops, and at which string."""
    finder = StopStrings(TOKENIZER)
    for end in range(1, len(tokens) + 1):
        if (found := finder.find(tokens[:end], stop)) is not None:
            return end, found
    return None


@pytest.mark.parametrize(
    ("tokens", "stop", "wanted"),
    [
        (ids("xxstopyy"), ["stop"], (6, "stop")),
        ([*ids("x"), AB, CD, *ids("y")], ["bc"], (3, "bc")),
        ([*ids("xa"), BC, *ids("dy")], ["abcd"], (4, "abcd")),
        ([AB, AB, CD], ["abab", "abcd"], (2, "abab")),
        (ids("a né b"), ["né"], (5, "né")),
        (ids("one\n\ntwo"), ["\n\n"], (5, "\n\n")),
        ([*ids("x"), EOS], ["<|im_end|>"], (2, "<|im_end|>")),
        (ids("x" * 50 + "0123456789abcdefghij"), ["0123456789abcdefghij"], (70, "0123456789abcdefghij")),
        (ids("stostostosto"), ["stop"], None),
    ],
)
def test_stop_strings_are_found_at_the_token_that_completes_them(
    tokens: list[int], stop: list[str], wanted: tuple[int, str] | None
) -> None:
    assert first_stop(tokens, *stop) == wanted


def test_a_stop_token_at_the_last_allowed_place_is_a_stop(batch: RunningBatch) -> None:
    free = make_job(prompt_of(5, 1), temperature=0, max_new_tokens=1)
    run_all(batch, [free])
    (last,) = free.output_ids
    job = make_job(free.input_ids, temperature=0, max_new_tokens=1, stop_token_ids=(last,), ignore_eos=False)
    run_all(batch, [job])
    assert (job.output_ids, job.finish_reason) == (free.output_ids, {"type": "stop", "matched": last})


# The keywords of JSON schemas that the grammars' library ignores are those that arl says it ignores.

COMPILER = xgrammar.GrammarCompiler(
    xgrammar.TokenizerInfo.from_huggingface(TOKENIZER, vocab_size=len(TOKENIZER), stop_token_ids=[EOS])
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
    ids = [*TOKENIZER.encode(json.dumps(value), add_special_tokens=False), EOS]
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
