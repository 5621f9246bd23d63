"""Agents as tools: each call is a conversation of its own, trained once, with a role; its failures are a tool's."""

import asyncio
import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from chat_templates import tokenizer_of
from scripted_answers import TOKENIZER, calling, decode, ended, exact, replying, said_in, saying, seen_by, too_long

from arl.api.errors import ConfigError, ServerError
from arl.api.fakes import ScriptedEngine
from arl.api.types import ModelRequest, SamplingParams
from arl.rewards import InlineReward, Score
from arl.workflow.compacting import Compaction
from arl.workflow.sub_agents import MAX_DEPTH, SubAgent
from arl.workflow.tool_agent import ToolAgentWorkflow
from arl.workflow.tools import Tool, ToolLimits

QUESTION = {"question": "What is it?", "answer": "done"}


async def fetch(page: str) -> str:
    """Fetch a page."""
    return f"<{page}>"


FETCH = Tool.from_function(fetch)
READER = SubAgent(name="reader", description="Reads pages.", system="Read.", tools=[FETCH], max_turns=2)


def agent(*sub_agents: SubAgent, **settings: Any) -> ToolAgentWorkflow:
    return ToolAgentWorkflow(TOKENIZER, exact, sub_agents=sub_agents or (READER,), **settings)


def asking(name: str, task: str = "home") -> str:
    return calling(name, task=task)


async def test_a_sub_agent_works_in_a_context_of_its_own_and_its_caller_reads_the_answer_alone() -> None:
    engine = saying(asking("reader"), calling("fetch", page="home"), "<think>\nhm\n</think>\n\nIt is.", "done")
    main, reader = await agent().arun_episode(engine, QUESTION)
    assert '"name": "reader", "description": "Reads pages."' in seen_by(engine, 0)
    assert seen_by(engine, 1).startswith("<|im_start|>system\nRead.\n# Tools")
    assert seen_by(engine, 1).endswith("<|im_start|>user\nhome<|im_end|>\n<|im_start|>assistant\n")
    assert "<home>" in seen_by(engine, 2)
    assert seen_by(engine).endswith("<tool_response>\nIt is.\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert [(t.role, t.reward) for t in (main, reader)] == [("agent", 1.0), ("reader", 1.0)]
    assert said_in(main) == f"{asking('reader')}<|im_end|>done<|im_end|>"
    assert said_in(reader).endswith("It is.<|im_end|>")
    counts = {"turns": 2, "tool_calls": 1, "sub_agent_calls": 1, "sub_agent_turns": 2, "sub_agent_tool_calls": 1}
    assert counts.items() <= main.metrics.items()


async def test_several_calls_run_at_the_same_time_and_each_token_is_trained_once_in_its_role() -> None:
    both = asyncio.Barrier(2)

    async def script(request: ModelRequest) -> list[int]:
        last = decode(request.input_ids).removesuffix("<|im_start|>assistant\n").rpartition("<|im_start|>")[2]
        if last.startswith("user\nWhat"):
            return ended(asking("reader", "one") + asking("reader", "two"))
        if last.startswith("user\n<|im_end|>") or "tool_response" in last:
            return ended("done")
        await both.wait()
        return ended(last.removeprefix("user\n").removesuffix("<|im_end|>\n") + "!")

    engine = ScriptedEngine(script)
    made = await agent(replace(READER, role="agent")).arun_episode(engine, QUESTION)
    assert [t.role for t in made] == ["agent"] * 3
    assert [said_in(t) for t in made[1:]] == ["one!<|im_end|>", "two!<|im_end|>"]
    assert "<tool_response>\none!\n</tool_response>\n<tool_response>\ntwo!\n</tool_response>" in seen_by(engine)
    assert sum(t.num_trained_tokens for t in made) == sum(
        len(ended(text)) for text in (asking("reader", "one") + asking("reader", "two"), "one!", "two!", "done")
    )


@pytest.mark.parametrize(
    ("answers", "told", "turns"),
    [
        ([calling("fetch", page="a"), calling("fetch", page="b")], "error: reader had no room for an answer", 2),
        ([too_long()], "error: the task is too long for reader", 0),
        ([calling("fetch", page="a"), too_long()], "error: reader had no room for an answer", 1),
    ],
)
async def test_a_sub_agent_without_an_answer_is_an_error_that_its_caller_reads(
    answers: list[Any], told: str, turns: int
) -> None:
    engine = saying(asking("reader"), *answers, "done")
    main, *reader = await agent().arun_episode(engine, QUESTION)
    assert f"<tool_response>\n{told}" in seen_by(engine)
    assert (main.reward, main.metrics["tool_errors"], main.metrics["sub_agent_turns"]) == (1.0, 1, turns)
    assert (main.metrics["context_full"], main.metrics["sub_agent_contexts_full"]) == (0, turns == 1)
    assert sum(len(t.turns) for t in reader) == turns


async def test_a_call_without_a_task_is_refused_as_any_tools() -> None:
    engine = saying(calling("reader", work="home"), "done")
    (main,) = await agent().arun_episode(engine, QUESTION)
    assert "<tool_response>\nerror: argument" in seen_by(engine)
    assert main.metrics["sub_agent_calls"] == 0


async def test_a_call_ends_at_its_own_time_limit_and_what_was_said_until_then_is_trained() -> None:
    hangs, answers = asyncio.Event(), iter([asking("reader"), calling("fetch", page="a"), None, "done"])

    async def script(request: ModelRequest) -> list[int]:
        if (answer := next(answers)) is None:
            await hangs.wait()
        return ended(answer or "")

    engine = ScriptedEngine(script)
    workflow = agent(replace(READER, timeout_s=0.05), limits=ToolLimits(timeout_s=60))
    main, reader = await workflow.arun_episode(engine, QUESTION)
    assert "error: there was no answer within 0.05 s" in seen_by(engine)
    assert (main.reward, len(reader.turns)) == (1.0, 1)


async def test_a_server_that_is_gone_fails_the_episode() -> None:
    with pytest.raises(ServerError):
        await agent().arun_episode(saying(asking("reader"), ServerError("gone")), QUESTION)


async def test_sub_agents_may_have_their_own_and_sampling_and_contexts_that_end() -> None:
    compaction = Compaction(context_length=900, summary_tokens=30, compact_at=100, instruction="Sum up.")
    clerk = SubAgent(
        name="clerk", description="Files.", sampling=SamplingParams(max_new_tokens=100, temperature=0.5),
        tools=[FETCH], compaction=compaction, role="staff",
    )  # fmt: skip
    engine = saying(
        asking("reader"), asking("clerk", "file it"), calling("fetch", page="a"), "the sum", "filed", "read", "done"
    )
    made = await agent(replace(READER, sub_agents=[clerk])).arun_episode(engine, QUESTION)
    assert [(t.role, t.temperature) for t in made] == [("agent", 1), ("reader", 1), ("staff", 0.5), ("staff", 0.5)]
    assert [said_in(t) for t in made[2:]] == [
        f"{calling('fetch', page='a')}<|im_end|>the sum<|im_end|>",
        "filed<|im_end|>",
    ]
    counts = {"sub_agent_calls": 2, "sub_agent_compactions": 1, "sub_agent_contexts_full": 0, "context_full": 0}
    assert counts.items() <= made[0].metrics.items()
    assert "compactions" not in made[0].metrics
    assert [t.metrics for t in made[1:]] == [{}] * 3  # else they would count in the means over episodes


def right_and_brief(answer: str, data: Any) -> Score:
    return Score(value=1.0, parts={"right": 1.0, "brief": 0.5})


async def test_a_sub_agent_has_its_workflows_template_options_and_reward_parts_and_its_answer_is_cut() -> None:
    qwen3, brief = tokenizer_of("qwen3"), replace(READER, max_output_chars=60)
    engine = ScriptedEngine.saying(qwen3, asking("reader"), "x" * 90, "done")
    settings = {"sub_agents": [brief], "template_options": {"enable_thinking": False}}
    made = await ToolAgentWorkflow(qwen3, InlineReward(right_and_brief), **settings).arun_episode(engine, QUESTION)
    assert {t.role for t in made} == {"agent", "reader"}
    assert all(t.rewards == {"right": 1.0, "brief": 0.5} for t in made)
    seen = [str(qwen3.decode(request.input_ids)) for request in engine.requests]
    assert all(text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n") for text in seen)
    assert f"{'x' * 60}\n[cut here: 30 more characters]" in seen[2]


def test_settings_that_make_no_sense_are_errors() -> None:
    deep = READER
    for n in range(MAX_DEPTH):
        deep = SubAgent(name=f"level {n}", description="?", sub_agents=[deep])
    small = Compaction(context_length=200, summary_tokens=90)
    for sub_agents, complaint in (
        ([deep], f"the sub-agent reader is {MAX_DEPTH + 1} deep"),
        ([READER, READER], "two tools are named 'reader'"),
        ([replace(READER, name="fetch")], "two tools are named 'fetch'"),
        ([replace(READER, max_turns=0)], "reader has max_turns 0"),
        ([replace(READER, compaction=small)], "has no room for a task"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            agent(*sub_agents, tools=[FETCH])


async def test_a_source_of_tools_with_a_sub_agents_name_is_refused_when_it_opens() -> None:
    @asynccontextmanager
    async def source() -> AsyncIterator[list[Tool]]:
        yield [replace(FETCH, name="reader")]

    with pytest.raises(ConfigError, match="two tools are named 'reader'"):
        async with agent(tools=[source()]):
            pass


async def test_many_episodes_share_one_workflow_and_no_conversation() -> None:
    def reply(said: str) -> str:
        return {"user\nWhat is it?": asking("reader"), "user\nhome": "read"}.get(said, "done")

    workflow = agent()
    made = await asyncio.gather(*(workflow.arun_episode(replying(reply), QUESTION) for _ in range(16)))
    assert [[t.role for t in trajectories] for trajectories in made] == [["agent", "reader"]] * 16


def test_sub_agents_can_be_sent_to_a_worker_process() -> None:
    copied = pickle.loads(pickle.dumps(replace(READER, tools=())))
    assert copied == replace(READER, tools=())


async def test_the_tools_of_a_sub_agent_may_be_functions() -> None:
    def double(number: int) -> int:
        """Twice a number."""
        return 2 * number

    engine = saying(asking("reader"), calling("double", number=21), "42", "done")
    main, reader = await agent(replace(READER, tools=[double])).arun_episode(engine, QUESTION)
    assert main.metrics["sub_agent_tool_calls"] == 1
    assert "<tool_response>\n42\n</tool_response>" in decode(reader.token_ids)
