"""The implicit process reward model (PRIME), as a Learner trains it beside the policy.

after:    batch --> process rewards | --> learn, policy          one forward pass of each token, beside the reference's
before:   batch --> learn --> process rewards | --> policy       two: PRIME's double forward
          `judge`                             | `train`

Its version is one ahead of the policy's between both updates. So a batch that is judged again, after an interruption
or from a checkpoint, is not learned from twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from arl.algorithm.batch import Batch
from arl.algorithm.flat_sequences import FlatSequences
from arl.algorithm.implicit_rewards import (
    ImplicitRewardLoss,
    implicit_rewards,
    lesson_of,
    outcomes_of,
    read_sequences,
)
from arl.api.engine import TrainEngine
from arl.api.objective import RewardModelConfig


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judged:
    """What a reward model says of a batch."""

    batch: Batch
    """With process rewards."""
    lesson: list[FlatSequences] = field(default_factory=list[FlatSequences])
    """The minibatches that it has yet to learn from."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Of what it has learned."""


class RewardModel:
    """The frozen reference is the model with which the run began."""

    def __init__(self, engine: TrainEngine, config: RewardModelConfig) -> None:
        self._engine = engine
        self._config = config
        engine.update_reference()

    def judge(self, batch: Batch, minibatches: Iterable[Sequence[int]], version: int) -> Judged:
        """Give a batch its process rewards, and learn from it first if the update is `before`.

        minibatches: the groups of each. version: the policy's. Raises TrajectoryError for rewards beyond 0 and 1.
        """
        outcomes, texts = batch.over_tokens(outcomes_of(batch)).float(), read_sequences(batch)
        reference = torch.cat(self._engine.forward(texts, "reference_logprobs"))
        read = replace(batch, reference_logprobs=reference, returns=outcomes)
        is_new = self._engine.version == version
        lesson, metrics = [lesson_of(read.take(groups)) for groups in minibatches] if is_new else [], {}
        if self._config.update == "before":
            metrics, lesson = self.learn(lesson), []
        rewards = implicit_rewards(self._engine.forward(texts), reference, self._config.beta)
        return Judged(batch=replace(batch, implicit_rewards=rewards), lesson=lesson, metrics=metrics)

    def learn(self, lesson: Sequence[FlatSequences]) -> dict[str, float]:
        """One optimizer step for each minibatch. Returns the metrics."""
        if not lesson:
            return {}
        metrics = self._engine.train_batch(lesson, ImplicitRewardLoss(beta=self._config.beta))
        return {f"reward_model/{name}": value for name, value in metrics.items()}
