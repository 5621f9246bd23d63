"""An agent with tools: it calls them until it answers without a call.

prompt -> turn -> calls -> tools (arun_tools) -> messages -> turn -> ... -> a turn without a call: the answer
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arl.api.errors import ConfigError
from arl.api.types import Example, Trajectory
from arl.rewards.score import Score
from arl.workflow.agent import AgentWorkflow, check_fits
from arl.workflow.call_formats import CallFormat, call_format_of
from arl.workflow.sub_agents import SubAgent, SubAgents, all_agents, check_names, check_sub_agents, roles_of
from arl.workflow.team import TeamSettings
from arl.workflow.tool_episode import ToolEpisode
from arl.workflow.tools import DEFAULT_LIMITS, Tool, ToolLimits, tools_by_name

if TYPE_CHECKING:
    from arl.api.engine import Sampler

ToolLike = Tool | Callable[..., Any]
"""A tool, or a typed function to make a tool from."""

ToolSource = AbstractAsyncContextManager[Sequence[ToolLike]]
"""An async context manager that returns tools: an MCP server, for instance."""


@dataclass(kw_only=True, eq=False, repr=False)
class ToolAgentWorkflow(AgentWorkflow):
    """Lets the model call tools until it answers without a call, and rewards the answer.

    An episode that ends without an answer (at max_turns, by is_done, or because the context is full) is scored with the
    empty answer. The calls of the last turn run too. An answer that max_new_tokens cut off is scored as it stands, and
    its trajectory is truncated. Metrics: tool_calls, tool_errors, malformed_calls, turns, answered and context_full.
    With compaction, those of CompactingConversation, and with sub_agents, those of SubAgents too.
    """

    tools: Sequence[ToolLike | ToolSource] = ()
    """Shared by all episodes. Sources such as MCPTools are open as long as the workflow is."""
    open_tools: Callable[[Example], ToolSource] | None = None
    """Makes the tools of one episode, which are closed at its end, however it ends."""
    sub_agents: Sequence[SubAgent] = ()
    """Agents that the model may call as tools. They have the episode's reward."""
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
        has_own = type(self).episode_tools is not ToolAgentWorkflow.episode_tools
        if not (self.tools or self.sub_agents or self.open_tools or has_own):
            raise ConfigError(
                f"{type(self).__name__} has no tools; pass tools=, open_tools= or sub_agents=, or use "
                "SingleTurnWorkflow"
            )
        self._format = self.call_format or call_format_of(self.tokenizer)
        self._shared = [Tool.of(tool) for tool in self.tools if not isinstance(tool, AbstractAsyncContextManager)]
        self._sources = [tool for tool in self.tools if isinstance(tool, AbstractAsyncContextManager)]
        self._opened: list[Tool] = []
        tools_by_name(self._shared)
        self._settings = TeamSettings(
            tokenizer=self.tokenizer,
            sampling=self.sampling,
            template_options=self.template_options,
            rewriting=self.rewriting,
            limits=self.limits,
            call_format=self._format,
        )
        check_names([tool.name for tool in self._shared], self.sub_agents)
        check_sub_agents(self.sub_agents, self._settings)

    def check_room(self, limit: int) -> None:
        super().check_room(limit)
        for agent in all_agents(self.sub_agents):
            check_fits(limit, agent.sampling, agent.compaction, f" of the sub-agent {agent.name}")

    async def _open(self, opened: AsyncExitStack) -> None:
        await super()._open(opened)
        self._opened = [Tool.of(tool) for source in self._sources for tool in await opened.enter_async_context(source)]
        tools_by_name([*self._shared, *self._opened])
        check_names([tool.name for tool in (*self._shared, *self._opened)], self.sub_agents)

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

    def _roles(self) -> frozenset[str]:
        return super()._roles() | roles_of(self.sub_agents)

    def is_done(self, episode: ToolEpisode) -> bool:
        """Whether the episode ends after the calls just answered: after a call of `submit`, for instance."""
        return False

    async def ascore_episode(self, episode: ToolEpisode) -> Score:
        """The reward of the episode. Its tools are still open."""
        return await self.ascore("" if episode.answer is None else self.answer(episode.answer), episode.data)

    async def arun_episode(self, engine: Sampler, data: Example) -> Sequence[Trajectory]:
        async with self.episode_tools(data) as own:
            others = SubAgents(engine, data, self._settings)
            tools = [*own, *others.tools(self.sub_agents)]
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
        metrics = {**episode.metrics, **(others.metrics if self.sub_agents else {}), **score.metrics}
        made = chat.trajectories(score.value, metrics, rewards=score.parts)
        return (*made, *others.trajectories(score.value, score.parts))
