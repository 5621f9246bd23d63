"""An agent with tools: it calls them until it answers without a call.

prompt -> turn -> calls -> tools (arun_tools) -> messages -> turn -> ... -> a turn without a call: the answer
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from arl.api.errors import ConfigError
from arl.api.types import Example, SamplingParams, Trajectory
from arl.rewards.score import Score
from arl.workflow.agent import AgentWorkflow
from arl.workflow.call_formats import CallFormat, call_format_of
from arl.workflow.tools import DEFAULT_LIMITS, Tool, ToolLimits, ToolResult, arun_tools, tools_by_name

if TYPE_CHECKING:
    from arl.api.engine import Sampler
    from arl.workflow.conversation import Conversation
    from arl.workflow.dialogue import Turn

ToolLike = Tool | Callable[..., Any]
"""A tool, or a typed function to make a tool from."""

ToolSource = AbstractAsyncContextManager[Sequence[ToolLike]]
"""An async context manager that returns tools: an MCP server, for instance."""


@dataclass(slots=True, kw_only=True, eq=False)
class ToolEpisode:
    """The state of an episode, for its workflow's methods."""

    data: Example
    conversation: Conversation
    tools: Sequence[Tool]
    results: list[ToolResult] = field(default_factory=list[ToolResult])
    """The results of all calls so far, in order."""
    answer: Turn | None = None
    """The turn without a call that ended the episode; None if max_turns, is_done or a full context ended it."""

    @property
    def metrics(self) -> dict[str, float]:
        failures = [result.failure for result in self.results]
        malformed = failures.count("malformed")
        return {
            "tool_calls": len(self.results) - malformed,
            "tool_errors": failures.count("refused") + failures.count("failed"),
            "malformed_calls": malformed,
            "turns": self.conversation.num_turns,
            "answered": float(self.answer is not None),
        }

    async def aspeak(
        self,
        engine: Sampler,
        sampling: SamplingParams,
        *,
        call_format: CallFormat,
        limits: ToolLimits,
        max_turns: int,
        is_done: Callable[[ToolEpisode], bool] = lambda _: False,
    ) -> None:
        """Let the model call tools until it answers or must stop; sets `answer`. Raises as agenerate and tools do."""
        chat, self.answer = self.conversation, None
        for _ in range(max_turns):
            turn = await chat.agenerate(engine, sampling)
            if chat.is_full:
                return
            calls = call_format.parse(turn.text).calls
            if not calls:
                self.answer = turn
                return
            results = await arun_tools(calls, self.tools, limits)
            self.results += results
            chat.add(*(result.message for result in results))
            if is_done(self):
                return


@dataclass(kw_only=True, eq=False, repr=False)
class ToolAgentWorkflow(AgentWorkflow):
    """Lets the model call tools until it answers without a call, and rewards the answer.

    An episode that ends without an answer (at max_turns, by is_done, or because the context is full) is scored with the
    empty answer. The calls of the last turn run too. An answer that max_new_tokens cut off is scored as it stands, and
    its trajectory is truncated. Metrics: tool_calls, tool_errors, malformed_calls, turns, answered and context_full.
    """

    tools: Sequence[ToolLike | ToolSource] = ()
    """Shared by all episodes. Sources such as MCPTools are open as long as the workflow is."""
    open_tools: Callable[[Example], ToolSource] | None = None
    """Makes the tools of one episode, which are closed at its end, however it ends."""
    max_turns: int = 8
    """How often the model may speak."""
    limits: ToolLimits = DEFAULT_LIMITS
    """Limits a call's time, and how much of its result the model reads."""
    call_format: CallFormat | None = None
    """If unset, the format that the chat template asks for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_turns < 1:
            raise ConfigError(f"max_turns is {self.max_turns}; it must be at least 1")
        if not self.tools and self.open_tools is None and type(self).episode_tools is ToolAgentWorkflow.episode_tools:
            raise ConfigError(
                f"{type(self).__name__} has no tools; pass tools= or open_tools=, or use SingleTurnWorkflow"
            )
        self._format = self.call_format or call_format_of(self.tokenizer)
        self._shared = [Tool.of(tool) for tool in self.tools if not isinstance(tool, AbstractAsyncContextManager)]
        self._sources = [tool for tool in self.tools if isinstance(tool, AbstractAsyncContextManager)]
        self._opened: list[Tool] = []
        tools_by_name(self._shared)

    async def _open(self, opened: AsyncExitStack) -> None:
        await super()._open(opened)
        self._opened = [Tool.of(tool) for source in self._sources for tool in await opened.enter_async_context(source)]
        tools_by_name([*self._shared, *self._opened])

    @asynccontextmanager
    async def episode_tools(self, data: Example) -> AsyncIterator[list[Tool]]:
        """All tools of one episode, closed at its end."""
        if self._sources and not self.is_open:
            raise ConfigError(f"the tools of {type(self).__name__} are not open; run episodes in `async with workflow`")
        shared = [*self._shared, *self._opened]
        if self.open_tools is None:
            yield shared
            return
        async with self.open_tools(data) as own:
            yield [*shared, *map(Tool.of, own)]

    def is_done(self, episode: ToolEpisode) -> bool:
        """Whether the episode ends after the calls just answered: after a call of `submit`, for instance."""
        return False

    async def ascore_episode(self, episode: ToolEpisode) -> Score:
        """The reward of the episode. Its tools are still open."""
        return await self.ascore("" if episode.answer is None else self.answer(episode.answer), episode.data)

    async def arun_episode(self, engine: Sampler, data: Example) -> Sequence[Trajectory]:
        async with self.episode_tools(data) as tools:
            chat = self.conversation(data, tools)
            episode = ToolEpisode(data=data, conversation=chat, tools=tools)
            await episode.aspeak(
                engine,
                self.sampling,
                call_format=self._format,
                limits=self.limits,
                max_turns=self.max_turns,
                is_done=self.is_done,
            )
            score = await self.ascore_episode(episode)
        return chat.trajectories(score.value, {**episode.metrics, **score.metrics}, rewards=score.parts)
