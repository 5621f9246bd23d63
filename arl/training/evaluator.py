"""Evaluator: plays held-out examples, and what their episodes amount to: rewards with their errors, and pass@k."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from statistics import fmean, stdev

from arl.api.engine import InferenceEngine
from arl.api.errors import ConfigError, FailureBudgetError
from arl.api.events import EvaluationEnded
from arl.api.settings.run import EvaluationConfig
from arl.api.types import NOT_SAMPLED, Evaluation
from arl.rollout.controller import Dataset, EvaluationEpisode, run_examples
from arl.rollout.episode import Episode, EpisodeRunner
from arl.rollout.monitors import FORGOTTEN_RETURN, WINDOW, FirstEpisodes
from arl.training.metrics import mean_metrics, mean_rewards, role_rewards

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """One of the held-out datasets; the only one has no name."""

    name: str
    rows: range
    """Where its examples are among all."""
    repeats: int
    """Episodes of each example."""
    every: int | None
    """Its own interval in versions. None: it is in every evaluation, and in its reward."""
    first: int
    """The number of its first episode, which does not depend on which suites are played."""

    @property
    def episodes(self) -> list[EvaluationEpisode]:
        rows = [row for row in self.rows for _ in range(self.repeats)]
        return [EvaluationEpisode(number=number, row=row) for number, row in enumerate(rows, self.first)]

    def is_due(self, versions: Sequence[int] | None) -> bool:
        """Whether it is played in an evaluation that came due at these versions. None: all suites are."""
        every = self.every
        return versions is None or every is None or any(version % every == 0 for version in versions)


class Evaluator:
    """Runs episodes for held-out examples with the workflow of training, but not its buffer."""

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
        max_concurrent: int = 64,
    ) -> None:
        """seed: gives each request a seed, the same in every evaluation. None: requests keep the workflow's seed.
        places: the indices of each named dataset's examples, if they have names. task_of: the task of the example at an
        index; its workflow runs the example. Raises ConfigError if evaluation.suites names another dataset, or leaves
        none for the evaluation's own reward, and if evaluation.keep_best is a pass@k that episodes_per_example does not
        give.
        """
        self.engine = engine
        self._runner = runner
        self._dataset = dataset
        self._config = config
        self._seed = seed
        self._task_of = task_of
        self._max_concurrent = max_concurrent
        self._num_begun = 0
        self._is_named = bool(places)
        self.suites = _suites(config, places or {"": range(len(dataset))})

    def num_episodes(self, due: Sequence[int] | None = None) -> int:
        """Of an evaluation that came due at these versions. None: of one that plays all suites."""
        return sum(len(suite.episodes) for suite in self.suites if suite.is_due(due))

    async def evaluate(
        self, on_end: Callable[[], None] = lambda: None, *, is_first: bool = False, due: Sequence[int] | None = None
    ) -> tuple[Evaluation, list[Episode]]:
        """Play the suites that are due; returns their episodes, too. `version` is the published version at the start.

        Failed and rejected episodes count as reward 0. on_end: called after each episode. is_first: nothing is known
        to work yet. Then it raises FailureBudgetError if all episodes fail, or as soon as the first 64 have, and asks
        about episodes that all return None. due: the versions whose suites are played. None: all.
        """
        suites = [suite for suite in self.suites if suite.is_due(due)]
        began, version = time.monotonic(), self.engine.version
        self._num_begun = number = self._num_begun + 1
        wanted = [replace(one, task=self._task_of(one.row)) for suite in suites for one in suite.episodes]
        first = FirstEpisodes(min(len(wanted), WINDOW), " of the first evaluation") if is_first else None

        def ended(episode: Episode) -> None:
            on_end()
            if first is not None:
                first.record(episode.error)

        played = await run_examples(
            self.engine,
            self._runner,
            self._dataset,
            wanted,
            max_concurrent=self._max_concurrent,
            seed=self._seed,
            on_end=ended,
            number=number,
        )
        episodes = {one.number: episode for one, episode in zip(wanted, played, strict=True)}
        seconds, parts, own = time.monotonic() - began, dict[str, Evaluation](), list[Evaluation]()
        for suite in suites:
            members = [episodes[one.number] for one in suite.episodes]
            parts[suite.name] = _evaluation(suite, members, version, seconds)
            if suite.every is None:
                own.append(parts[suite.name])
        evaluation = _whole(own, parts) if self._is_named else parts[""]
        if is_first:
            if all(episode.is_rejected for episode in episodes.values()):
                what = {"number": len(episodes), "what": " of the first evaluation", "workflow": self._runner.called}
                log.warning(FORGOTTEN_RETURN.format(**what))
            self._check_names({s.name: [episodes[one.number] for one in s.episodes] for s in suites})
        self._report(number, evaluation)
        return evaluation, [*episodes.values()]

    def _report(self, number: int, evaluation: Evaluation) -> None:
        parts = evaluation.by_name or {}
        of_parts = {
            f"{name}/{what}": value
            for name, part in parts.items()
            for what, value in {"reward": part.reward, **part.metrics}.items()
        }
        self._runner.events.emit(
            EvaluationEnded(
                number=number,
                version=evaluation.version,
                reward=evaluation.reward,
                standard_error=evaluation.standard_error,
                num_episodes=evaluation.num_episodes,
                num_failed=evaluation.num_failed,
                seconds=evaluation.wall_s,
                metrics={**evaluation.metrics, **of_parts},
            )
        )

    def _check_names(self, episodes: Mapping[str, Sequence[Episode]]) -> None:
        """Raise FailureBudgetError if all episodes of a named dataset failed: its rewards of 0 would be no news."""
        for name, own in episodes.items():
            errors = [episode.error for episode in own]
            if self._is_named and (first := errors[0]) is not None and None not in errors:
                raise FailureBudgetError(
                    f"all {len(errors)} episodes of eval_dataset[{name!r}] failed in the first evaluation, so the run "
                    f"does not go on. The first failed with {type(first).__name__}: {first}"
                ) from first


def _suites(config: EvaluationConfig, places: Mapping[str, range]) -> list[Suite]:
    if unknown := [name for name in config.suites if name not in places]:
        known = ", ".join(map(repr, filter(None, places))) or "none, as eval_dataset is one dataset without a name"
        raise ConfigError(f"evaluation.suites names {unknown[0]!r}, and the held-out datasets are: {known}")
    suites, first = list[Suite](), 0
    for name, rows in places.items():
        own = config.suites.get(name)
        suite = Suite(
            name=name, rows=rows, repeats=config.repeats_of(name), every=own.every if own else None, first=first
        )
        first += len(suite.episodes)
        suites.append(suite)
    if all(suite.every is not None for suite in suites):
        raise ConfigError(
            "evaluation.suites has an interval for every held-out dataset, so none is left for evaluation.every, which "
            f"gives the evaluation its reward; leave `every` of {suites[0].name!r} out"
        )
    name, _, measure = (config.keep_best or "").rpartition("/")
    of = [suite for suite in suites if (suite.name == name if name else suite.every is None)]
    known = pass_names(min((suite.repeats for suite in of), default=1))
    if measure.startswith("pass@") and measure not in known:
        has = f"has {', '.join(known)}" if known else "has no pass@k, as each example is played once"
        raise ConfigError(
            f"evaluation.keep_best is {config.keep_best!r}, and {f'the suite {name!r}' if name else 'the evaluation'} "
            f"{has}; set episodes_per_example, or another metric"
        )
    return suites


def _evaluation(suite: Suite, episodes: Sequence[Episode], version: int, wall_s: float) -> Evaluation:
    """episodes: of the suite; those of an example stand together."""
    by_example = [episodes[i : i + suite.repeats] for i in range(0, len(episodes), suite.repeats)]
    estimate = Estimate.of([fmean(episode.reward for episode in own) for own in by_example])
    right = [sum(episode.is_finished and episode.reward >= 1 for episode in own) for own in by_example]
    trajectories = [trajectory for episode in episodes for trajectory in episode.trajectories]
    num_sampled = sum(int((t.versions != NOT_SAMPLED).sum()) for t in trajectories)
    num_at_version = sum(int((t.versions == version).sum()) for t in trajectories)
    return Evaluation(
        version=version,
        reward=estimate.mean,
        standard_error=estimate.standard_error,
        num_episodes=len(episodes),
        num_failed=sum(episode.error is not None for episode in episodes),
        wall_s=wall_s,
        metrics={
            **mean_metrics(trajectories),
            **mean_rewards(episode.trajectories for episode in episodes),
            **role_rewards(episode.trajectories for episode in episodes),
            **{
                name: fmean(pass_at_k(suite.repeats, count, int(name.removeprefix("pass@"))) for count in right)
                for name in pass_names(suite.repeats)
            },
            **({"at_version": num_at_version / num_sampled} if num_sampled else {}),
        },
    )


def _whole(own: Sequence[Evaluation], parts: Mapping[str, Evaluation]) -> Evaluation:
    """All suites as one evaluation. own: those that give it its reward, each the same weight."""
    errors = [part.standard_error for part in own if part.standard_error is not None]
    return Evaluation(
        version=own[0].version,
        reward=fmean(part.reward for part in own),
        standard_error=math.hypot(*errors) / len(own) if len(errors) == len(own) else None,
        num_episodes=sum(part.num_episodes for part in parts.values()),
        num_failed=sum(part.num_failed for part in parts.values()),
        wall_s=own[0].wall_s,
        metrics=_mean_of([part.metrics for part in own]),
        by_name=parts,
    )


def _mean_of(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each dataset has the same weight. pass@k only where all have it: a mean over fewer would be another measure."""
    names = dict.fromkeys(name for one in metrics for name in one)
    values = {name: [one[name] for one in metrics if name in one] for name in names}
    return {
        name: fmean(known)
        for name, known in values.items()
        if len(known) == len(metrics) or not name.startswith("pass@")
    }


def pass_names(repeats: int) -> list[str]:
    """The measures that an example's episodes give: pass@k for k = 1, 2, 4, ...; none with one episode."""
    return [f"pass@{1 << i}" for i in range(repeats.bit_length())] if repeats > 1 else []
