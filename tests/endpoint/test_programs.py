"""Programs that call tools, written by hand or with a framework: each is recorded as a conversation would be."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anthropic
import openai
import pytest
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from langchain_core.messages import AIMessageChunk, BaseMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from programs import ADD, ASK, CALL_ADD, CERTIFICATES, Opened, opened, saying, shown, trained
from pydantic import SecretStr
from workflow.scripted_answers import TOKENIZER, calling, encode, ended

from arl.api.fakes import ScriptedEngine
from arl.api.types import SamplingParams
from arl.workflow.conversation import Conversation
from arl.workflow.tools import Tool

FUNCTION = ADD["function"]
ANSWERS = (f"Let me see.\n{CALL_ADD}", calling("add", a=3, b=4), "It is 7.")


@pytest.fixture(autouse=True)
def _nothing_is_told_to_anybody() -> Iterator[None]:
    set_tracing_disabled(True)
    yield
    set_tracing_disabled(False)


def total(arguments: dict[str, Any]) -> str:
    return str(sum(value for value in arguments.values() if not isinstance(value, str)))


async def on_chat(episode: Opened) -> str:
    messages: list[Any] = list(ASK)
    while calls := (said := (await episode.ask(messages, tools=[ADD])).choices[0].message).tool_calls:
        results = [(call.id, total(json.loads(call.function.arguments))) for call in calls]
        messages += [said, *({"role": "tool", "tool_call_id": key, "content": value} for key, value in results)]
    return said.content


async def on_responses(episode: Opened) -> str:
    items, tool = list(ASK), {"type": "function", **FUNCTION}
    while True:
        response = await episode.client.responses.create(model="any", input=items, tools=[tool])
        items += [item.model_dump(exclude_none=True) for item in response.output]
        if items[-1]["type"] != "function_call":
            return response.output_text
        output = total(json.loads(items[-1]["arguments"]))
        items.append({"type": "function_call_output", "call_id": items[-1]["call_id"], "output": output})


async def on_anthropic(episode: Opened) -> str:
    tool = {"name": "add", "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
    asked: dict[str, Any] = {"model": "any", "max_tokens": 200, "tools": [tool], "messages": list(ASK)}
    key, http = episode.session.api_key, anthropic.DefaultAsyncHttpxClient(verify=CERTIFICATES)
    async with anthropic.AsyncAnthropic(base_url=episode.session.url, api_key=key, http_client=http) as client:
        while (said := await client.messages.create(**asked)).stop_reason == "tool_use":
            uses = [block for block in said.content if block.type == "tool_use"]
            answers = [(use.id, total(use.input)) for use in uses]
            results = [{"type": "tool_result", "tool_use_id": key, "content": text} for key, text in answers]
            asked["messages"] += [{"role": "assistant", "content": said.content}, {"role": "user", "content": results}]
    return said.content[0].text


@pytest.mark.parametrize("program", [on_chat, on_responses, on_anthropic])
async def test_an_episode_is_recorded_as_a_conversation_records_it(program: Any) -> None:
    tool = Tool.from_schema(sum, name="add", description=FUNCTION["description"], parameters=FUNCTION["parameters"])
    conversation, engine = Conversation(TOKENIZER, ASK, tools=[tool]), saying(*ANSWERS)
    for result in ("", "3", "7"):
        conversation.add(*([{"role": "tool", "content": result}] if result else []))
        await conversation.agenerate(engine, SamplingParams())
    (expected,) = conversation.trajectories(0.5)
    async with opened(saying(*ANSWERS)) as episode:
        assert await program(episode) == ANSWERS[-1]
        (made,) = episode.session.trajectories(0.5, {"score": 2.0})
    assert replace(made, metrics={}) == replace(expected, metrics={})
    assert (made.metrics["calls"], made.metrics["branches"], made.metrics["score"]) == (3, 0, 2.0)


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def agent_that_streams(episode: Opened) -> str:
    model = OpenAIChatCompletionsModel(model="gpt-5", openai_client=episode.client)
    run = Runner.run_streamed(Agent(name="adder", instructions="Add.", model=model, tools=[add]), "Why?")
    async for _ in run.stream_events():
        pass
    return run.final_output


async def agent_on_responses(episode: Opened) -> str:
    model = OpenAIResponsesModel(model="gpt-5", openai_client=episode.client)
    return (await Runner.run(Agent(name="adder", instructions="Add.", model=model, tools=[add]), "Why?")).final_output


async def langchain_that_streams(episode: Opened) -> str:
    session, messages = episode.session, list[BaseMessage]([HumanMessage("Why?")])
    model = ChatOpenAI(model="gpt-4o", base_url=session.base_url, api_key=SecretStr(session.api_key))
    while True:
        said = AIMessageChunk(content="")
        async for chunk in model.bind_tools([ADD]).astream(messages):
            said += chunk
        if not said.tool_calls:
            return said.content
        results = [ToolMessage(total(call["args"]), tool_call_id=call["id"]) for call in said.tool_calls]
        messages += [said, *results]


@pytest.mark.parametrize("program", [agent_that_streams, agent_on_responses, langchain_that_streams])
async def test_a_framework_that_knows_nothing_of_its_training_makes_one_trajectory(program: Any) -> None:
    engine = saying(*ANSWERS)
    async with opened(engine) as episode:
        assert await program(episode) == ANSWERS[-1]
        (made,) = episode.session.trajectories(1.0)
    assert trained(made) == list(ANSWERS)
    assert (made.metrics["calls"], made.metrics["branches"]) == (3, 0)
    assert shown(engine.requests[2]).count("<tool_response>\n7\n</tool_response>") == 1


ODD = (
    '{"a": 1.50, "b": 1e3}',
    '{"b":2,"a":1 }',
    '{"a": 1, "b": 1, "a": 2}',
    r'{"a": 1, "note": "caf\u00e9 \/ \ud83d\ude00"}',
    r'{"a": 1, "note": "half \ud800 a pair"}',
)
PROGRAMS = [on_chat, on_responses, on_anthropic, agent_that_streams, agent_on_responses, langchain_that_streams]


@pytest.mark.parametrize("program", PROGRAMS)
async def test_calls_that_an_sdk_would_write_otherwise_are_kept_as_they_were_sampled(program: Any) -> None:
    said = [f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>' for arguments in ODD]
    said.append(f"Both.\n<tool_call>\n{{a bad one\n</tool_call>\n{CALL_ADD}")
    async with opened(saying(*said, "Done.")) as episode:
        assert await program(episode) == "Done."
        (made,) = episode.session.trajectories(1.0)
    assert trained(made) == [*said, "Done."]
    assert (made.metrics["branches"], made.metrics["malformed_calls"]) == (0, 1)


@pytest.mark.parametrize("program", PROGRAMS)
async def test_thinking_that_a_template_does_not_know_is_apart_for_programs_and_stays_in_the_models_view(
    program: Any,
) -> None:
    said = [f"<think>\nhm\n</think>\n\n{CALL_ADD}", "<think>\nso\n</think>\n\nIt is 3."]
    async with opened(engine := saying(*said)) as episode:
        assert await program(episode) == "It is 3."
        (made,) = episode.session.trajectories(1.0)
    assert (trained(made), made.metrics["branches"]) == (said, 0)
    assert said[0] in shown(engine.requests[1])


@pytest.mark.parametrize("program", [on_chat, on_responses, on_anthropic])
async def test_bytes_that_are_no_text_do_not_stop_an_sdk(program: Any) -> None:
    half = [encode("\ud55c")[0], *reversed(encode("\u2020")[1:])]  # ED A0 80, half of a surrogate pair in UTF-8
    answers = iter([[*half, *ended(CALL_ADD)], ended("Done.")])
    async with opened(ScriptedEngine(lambda _: next(answers))) as episode:
        assert await program(episode) == "Done."
        (made,) = episode.session.trajectories(1.0)
    assert trained(made) == [f"\ufffd\ufffd\ufffd{CALL_ADD}", "Done."]


async def test_an_agent_that_hands_over_gives_a_trajectory_for_each_view() -> None:
    async with opened(saying(calling("transfer_to_adder"), CALL_ADD, "It is 3.")) as episode:
        model = OpenAIResponsesModel(model="gpt-5", openai_client=episode.client)
        adder = Agent(name="adder", instructions="Use the tool.", model=model, tools=[add])
        clerk = Agent(name="clerk", instructions="Hand over.", model=model, handoffs=[adder])
        result = await Runner.run(clerk, "1 + 2?")
        clerks, adders = episode.session.trajectories(1.0)
    assert (result.final_output, result.last_agent.name) == ("It is 3.", "adder")
    assert [trained(clerks), trained(adders)] == [[calling("transfer_to_adder")], [CALL_ADD, "It is 3."]]


async def test_a_stored_response_is_continued_by_its_id_with_other_instructions() -> None:
    engine = saying("Ann", "You said Ann.")
    async with opened(engine) as episode:
        create = episode.client.responses.create
        first = await create(model="any", input="A name?", instructions="Be brief.")
        await create(model="any", input="Which?", previous_response_id=first.id, instructions="Be kind.")
        lost = await create(model="any", input="A name?", store=False)
        with pytest.raises(openai.BadRequestError, match=f"{lost.id}.* not found") as refusal:
            await create(model="any", input="Which?", previous_response_id=lost.id)
    assert refusal.value.code == "previous_response_not_found"
    assert shown(engine.requests[1]) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nA name?<|im_end|>\n<|im_start|>assistant\nAnn"
        "<|im_end|>\n<|im_start|>user\nWhich?<|im_end|>\n<|im_start|>assistant\n"
    )
