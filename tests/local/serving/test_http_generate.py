"""POST /generate over a real server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from server_process import Client

PROMPT = [10, 11, 12, 13]
GREEDY = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
ENDLESS = {"max_new_tokens": 8000, "ignore_eos": True}


async def test_an_answer_has_ids_text_and_everything_known_about_them(client: Client) -> None:
    answer = await client.generate(input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True, rid="mine")
    info = answer["meta_info"]
    assert len(answer["output_ids"]) == 8
    assert isinstance(answer["text"], str)
    assert info["id"] == "mine"
    assert info["finish_reason"] == {"type": "length", "length": 8}
    assert (info["prompt_tokens"], info["completion_tokens"]) == (4, 8)
    assert info["cached_tokens"] in range(4)
    assert [token for _, token, _ in info["output_token_logprobs"]] == answer["output_ids"]
    assert all(logprob < 0 for logprob, _, _ in info["output_token_logprobs"])
    assert info["weight_version"] == "v0"
    assert info["weight_versions"] == [{"version": "v0", "start": 0, "end": 8}]
    assert info["num_retractions"] == 0
    assert info["e2e_latency"] > 0


async def test_logprobs_come_only_when_asked_for(client: Client) -> None:
    assert "output_token_logprobs" not in (await client.generate(input_ids=PROMPT, sampling_params=GREEDY))["meta_info"]


async def test_a_text_prompt_is_its_tokens(client: Client) -> None:
    by_text = await client.generate(text="hello", sampling_params=GREEDY)
    assert by_text["meta_info"]["prompt_tokens"] == 5
    assert len(by_text["output_ids"]) == 8


async def test_a_batch_answers_each_prompt_in_order_under_its_own_parameters(client: Client) -> None:
    alone = await client.generate(input_ids=PROMPT, sampling_params=GREEDY)
    answers = await client.generate(
        input_ids=[PROMPT, PROMPT[:2]], sampling_params=[GREEDY, {**GREEDY, "max_new_tokens": 3}], rid=["a", "b"]
    )
    assert [answer["meta_info"]["id"] for answer in answers] == ["a", "b"]
    assert [len(answer["output_ids"]) for answer in answers] == [8, 3]
    assert answers[0]["output_ids"] == alone["output_ids"]


async def test_one_rid_for_a_batch_is_a_prefix(client: Client) -> None:
    answers = await client.generate(input_ids=[PROMPT, PROMPT], sampling_params=GREEDY, rid="mine")
    assert [answer["meta_info"]["id"] for answer in answers] == ["mine_0", "mine_1"]


async def test_a_batch_of_one_is_answered_as_a_list(client: Client) -> None:
    assert len(await client.generate(input_ids=[PROMPT], sampling_params=GREEDY)) == 1


async def test_n_samples_of_each_prompt_stand_side_by_side(client: Client) -> None:
    answers = await client.generate(input_ids=[PROMPT, PROMPT[:2]], sampling_params={**GREEDY, "n": 2})
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [4, 4, 2, 2]


async def test_a_seed_gives_the_same_samples_again_and_n_different_ones(client: Client) -> None:
    sampling = {"max_new_tokens": 16, "ignore_eos": True, "sampling_seed": 5, "n": 2}
    first, again = [await client.generate(input_ids=PROMPT, sampling_params=sampling) for _ in range(2)]
    assert [answer["output_ids"] for answer in first] == [answer["output_ids"] for answer in again]
    assert first[0]["output_ids"] != first[1]["output_ids"]


async def test_streaming_ends_with_what_an_unstreamed_request_answers(client: Client) -> None:
    sampling = {**GREEDY, "max_new_tokens": 400}  # enough that no client is too slow to see it grow
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "rid": "same"}
    whole = await client.generate(**body)
    async with client.stream("/generate", body) as events:
        seen = [event async for event in events]
    assert seen[-1] == "[DONE]"
    lengths = [len(event["output_ids"]) for event in seen[:-1]]
    assert lengths == sorted(set(lengths))
    assert lengths[0] < 400
    assert all(event["meta_info"]["finish_reason"] is None for event in seen[:-2])
    assert comparable(seen[-2]) == comparable(whole)


def comparable(answer: Any) -> Any:
    """An answer without what differs from run to run; logprobs to float rounding."""
    info = {name: value for name, value in answer["meta_info"].items() if name not in ("e2e_latency", "cached_tokens")}
    info["output_token_logprobs"] = [round(logprob, 3) for logprob, _, _ in info["output_token_logprobs"]]
    return {**answer, "meta_info": info}


async def test_a_streamed_batch_tells_which_answer_each_event_is_of(client: Client) -> None:
    async with client.stream("/generate", {"input_ids": [PROMPT, PROMPT], "sampling_params": GREEDY}) as events:
        seen = [event async for event in events]
    last = {event["index"]: event for event in seen[:-1]}
    assert {index: len(event["output_ids"]) for index, event in last.items()} == {0: 8, 1: 8}


async def test_a_stop_token_ends_the_ids_and_is_not_in_the_text(client: Client) -> None:
    sampling = {"max_new_tokens": 8, "sampling_seed": 3}  # with ignore_eos a stop token would not stop
    whole = await client.generate(input_ids=PROMPT, sampling_params=sampling)
    stop = whole["output_ids"][3]
    ids = whole["output_ids"][: whole["output_ids"].index(stop) + 1]
    body = {"input_ids": PROMPT, "sampling_params": {**sampling, "stop_token_ids": [stop]}}
    stopped = await client.generate(**body)
    body["sampling_params"]["no_stop_trim"] = True
    untrimmed = await client.generate(**body)
    assert stopped["output_ids"] == untrimmed["output_ids"] == ids
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert untrimmed["text"].startswith(stopped["text"])
    assert len(untrimmed["text"]) > len(stopped["text"])


async def test_aborting_a_request_answers_what_it_has(client: Client) -> None:
    running = asyncio.create_task(client.generate(input_ids=PROMPT, sampling_params=ENDLESS, rid="mine"))
    other = asyncio.create_task(client.generate(input_ids=PROMPT, sampling_params=ENDLESS, rid="mine too"))
    await client.until_running(2)
    assert (await client.post("/abort_request", {"rid": "mine"})).status == 200
    answer = await running
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"] < 8000
    assert not other.done()
    await client.post("/abort_request", {"abort_all": True})
    assert (await other)["meta_info"]["finish_reason"]["type"] == "abort"


async def test_the_rid_of_a_batch_with_n_aborts_all_its_samples(client: Client) -> None:
    body = {"input_ids": [PROMPT, PROMPT], "sampling_params": {**ENDLESS, "n": 2}, "rid": "mine"}
    running = asyncio.create_task(client.generate(**body))
    await client.until_running(4)
    await client.post("/abort_request", {"rid": "mine"})
    assert [answer["meta_info"]["finish_reason"]["type"] for answer in await running] == ["abort"] * 4


async def test_a_client_that_goes_away_aborts_its_request(client: Client) -> None:
    body = {"input_ids": PROMPT, "sampling_params": ENDLESS}
    running = asyncio.create_task(client.generate(**body))
    async with client.stream("/generate", body) as events:
        await anext(events)
        await client.until_running(2)
        await client.post("/pause_generation", {"mode": "in_place"})  # so that neither can end by itself
        running.cancel()
    await client.until_running(0)


async def test_a_rid_that_is_under_way_is_refused_until_it_is_done(client: Client) -> None:
    running = asyncio.create_task(client.generate(input_ids=PROMPT, sampling_params=ENDLESS, rid="mine"))
    await client.until_running(1)
    again = await client.post("/generate", {"input_ids": PROMPT, "rid": "mine"})
    assert (again.status, again.message) == (400, "Duplicate request ID detected: mine")
    await client.post("/abort_request", {"rid": "mine"})
    await running
    await client.generate(input_ids=PROMPT, sampling_params=GREEDY, rid="mine")


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
    ({"input_ids": [1] * 9000}, "The input (9000 tokens) is longer than the model's context length (8192 tokens)."),
    (
        {"input_ids": [1] * 8000, "sampling_params": {"max_new_tokens": 500}},
        "Requested token count exceeds the model's maximum context length of 8192 tokens.",
    ),
    ({"text": 3}, "text is 3; it must be a string or a list of strings"),
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
    ({"input_ids": PROMPT, "lora_path": "x"}, 'lora_path (here "x") is not supported by this server'),
    ({"input_ids": PROMPT, "image_data": "x"}, 'image_data (here "x") is not supported'),
    ({"input_ids": PROMPT, "logprob_start_len": 0, "return_logprob": True}, "logprob_start_len (here 0) is not"),
    ({"input_ids": PROMPT, "top_logprobs_num": 2}, "top_logprobs_num (here 2) is not supported"),
    ({"input_ids": PROMPT, "never_heard_of": 1}, "never_heard_of (here 1) is not supported"),
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
    ({"stop_token_ids": ["a"]}, 'stop_token_ids is ["a"]; it must be a list of token ids'),
    ({"frequency_penalty": 0.5}, "frequency_penalty (here 0.5) is not supported"),
    ({"repetition_penalty": 1.2}, "repetition_penalty (here 1.2) is not supported"),
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
        assert sentence in (await response.json())["error"]["message"]


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
