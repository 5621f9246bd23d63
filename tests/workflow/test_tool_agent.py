"""The tool agent: whatever goes wrong with calls, tools or room is an outcome of the episode, and it goes on."""

import asyncio
import threading
from collections.abc import Sequence

import pytest
from scripted_answers import TOKENIZER, calling, cut_off, exact, said_in, saying, seen_by, too_long

from arl.api.errors import ConfigError, ModelError, PromptTooLongError, ServerError
from arl.api.fakes import ScriptedEngine
from arl.api.types import Example
from arl.engine.tiny import tiny_tokenizer
from arl.rewards import Score
from arl.workflow.call_formats import LLAMA, ToolCall
from arl.workflow.tool_agent import ToolAgentWorkflow
from arl.workflow.tool_episode import ToolEpisode
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


async def test_open_sources_are_closed_if_another_cannot_be_opened() -> None:
    class Broken(Counter):
        async def __aenter__(self) -> Sequence[Tool]:
            raise ServerError("it does not start")

    for other, error in ((Broken(), ServerError), (Counter().add, ConfigError)):  # of two tools named `add`
        source = Counter()
        with pytest.raises(error):
            await agent(source, other).__aenter__()
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
