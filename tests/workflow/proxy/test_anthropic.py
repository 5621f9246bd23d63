"""/v1/messages with Anthropic's own client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from anthropic import APIStatusError, AsyncAnthropic, AuthenticationError, BadRequestError, DefaultAsyncHttpxClient
from programs import CERTIFICATES, calling, saying, shown, trained

from arl.api.errors import ServerError
from arl.api.scripted import ScriptedEngine
from arl.engine.tiny import tiny_tokenizer
from arl.workflow.proxy import EpisodeSession, OpenAIProxy

ADD: Any = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    "cache_control": {"type": "ephemeral"},
}
CALL = calling("add", a=1, b=2)
HI: Any = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def calling_with(engine: ScriptedEngine) -> AsyncIterator[tuple[EpisodeSession, AsyncAnthropic]]:
    async with (
        DefaultAsyncHttpxClient(verify=CERTIFICATES) as http,
        OpenAIProxy(tiny_tokenizer()) as proxy,
        proxy.episode(engine) as session,
        AsyncAnthropic(base_url=session.url, api_key=session.api_key, max_retries=0, http_client=http) as client,
    ):
        yield session, client


async def test_a_loop_over_tools_gives_one_trajectory() -> None:
    engine = saying(CALL, f"Once more.{CALL}", "It is 3.")
    messages: list[Any] = [{"role": "user", "content": "1 + 2?"}]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    async with calling_with(engine) as (session, client):
        while True:
            answer = await client.messages.create(
                model="any", max_tokens=200, system=system, messages=messages, tools=[ADD]
            )
            messages.append({"role": "assistant", "content": answer.content})
            uses = [block for block in answer.content if block.type == "tool_use"]
            if not uses:
                break
            results = [{"type": "tool_result", "tool_use_id": use.id, "content": str(use.input)} for use in uses]
            messages.append({"role": "user", "content": results})
        (trajectory,) = session.trajectories(1.0)
    assert (answer.stop_reason, answer.usage.output_tokens) == ("end_turn", len("It is 3.") + 1)
    assert trained(trajectory) == [CALL, f"Once more.{CALL}", "It is 3."]
    assert "system\nBe brief." in shown(engine.requests[0])
    assert "<tool_response>\n{'a': 1, 'b': 2}\n</tool_response>" in shown(engine.requests[2])


async def test_the_stream_builds_up_to_the_message() -> None:
    async with (
        calling_with(saying(f"I add.{CALL}")) as (session, client),
        client.messages.stream(model="any", max_tokens=200, messages=HI, tools=[ADD]) as stream,
    ):
        kinds = list(dict.fromkeys([event.type async for event in stream]))
        message = await stream.get_final_message()
        assert session.counts.answered == 1
    assert kinds == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "text",
        "content_block_stop",
        "input_json",
        "message_delta",
        "message_stop",
    ]
    assert [block.type for block in message.content] == ["text", "tool_use"]
    assert message.content[0].text == "I add."
    assert message.content[1].input == {"a": 1, "b": 2}
    assert (message.stop_reason, message.usage.output_tokens) == ("tool_use", len(tiny_tokenizer().encode(CALL)) + 7)


async def test_results_that_are_errors_and_texts_beside_them_are_messages_of_their_own() -> None:
    engine = saying("Sorry.")
    use = {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}}
    result = {
        "type": "tool_result",
        "tool_use_id": "1",
        "is_error": True,
        "content": [{"type": "text", "text": "no b"}],
    }
    said: Any = [
        *HI,
        {"role": "assistant", "content": [{"type": "text", "text": "I add."}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
    ]
    async with calling_with(engine) as (_, client):
        await client.messages.create(model="any", max_tokens=200, messages=said, tools=[ADD])
    assert shown(engine.requests[0]).endswith(
        f"I add.\n{calling('add', a=1)}<|im_end|>\n<|im_start|>user\n<tool_response>\nerror: no b\n</tool_response>"
        "<|im_end|>\n<|im_start|>user\nWell?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("answer", "asked", "reason", "sequence", "text"),
    [
        ("one. two", {"stop_sequences": ["two", "."]}, "stop_sequence", ".", "one"),
        ("one. two", {"max_tokens": 3}, "max_tokens", None, "one"),
        ("one. two", {}, "end_turn", None, "one. two"),
    ],
)
async def test_the_end_of_an_answer_has_its_reason(
    answer: str, asked: dict[str, Any], reason: str, sequence: str | None, text: str
) -> None:
    async with calling_with(saying(answer)) as (_, client):
        message = await client.messages.create(**{"model": "any", "max_tokens": 200, "messages": HI, **asked})
    assert (message.stop_reason, message.stop_sequence, message.content[0].text) == (reason, sequence, text)


@pytest.mark.parametrize("asked", [{}, {"thinking": {"type": "adaptive"}}])
async def test_thoughts_are_told_to_those_who_ask(asked: dict[str, Any]) -> None:
    async with calling_with(saying("<think>Hm.</think>Hello")) as (_, client):
        message = await client.messages.create(model="any", max_tokens=200, messages=HI, **asked)
    assert [block.type for block in message.content] == [*(["thinking"] if asked else []), "text"]
    assert message.content[-1].text == "Hello"


async def test_sampling_is_as_asked_for() -> None:
    engine = saying("Hello")
    async with calling_with(engine) as (_, client):
        await client.messages.create(
            model="any", max_tokens=9, messages=HI, extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 7}
        )
    sampling = engine.requests[0].sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (9, 0.5, 0.9, 7)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\].*own tools are not here"),
        ({"tool_choice": {"type": "any"}}, "tool_choice is .any.; a call cannot be forced"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking is .enabled.; .* budget of thought"),
        ({"container": "c"}, "container: code is not run here"),
        ({"mcp_servers": [{"name": "m"}]}, "mcp_servers: MCP servers are the program's"),
        ({"messages": [*HI, {"role": "assistant", "content": "Well,"}]}, "the beginning of an answer cannot be given"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"content\[0\] is of type .image."),
        ({"messages": [{"role": "robot", "content": "hi"}]}, r"messages\[0\].role is .robot."),
        ({"messages": []}, "messages is empty"),
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"no_such_field": 1}, "no_such_field .here 1.: it is not known here"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_in_anthropics_shape(asked: dict[str, Any], reason: str) -> None:
    engine = saying("Hello")
    async with calling_with(engine) as (_, client):
        with pytest.raises(BadRequestError, match=reason) as refusal:
            await client.messages.create(model="any", max_tokens=9, messages=HI, extra_body=asked)
    assert refusal.value.body == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": refusal.value.body["error"]["message"]},  # type: ignore[index]
    }
    assert not engine.requests


async def test_a_wrong_key_is_an_authentication_error() -> None:
    engine = saying("Hello")
    async with calling_with(engine) as (_, client):
        with pytest.raises(AuthenticationError, match="authentication_error"):
            await client.with_options(api_key="wrong").messages.create(model="any", max_tokens=9, messages=HI)
    assert not engine.requests


@pytest.mark.parametrize("streams", [False, True])
async def test_an_engine_that_is_down_is_an_overload(streams: bool) -> None:
    def fail(_: object) -> list[int]:
        raise ServerError("all servers are down")

    async with calling_with(ScriptedEngine(fail)) as (_, client):
        with pytest.raises(APIStatusError, match="all servers are down") as failure:
            await client.messages.create(model="any", max_tokens=9, messages=HI, stream=streams)
    assert (failure.value.status_code, failure.value.body["error"]["type"]) == (503, "overloaded_error")  # type: ignore[index]
