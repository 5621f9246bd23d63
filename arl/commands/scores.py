"""What a number of episodes says about a model: means with their standard errors, and pass@k."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean, stdev

from arl.algorithm.pass_at_k import pass_at_k
from arl.commands.episodes import Run, Work
from arl.rollout.episode import Episode, rewards_by_role
from arl.training.stats import mean_rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over examples. standard_error: None with one example."""

    mean: float
    standard_error: float | None
    num_examples: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """values: one for each example; episodes of one example are not independent, so that each counts as one
        cluster (Miller 2024, 2411.00640, section 2.2)."""
        error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return cls(mean=fmean(values), standard_error=error, num_examples=len(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What is kept of an episode. means: its numbers by name, the workflow's and arl's own; none without an end."""

    reward: float
    passed: bool
    is_rejected: bool
    error: Exception | None
    means: Mapping[str, Sequence[float]]

    @classmethod
    def of(cls, episode: Episode, pass_reward: float) -> Outcome:
        return cls(
            reward=episode.reward,
            passed=episode.is_finished and episode.reward >= pass_reward,
            is_rejected=episode.is_rejected,
            error=episode.error,
            means=_numbers(episode) if episode.is_finished else {},
        )


@dataclass(slots=True, kw_only=True)
class Scores:
    """Adds up episodes as they end. pass_reward: an episode passes with this reward or more. Episodes that failed or
    were rejected have reward 0 and do not pass."""

    ks: Sequence[int]
    pass_reward: float
    by_example: dict[int, list[Outcome]] = field(default_factory=dict[int, list[Outcome]])
    num_episodes: int = 0
    num_failed: int = 0
    num_rejected: int = 0
    total_reward: float = 0.0
    first_error: tuple[Work, Exception] | None = None

    def add(self, run: Run) -> Outcome:
        outcome = Outcome.of(run.episode, self.pass_reward)
        self.by_example.setdefault(run.work.index, []).append(outcome)
        self.num_episodes += 1
        self.num_failed += outcome.error is not None
        self.num_rejected += outcome.is_rejected
        self.total_reward += outcome.reward
        if outcome.error is not None and self.first_error is None:
            self.first_error = (run.work, outcome.error)
        return outcome

    def estimates(self) -> dict[str, Estimate]:
        """The reward, and pass@k over the examples that have k episodes: not all have, in a run that was stopped."""
        groups = list(self.by_example.values())
        found = {"reward": Estimate.of([fmean(outcome.reward for outcome in group) for group in groups])}
        for k in self.ks:
            chances = [
                pass_at_k(len(group), sum(outcome.passed for outcome in group), k)
                for group in groups
                if len(group) >= k
            ]
            if chances:
                found[f"pass@{k}"] = Estimate.of(chances)
        return found

    def means(self) -> dict[str, float]:
        """Over what has such a number: parts of the reward, rewards of roles where there are several, the workflow's
        metrics, trained tokens, whether a length limit cut an episode, and its seconds."""
        values: dict[str, list[float]] = {}
        for outcome in chain.from_iterable(self.by_example.values()):
            for name, numbers in outcome.means.items():
                values.setdefault(name, []).extend(numbers)
        return {name: fmean(numbers) for name, numbers in values.items()}


def _numbers(episode: Episode) -> dict[str, list[float]]:
    trajectories = episode.trajectories
    of_roles = rewards_by_role(trajectories) if len({t.role for t in trajectories}) > 1 else {}
    own = {**mean_rewards([trajectories]), **{f"reward of {role}": value for role, value in of_roles.items()}}
    found = {name: [value] for name, value in own.items()}
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            found.setdefault(name, []).append(value)
    found["trained tokens"] = [sum(trajectory.num_trained_tokens for trajectory in trajectories)]
    found["cut by a limit"] = [any(trajectory.is_truncated for trajectory in trajectories)]
    found["seconds"] = [episode.elapsed_s]
    return found
