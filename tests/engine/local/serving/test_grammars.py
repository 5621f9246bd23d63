"""Constrained decoding on the embedded server: tokens are sampled among what a grammar allows, and say among what."""

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
import xgrammar
from protocol_client import Client
from reference import Reference, chosen, close

from arl.api.errors import ServerError
from arl.api.grammar import Grammar
from arl.api.settings.engines import ClientConfig
from arl.api.types import ModelRequest, ModelResponse, SamplingParams
from arl.engine.client.remote_engine import RemoteInferenceEngine
from arl.engine.local import sampler
from arl.engine.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_token_id
PROMPT = TOKENIZER.encode("Say it in JSON: ")
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def of_json(schema: dict[str, Any]) -> Grammar:
    return Grammar(kind="json_schema", text=json.dumps(schema))


def of_regex(text: str) -> Grammar:
    return Grammar(kind="regex", text=text)


def ids_of(text: str) -> set[int]:
    return set(TOKENIZER.encode(text))


@asynccontextmanager
async def engine_over(url: str, **config: Any) -> AsyncIterator[RemoteInferenceEngine]:
    async with RemoteInferenceEngine([url], ClientConfig(request_timeout_s=60.0, **config)) as engine:
        yield engine


async def answer(engine: RemoteInferenceEngine, grammar: Grammar | None, **sampling: Any) -> ModelResponse:
    params = SamplingParams(**{"max_new_tokens": 64, "grammar": grammar, "seed": 7, **sampling})
    return await engine.agenerate(ModelRequest(input_ids=PROMPT, sampling=params))


def sets_of(response: ModelResponse) -> list[set[int]]:
    assert response.kept_ids is not None
    mask = torch.from_numpy(response.kept_ids.mask(TOKENIZER.vocab_size + 32))
    return [set(row.nonzero()[:, 0].tolist()) for row in mask]


def check_logprobs(response: ModelResponse, model: str, temperature: float = 1.0) -> None:
    """They are those of plain transformers' softmax over the kept ids."""
    assert response.kept_ids is not None
    logits = Reference(model).logits(PROMPT, response.output_ids) / temperature
    mask = torch.from_numpy(response.kept_ids.mask(logits.shape[-1]))
    close(response.output_logprobs, chosen(logits.masked_fill(~mask, -torch.inf), response.output_ids), atol=1e-5)


async def test_each_token_is_sampled_among_what_the_grammar_allows_there(shared_url: str, model_a: str) -> None:
    async with engine_over(shared_url) as engine:
        response = await answer(engine, of_regex("[ab]{3}c?"), temperature=1.3)
    said = sets_of(response)
    assert said[:4] == [ids_of("ab")] * 3 + [ids_of("c") | {EOS}]
    assert said[4:] in ([], [{EOS}])
    assert response.output_ids[-1] == EOS
    assert response.stop_reason == "stop"
    check_logprobs(response, model_a, temperature=1.3)


async def test_json_schemas_and_structural_tags_are_followed_and_free_text_has_no_set(
    shared_url: str, model_a: str
) -> None:
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": ["<f>"],
            "tags": [{"begin": "<f>", "content": {"type": "json_schema", "json_schema": PERSON}, "end": "</f>"}],
        },
    }
    async with engine_over(shared_url) as engine:
        person = await answer(engine, of_json(PERSON), temperature=0.5, max_new_tokens=400)
        tagged = await answer(engine, Grammar(kind="structural_tag", text=json.dumps(tag)))
    assert person.stop_reason == "stop"
    said = json.loads(TOKENIZER.decode(person.output_ids[:-1]))
    assert said.keys() == PERSON["properties"].keys()
    assert isinstance(said["age"], int)
    check_logprobs(person, model_a, temperature=0.5)
    check_logprobs(tagged, model_a)


async def test_filters_narrow_what_the_grammar_allows(shared_url: str, model_a: str) -> None:
    async with engine_over(shared_url) as engine:
        two = await answer(engine, of_regex("[a-z]{6}"), top_k=2)
        nucleus = await answer(engine, of_regex("[a-z]{6}"), top_p=0.4)
        greedy = await answer(engine, of_regex("[a-z]{6}"), temperature=0, top_k=2)
    assert [len(kept) for kept in sets_of(two)] == [2] * 6 + [1]
    assert all(1 < len(kept) < 26 for kept in sets_of(nucleus)[:6])
    assert [len(kept) for kept in sets_of(greedy)] == [26] * 6 + [1]
    for response in (two, nucleus, greedy):
        check_logprobs(response, model_a)
    logits = Reference(model_a).logits(PROMPT, greedy.output_ids)[:6, sorted(ids_of("abcdefghijklmnopqrstuvwxyz"))]
    assert torch.tensor(sorted(ids_of("abcdefghijklmnopqrstuvwxyz")))[logits.argmax(1)].tolist() == list(
        greedy.output_ids[:6]
    )


async def test_sequences_of_different_grammars_and_of_none_share_a_batch(shared_url: str, model_a: str) -> None:
    wanted: list[Grammar | None] = [of_regex("[ab]{40}"), None, of_regex("[0-9]{30}"), of_json(PERSON), None]
    async with engine_over(shared_url) as engine:
        alone = [await answer(engine, grammar, temperature=0.7) for grammar in wanted]
        together = await asyncio.gather(*(answer(engine, grammar, temperature=0.7) for grammar in wanted))
    for one, other, grammar in zip(alone, together, wanted, strict=True):
        assert one.output_ids == other.output_ids
        assert one.kept_ids == other.kept_ids
        assert (one.kept_ids is None) == (grammar is None)


@pytest.mark.parametrize(
    ("sampling", "said", "reason"),
    [
        ({"ignore_eos": True}, "aaaa<|im_end|>", "stop"),
        ({"max_new_tokens": 3}, "aaa", "length"),
        ({"stop": ("aa",)}, "aa", "stop"),
        ({"stop_token_ids": tuple(ids_of("a"))}, "a", "stop"),
    ],
)
async def test_a_response_ends_with_its_grammar_or_before(
    shared_url: str, sampling: dict[str, Any], said: str, reason: str
) -> None:
    async with engine_over(shared_url) as engine:
        response = await answer(engine, of_regex("a{4}"), **sampling)
    assert TOKENIZER.decode(response.output_ids) == said
    assert response.stop_reason == reason


@pytest.mark.parametrize(
    ("grammar", "sentence"),
    [
        (of_regex("(("), "the regex cannot be compiled: Regex parsing error at position 3"),
        (of_regex("(?=a)b"), "Lookahead is not supported"),
        (of_regex("a\0b"), "holds a NUL character"),
        (of_json({"type": "foo"}), 'Unsupported type "foo"'),
        (of_json({"properties": {"x": {"multipleOf": 3}}}), "at #/properties/x cannot be honoured: multipleOf"),
        (of_json({"anyOf": []}), "anyOf is empty"),
        (of_json({"type": [[]], "format": {}, "allOf": 3, "multipleOf": "a"}), "cannot be honoured: multipleOf"),
        (
            Grammar(kind="structural_tag", text=json.dumps({"type": "structural_tag", "format": {
                "type": "json_schema", "json_schema": {"uniqueItems": True}}})),
            "uniqueItems cannot be enforced",
        ),
        (Grammar(kind="structural_tag", text='{"type": "x"}'), "structural_tag cannot be compiled"),
    ],
)  # fmt: skip
async def test_a_grammar_that_cannot_be_honoured_is_refused_with_the_reason(
    shared_url: str, grammar: Grammar, sentence: str
) -> None:
    async with engine_over(shared_url) as engine:
        with pytest.raises(ServerError) as error:
            await answer(engine, grammar)
        assert sentence in str(error.value)
        assert (await answer(engine, None)).output_ids


def test_data_in_a_schema_is_not_taken_for_schemas() -> None:
    sampler.check_schema({"properties": {"not": {"const": {"not": 1}}, "format": {"enum": [{"if": 2}]}}})


@pytest.mark.parametrize(("spaces", "is_taken"), [(20, True), (21, False)])
def test_a_model_that_writes_white_space_must_go_on_with_its_json(spaces: int, is_taken: bool) -> None:
    tokenizer = tiny_tokenizer()
    schema = Grammar(kind="json_schema", text='{"type": "object", "properties": {"x": {"type": "integer"}}}')
    matcher = xgrammar.GrammarMatcher(
        sampler.Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id]).compiled(schema).result()
    )
    assert matcher.accept_string("{" + " " * spaces) is is_taken


async def test_a_grammar_without_the_extra_says_what_to_install(
    shared_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    async with engine_over(shared_url) as engine:
        with pytest.raises(ServerError, match=r"a grammar needs xgrammar: .*structured"):
            await answer(engine, of_regex("never compiled before"))


async def test_a_dead_end_fails_the_request_and_no_other(shared_url: str) -> None:
    """The grammar goes on with a token that fills up the vocabulary, which nothing can sample."""
    elements = [{"type": "const_string", "value": "ab"}, {"type": "token", "token": 287}]
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
    async with engine_over(shared_url) as engine:
        with pytest.raises(ServerError, match="allows no token of this model after 2"):
            await answer(engine, Grammar(kind="structural_tag", text=json.dumps(tag)))
        assert (await answer(engine, of_regex("ab"))).stop_reason == "stop"


async def test_what_continues_must_match_so_far(client: Client) -> None:
    a, b = (next(iter(ids_of(letter))) for letter in "ab")

    async def go_on(*begun: int, continued: int | None = None) -> Any:
        body = {"input_ids": [1, *begun], "continued_tokens": len(begun) if continued is None else continued}
        sampling = {"max_new_tokens": 9, "regex": "ab{2}"}
        return await client.post("/generate", body | {"sampling_params": sampling, "return_logprob": True})

    assert (await go_on(a)).body["output_ids"] == [b, b, EOS]
    assert (await go_on(a, b, b)).body["output_ids"] == [EOS]
    for begun in ((b,), (a, b, b, EOS, EOS)):
        refused = await go_on(*begun)
        assert refused.status == 400
        assert "breaks its grammar" in refused.body["error"]["message"]
    assert "leaves no prompt" in (await go_on(a, continued=2)).body["error"]["message"]


async def test_over_http_kept_ids_are_lists_as_in_sglang(client: Client) -> None:
    body = {"input_ids": PROMPT, "return_logprob": True, "return_sampling_mask": True}
    sampling = {"max_new_tokens": 9, "regex": "[ab]c"}
    meta = (await client.post("/generate", body | {"sampling_params": sampling})).body["meta_info"]
    assert meta["output_token_sampling_mask"] == [sorted(ids_of("ab")), sorted(ids_of("c")), [EOS]]
    assert meta["output_token_sampling_logprobs"] == [entry[0] for entry in meta["output_token_logprobs"]]
    free = await client.post("/generate", body | {"sampling_params": {"max_new_tokens": 1}})
    assert "return_sampling_mask needs top_k, top_p or min_p" in free.body["error"]["message"]
    both = await client.post("/generate", body | {"sampling_params": sampling | {"json_schema": "{}"}})
    assert "json_schema and regex are both set" in both.body["error"]["message"]


async def test_a_request_whose_grammar_is_being_compiled_can_be_aborted(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow_check(grammar: Grammar) -> None:
        begun.set()
        go_on.wait(60)

    monkeypatch.setattr(sampler, "check_grammar", slow_check)
    body = {"rid": "r", "input_ids": [1], "sampling_params": {"max_new_tokens": 9, "regex": "slow to compile"}}
    try:
        asked = asyncio.create_task(client.post("/generate", body))
        await asyncio.to_thread(begun.wait, 60)
        assert (
            await client.post("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}})
        ).status == 200
        await client.post("/abort_request", {"rid": "r"})
        finish = (await asked).body["meta_info"]["finish_reason"]
    finally:
        go_on.set()
    assert finish == {"type": "abort", "message": "Aborted by request"}
