"""POST /v1/chat/completions and /v1/completions over a real server."""

from __future__ import annotations

import asyncio
from typing import Any

from protocol_client import Client
from transformers import AutoTokenizer

HI = [{"role": "user", "content": "hi"}]
SEEDED = {"messages": HI, "max_tokens": 8, "seed": 3, "ignore_eos": True}
TOOL = {"type": "function", "function": {"name": "calculate", "parameters": {"type": "object", "properties": {}}}}


async def chat(client: Client, **body: Any) -> Any:
    answer = await client.post("/v1/chat/completions", {**SEEDED, **body})
    assert answer.status == 200, answer.body
    return answer.body


def template_ids(model: str, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **options)


async def test_tools_reach_the_template_unless_the_choice_is_none(client: Client, model_a: str) -> None:
    for choice, tools in (("auto", [TOOL]), ("none", None)):
        answer = await chat(client, tools=[TOOL], tool_choice=choice, return_token_ids=True)
        assert answer["choices"][0]["prompt_token_ids"] == template_ids(model_a, HI, tools=tools)


async def test_a_stop_string_ends_the_text_and_is_never_streamed(client: Client) -> None:
    text = (await chat(client, max_tokens=40))["choices"][0]["message"]["content"]
    stop = text[10:13]
    expected = text[: text.index(stop)]
    stopping = {"max_tokens": 40, "stop": [stop], "ignore_eos": False}
    stopped = (await chat(client, **stopping))["choices"][0]
    assert (stopped["message"]["content"], stopped["matched_stop"]) == (expected, stop)
    async with client.stream("/v1/chat/completions", {**SEEDED, **stopping}) as events:
        pieces = [event["choices"][0]["delta"]["content"] async for event in events if event != "[DONE]"]
    assert "".join(pieces) == expected


async def test_choices_differ(client: Client) -> None:
    choices = (await chat(client, n=2))["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert choices[0]["message"] != choices[1]["message"]


async def test_an_abort_is_a_finish_reason(client: Client) -> None:
    running = asyncio.create_task(chat(client, max_completion_tokens=8000, rid="mine"))
    await client.until_running(1)
    await client.post("/abort_request", {"rid": "mine"})
    assert (await running)["choices"][0]["finish_reason"] == "abort"


async def test_bad_chat_bodies_are_refused_in_openai_shape(client: Client) -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    bad: list[tuple[dict[str, Any], str]] = [
        ({"messages": []}, "Messages cannot be empty."),
        ({"messages": "x"}, 'messages is "x"; it must be a list'),
        ({"messages": [{"content": "x"}]}, "messages[0] is"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content is 3"),
        ({"messages": image}, "Model only supports text input"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, "is longer than the model's context length"),
        ({"max_tokens": 99999}, "Requested token count exceeds the model's maximum context length"),
        ({"temperature": -1}, "temperature is -1.0"),
        ({"n": 0}, "n is 0"),
        ({"top_logprobs": 2}, "top_logprobs is 2, which cannot be honoured here"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": "x"}, 'tools is "x"'),
        ({"tool_choice": "required"}, 'tool_choice is "required"'),
        ({"input_ids": "x"}, 'input_ids is "x"'),
        ({"stream": True, "return_token_ids": True}, "return_token_ids is not supported with streaming"),
    ]
    for body, sentence in bad:
        answer = await client.post("/v1/chat/completions", {**SEEDED, **body})
        assert (answer.status, answer.body["object"], answer.body["code"]) == (400, "error", 400), body
        assert sentence in answer.message, body


async def test_completions_take_ids_and_text_one_or_many(client: Client) -> None:
    body = {"max_tokens": 3, "ignore_eos": True, "return_token_ids": True}
    for prompt, count in (([10, 11], 1), ("ab", 1), ([[10, 11], [12]], 2), (["ab", "c"], 2)):
        answer = (await client.post("/v1/completions", {**body, "prompt": prompt})).body
        assert [len(choice["token_ids"]) for choice in answer["choices"]] == [3] * count
        assert answer["usage"]["completion_tokens"] == 3 * count
    missing = await client.post("/v1/completions", body)
    assert (missing.status, missing.body["object"]) == (400, "error")
