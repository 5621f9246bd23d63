"""Held-out examples, run with the same workflow and engine as training, apart from its buffer."""

from __future__ import annotations

import time
from statistics import fmean

from arl.api.config import EvaluationConfig
from arl.api.engine import InferenceEngine
from arl.api.workflow import RolloutWorkflow
from arl.rollout.controller import Dataset, run_examples
from arl.training.metrics import Evaluation, mean_metrics, mean_rewards


class Evaluator:
    """One episode for each held-out example, on whatever weights the engine serves meanwhile.

    seed: each request has one of its own, the same in every evaluation. Unset: none but the workflow's.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        workflow: RolloutWorkflow,
        dataset: Dataset,
        config: EvaluationConfig,
        *,
        episode_timeout_s: float,
        seed: int | None = None,
    ) -> None:
        self._engine = engine
        self._workflow = workflow
        self._dataset = dataset
        self._config = config
        self._episode_timeout_s = episode_timeout_s
        self._seed = seed

    async def evaluate(self) -> Evaluation:
        """Failed and rejected episodes count as reward 0; `version` is the one published at the start."""
        began, version = time.monotonic(), self._engine.version
        episodes = await run_examples(
            self._engine,
            self._workflow,
            self._dataset,
            max_concurrent=self._config.max_concurrent_episodes,
            timeout_s=self._episode_timeout_s,
            seed=self._seed,
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
