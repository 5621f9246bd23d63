"""Several agents in one episode. Each has a role and a conversation, and may have its own tools and reward.

    team = Team(engine, [Member(name="author"), Member(name="critic", system="Find mistakes.")], settings)
    draft = await team.ask("author", question)
    verdict = await team.ask("critic", f"Is it right? {draft}")
    return team.trajectories({"author": is_right, "critic": saw_it})

Advantages compare trajectories of one role, so give members with the same job one role.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

from arl.api.errors import ConfigError, PromptTooLongError
from arl.api.types import Example, SamplingParams, Trajectory
from arl.rewards.score import Score, score_of
from arl.rewards.threads import together
from arl.workflow.agent import AgentWorkflow, with_system
from arl.workflow.call_formats import CallFormat, call_format_of
from arl.workflow.content import content_of, joined
from arl.workflow.conversation import Conversation
from arl.workflow.dialogue import Rewriting
from arl.workflow.messages import Message
from arl.workflow.tool_episode import ToolEpisode
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


@dataclass(kw_only=True, eq=False, repr=False)
class _TeamWorkflow(AgentWorkflow):
    shared: bool = False
    """Whether all members get one reward: the debaters' mean, or the solver's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compaction is not None:
            raise ConfigError(
                f"{type(self).__name__} has no compaction: its members' conversations end when they are full"
            )

    def _team(self, engine: Sampler, members: Sequence[Member]) -> Team:
        settings = TeamSettings(
            tokenizer=self.tokenizer,
            sampling=self.sampling,
            template_options=self.template_options,
            rewriting=self.rewriting,
        )
        return Team(engine, members, settings)


@dataclass(kw_only=True, eq=False, repr=False)
class DebateWorkflow(_TeamWorkflow):
    """Debaters answer at the same time, read each other's answers, and answer again; the last answers are rewarded.

    All have the role `debater`, so they are compared with each other and with the debaters of the group's other
    episodes. Metrics: turns.
    """

    debaters: int = 2
    rounds: int = 2
    """How often each debater answers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.debaters < 2 or self.rounds < 1:
            raise ConfigError(
                f"debaters is {self.debaters} and rounds {self.rounds}; give at least 2 debaters and 1 round"
            )

    def member(self, index: int) -> Member:
        """One debater. Only `others_said` sees its name."""
        return Member(name=f"debater {index + 1}", role="debater", system=self.system)

    def _roles(self) -> frozenset[str]:
        return frozenset(self.member(index).played_role for index in range(self.debaters))

    def others_said(self, answers: Mapping[str, str]) -> str:
        """What to tell a debater between rounds. answers: the other debaters' answers, by name."""
        said = "\n\n".join(f"Another agent answered:\n{answer}" for answer in answers.values())
        return f"{said}\n\nConsider these answers, and give yours again."

    async def arun_episode(self, engine: Sampler, data: Example) -> Sequence[Trajectory]:
        members = [self.member(index) for index in range(self.debaters)]
        names = [member.name for member in members]
        team = self._team(engine, members)
        said: dict[str, Said] = dict.fromkeys(names, self.messages(data))
        answers = dict.fromkeys(names, "")
        for _ in range(self.rounds):
            new = await team.ask_all(said)
            answers |= {name: answer for name, answer in new.items() if answer is not None}
            said = {name: self.others_said({n: a for n, a in answers.items() if n != name}) for name in names}
        scores = await together(self.ascore(answers[name], data) for name in names)
        return team.trajectories(self.rewards(dict(zip(names, scores, strict=True))), _mean_metrics(scores))

    def rewards(self, scores: Mapping[str, Score]) -> Mapping[str, float | Score]:
        """The reward of each debater. Takes name -> score of the last answer, and returns name -> reward."""
        if not self.shared:
            return scores
        parts = {name: fmean(s.parts[name] for s in scores.values()) for name in next(iter(scores.values())).parts}
        return dict.fromkeys(scores, Score(fmean(score.value for score in scores.values()), parts))


def _mean_metrics(scores: Sequence[Score]) -> dict[str, float]:
    names = dict.fromkeys(name for score in scores for name in score.metrics)
    return {name: fmean(s.metrics[name] for s in scores if name in s.metrics) for name in names}


CHECKER_SYSTEM = (
    "You check answers. Say what is wrong with the answer, if anything, and end with one word: ACCEPT where the answer "
    "is right, REJECT where it is not."
)


@dataclass(kw_only=True, eq=False, repr=False)
class SolverCheckerWorkflow(_TeamWorkflow):
    """A solver answers. A checker accepts the answer, or rejects it with a reason, and the solver tries again.

    The solver's reward is the reward of its last answer. The checker's reward is the share of right verdicts. A verdict
    is right if it accepts an answer worth at least right_from, or rejects an answer worth less. An unreadable verdict
    is wrong, and counts as a rejection. Roles: solver, checker. Metrics: turns, attempts, accepted (1 or 0),
    right_verdicts (share).
    """

    checker_system: str = CHECKER_SYSTEM
    max_attempts: int = 3
    """How often the solver may answer."""
    right_from: float = 1.0
    """The least reward of a right answer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_attempts < 1:
            raise ConfigError(f"max_attempts is {self.max_attempts}; it must be at least 1")

    def members(self) -> tuple[Member, Member]:
        """The solver and the checker."""
        return Member(name="solver", system=self.system), Member(name="checker", system=self.checker_system)

    def _roles(self) -> frozenset[str]:
        return frozenset(member.played_role for member in self.members())

    def to_check(self, data: Example, answer: str, attempt: int) -> Said:
        """What to ask the checker. attempt: the number of answers it has seen before."""
        if attempt:
            return f"The next answer:\n{answer}\n\nACCEPT or REJECT?"
        asked = [content_of(message) for message in self.messages(data) if message["role"] == "user"]
        question = [part for content in asked for part in ("\n\n", content)][1:]
        said = joined(("Question:\n", *question, f"\n\nAnswer:\n{answer}\n\nACCEPT or REJECT?"))
        return said if isinstance(said, str) else [{"role": "user", "content": said}]

    def objection(self, verdict: str) -> str:
        """What to tell the solver after a rejection."""
        return f"A checker rejected your answer:\n{verdict}\n\nTry again."

    def accepts(self, verdict: str) -> bool | None:
        """Whether the last ACCEPT or REJECT in the verdict is ACCEPT; None if it has neither."""
        words = re.findall(r"\b(ACCEPT|REJECT)\b", verdict)
        return words[-1] == "ACCEPT" if words else None

    async def arun_episode(self, engine: Sampler, data: Example) -> Sequence[Trajectory]:
        solver, checker = self.members()
        team = self._team(engine, (solver, checker))
        answers: list[str] = []
        verdicts: list[bool | None] = []
        said: Said = self.messages(data)
        while len(answers) < self.max_attempts and (answer := await team.ask(solver.name, said)) is not None:
            answers.append(answer)
            try:
                verdict = await team.ask(checker.name, self.to_check(data, answer, len(answers) - 1))
            except PromptTooLongError:  # the first answer alone fills its context
                verdict = None
            if verdict is None:
                break
            verdicts.append(self.accepts(verdict))
            if verdicts[-1]:
                break
            said = self.objection(verdict)
        return await self._rewarded(team, answers or [""], verdicts, data)

    async def _rewarded(
        self, team: Team, answers: Sequence[str], verdicts: Sequence[bool | None], data: Example
    ) -> Sequence[Trajectory]:
        scores = await together(self.ascore(answer, data) for answer in answers)
        rights = [
            float(verdict is not None and verdict == (score.value >= self.right_from))
            for verdict, score in zip(verdicts, scores, strict=False)  # the checker's context may be full
        ]
        share = fmean(rights) if rights else 0.0
        metrics = {
            "attempts": float(len(answers)),
            "accepted": float(bool(verdicts and verdicts[-1])),
            "right_verdicts": share,
            **scores[-1].metrics,
        }
        solver, checker = self.members()
        own: dict[str, float | Score] = {solver.name: scores[-1], checker.name: share}
        return team.trajectories(scores[-1] if self.shared else own, metrics)
