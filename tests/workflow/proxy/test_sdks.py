"""Real programs as clients that stream: openai-agents and LangChain."""

from collections.abc import Iterator
from typing import Any

import pytest
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from langchain_core.messages import AIMessageChunk, BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from programs import CALL_ADD, Opened, opened, replying
from pydantic import SecretStr

ANSWER = "It is 3."


@pytest.fixture(autouse=True)
def _nothing_is_told_to_anybody() -> Iterator[None]:
    set_tracing_disabled(True)
    yield
    set_tracing_disabled(False)


def answers(text: str) -> str:
    """Calls the tool, and says what it gave."""
    return ANSWER if "<tool_response>\n3" in text else f"Let me add.\n{CALL_ADD}"


@function_tool(name_override="add")
def add_tool(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def agent_of(episode: Opened) -> Agent:
    model = OpenAIChatCompletionsModel(model="gpt-5", openai_client=episode.client)
    return Agent(name="adder", instructions="Add.", model=model, tools=[add_tool])


async def test_an_agent_of_openai_agents_that_streams_is_one_trajectory() -> None:
    async with opened(replying(answers)) as episode:
        run = Runner.run_streamed(agent_of(episode), "1 + 2?")
        async for _ in run.stream_events():
            pass
        (made,) = episode.session.trajectories(1.0)
    assert run.final_output == ANSWER
    assert (len(made.turns), made.metrics["calls"], made.metrics["branches"]) == (2, 2, 0)


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def test_a_model_of_langchain_that_streams_is_one_trajectory() -> None:
    async with opened(replying(answers)) as episode:
        session = episode.session
        model = ChatOpenAI(model="gpt-4o", base_url=session.base_url, api_key=SecretStr(session.api_key))
        bound = model.bind_tools([add])

        async def speak(messages: list[BaseMessage]) -> Any:
            spoken = AIMessageChunk(content="")
            async for chunk in bound.astream(messages):
                spoken += chunk
            return spoken

        messages: list[BaseMessage] = [HumanMessage("1 + 2?")]
        called = await speak(messages)
        (call,) = called.tool_calls
        messages += [called, ToolMessage(str(add.invoke(call["args"])), tool_call_id=call["id"])]
        said = await speak(messages)
        (made,) = session.trajectories(1.0)
    assert said.content == ANSWER
    assert len(made.turns) == 2
