"""Several agents in one episode. Each has a role and a conversation, and may have its own tools and reward.

    team = Team(engine, [Member(name="author"), Member(name="critic", system="Find mistakes.")], settings)
    draft = await team.ask("author", question)
    verdict = await team.ask("critic", f"Is it right? {draft}")
    return team.trajectories({"author": is_right, "critic": saw_it})

Advantages compare trajectories of one role, so give members with the same job one role.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from arl.api.errors import ConfigError
from arl.api.types import SamplingParams, Trajectory
from arl.rewards.score import Score, score_of
from arl.rewards.threads import together
from arl.workflow.agent import ToolEpisode, with_system
from arl.workflow.call_formats import CallFormat
from arl.workflow.chat_template import call_format_of
from arl.workflow.conversation import Conversation
from arl.workflow.dialogue import Rewriting
from arl.workflow.messages import Message
from arl.workflow.tools import DEFAULT_LIMITS, Tool, ToolLimits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from arl.api.engine import Sampler

Said = str | Sequence[Message]
"""What to say to a member: a text, or messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One agent of a team."""

    name: str
    role: str | None = None
    """Trajectories of the same role are compared. If unset, the member's name."""
    system: str | None = None
    """Its system prompt."""
    tools: Sequence[Tool | Callable[..., Any]] = ()
    """A function becomes a tool as `Tool.from_function` makes it."""
    max_turns: int = 8
    """How often it may speak until it has answered, if it has tools."""
    sampling: SamplingParams | None = None
    """Unset, the team's."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tools", tuple(map(Tool.of, self.tools)))

    @property
    def made_tools(self) -> tuple[Tool, ...]:
        """`tools`, all of which are tools by now."""
        return cast("tuple[Tool, ...]", self.tools)

    @property
    def played_role(self) -> str:
        """`role`, or else its name."""
        return self.role or self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamSettings:
    """Settings that all members share. AgentWorkflow and ToolAgentWorkflow explain each field."""

    tokenizer: PreTrainedTokenizerBase
    sampling: SamplingParams = field(default_factory=SamplingParams)
    template_options: Mapping[str, Any] | None = None
    rewriting: Rewriting = "branch"
    limits: ToolLimits = DEFAULT_LIMITS
    call_format: CallFormat | None = None


class Team:
    """The members of one episode. Make it in arun_episode."""

    def __init__(self, engine: Sampler, members: Sequence[Member], settings: TeamSettings) -> None:
        """Raises ConfigError for two members of one name."""
        self._engine = engine
        self._settings = settings
        self._members = {member.name: member for member in members}
        self._episodes: dict[str, ToolEpisode] = {}
        if len(self._members) < len(members):
            raise ConfigError(f"members are named {[m.name for m in members]}; their names must differ, unlike roles")

    async def ask(self, name: str, said: Said) -> str | None:
        """Say something to a member, and let it speak until it has answered. Returns the answer.

        Returns None if the context is full, or if the member called tools for max_turns. Raises PromptTooLongError if
        even the first prompt does not fit, and ConfigError for an unknown member.
        """
        episode = self._episode(name, said)
        member, settings = self._members[name], self._settings
        sampling = member.sampling or settings.sampling
        if not member.tools:
            turn = await episode.conversation.agenerate(self._engine, sampling)
            return None if episode.conversation.is_full else turn.text
        call_format = settings.call_format or call_format_of(settings.tokenizer)
        await episode.aspeak(
            self._engine, sampling, call_format=call_format, limits=settings.limits, max_turns=member.max_turns
        )
        return episode.answer.text if episode.answer is not None else None

    async def ask_all(self, said: Mapping[str, Said]) -> dict[str, str | None]:
        """Ask several members at the same time. Takes name -> message, and returns name -> answer."""
        answers = await together(self.ask(name, what) for name, what in said.items())
        return dict(zip(said, answers, strict=True))

    @property
    def metrics(self) -> dict[str, float]:
        """Sums over members: turns, and the tool calls and errors of members with tools."""
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
        """The trajectories of all members that spoke, to return from arun_episode.

        rewards: one reward that all share, or name -> reward. metrics: of the whole episode, added to the team's; only
        the first trajectory has them. Raises ConfigError for a member that spoke and has no reward.
        """
        made: list[Trajectory] = []
        for name, episode in self._episodes.items():
            if not episode.conversation.num_turns:
                continue
            given = rewards.get(name) if isinstance(rewards, Mapping) else rewards
            if given is None:
                raise ConfigError(f"{name} spoke but has no reward; pass one for each member, or one for all")
            score = score_of(given)
            own = {**self.metrics, **(metrics or {})} if not made else {}
            made += episode.conversation.trajectories(score.value, own, rewards=score.parts)
        return tuple(made)

    def _episode(self, name: str, said: Said) -> ToolEpisode:
        if name not in self._members:
            raise ConfigError(f"there is no member {name!r}; the members are {', '.join(self._members)}")
        member, settings = self._members[name], self._settings
        if name in self._episodes:
            self._episodes[name].conversation.add(*with_system(None, said))
            return self._episodes[name]
        chat = Conversation(
            settings.tokenizer,
            with_system(member.system, said),
            tools=member.made_tools,
            template_options=settings.template_options,
            rewriting=settings.rewriting,
            role=member.played_role,
        )
        self._episodes[name] = ToolEpisode(data={}, conversation=chat, tools=member.made_tools)
        return self._episodes[name]
