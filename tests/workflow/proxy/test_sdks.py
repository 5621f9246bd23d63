"""Real programs as clients: openai-agents, LangChain, OpenAI's synchronous client in a thread, and curl."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, handoff, set_tracing_disabled
from langchain_core.messages import AIMessageChunk, BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from programs import ASK, CALL_ADD, Opened, opened, replying, saying, shown
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


def agent_of(episode: Opened, **more: Any) -> Agent:
    model = OpenAIChatCompletionsModel(model="gpt-5", openai_client=episode.client)
    return Agent(**{"name": "adder", "instructions": "Add.", "model": model, "tools": [add_tool], **more})


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_agent_of_openai_agents_is_one_trajectory(streamed: bool) -> None:
    async with opened(replying(answers)) as episode:
        if streamed:
            run = Runner.run_streamed(agent_of(episode), "1 + 2?")
            async for _ in run.stream_events():
                pass
        else:
            run = await Runner.run(agent_of(episode), "1 + 2?")
        (made,) = episode.session.trajectories(1.0)
    assert run.final_output == ANSWER
    assert (len(made.turns), made.metrics["calls"], made.metrics["branches"]) == (2, 2, 0)


async def test_an_agent_that_hands_off_makes_a_trajectory_for_each_set_of_instructions() -> None:
    def says(text: str) -> str:
        return "Done." if "You finish." in text else '<tool_call>\n{"name": "pass_on", "arguments": {}}\n</tool_call>'

    async with opened(replying(says)) as episode:
        second = agent_of(episode, name="second", instructions="You finish.", tools=[])
        first = agent_of(episode, handoffs=[handoff(second, tool_name_override="pass_on")], tools=[])
        run = await Runner.run(first, "Go.")
        made = episode.session.trajectories(1.0)
    assert run.final_output == "Done."
    assert [len(trajectory.turns) for trajectory in made] == [1, 1]


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_model_of_langchain_with_tools_is_one_trajectory(streamed: bool) -> None:
    async with opened(replying(answers)) as episode:
        session = episode.session
        model = ChatOpenAI(model="gpt-4o", base_url=session.base_url, api_key=SecretStr(session.api_key))
        bound = model.bind_tools([add])

        async def speak(messages: list[BaseMessage]) -> Any:
            if not streamed:
                return await bound.ainvoke(messages)
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
        with pytest.raises(openai.BadRequestError, match="cannot be forced"):
            await model.bind_tools([add], tool_choice="add").ainvoke("1 + 2?")
    assert said.content == ANSWER
    assert len(made.turns) == 2


async def test_a_synchronous_client_works_from_a_thread() -> None:
    async with opened(saying("First.", "Second.")) as episode:

        def program() -> list[str | None]:
            session = episode.session
            with openai.OpenAI(base_url=session.base_url, api_key=session.api_key) as client:
                first = client.chat.completions.create(model="m", messages=ASK).choices[0].message
                with client.chat.completions.stream(model="m", messages=[*ASK, first, *ASK]) as stream:  # pyright: ignore[reportArgumentType]
                    second = stream.get_final_completion().choices[0].message
            wrong = openai.OpenAI(base_url=session.base_url, api_key="arl-wrong")
            with wrong, pytest.raises(openai.AuthenticationError):
                wrong.models.list()
            return [first.content, second.content]

        assert await asyncio.to_thread(program) == ["First.", "Second."]
        (made,) = episode.session.trajectories(1.0)
    assert len(made.turns) == 2


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_a_program_without_any_sdk_works() -> None:
    async with opened(saying("Because.")) as episode:
        process = await asyncio.create_subprocess_exec(
            "curl", "--silent", "--no-buffer", f"{episode.session.base_url}/chat/completions",
            "--header", f"Authorization: Bearer {episode.session.api_key}",
            "--json", json.dumps({"messages": ASK, "stream": True}),
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        printed, _ = await process.communicate()
    events = [line.removeprefix("data: ") for line in printed.decode().split("\n\n") if line]
    chunks = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == "Because."
    assert events[-1] == "[DONE]"


async def test_tools_are_shown_as_the_program_describes_them() -> None:
    engine = replying(answers)
    async with opened(engine) as episode:
        await Runner.run(agent_of(episode), "1 + 2?")
    assert '"description": "Add two numbers."' in shown(engine.requests[0])
