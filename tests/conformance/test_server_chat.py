"""POST /v1/chat/completions, with the token ids and logprobs that training needs."""

from __future__ import annotations

from typing import Any

from conformance.conftest import Models
from protocol_client import Client
from reference import close

HI = [{"role": "user", "content": "hi"}]
GREEDY = {"model": "default", "messages": HI, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
TOOL = {
    "type": "function",
    "function": {"name": "calculate", "description": "It does.", "parameters": {"type": "object", "properties": {}}},
}


async def chat(client: Client, **body: Any) -> Any:
    answer = await client.post("/v1/chat/completions", {**GREEDY, **body})
    assert answer.status == 200, answer.body
    return answer.body


def template_ids(models: Models, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    ids = models.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **options)
    assert isinstance(ids, list)
    return ids


async def test_an_answer_carries_the_exact_tokens_of_prompt_and_response(client: Client, models: Models) -> None:
    answer = await chat(client, return_token_ids=True, logprobs=True)
    prompt = template_ids(models, HI)
    output = models.a.greedy(prompt, 8)
    (choice,) = answer["choices"]
    assert (choice["prompt_token_ids"], choice["response_token_ids"]) == (prompt, output)
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == models.tokenizer.decode(output, skip_special_tokens=True)
    assert choice["finish_reason"] == "length"
    close([token["logprob"] for token in choice["logprobs"]["content"]], models.a.logprobs(prompt, output))
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (8, 8, 16)


async def test_an_answer_names_the_weights_of_its_tokens(client: Client) -> None:
    metadata = (await chat(client))["metadata"]
    assert metadata["weight_version"] == "a"
    assert metadata["weight_versions"] == [{"version": "a", "start": 0, "end": 8}]


async def test_ids_and_logprobs_come_only_when_asked_for(client: Client) -> None:
    (choice,) = (await chat(client))["choices"]
    assert choice["logprobs"] is None
    assert choice.get("response_token_ids") is None


async def test_given_token_ids_bypass_the_template(client: Client, models: Models) -> None:
    (choice,) = (await chat(client, input_ids=[7, 8], return_token_ids=True))["choices"]
    assert (choice["prompt_token_ids"], choice["response_token_ids"]) == ([7, 8], models.a.greedy([7, 8], 8))


async def test_tools_reach_the_template(client: Client) -> None:
    without, given = [
        (await chat(client, return_token_ids=True, **tools))["choices"][0]["prompt_token_ids"]
        for tools in ({}, {"tools": [TOOL]})
    ]
    assert len(given) > len(without) + 50


async def test_text_parts_are_joined_by_a_space(client: Client, models: Models) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    (choice,) = (await chat(client, messages=[{"role": "user", "content": parts}], return_token_ids=True))["choices"]
    assert choice["prompt_token_ids"] == template_ids(models, [{"role": "user", "content": "h i"}])


async def test_streamed_pieces_make_up_the_whole_answer(client: Client) -> None:
    whole = await chat(client)
    body = {**GREEDY, "stream_options": {"include_usage": True}}
    async with client.stream("/v1/chat/completions", body) as events:
        *chunks, usage, done = [event async for event in events]
    pieces = [chunk["choices"][0] for chunk in chunks]
    text = "".join(piece["delta"].get("content") or "" for piece in pieces)
    assert text == whole["choices"][0]["message"]["content"]
    assert pieces[0]["delta"]["role"] == "assistant"
    reasons = [piece["finish_reason"] for piece in pieces]
    assert reasons == [None] * (len(pieces) - 1) + ["length"]
    assert usage["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert done == "[DONE]"


async def test_bad_bodies_are_refused_in_openais_shape(client: Client) -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    bad: list[dict[str, Any]] = [
        {"messages": []},
        {"messages": "x"},
        {"messages": image},
        {"max_tokens": 99999},
        {"temperature": -1},
        {"tools": "x"},
        {"stream": True, "return_token_ids": True},
    ]
    for body in bad:
        answer = await client.post("/v1/chat/completions", {**GREEDY, **body})
        assert (answer.status, answer.body["object"], answer.body["code"]) == (400, "error", 400), body
