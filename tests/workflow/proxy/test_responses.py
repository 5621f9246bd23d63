"""/v1/responses with OpenAI's own client, and with agents of openai-agents that know nothing of their training."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from agents import Agent, OpenAIProvider, RunConfig, Runner, function_tool
from openai import AsyncOpenAI, BadRequestError
from programs import client_of, saying, shown, trained
from workflow.scripted_answers import calling

from arl.api.scripted import ScriptedEngine
from arl.engine.tiny import CHAT_TEMPLATE, tiny_tokenizer
from arl.workflow.proxy.openai_proxy import OpenAIProxy
from arl.workflow.proxy.session import EpisodeSession

ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    "strict": True,
}
CALL = calling("add", a=1, b=2)


@asynccontextmanager
async def calling_with(
    engine: ScriptedEngine, template: str = CHAT_TEMPLATE
) -> AsyncIterator[tuple[EpisodeSession, AsyncOpenAI]]:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    async with (
        OpenAIProxy(tokenizer) as proxy,
        proxy.episode(engine) as session,
        client_of(session, max_retries=0) as client,
    ):
        yield session, client


async def test_a_string_is_answered_with_text_and_counts_of_tokens() -> None:
    engine = saying("Hello")
    async with calling_with(engine) as (session, client):
        response = await client.responses.create(model="any", input="hi", instructions="Be brief.")
        (trajectory,) = session.trajectories(1.0)
    assert response.output_text == "Hello"
    assert response.status == "completed"
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (len(engine.requests[0].input_ids), 6)
    assert shown(engine.requests[0]).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>"
    )
    assert trained(trajectory) == ["Hello"]


async def test_items_that_come_back_continue_the_turn_that_they_are_of() -> None:
    engine = saying(f"I add.{CALL}", "3")
    async with calling_with(engine) as (session, client):
        first = await client.responses.create(model="any", input="1 + 2?", tools=[ADD])
        assert [item.type for item in first.output] == ["message", "function_call"]
        said: list[Any] = [item.model_dump(exclude_none=True) for item in first.output]
        answer = {"type": "function_call_output", "call_id": said[-1]["call_id"], "output": "3"}
        question = {"role": "user", "content": [{"type": "input_text", "text": "1 + 2?"}]}
        second = await client.responses.create(model="any", input=[question, *said, answer], tools=[ADD])
        (trajectory,) = session.trajectories(1.0)
    assert second.output_text == "3"
    assert "<tool_response>\n3\n</tool_response>" in shown(engine.requests[1])
    assert trained(trajectory) == [f"I add.{CALL}", "3"]


async def test_thoughts_are_an_item_that_the_template_is_given_back() -> None:
    engine = saying("<think>Ann or Bob?</think>Ann", "Ann")
    template = CHAT_TEMPLATE.replace("message.content", "(message.reasoning_content or '') + message.content")
    async with calling_with(engine, template=template) as (_, client):
        first = await client.responses.create(model="any", input="A name?")
        said: list[Any] = [item.model_dump(exclude_none=True) for item in first.output]
        asked = {"role": "user", "content": "Again?"}
        await client.responses.create(model="any", input=[{"role": "user", "content": "A name?"}, *said, asked])
    assert [item["type"] for item in said] == ["reasoning", "message"]
    assert "assistant\nAnn or Bob?Ann<|im_end|>" in shown(engine.requests[1])


async def test_the_stream_builds_up_to_the_response_that_it_ends_with() -> None:
    async with (
        calling_with(saying(f"<think>Sum.</think>I add.{CALL}")) as (_, client),
        client.responses.stream(model="any", input="1 + 2?", tools=[ADD]) as stream,
    ):
        events = [event async for event in stream]
        final = await stream.get_final_response()
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "I add."
    arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(arguments) == '{"a": 1, "b": 2}'
    assert final.output_text == "I add."


async def test_a_stored_response_is_continued_by_its_id_with_other_instructions() -> None:
    engine = saying("Ann", "You said Ann.")
    async with calling_with(engine) as (_, client):
        first = await client.responses.create(model="any", input="A name?", instructions="Be brief.")
        await client.responses.create(
            model="any", input="Which?", previous_response_id=first.id, instructions="Be kind."
        )
    assert shown(engine.requests[1]) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nA name?<|im_end|>\n<|im_start|>assistant\nAnn"
        "<|im_end|>\n<|im_start|>user\nWhich?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_response_that_was_not_stored_cannot_be_continued() -> None:
    async with calling_with(saying("Ann", "Bob")) as (_, client):
        first = await client.responses.create(model="any", input="A name?", store=False)
        with pytest.raises(BadRequestError, match=f"{first.id}.* not found") as refusal:
            await client.responses.create(model="any", input="Which?", previous_response_id=first.id)
    assert refusal.value.code == "previous_response_not_found"


# openai-agents


@function_tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


def using(client: AsyncOpenAI) -> RunConfig:
    return RunConfig(model_provider=OpenAIProvider(openai_client=client), tracing_disabled=True)


async def test_an_agent_that_calls_tools_gives_one_trajectory() -> None:
    engine = saying(CALL, calling("add", a=3, b=4), "It is 7.")
    agent = Agent(name="adder", instructions="Use the tool.", tools=[add])
    async with calling_with(engine) as (session, client):
        result = await Runner.run(agent, "1 + 2 + 4?", run_config=using(client))
        (trajectory,) = session.trajectories(1.0)
    assert result.final_output == "It is 7."
    assert trained(trajectory) == [CALL, calling("add", a=3, b=4), "It is 7."]
    assert "<tool_response>\n7\n</tool_response>" in shown(engine.requests[2])


async def test_an_agent_that_hands_over_gives_a_trajectory_for_each_view() -> None:
    engine = saying(calling("transfer_to_adder"), CALL, "It is 3.")
    adder = Agent(name="adder", instructions="Use the tool.", tools=[add])
    clerk = Agent(name="clerk", instructions="Hand over.", handoffs=[adder])
    async with calling_with(engine) as (session, client):
        result = await Runner.run(clerk, "1 + 2?", run_config=using(client))
        clerks, adders = session.trajectories(1.0)
    assert (result.final_output, result.last_agent.name) == ("It is 3.", "adder")
    assert trained(clerks) == [calling("transfer_to_adder")]
    assert trained(adders) == [CALL, "It is 3."]
