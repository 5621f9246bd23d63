"""A solver proposes answers, a checker accepts or rejects them: the one is paid for right answers, the other for
knowing which are right."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from arl.api.errors import ConfigError, PromptTooLongError
from arl.api.types import Example, Trajectory
from arl.rewards.reward import Score
from arl.workflow.agent import AgentWorkflow
from arl.workflow.messages import Message, text_content
from arl.workflow.team import Member, Team, TeamSettings
from arl.workflow.together import together

if TYPE_CHECKING:
    from arl.api.engine import InferenceEngine

CHECKER_SYSTEM = (
    "You check answers. Say what is wrong with the answer, if anything, and end with one word: ACCEPT where the answer "
    "is right, REJECT where it is not."
)


@dataclass(kw_only=True, eq=False, repr=False)
class SolverCheckerWorkflow(AgentWorkflow):
    """The solver answers; the checker accepts, or rejects with a reason, and the solver tries again.

    The solver's reward is that of its last answer; the checker's is the share of its verdicts that are right: accepted
    what is worth at least right_from, rejected what is not. A verdict that cannot be read is a wrong one, and counts as
    a rejection. shared: both get the solver's reward. max_attempts: answers of the solver. system, checker_system:
    their system prompts. Roles: solver, checker. Metrics: turns, attempts, accepted (1 or 0), right_verdicts (a share).
    """

    checker_system: str = CHECKER_SYSTEM
    max_attempts: int = 3
    right_from: float = 1.0
    shared: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_attempts < 1:
            raise ConfigError(f"max_attempts is {self.max_attempts}; it must be at least 1")

    def members(self) -> tuple[Member, Member]:
        """The solver and the checker."""
        return Member(name="solver", system=self.system), Member(name="checker", system=self.checker_system)

    def to_check(self, data: Example, answer: str, attempt: int) -> str | Sequence[Message]:
        """What the checker is asked. attempt: how many answers it has seen before this one."""
        if attempt:
            return f"The next answer:\n{answer}\n\nACCEPT or REJECT?"
        question = "\n\n".join(text_content(m) for m in self.messages(data) if m["role"] == "user")
        return f"Question:\n{question}\n\nAnswer:\n{answer}\n\nACCEPT or REJECT?"

    def objection(self, verdict: str) -> str:
        """What the solver is told after a rejection."""
        return f"A checker rejected your answer:\n{verdict}\n\nTry again."

    def accepts(self, verdict: str) -> bool | None:
        """The last ACCEPT or REJECT in the checker's words; None where there is neither."""
        words = re.findall(r"\b(ACCEPT|REJECT)\b", verdict)
        return words[-1] == "ACCEPT" if words else None

    async def arun_episode(self, engine: InferenceEngine, data: Example) -> Sequence[Trajectory]:
        solver, checker = self.members()
        settings = TeamSettings(
            tokenizer=self.tokenizer,
            sampling=self.sampling,
            template_options=self.template_options,
            rewriting=self.rewriting,
        )
        team = Team(engine, [solver, checker], settings)
        answers: list[str] = []
        verdicts: list[bool | None] = []
        said: str | Sequence[Message] = self.messages(data)
        while len(answers) < self.max_attempts:
            answer = await team.ask(solver.name, said)
            if answer is None:
                break
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
