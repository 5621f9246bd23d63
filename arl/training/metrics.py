"""The numbers of a run: evaluations on held-out examples, and metrics of batches."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from statistics import fmean, pstdev, stdev

from arl.api.config import EvaluationConfig
from arl.api.engine import InferenceEngine, PublishStats
from arl.api.errors import FailureBudgetError
from arl.api.events import EvaluationEnded
from arl.api.types import Evaluation, Group, Trajectory
from arl.rollout.controller import Dataset, EvaluationRules, run_examples
from arl.rollout.episode import Episode, EpisodeRunner, episode_reward
from arl.rollout.watches import FORGOTTEN_RETURN, WINDOW, FirstEpisodes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over examples."""

    mean: float
    standard_error: float | None
    """None with one example."""
    num_examples: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """values: one for each example, the mean of its episodes. Episodes of one example are not independent, so an
        example is a cluster: the error is the values' standard deviation over the root of their number (Miller 2024,
        2411.00640, section 2.2)."""
        error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return cls(mean=fmean(values), standard_error=error, num_examples=len(values))


def with_error(mean: float, standard_error: float | None) -> str:
    """`0.412 ± 0.031`; the mean alone where there is no error."""
    return f"{mean:.3f}" + ("" if standard_error is None else f" ± {standard_error:.3f}")


def pass_at_k(num_episodes: int, num_right: int, k: int) -> float:
    """The chance that at least one of k episodes is right: the unbiased estimate from n >= k episodes, c of them right.

    pass@k = 1 - C(n - c, k) / C(n, k), eq. 1 of "Evaluating Large Language Models Trained on Code" (2107.03374), in
    whole numbers up to the division. Raises ValueError for fewer than k episodes.
    """
    if not 0 <= num_right <= num_episodes or not 1 <= k <= num_episodes:
        raise ValueError(f"pass@{k} of {num_right} right among {num_episodes} episodes; it needs at least k of them")
    return float(1 - Fraction(math.comb(num_episodes - num_right, k), math.comb(num_episodes, k)))


class Evaluator:
    """Runs episodes for each held-out example with the workflow and engine of training, but not its buffer."""

    def __init__(
        self,
        engine: InferenceEngine,
        runner: EpisodeRunner,
        dataset: Dataset,
        config: EvaluationConfig,
        *,
        seed: int | None = None,
        places: Mapping[str, range] | None = None,
        task_of: Callable[[int], str] = lambda _: "",
    ) -> None:
        """seed: gives each request a seed, the same in every evaluation. None: requests keep the workflow's seed.
        places: the indices of each named dataset's examples, if they have names. task_of: the task of the example
        at an index; its workflow runs the example.
        """
        self._task_of = task_of
        self._places = places or {}
        self._num_begun = 0
        self._engine = engine
        self._runner = runner
        self._dataset = dataset
        self._config = config
        self._seed = seed

    @property
    def num_examples(self) -> int:
        return len(self._dataset)

    async def evaluate(
        self, on_end: Callable[[], None] = lambda: None, *, is_first: bool = False
    ) -> tuple[Evaluation, list[Episode]]:
        """Run all held-out examples; returns their episodes, too. `version` is the published version at the start.

        Failed and rejected episodes count as reward 0. on_end: called after each episode. is_first: nothing is known
        to work yet. Then it raises FailureBudgetError if all episodes fail, or as soon as the first 64 have, and asks
        about episodes that all return None.
        """
        repeats = self._config.episodes_per_example
        first = (
            FirstEpisodes(min(repeats * len(self._dataset), WINDOW), " of the first evaluation") if is_first else None
        )

        def ended(episode: Episode) -> None:
            on_end()
            if first is not None:
                first.record(episode.error)

        began, version = time.monotonic(), self._engine.version
        self._num_begun = number = self._num_begun + 1
        episodes = await run_examples(
            self._engine,
            self._runner,
            self._dataset,
            max_concurrent=self._config.max_concurrent_episodes,
            seed=self._seed,
            on_end=ended,
            number=number,
            rules=EvaluationRules(repeats=repeats, task_of=self._task_of),
        )
        if is_first and all(episode.is_rejected for episode in episodes):
            what = {"number": len(episodes), "what": " of the first evaluation", "workflow": self._runner.called}
            log.warning(FORGOTTEN_RETURN.format(**what))
        evaluation = _evaluation(episodes, self._config, version, time.monotonic() - began)
        parts = {
            name: _evaluation(self._of(places, episodes), self._config, version, evaluation.wall_s)
            for name, places in self._places.items()
        }
        if is_first:
            self._check_names(episodes)
        if parts:
            evaluation = replace(
                evaluation,
                reward=fmean(part.reward for part in parts.values()),
                standard_error=_error_of_mean([part.standard_error for part in parts.values()]),
                by_name=parts,
            )
        self._runner.events.emit(
            EvaluationEnded(
                number=number,
                version=version,
                reward=evaluation.reward,
                standard_error=evaluation.standard_error,
                num_episodes=evaluation.num_episodes,
                num_failed=evaluation.num_failed,
                seconds=evaluation.wall_s,
                metrics={
                    **evaluation.metrics,
                    **{f"{name}/reward": part.reward for name, part in parts.items()},
                },
            )
        )
        return evaluation, episodes

    def _of(self, places: range, episodes: Sequence[Episode]) -> Sequence[Episode]:
        """Those of the examples at these places."""
        repeats = self._config.episodes_per_example
        return episodes[repeats * places.start : repeats * places.stop]

    def _check_names(self, episodes: Sequence[Episode]) -> None:
        """Raise FailureBudgetError if all episodes of a named dataset failed: its rewards of 0 would be no news."""
        for name, places in self._places.items():
            errors = [episode.error for episode in self._of(places, episodes)]
            if (first := errors[0]) is not None and None not in errors:
                raise FailureBudgetError(
                    f"all {len(errors)} episodes of eval_dataset[{name!r}] failed in the first evaluation, so the run "
                    f"does not go on. The first failed with {type(first).__name__}: {first}"
                ) from first


def _evaluation(episodes: Sequence[Episode], config: EvaluationConfig, version: int, wall_s: float) -> Evaluation:
    """episodes: those of an example stand together."""
    repeats = config.episodes_per_example
    by_example = [episodes[i : i + repeats] for i in range(0, len(episodes), repeats)]
    estimate = Estimate.of([fmean(episode.reward for episode in own) for own in by_example])
    return Evaluation(
        version=version,
        reward=estimate.mean,
        standard_error=estimate.standard_error,
        num_episodes=len(episodes),
        num_failed=sum(episode.error is not None for episode in episodes),
        wall_s=wall_s,
        metrics={
            **mean_metrics([t for episode in episodes for t in episode.trajectories]),
            **mean_rewards(episode.trajectories for episode in episodes),
            **_passes(by_example, config.pass_reward),
        },
    )


def _passes(by_example: Sequence[Sequence[Episode]], pass_reward: float) -> dict[str, float]:
    """`pass@k` for k = 1, 2, 4, ..., as far as the examples have episodes; nothing with one episode each."""
    repeats = len(by_example[0])
    right = [sum(episode.is_finished and episode.reward >= pass_reward for episode in own) for own in by_example]
    ks = [1 << i for i in range(repeats.bit_length())] if repeats > 1 else []
    return {f"pass@{k}": fmean(pass_at_k(repeats, count, k) for count in right) for k in ks}


def _error_of_mean(errors: Sequence[float | None]) -> float | None:
    """The standard error of the mean of independent means; None if one of their errors is unknown."""
    known = [error for error in errors if error is not None]
    return math.hypot(*known) / len(errors) if len(known) == len(errors) else None


# Metrics of batches and runs, computed from records alone.


@dataclass(slots=True, kw_only=True)
class RunTotals:
    """Totals of a run over all its starts, kept in checkpoints. The rollout controller keeps its own counters."""

    wall_s: float = 0.0
    """Training time in seconds."""
    max_staleness_seen: int = 0
    """The largest staleness of a trained token so far."""


def episode_rewards(groups: Sequence[Group]) -> list[float]:
    """One reward for each episode. With several trajectories it is the mean over the roles."""
    return [episode_reward(episode) for episode in _episodes(groups)]


def _episodes(groups: Sequence[Group]) -> list[list[Trajectory]]:
    episodes: list[list[Trajectory]] = []
    for group in groups:
        by_episode: dict[int, list[Trajectory]] = {}
        for index, trajectory in zip(group.episode_indices, group.trajectories, strict=True):
            by_episode.setdefault(index, []).append(trajectory)
        episodes += by_episode.values()
    return episodes


def batch_metrics(
    groups: Sequence[Group], version: int, replayed: Sequence[Group] = (), *, mask_truncated: bool = False
) -> dict[str, float]:
    """Staleness of the trained tokens at the trainer's `version`, lengths, the workflow's metrics and reward parts.

    replayed: groups of earlier batches, trained beside the new ones. They count in the staleness alone.
    mask_truncated: truncated trajectories are not trained.
    """

    def is_trained(trajectory: Trajectory) -> bool:
        return not (mask_truncated and trajectory.is_truncated)

    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    all_trained = [*trajectories, *(trajectory for group in replayed for trajectory in group.trajectories)]
    trained = [t for t in all_trained if is_trained(t) and t.oldest_version is not None]
    num_tokens = sum(t.num_trained_tokens for t in trained)
    return {
        "staleness/mean": (version * num_tokens - sum(map(_sum_of_versions, trained))) / max(num_tokens, 1),
        "staleness/max": version - min((t.oldest_version or 0 for t in trained), default=version),
        "replayed_groups": len(replayed),
        "equal_groups": fmean(map(_is_equal, groups)),
        "truncated": fmean(t.is_truncated for t in trajectories),
        "branches": fmean(len(own) - len({t.role for t in own}) for own in _episodes(groups)),
        "length/tokens": fmean(len(t.token_ids) for t in trajectories),
        "length/tokens_max": max(len(t.token_ids) for t in trajectories),
        "length/trained_tokens": fmean(t.num_trained_tokens * is_trained(t) for t in trajectories),
        **_lengths_by_outcome(groups, is_trained),
        **mean_metrics(trajectories),
        **mean_rewards(_episodes(groups)),
        **_of_tasks(groups),
    }


def _of_tasks(groups: Sequence[Group]) -> dict[str, float]:
    """`task/NAME/...` for each task in the batch; nothing without tasks."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(group.task for group in groups if group.task):
        own = [group for group in groups if group.task == name]
        found |= {
            f"task/{name}/reward": fmean(episode_rewards(own)),
            f"task/{name}/share": len(own) / len(groups),
            f"task/{name}/equal_groups": fmean(map(_is_equal, own)),
        }
    return found


def _lengths_by_outcome(groups: Iterable[Group], is_trained: Callable[[Trajectory], bool]) -> dict[str, float]:
    """Trained tokens of the episodes above, and of those below, their group's mean reward: each group's mean, averaged
    over the groups with both. Within a group, for hard examples may have longer episodes, won or lost."""
    winning, losing = list[float](), list[float]()
    for group in groups:
        episodes = _episodes([group])
        tokens = [sum(t.num_trained_tokens for t in episode if is_trained(t)) for episode in episodes]
        rewards = [episode_reward(episode) for episode in episodes]
        middle = fmean(rewards)
        above, below = [
            [n for n, reward in zip(tokens, rewards, strict=True) if sign * (reward - middle) > 0] for sign in (1, -1)
        ]
        if above and below:
            winning.append(fmean(above))
            losing.append(fmean(below))
    return {"length/winning_tokens": fmean(winning), "length/losing_tokens": fmean(losing)} if winning else {}


def _sum_of_versions(trajectory: Trajectory) -> int:
    """Over the trained tokens, which are of one version in most trajectories."""
    if trajectory.oldest_version == trajectory.newest_version:
        return (trajectory.oldest_version or 0) * trajectory.num_trained_tokens
    return int(trajectory.versions[trajectory.loss_mask].sum())


def reward_metrics(rewards: Sequence[float]) -> dict[str, float]:
    """Statistics of a batch's episode rewards."""
    return {
        "reward": fmean(rewards),
        "reward_std": pstdev(rewards),
        "reward_min": min(rewards),
        "reward_max": max(rewards),
    }


def _is_equal(group: Group) -> bool:
    """Whether the outcomes are equal within each role."""
    return len({(t.role, t.reward) for t in group.trajectories}) == len({t.role for t in group.trajectories})


def mean_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`episode/NAME`: each workflow metric, averaged over the trajectories that have it."""
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            values.setdefault(f"episode/{name}", []).append(value)
    return {name: fmean(numbers) for name, numbers in values.items()}


def mean_rewards(episodes: Iterable[Sequence[Trajectory]]) -> dict[str, float]:
    """`reward/NAME`: each named part of the reward, averaged over an episode's trajectories that have it, then over
    episodes."""
    values: dict[str, list[float]] = {}
    for trajectories in episodes:
        for name in dict.fromkeys(name for t in trajectories for name in t.rewards):
            own = fmean(t.rewards[name] for t in trajectories if name in t.rewards)
            values.setdefault(f"reward/{name}", []).append(own)
    return {name: fmean(numbers) for name, numbers in values.items()}


def publish_metrics(published: PublishStats | None) -> dict[str, float]:
    """The metrics of the newest complete publish, which may be of an earlier version."""
    if published is None:
        return {}
    return {
        "weights/version": published.version,
        "weights/snapshot_s": published.snapshot_s,
        "weights/transfer_s": published.transfer_s,
        "weights/pause_s": published.pause_s,
        "weights/bytes": published.num_bytes,
    }
