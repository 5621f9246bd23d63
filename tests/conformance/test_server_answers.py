"""POST /generate: what an answer holds, alone and in batches, whole and streamed."""

from __future__ import annotations

from typing import Any

import torch
from conformance.conftest import Models
from protocol_client import Client, fresh_rid, spans

PROMPT = [10, 11, 12, 13]
GREEDY = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}


async def test_an_answer_has_ids_text_and_everything_known_about_them(client: Client, models: Models) -> None:
    answer = await client.generate(input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True, rid="mine")
    info = answer["meta_info"]
    assert answer["output_ids"] == models.a.greedy(PROMPT, 8)
    assert answer["text"] == models.tokenizer.decode(answer["output_ids"])
    assert info["id"] == "mine"
    assert info["finish_reason"] == {"type": "length", "length": 8}
    assert (info["prompt_tokens"], info["completion_tokens"]) == (4, 8)
    assert info["cached_tokens"] in range(4)
    assert [token for _, token, _ in info["output_token_logprobs"]] == answer["output_ids"]
    assert info["weight_version"] == "a"
    assert spans(answer) == [("a", 0, 8)]
    assert info["num_retractions"] == 0
    assert info["e2e_latency"] > 0


async def test_logprobs_come_only_when_asked_for(client: Client) -> None:
    assert "output_token_logprobs" not in (await client.generate(input_ids=PROMPT, sampling_params=GREEDY))["meta_info"]


async def test_a_text_prompt_is_its_tokens(client: Client, models: Models) -> None:
    by_text = await client.generate(text="hello", sampling_params=GREEDY)
    assert by_text["meta_info"]["prompt_tokens"] == 5
    assert by_text["output_ids"] == models.a.greedy(models.tokenizer.encode("hello"), 8)


async def test_a_batch_answers_each_prompt_in_order_under_its_own_parameters(client: Client, models: Models) -> None:
    answers = await client.generate(
        input_ids=[PROMPT, PROMPT[:2]], sampling_params=[GREEDY, {**GREEDY, "max_new_tokens": 3}], rid=["x", "y"]
    )
    assert [answer["meta_info"]["id"] for answer in answers] == ["x", "y"]
    assert [answer["output_ids"] for answer in answers] == [models.a.greedy(PROMPT, 8), models.a.greedy(PROMPT[:2], 3)]


async def test_one_rid_for_a_batch_is_the_beginning_of_its_members(client: Client) -> None:
    answers = await client.generate(input_ids=[PROMPT, PROMPT], sampling_params=GREEDY, rid="mine")
    assert [answer["meta_info"]["id"] for answer in answers] == ["mine_0", "mine_1"]


async def test_a_batch_of_one_is_answered_as_a_list(client: Client) -> None:
    assert len(await client.generate(input_ids=[PROMPT], sampling_params=GREEDY)) == 1


async def test_n_samples_of_each_prompt_stand_side_by_side(client: Client) -> None:
    answers = await client.generate(input_ids=[PROMPT, PROMPT[:2]], sampling_params={**GREEDY, "n": 2})
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [4, 4, 2, 2]


async def test_a_stream_grows_and_ends_with_what_an_unstreamed_request_answers(client: Client) -> None:
    sampling = {**GREEDY, "max_new_tokens": 60}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "rid": fresh_rid()}
    whole = await client.generate(**body)
    async with client.stream("/generate", body) as events:
        *seen, done = [event async for event in events]
    assert done == "[DONE]"
    lengths = [len(event["output_ids"]) for event in seen]
    assert lengths == sorted(set(lengths))
    for event in seen:
        assert event["output_ids"] == whole["output_ids"][: len(event["output_ids"])]
        assert [token for _, token, _ in event["meta_info"]["output_token_logprobs"]] == event["output_ids"]
        assert whole["text"].startswith(event["text"].rstrip("\ufffd"))
    assert all(event["meta_info"]["finish_reason"] is None for event in seen[:-1])
    assert comparable(seen[-1]) == comparable(whole)


def comparable(answer: Any) -> Any:
    """What two answers to one greedy request have in common; logprobs to float rounding."""
    names = ("id", "finish_reason", "prompt_tokens", "completion_tokens", "weight_version", "weight_versions")
    info = {name: answer["meta_info"][name] for name in names}
    logprobs = [round(logprob, 3) for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]]
    return answer["text"], answer["output_ids"], info, logprobs


async def test_a_streamed_batch_tells_which_answer_each_event_is_of(client: Client) -> None:
    async with client.stream("/generate", {"input_ids": [PROMPT, PROMPT], "sampling_params": GREEDY}) as events:
        seen = [event async for event in events]
    last = {event["index"]: event for event in seen[:-1]}
    assert {index: len(event["output_ids"]) for index, event in last.items()} == {0: 8, 1: 8}


async def test_a_prompt_that_was_answered_is_read_from_the_cache(client: Client) -> None:
    prompt = torch.randint(256, (64,), generator=torch.Generator().manual_seed(1)).tolist()
    first, again = [await client.generate(input_ids=prompt, sampling_params=GREEDY) for _ in range(2)]
    assert (first["meta_info"]["cached_tokens"], again["meta_info"]["cached_tokens"]) == (0, 63)


async def test_prefixes_are_shared_within_an_extra_key_alone(client: Client) -> None:
    prompt = torch.randint(256, (64,), generator=torch.Generator().manual_seed(2)).tolist()
    cached = [
        (await client.generate(input_ids=prompt, sampling_params=GREEDY, extra_key=key))["meta_info"]["cached_tokens"]
        for key in ("1", "2", None, "1", "2", None)
    ]
    assert cached == [0, 0, 0, 63, 63, 63]
