"""POST /generate over a real server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from protocol_client import Client

PROMPT = [10, 11, 12, 13]
GREEDY = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
ENDLESS = {"max_new_tokens": 8000, "ignore_eos": True}


async def test_the_rid_of_a_batch_with_n_aborts_all_its_samples(client: Client) -> None:
    body = {"input_ids": [PROMPT, PROMPT], "sampling_params": {**ENDLESS, "n": 2}, "rid": "mine"}
    running = asyncio.create_task(client.generate(**body))
    await client.until_running(4)
    await client.post("/abort_request", {"rid": "mine"})
    assert [answer["meta_info"]["finish_reason"]["type"] for answer in await running] == ["abort"] * 4


async def test_a_client_that_leaves_its_stream_aborts_its_request(client: Client) -> None:
    async with client.stream("/generate", {"input_ids": PROMPT, "sampling_params": ENDLESS}) as events:
        await anext(events)
        await client.post("/pause_generation", {"mode": "in_place"})  # so that it cannot end by itself
    await client.until_running(0)


BAD_BODIES: list[tuple[Any, str]] = [
    ({}, "Either text, input_ids or input_embeds should be provided."),
    ({"input_ids": []}, "input_ids cannot be empty."),
    ({"input_ids": [[]]}, "input_ids cannot be empty."),
    ({"input_ids": [PROMPT, []]}, "input_ids cannot be empty."),
    ({"input_ids": "abc"}, 'input_ids is "abc"; it must be a list of integers'),
    ({"input_ids": ["a"]}, 'input_ids is ["a"]; it must be a list of integers'),
    ({"input_ids": [1.5]}, "input_ids is [1.5]; it must be a list of integers"),
    ({"input_ids": [True]}, "input_ids is [true]; it must be a list of integers"),
    ({"input_ids": [PROMPT, 3]}, "it must be a list of integers, or a list of such lists"),
    ({"input_ids": [100000]}, "input_ids holds a token outside the model's vocabulary of 288 tokens."),
    ({"input_ids": [-1]}, "input_ids holds a token outside the model's vocabulary of 288 tokens."),
    ({"text": 3}, "text is 3; it must be a string"),
    ({"text": ""}, "text cannot be empty."),
    ({"input_ids": PROMPT, "sampling_params": "hot"}, 'sampling_params is "hot"; it must be a JSON object'),
    ({"input_ids": [PROMPT] * 2, "sampling_params": [GREEDY]}, "sampling_params has 1 entries for a batch of 2"),
    (
        {"input_ids": [PROMPT] * 2, "sampling_params": [{"n": 1}, {"n": 2}]},
        "n differs between the sampling_params of one batch",
    ),
    ({"input_ids": [PROMPT] * 2, "rid": ["a"]}, "The specified rids length mismatch"),
    ({"input_ids": [PROMPT] * 2, "rid": ["a", "a"]}, "Duplicate request IDs detected within the request: ['a']"),
    ({"input_ids": PROMPT, "rid": 7}, "rid is 7; it must be a string"),
    ({"input_ids": PROMPT, "stream": "yes"}, 'stream is "yes"; it must be true or false'),
    ({"input_ids": PROMPT, "lora_path": "x"}, "LoRA adapter x is not loaded. Loaded adapters: none"),
    ({"input_ids": PROMPT, "lora_path": 7}, "lora_path is 7; it must be a string"),
    ({"input_ids": PROMPT, "image_data": "x"}, 'image_data (here "x")'),
    ({"input_ids": PROMPT, "logprob_start_len": -2}, "logprob_start_len is -2; it must be at least -1"),
    ({"input_ids": PROMPT, "logprob_start_len": "0"}, 'logprob_start_len is "0"; it must be an integer'),
    ({"input_ids": [PROMPT] * 2, "logprob_start_len": [0]}, "logprob_start_len has 1 entries for a batch of 2"),
    ({"input_ids": PROMPT, "top_logprobs_num": 2}, "top_logprobs_num is 2, which cannot be honoured here"),
    ({"input_ids": PROMPT, "never_heard_of": 1}, "never_heard_of (here 1)"),
]
BAD_SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature is -1.0; it must be 0 (greedy) or above"),
    ({"temperature": "hot"}, 'temperature is "hot"; it must be a number'),
    ({"top_p": 0}, "top_p is 0.0; it must be in (0, 1]"),
    ({"top_k": 0}, "top_k is 0; it must be -1 (off) or at least 1"),
    ({"min_p": 2}, "min_p is 2.0; it must be in [0, 1]"),
    ({"max_new_tokens": -1}, "max_new_tokens is -1; it must be at least 1"),
    ({"max_new_tokens": 1.5}, "max_new_tokens is 1.5; it must be an integer"),
    ({"max_new_tokens": True}, "max_new_tokens is true; it must be an integer"),
    ({"n": 0}, "n is 0; it must be at least 1"),
    ({"stop": [""]}, "none of them empty"),
    ({"stop": 3}, "stop is 3; it must be a string or a list of strings"),
    ({"stop_token_ids": ["a"]}, 'stop_token_ids is ["a"]; it must be a list of integers'),
    ({"frequency_penalty": 0.5}, "frequency_penalty is 0.5, which cannot be honoured here"),
    ({"repetition_penalty": 1.2}, "repetition_penalty is 1.2, which cannot be honoured here"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"json_schema": "{}"}, "json_schema"),
    ({"custom_params": {"a": 1}}, "custom_params"),
    ({"never_heard_of": 1}, "never_heard_of"),
]


async def test_bad_bodies_are_refused_with_a_sentence_that_names_the_field(client: Client) -> None:
    sampling = [({"input_ids": PROMPT, "sampling_params": fields}, sentence) for fields, sentence in BAD_SAMPLING]
    for body, sentence in BAD_BODIES + sampling:
        answer = await client.post("/generate", body)
        assert answer.status == 400, body
        assert sentence in answer.message, body


@pytest.mark.parametrize(("raw", "sentence"), [(b"{bad", "the request body is not JSON"), (b"[1]", "a JSON object")])
async def test_what_is_no_json_object_is_refused(client: Client, raw: bytes, sentence: str) -> None:
    async with client.session.post("/generate", data=raw) as response:
        assert response.status == 400
        assert sentence in (await response.json())["message"]


async def test_fields_that_change_nothing_are_accepted(client: Client) -> None:
    answer = await client.generate(
        input_ids=PROMPT,
        sampling_params={
            **GREEDY,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "json_schema": None,
            "stop": None,
            "spaces_between_special_tokens": True,
        },
        lora_path=None,
        priority=3,
        log_metrics=False,
        return_hidden_states=False,
    )
    assert len(answer["output_ids"]) == 8


async def test_unlimited_new_tokens_are_as_many_as_fit(client: Client) -> None:
    answer = await client.generate(input_ids=[1] * 8180, sampling_params={"max_new_tokens": None, "ignore_eos": True})
    assert answer["meta_info"]["completion_tokens"] == 12
