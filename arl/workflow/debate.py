"""Agents that answer one question, read what the others said, and answer again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from arl.api.errors import ConfigError
from arl.api.types import Example, Trajectory
from arl.rewards.reward import Score
from arl.workflow.agent import AgentWorkflow
from arl.workflow.team import Member, Team, TeamSettings
from arl.workflow.together import together

if TYPE_CHECKING:
    from arl.api.engine import InferenceEngine


@dataclass(kw_only=True, eq=False, repr=False)
class DebateWorkflow(AgentWorkflow):
    """Debaters answer at the same time, then for `rounds - 1` rounds read the others' answers and answer again; the
    reward judges the last answer of each.

    shared: each debater gets the mean of all rewards, and not its own. All have the role `debater`, so that they are
    compared with each other and with those of the group's other episodes. Metrics: turns.
    """

    debaters: int = 2
    rounds: int = 2
    shared: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.debaters < 2 or self.rounds < 1:
            raise ConfigError(
                f"debaters is {self.debaters} and rounds {self.rounds}; a debate needs 2 debaters and 1 round at least"
            )

    def member(self, index: int) -> Member:
        """One debater. Its name is seen by nobody but `others_said`."""
        return Member(name=f"debater {index + 1}", role="debater", system=self.system)

    def others_said(self, answers: Mapping[str, str]) -> str:
        """What a debater is told between rounds; answers: of the others, by name."""
        said = "\n\n".join(f"Another agent answered:\n{answer}" for answer in answers.values())
        return f"{said}\n\nConsider these answers, and give yours again."

    async def arun_episode(self, engine: InferenceEngine, data: Example) -> Sequence[Trajectory]:
        names = [self.member(index).name for index in range(self.debaters)]
        settings = TeamSettings(
            tokenizer=self.tokenizer,
            sampling=self.sampling,
            template_options=self.template_options,
            rewriting=self.rewriting,
        )
        team = Team(engine, [self.member(index) for index in range(self.debaters)], settings)
        question = self.messages(data)
        answers = {name: answer or "" for name, answer in (await team.ask_all(dict.fromkeys(names, question))).items()}
        for _ in range(self.rounds - 1):
            told = {name: self.others_said({n: a for n, a in answers.items() if n != name}) for name in names}
            new = await team.ask_all(told)
            answers = {name: answer if (answer := new[name]) is not None else answers[name] for name in names}
        scores = await together(self.ascore(answers[name], data) for name in names)
        return team.trajectories(self.rewards(dict(zip(names, scores, strict=True))), _mean_metrics(scores))

    def rewards(self, scores: Mapping[str, Score]) -> Mapping[str, float | Score]:
        """What each debater gets: name -> score of its last answer; name -> its reward."""
        if not self.shared:
            return scores
        parts = {name: fmean(s.parts[name] for s in scores.values()) for name in next(iter(scores.values())).parts}
        return dict.fromkeys(scores, Score(fmean(score.value for score in scores.values()), parts))


def _mean_metrics(scores: Sequence[Score]) -> dict[str, float]:
    names = dict.fromkeys(name for score in scores for name in score.metrics)
    return {name: fmean(s.metrics[name] for s in scores if name in s.metrics) for name in names}
