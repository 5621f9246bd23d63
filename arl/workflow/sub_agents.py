"""Agents as tools: an agent calls another with a task, and reads its answer.

    researcher = SubAgent(name="researcher", description="Answers a question.", tools=[search])
    workflow = ToolAgentWorkflow(tokenizer, reward, tools=[...], sub_agents=[researcher])

Each call is a conversation of its own, of which the caller sees the answer alone. Its tokens are trained, with the
episode's reward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from arl.api.errors import ConfigError, PromptTooLongError, ToolError
from arl.workflow.agent import with_system
from arl.workflow.call_formats import call_format_of
from arl.workflow.chat_template import template_of
from arl.workflow.compacting import CompactingConversation, Compaction, conversation_of
from arl.workflow.team import Member, TeamSettings
from arl.workflow.tool_episode import ToolEpisode
from arl.workflow.tools import Tool

if TYPE_CHECKING:
    from arl.api.engine import Sampler
    from arl.api.types import Example, Trajectory

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


def roles_of(agents: Iterable[SubAgent]) -> frozenset[str]:
    """The roles of the agents, and of those that they may call."""
    return frozenset(agent.played_role for agent in all_agents(agents))


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
