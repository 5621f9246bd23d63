"""/v1/messages with Anthropic's own client."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient
from programs import CERTIFICATES, saying, shown, trained
from workflow.scripted_answers import calling

from arl.api.scripted import ScriptedEngine
from arl.engine.tiny import tiny_tokenizer
from arl.workflow.proxy.openai_proxy import OpenAIProxy
from arl.workflow.proxy.session import EpisodeSession

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


async def test_failed_results_and_texts_beside_them_are_separate_messages() -> None:
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
