"""Evaluation on held-out examples, with the same workflow and engine as training, but without its buffer."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean

from arl.api.config import EvaluationConfig
from arl.api.engine import InferenceEngine
from arl.rollout.controller import Dataset, run_examples
from arl.rollout.episode import EpisodeRunner
from arl.training.metrics import Evaluation, mean_metrics, mean_rewards


class Evaluator:
    """Runs one episode for each held-out example, on the weights that the engine serves at the time."""

    def __init__(
        self,
        engine: InferenceEngine,
        runner: EpisodeRunner,
        dataset: Dataset,
        config: EvaluationConfig,
        *,
        seed: int | None = None,
    ) -> None:
        """seed: gives each request a seed, the same in every evaluation. None: requests keep the workflow's seed."""
        self._engine = engine
        self._runner = runner
        self._dataset = dataset
        self._config = config
        self._seed = seed

    @property
    def num_examples(self) -> int:
        return len(self._dataset)

    async def evaluate(self, on_end: Callable[[], None] = lambda: None) -> Evaluation:
        """Run all held-out examples. `version` is the published version at the start.

        Failed and rejected episodes count as reward 0. on_end: called after each episode.
        """
        began, version = time.monotonic(), self._engine.version
        episodes = await run_examples(
            self._engine,
            self._runner,
            self._dataset,
            max_concurrent=self._config.max_concurrent_episodes,
            seed=self._seed,
            on_end=on_end,
        )
        return Evaluation(
            version=version,
            reward=fmean(episode.reward for episode in episodes),
            num_episodes=len(episodes),
            num_failed=sum(episode.error is not None for episode in episodes),
            wall_s=time.monotonic() - began,
            metrics={
                **mean_metrics([t for episode in episodes for t in episode.trajectories]),
                **mean_rewards(episode.trajectories for episode in episodes),
            },
        )
