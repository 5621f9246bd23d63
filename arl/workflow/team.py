"""Several agents in one episode: each has a role, a conversation of its own, and perhaps tools and a reward of its own.

    team = Team(engine, [Member(name="author"), Member(name="critic", system="Find mistakes.")], settings)
    draft = await team.ask("author", question)
    verdict = await team.ask("critic", f"Is it right? {draft}")
    return team.trajectories({"author": is_right, "critic": saw_it})

Advantages compare a trajectory with those of the same role alone, so rewards of different roles need not be comparable;
members that do the same job have one role.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from arl.api.errors import ConfigError, PromptTooLongError
from arl.api.types import SamplingParams, Trajectory
from arl.rewards.reward import Score, score_of
from arl.workflow.agent import with_system
from arl.workflow.call_formats import CallFormat, call_format_of
from arl.workflow.conversation import Conversation
from arl.workflow.dialogue import Rewriting
from arl.workflow.messages import Message
from arl.workflow.together import together
from arl.workflow.tool_agent import ToolEpisode, ToolSpeaker
from arl.workflow.tools import DEFAULT_LIMITS, Tool, ToolLimits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from arl.api.engine import InferenceEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One agent of a team. role: what its trajectories are compared under; its name where unset. system: its system
    prompt. max_turns: how often it may speak until it has answered, where it has tools. sampling: unset, the team's."""

    name: str
    role: str | None = None
    system: str | None = None
    tools: Sequence[Tool] = ()
    max_turns: int = 8
    sampling: SamplingParams | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamSettings:
    """What all members have in common; see AgentWorkflow and ToolAgentWorkflow for each."""

    tokenizer: PreTrainedTokenizerBase
    sampling: SamplingParams = field(default_factory=SamplingParams)
    template_options: Mapping[str, Any] | None = None
    rewriting: Rewriting = "branch"
    limits: ToolLimits = DEFAULT_LIMITS
    call_format: CallFormat | None = None


class Team:
    """The members of one episode. Make it in arun_episode."""

    def __init__(self, engine: InferenceEngine, members: Sequence[Member], settings: TeamSettings) -> None:
        """Raises ConfigError for two members of one name."""
        self._engine = engine
        self._settings = settings
        self._members = {member.name: member for member in members}
        self._episodes: dict[str, ToolEpisode] = {}
        if len(self._members) < len(members):
            raise ConfigError(f"members are named {[m.name for m in members]}; give each a name of its own, and a role")

    async def ask(self, name: str, said: str | Sequence[Message]) -> str | None:
        """Say something to a member, and let it speak until it has answered.

        None where it did not: its context is full, or it went on calling tools for max_turns. Raises
        PromptTooLongError where it never said anything, and ConfigError for a member that there is not.
        """
        episode = self._episode(name, said)
        member, settings = self._members[name], self._settings
        sampling = member.sampling or settings.sampling
        if not member.tools:
            return await self._ask_once(episode, sampling)
        call_format = settings.call_format or call_format_of(settings.tokenizer)
        speaker = ToolSpeaker(call_format=call_format, limits=settings.limits, max_turns=member.max_turns)
        await speaker.aspeak(self._engine, sampling, episode)
        return episode.answer.text if episode.answer is not None else None

    async def ask_all(self, said: Mapping[str, str | Sequence[Message]]) -> dict[str, str | None]:
        """Several members at the same time: name -> what is said to it; name -> what it answered."""
        answers = await together(self.ask(name, what) for name, what in said.items())
        return dict(zip(said, answers, strict=True))

    def conversation(self, name: str) -> Conversation:
        """A member's, once it was asked."""
        return self._episodes[name].conversation

    @property
    def metrics(self) -> dict[str, float]:
        """Sums over members: turns, and of those with tools their calls and errors."""
        metrics: dict[str, float] = {"turns": 0.0}
        for name, episode in self._episodes.items():
            counts = episode.metrics if self._members[name].tools else {"turns": episode.conversation.num_turns}
            for key, count in counts.items():
                if key != "answered":
                    metrics[key] = metrics.get(key, 0.0) + count
        return metrics

    def trajectories(
        self, rewards: float | Score | Mapping[str, float | Score], metrics: Mapping[str, float] | None = None
    ) -> tuple[Trajectory, ...]:
        """What to return from arun_episode: those of all members that said something.

        rewards: one that all share, or name -> its own. metrics: beside the team's own; of the whole episode, so on the
        first trajectory alone. Raises ConfigError for a member that spoke and has no reward.
        """
        made: list[Trajectory] = []
        for name, episode in self._episodes.items():
            if not episode.conversation.num_turns:
                continue
            given = rewards.get(name) if isinstance(rewards, Mapping) else rewards
            if given is None:
                raise ConfigError(f"{name} spoke and has no reward; give each member one, or one that all share")
            score = score_of(given)
            own = {**self.metrics, **(metrics or {})} if not made else {}
            role = self._members[name].role or name
            made += episode.conversation.trajectories(score.value, own, role, rewards=score.parts)
        return tuple(made)

    async def _ask_once(self, episode: ToolEpisode, sampling: SamplingParams) -> str | None:
        try:
            return (await episode.conversation.agenerate(self._engine, sampling)).text
        except PromptTooLongError:
            if not episode.conversation.num_turns:
                raise
            return None

    def _episode(self, name: str, said: str | Sequence[Message]) -> ToolEpisode:
        if name not in self._members:
            raise ConfigError(f"there is no member {name!r}; there is {', '.join(self._members)}")
        member, settings = self._members[name], self._settings
        if name in self._episodes:
            episode = self._episodes[name]
            episode.conversation.add(*with_system(None, said))
            return episode
        chat = Conversation(
            settings.tokenizer,
            with_system(member.system, said),
            tools=member.tools,
            template_options=settings.template_options,
            rewriting=settings.rewriting,
        )
        self._episodes[name] = ToolEpisode(data={}, conversation=chat, tools=member.tools)
        return self._episodes[name]
