"""The tool agent: whatever goes wrong with calls, tools or room is an outcome of the episode, which goes on. And agents
as tools: each call is a conversation of its own, trained once, with a role."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from chat_templates import tokenizer_of
from scripted_answers import TOKENIZER, calling, cut_off, decode, ended, exact, said_in, saying, seen_by, too_long

from arl.api.errors import ConfigError, ModelError, PromptTooLongError, ServerError
from arl.api.fakes import ScriptedEngine
from arl.api.types import Example, ModelRequest, SamplingParams
from arl.engine.tiny import tiny_tokenizer
from arl.rewards import InlineReward, Score
from arl.workflow.agent import ToolEpisode
from arl.workflow.call_formats import LLAMA, ToolCall
from arl.workflow.compacting import Compaction
from arl.workflow.tool_agent import MAX_DEPTH, SubAgent, ToolAgentWorkflow
from arl.workflow.tools import Tool, ToolLimits

QUESTION = {"question": "What is it?", "answer": "done"}


def divide(a: float, b: float) -> float:
    """Divide a by b."""
    return a / b


async def fetch(page: str) -> str:
    """Fetch a page."""
    return f"<{page}>"


def agent(*tools: object, **settings: object) -> ToolAgentWorkflow:
    return ToolAgentWorkflow(TOKENIZER, exact, tools=tools or (divide, fetch), **settings)  # pyright: ignore[reportArgumentType]


async def test_tools_are_called_until_there_is_an_answer() -> None:
    engine = saying(f"Let me see. {calling('divide', a=12, b=5)}{calling('fetch', page='home')}", "done")
    (trajectory,) = await agent().arun_episode(engine, QUESTION)
    assert trajectory.reward == 1.0
    counts = {"tool_calls": 2, "tool_errors": 0, "malformed_calls": 0, "turns": 2, "answered": 1, "context_full": 0}
    assert trajectory.metrics == counts
    assert "<tool_response>\n2.4\n</tool_response>\n<tool_response>\n<home>\n</tool_response>" in seen_by(engine)
    assert '"name": "divide", "description": "Divide a by b."' in seen_by(engine, 0)
    assert said_in(trajectory).endswith("</tool_call><|im_end|>done<|im_end|>")


@pytest.mark.parametrize(
    ("written", "told", "counted"),
    [
        (calling("divide", a=1, b=0), "error: the tool failed: ZeroDivisionError", "tool_errors"),
        (calling("divide", a=1, b="x"), "error: argument b: Input should be", "tool_errors"),
        ('<tool_call>{"name": "divide", "argu', "error: a tool call must be one JSON object", "malformed_calls"),
        (calling("fetch", page="a" * 100), "<aaaaaaaaaaaaaaaaaaaaaaaaaaaaa\n[cut here: ", "turns"),
    ],
)
async def test_what_a_call_gave_is_told_and_counted_and_the_episode_goes_on(
    written: str, told: str, counted: str
) -> None:
    engine = saying(written, "done")
    (trajectory,) = await agent(limits=ToolLimits(max_output_chars=30)).arun_episode(engine, QUESTION)
    assert (trajectory.reward, trajectory.metrics[counted]) == (1.0, 2 if counted == "turns" else 1)
    assert f"<tool_response>\n{told[:30]}" in seen_by(engine)


async def test_an_episode_without_an_answer_is_scored_as_the_empty_one() -> None:
    asked: list[str] = []

    async def scored(answer: str, data: Example) -> Score:
        asked.append(answer)
        return Score(0.25, {"correct": 0.0})

    workflow = ToolAgentWorkflow(TOKENIZER, scored, tools=[fetch], max_turns=2)
    (trajectory,) = await workflow.arun_episode(
        saying(calling("fetch", page="a"), calling("fetch", page="b")), QUESTION
    )
    assert (asked, trajectory.reward, trajectory.rewards) == ([""], 0.25, {"correct": 0.0})
    assert (trajectory.metrics["turns"], trajectory.metrics["tool_calls"], trajectory.metrics["answered"]) == (2, 2, 0)
    assert not trajectory.is_truncated


async def test_a_full_context_ends_the_episode_with_what_there_is() -> None:
    (trajectory,) = await agent().arun_episode(saying(calling("fetch", page="a"), too_long()), QUESTION)
    assert (trajectory.reward, trajectory.is_truncated, trajectory.metrics["answered"]) == (0.0, True, 0)
    with pytest.raises(PromptTooLongError):
        await agent().arun_episode(saying(too_long()), QUESTION)


async def test_an_answer_that_was_cut_off_is_scored_as_it_stands() -> None:
    (trajectory,) = await agent().arun_episode(ScriptedEngine(lambda _: cut_off("done")), QUESTION)
    assert (trajectory.reward, trajectory.is_truncated) == (1.0, True)


class Counter:
    """Tools that share a count, and are there while it is open."""

    def __init__(self) -> None:
        self.count = 0
        self.is_open = False

    async def __aenter__(self) -> Sequence[Tool]:
        self.is_open = True
        return [Tool.from_function(self.add), Tool.from_function(self.submit)]

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.sleep(0)
        self.is_open = False

    def add(self, n: int) -> int:
        """Add n."""
        assert self.is_open
        self.count += n
        return self.count

    async def submit(self) -> str:
        """Say that it is done."""
        return "submitted"


class Submitting(ToolAgentWorkflow):
    """A call of `submit` ends its episodes, whose counts are their rewards. counters: one for each episode."""

    def __post_init__(self) -> None:
        self.counters: list[Counter] = []
        self.open_tools = lambda data: self.counters.append(Counter()) or self.counters[-1]
        super().__post_init__()

    def is_done(self, episode: ToolEpisode) -> bool:
        return any(isinstance(r.call, ToolCall) and r.call.name == "submit" for r in episode.results)

    async def ascore_episode(self, episode: ToolEpisode) -> Score:
        assert self.counters[-1].is_open
        return Score(float(self.counters[-1].count))


async def test_stateful_tools_are_each_episodes_own_and_may_end_it_and_be_what_counts() -> None:
    workflow, add = Submitting(TOKENIZER, exact), calling("add", n=2)
    engine = saying(calling("add", n=1) + add, calling("submit"), calling("add", n=5), "done")
    (first,) = await workflow.arun_episode(engine, QUESTION)
    assert "<tool_response>\n1\n</tool_response>\n<tool_response>\n3\n" in seen_by(engine)
    (second,) = await workflow.arun_episode(engine, QUESTION)
    assert [(t.reward, t.metrics["turns"]) for t in (first, second)] == [(3.0, 2), (5.0, 2)]
    assert [(counter.count, counter.is_open) for counter in workflow.counters] == [(3, False), (5, False)]


@pytest.mark.parametrize("end", [ServerError, asyncio.CancelledError])
async def test_stateful_tools_are_closed_however_the_episode_ends(end: type[BaseException]) -> None:
    workflow, has_begun = Submitting(TOKENIZER, exact), asyncio.Event()

    async def script(request: object) -> list[int]:
        has_begun.set()
        if end is ServerError:
            raise ServerError("gone")
        await asyncio.Event().wait()
        return []

    episode = asyncio.create_task(workflow.arun_episode(ScriptedEngine(script), QUESTION))
    await has_begun.wait()
    if end is asyncio.CancelledError:
        episode.cancel()
    with pytest.raises(end):
        await episode
    assert [counter.is_open for counter in workflow.counters] == [False]


async def test_sources_of_shared_tools_are_open_as_long_as_the_workflow() -> None:
    source = Counter()
    workflow = agent(source)
    with pytest.raises(ConfigError, match="run episodes in `async with workflow`"):
        await workflow.arun_episode(saying(), QUESTION)
    async with workflow:
        engine = saying(calling("add", n=7), "done")
        await workflow.arun_episode(engine, QUESTION)
        assert "<tool_response>\n7\n" in seen_by(engine)
    assert not source.is_open


async def test_calls_are_read_in_the_format_that_is_given() -> None:
    engine = saying('{"name": "fetch", "parameters": {"page": "home"}}', "done")
    await agent(call_format=LLAMA).arun_episode(engine, QUESTION)
    assert "<home>" in seen_by(engine)
    mute = tiny_tokenizer()
    mute.chat_template = "{{ messages }}"
    with pytest.raises(ModelError, match="pass call_format="):
        ToolAgentWorkflow(mute, exact, tools=[fetch])


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="has no tools"):
        ToolAgentWorkflow(TOKENIZER, exact)
    with pytest.raises(ConfigError, match="max_turns is 0"):
        agent(max_turns=0)
    with pytest.raises(ConfigError, match="two tools are named 'fetch'"):
        agent(fetch, fetch)


async def test_the_tools_of_many_episodes_run_at_the_same_time() -> None:
    num_episodes = 256
    threads = threading.Barrier(num_episodes)

    def meet() -> str:
        """Wait for all the others."""
        threads.wait(60)
        return "met"

    workflow = agent(meet, limits=ToolLimits(timeout_s=60))
    engines = [saying(calling("meet"), "done") for _ in range(num_episodes)]
    async with asyncio.TaskGroup() as group:
        for engine in engines:
            group.create_task(workflow.arun_episode(engine, QUESTION))
    assert all("<tool_response>\nmet\n" in seen_by(engine) for engine in engines)


FETCH = Tool.from_function(fetch)
READER = SubAgent(name="reader", description="Reads pages.", system="Read.", tools=[FETCH], max_turns=2)


def caller(*sub_agents: SubAgent, **settings: Any) -> ToolAgentWorkflow:
    return ToolAgentWorkflow(TOKENIZER, exact, sub_agents=sub_agents or (READER,), **settings)


def asking(name: str, task: str = "home") -> str:
    return calling(name, task=task)


async def test_a_sub_agent_works_in_a_context_of_its_own_and_its_caller_reads_the_answer_alone() -> None:
    engine = saying(asking("reader"), calling("fetch", page="home"), "<think>\nhm\n</think>\n\nIt is.", "done")
    main, reader = await caller().arun_episode(engine, QUESTION)
    assert '"name": "reader", "description": "Reads pages."' in seen_by(engine, 0)
    assert seen_by(engine, 1).startswith("<|im_start|>system\nRead.\n# Tools")
    assert seen_by(engine, 1).endswith("<|im_start|>user\nhome<|im_end|>\n<|im_start|>assistant\n")
    assert "<home>" in seen_by(engine, 2)
    assert seen_by(engine).endswith("<tool_response>\nIt is.\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert [(t.role, t.reward) for t in (main, reader)] == [("agent", 1.0), ("reader", 1.0)]
    assert [request.role for request in engine.requests] == ["agent", "reader", "reader", "agent"]
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
    made = await caller(replace(READER, role="agent")).arun_episode(engine, QUESTION)
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
    main, *reader = await caller().arun_episode(engine, QUESTION)
    assert f"<tool_response>\n{told}" in seen_by(engine)
    assert (main.reward, main.metrics["tool_errors"], main.metrics["sub_agent_turns"]) == (1.0, 1, turns)
    assert (main.metrics["context_full"], main.metrics["sub_agent_contexts_full"]) == (0, turns == 1)
    assert sum(len(t.turns) for t in reader) == turns


async def test_a_call_ends_at_its_own_time_limit_and_what_was_said_until_then_is_trained() -> None:
    hangs, answers = asyncio.Event(), iter([asking("reader"), calling("fetch", page="a"), None, "done"])

    async def script(request: ModelRequest) -> list[int]:
        if (answer := next(answers)) is None:
            await hangs.wait()
        return ended(answer or "")

    engine = ScriptedEngine(script)
    workflow = caller(replace(READER, timeout_s=0.05), limits=ToolLimits(timeout_s=60))
    main, reader = await workflow.arun_episode(engine, QUESTION)
    assert "error: there was no answer within 0.05 s" in seen_by(engine)
    assert (main.reward, len(reader.turns)) == (1.0, 1)


async def test_sub_agents_may_have_their_own_and_sampling_and_contexts_that_end() -> None:
    compaction = Compaction(context_length=900, summary_tokens=30, compact_at=100, instruction="Sum up.")
    clerk = SubAgent(
        name="clerk", description="Files.", sampling=SamplingParams(max_new_tokens=100, temperature=0.5),
        tools=[FETCH], compaction=compaction, role="staff",
    )  # fmt: skip
    engine = saying(
        asking("reader"), asking("clerk", "file it"), calling("fetch", page="a"), "the sum", "filed", "read", "done"
    )
    made = await caller(replace(READER, sub_agents=[clerk])).arun_episode(engine, QUESTION)
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


def test_sub_agents_that_make_no_sense_are_errors() -> None:
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
            caller(*sub_agents, tools=[FETCH])


async def test_a_source_of_tools_with_a_sub_agents_name_is_refused_when_it_opens() -> None:
    @asynccontextmanager
    async def source() -> AsyncIterator[list[Tool]]:
        yield [replace(FETCH, name="reader")]

    with pytest.raises(ConfigError, match="two tools are named 'reader'"):
        async with caller(tools=[source()]):
            pass


async def test_the_tools_of_a_sub_agent_may_be_functions() -> None:
    def double(number: int) -> int:
        """Twice a number."""
        return 2 * number

    engine = saying(asking("reader"), calling("double", number=21), "42", "done")
    main, reader = await caller(replace(READER, tools=[double])).arun_episode(engine, QUESTION)
    assert main.metrics["sub_agent_tool_calls"] == 1
    assert "<tool_response>\n42\n</tool_response>" in decode(reader.token_ids)
