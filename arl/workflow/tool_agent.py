"""An agent with tools: it calls them until it answers without a call. And agents as tools of another.

prompt -> turn -> calls -> tools (arun_tools) -> messages -> turn -> ... -> a turn without a call: the answer

    researcher = SubAgent(name="researcher", description="Answers a question.", tools=[search])
    workflow = ToolAgentWorkflow(tokenizer, reward, tools=[...], sub_agents=[researcher])

Each call of a sub-agent is a conversation of its own, of which the caller sees the answer alone. Its tokens are
trained, with the episode's reward.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from arl.api.errors import ConfigError, PromptTooLongError, ToolError
from arl.api.types import Example, Trajectory
from arl.rewards.score import Score
from arl.workflow.agent import AgentWorkflow, ToolEpisode, check_fits, with_system
from arl.workflow.call_formats import CallFormat
from arl.workflow.chat_template import call_format_of, template_of
from arl.workflow.compacting import CompactingConversation, Compaction, conversation_of
from arl.workflow.team import Member, TeamSettings
from arl.workflow.tools import DEFAULT_LIMITS, Tool, ToolLimits, tools_by_name

if TYPE_CHECKING:
    from arl.api.engine import Sampler

MAX_DEPTH = 4
"""How deep sub-agents may have sub-agents of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubAgent(Member):
    """An agent that another agent may call as a tool. The tool has its name, and takes one argument, `task`."""

    description: str
    """What the calling model reads about it."""
    sub_agents: Sequence[SubAgent] = ()
    """Those that it may call itself."""
    compaction: Compaction | None = None
    timeout_s: float = 600.0
    """The longest a call may take. The caller then reads that there was no answer in time."""
    max_output_chars: int | None = None
    """Characters of the answer that the caller reads; None: as ToolLimits says."""


def check_sub_agents(agents: Iterable[SubAgent], settings: TeamSettings, depth: int = 1) -> None:
    """Raise ConfigError for sub-agents that are nested too deep, have an equal name, or settings that cannot be."""
    for agent in agents:
        if depth > MAX_DEPTH:
            raise ConfigError(f"the sub-agent {agent.name} is {depth} deep among sub-agents; {MAX_DEPTH} is the most")
        if agent.max_turns < 1 or agent.timeout_s <= 0:
            raise ConfigError(
                f"the sub-agent {agent.name} has max_turns {agent.max_turns} and timeout_s {agent.timeout_s:g}; they "
                "must be at least 1, and above 0"
            )
        if agent.compaction is not None:
            template = template_of(settings.tokenizer, settings.template_options)
            agent.compaction.check(template, agent.sampling or settings.sampling)
        check_names([tool.name for tool in agent.made_tools], agent.sub_agents)
        check_sub_agents(agent.sub_agents, settings, depth + 1)


def all_agents(agents: Iterable[SubAgent]) -> Iterator[SubAgent]:
    """The agents, each followed by those that it may call."""
    for agent in agents:
        yield agent
        yield from all_agents(agent.sub_agents)


def check_names(tools: Iterable[str], agents: Iterable[SubAgent]) -> None:
    """Raise ConfigError if a tool and a sub-agent, or two sub-agents, have one name."""
    names = [*tools, *(agent.name for agent in agents)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two tools are named {twice!r}; give one of them another name (a sub-agent is a tool, too)")


class SubAgents:
    """The sub-agents of one episode, and what they said in it. Make it in arun_episode."""

    def __init__(self, engine: Sampler, data: Example, settings: TeamSettings) -> None:
        self._engine = engine
        self._data = data
        self._settings = settings
        self._called: list[tuple[SubAgent, ToolEpisode]] = []

    def tools(self, agents: Iterable[SubAgent]) -> list[Tool]:
        """A tool for each of the agents."""
        return [self._tool(agent) for agent in agents]

    @property
    def metrics(self) -> dict[str, float]:
        """Sums over all calls, those of nested sub-agents included."""
        chats = [episode.conversation for _, episode in self._called]
        counts = {
            "sub_agent_calls": len(chats),
            "sub_agent_turns": sum(chat.num_turns for chat in chats),
            "sub_agent_tool_calls": sum(len(episode.results) for _, episode in self._called),
            "sub_agent_compactions": sum(len(c.summaries) for c in chats if isinstance(c, CompactingConversation)),
            "sub_agent_contexts_full": sum(chat.is_full for chat in chats),
        }
        return {name: float(count) for name, count in counts.items()}

    def trajectories(self, reward: float, rewards: Mapping[str, float] | None = None) -> list[Trajectory]:
        """Of all that spoke, each with the role of its agent. rewards: named parts of the reward.

        They have no metrics, which are the caller's.
        """
        return [
            replace(trajectory, metrics={})
            for _, episode in self._called
            if episode.conversation.num_turns
            for trajectory in episode.conversation.trajectories(reward, rewards=rewards)
        ]

    def _tool(self, agent: SubAgent) -> Tool:
        async def call(task: str) -> str:
            """Let it work on a task.

            Args:
                task: all that it needs to know; it sees nothing else of this conversation.
            """
            return await self._answer(agent, task)

        tool = Tool.from_function(call)
        spec = {**tool.spec["function"], "name": agent.name, "description": agent.description}
        return replace(
            tool,
            name=agent.name,
            spec={"type": "function", "function": spec},
            timeout_s=agent.timeout_s,
            max_output_chars=agent.max_output_chars,
        )

    async def _answer(self, agent: SubAgent, task: str) -> str:
        settings = self._settings
        tools = [*agent.made_tools, *self.tools(agent.sub_agents)]
        chat = conversation_of(
            settings.tokenizer,
            with_system(agent.system, task),
            agent.compaction,
            tools=tools,
            template_options=settings.template_options,
            rewriting=settings.rewriting,
            role=agent.played_role,
        )
        episode = ToolEpisode(data=self._data, conversation=chat, tools=tools)
        self._called.append((agent, episode))
        try:
            await episode.aspeak(
                self._engine,
                agent.sampling or settings.sampling,
                call_format=settings.call_format or call_format_of(settings.tokenizer),
                limits=settings.limits,
                max_turns=agent.max_turns,
            )
        except PromptTooLongError as error:
            if chat.num_turns:
                raise
            raise ToolError(f"the task is too long for {agent.name}") from error
        if episode.answer is None:
            raise ToolError(f"{agent.name} had no room for an answer, or called tools until its turns were over")
        return episode.answer.text.rpartition("</think>")[2].strip()


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
        return super()._roles() | {agent.played_role for agent in all_agents(self.sub_agents)}

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
