"""The training of one batch: a Learner turns groups into optimizer steps. It blocks.

groups --> sequences --> logprobs, values --> advantages --> minibatches | --> critic, policy --> metrics
                         process rewards                     selected,   |     reward model
                         forward passes                      weighed     |
`prepare`, which changes no weights, but those of a reward model         | `train`
that learns before it is asked
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from arl.algorithm.advantages import arranged, with_advantages
from arl.algorithm.batch import Batch, loss_weights
from arl.algorithm.comparisons import comparison_metrics
from arl.algorithm.flat_sequences import FlatSequences
from arl.algorithm.losses.reinforcement import PolicyLoss, ValueLoss
from arl.algorithm.losses.selection import selected_tokens
from arl.api.algorithm import AlgorithmConfig
from arl.api.config import EventsConfig
from arl.api.engine import Saving, TrainEngine
from arl.api.train_sequence import TrainSequence
from arl.api.types import Group
from arl.api.weight_prints import TensorPrint
from arl.training.kept_tokens import KeptBatch, TrainedBatch, kept_batch
from arl.training.reward_model import Judged, RewardModel
from arl.training.train_engines import TrainEngines


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedBatch:
    """A batch that is ready for training."""

    minibatches: list[FlatSequences]
    """The sequences of each optimizer step."""
    of_critic: list[FlatSequences]
    """The same for the critic: of a critic of turns the first token of each turn is trained. Empty without a critic."""
    advantages: list[float | None]
    """[N] The mean over each trajectory's trained tokens, replayed groups last; None without trained tokens: it is not
    trained."""
    batch: Batch
    num_new: int
    """How many of its groups are new."""
    rows: list[list[int]]
    """The places in `batch` of each minibatch's trajectories."""
    metrics: dict[str, float]
    """What the losses cannot say of it, and what a reward model has learned of it already."""
    lesson: list[FlatSequences] = field(default_factory=list[FlatSequences])
    """What a reward model has yet to learn from the batch, a minibatch each."""


class Learner:
    """Applies the algorithm to a batch, with the train engines of the policy, and of a critic or reward model, if any.

    `close` closes the engines.
    """

    def __init__(
        self,
        engine: TrainEngine,
        config: AlgorithmConfig,
        *,
        critic: TrainEngine | None = None,
        reward_model: TrainEngine | None = None,
        max_staleness: int = 0,
        seed: int = 0,
        events: EventsConfig | None = None,
    ) -> None:
        """events: what `train` keeps of a batch's tokens; None: nothing."""
        self.engine = engine
        self._events = events
        self.critic = critic
        self.engines = TrainEngines(engine, {"critic": critic, "reward_model": reward_model})
        if (config.reward_model is None) != (reward_model is None):
            raise ValueError(f"algorithm.reward_model is {config.reward_model}, but its engine is {reward_model}")
        self._reward_model = (
            RewardModel(reward_model, config.reward_model) if reward_model and config.reward_model else None
        )
        self._config = config
        self._max_staleness = max_staleness
        self._seed = seed
        if config.needs_reference:
            engine.update_reference()

    @property
    def version(self) -> int:
        return self.engine.version

    def prepare(self, groups: Sequence[Group], replayed: Sequence[Group] = ()) -> PreparedBatch:
        """Compute logprobs, advantages and minibatches under the current weights. Changes none of the policy's.

        replayed: groups of earlier batches, spread over the new groups' minibatches.
        """
        config = self._config
        batch = self._with_forward_passes(arranged(Batch.of([*groups, *replayed], config.overlong), config))
        judged = self._judged(batch, len(groups), len(replayed))
        batch = with_advantages(judged.batch, config)
        minibatches, of_critic = list[FlatSequences](), list[FlatSequences]()
        members, rows = batch.members, list[list[int]]()
        for indices in self._minibatches(len(groups), len(replayed), config.epochs):
            part = batch.take(indices)
            part = replace(part, selected=selected_tokens(part, config.selection, seed=self._seed + self.version))
            minibatches.append(self._weighed(part))
            if self.critic:
                of_critic.append(self._weighed(self._valued(part)) if config.has_critic_of_turns else minibatches[-1])
            rows.append([i for group in indices for i in members[group]])
        return PreparedBatch(
            minibatches=minibatches,
            of_critic=of_critic,
            advantages=_mean_advantages(batch),
            batch=batch,
            num_new=len(groups),
            rows=rows,
            metrics=comparison_metrics(batch, config) | judged.metrics,
            lesson=judged.lesson,
        )

    def _weighed(self, part: Batch) -> FlatSequences:
        config = self._config
        weights = loss_weights(part, config.aggregation, sequence_tokens=config.sequence_tokens)
        return replace(part, loss_weights=weights).sequences()

    def _valued(self, batch: Batch) -> Batch:
        """The batch as the critic is given it: of one of turns, with the first token of each turn alone."""
        return replace(batch, loss_mask=batch.turn_starts) if self._config.has_critic_of_turns else batch

    def train(self, batch: PreparedBatch) -> TrainedBatch:
        """Make one optimizer step for each minibatch, then version += 1."""
        config, version = self._config, self.version
        keeps = self._events is not None
        loss = PolicyLoss.of(config, version=version, max_staleness=self._max_staleness, keeps_tokens=keeps)
        metrics = batch.metrics | self._train_critic(batch.of_critic)
        if self._reward_model:
            metrics |= self._reward_model.learn(batch.lesson)
        if config.critic and version < config.critic.warmup_batches:
            self.engine.train_batch([], loss)  # the policy stands still, and has nothing to report
        else:
            metrics |= self.engine.train_batch(batch.minibatches, loss)
        kl = config.kl
        if config.needs_reference and kl.update_every is not None and self.version % kl.update_every == 0:
            self.engine.update_reference()
        return TrainedBatch(metrics=metrics, kept=self._kept(batch))

    def offload(self) -> None:
        """Leave the device; see TrainEngine."""
        self.engines.offload()

    def onload(self) -> None:
        self.engines.onload()

    def fingerprint(self) -> dict[str, TensorPrint]:
        """The fingerprints of all trained tensors; see TrainEngines."""
        return self.engines.fingerprint()

    def save(self, directory: Path) -> Saving:
        return self.engines.save(directory)

    def load(self, directory: Path) -> None:
        """Raises CheckpointError, which names the mismatch."""
        self.engines.load(directory)

    def close(self) -> None:
        self.engines.close()

    def _judged(self, batch: Batch, num_new: int, num_replayed: int) -> Judged:
        """The batch with a reward model's process rewards, if there is one."""
        model = self._config.reward_model
        if self._reward_model is None or model is None:
            return Judged(batch=batch)
        minibatches = self._minibatches(num_new, num_replayed, model.epochs)
        return self._reward_model.judge(batch, minibatches, self.version)

    def _with_forward_passes(self, batch: Batch) -> Batch:
        """Add the logprobs and values that the algorithm needs, from before any update on the batch."""
        config, known = self._config, dict[str, torch.Tensor]()
        if not (config.needs_proximal_forward or config.needs_reference or self.critic):
            return batch
        sequences = batch.sequences()
        if config.needs_proximal_forward:
            known["proximal_logprobs"] = torch.cat(self.engine.forward(sequences, "logprobs"))
        if config.needs_reference:
            known["reference_logprobs"] = torch.cat(self.engine.forward(sequences, "reference_logprobs"))
        if self.critic:
            known["values"] = torch.cat(self.critic.forward(self._valued(batch).sequences(), "values"))
        return replace(batch, **known)

    def _kept(self, batch: PreparedBatch) -> KeptBatch | None:
        if self._events is None or self.version % self._events.every:
            return None
        parts = [*zip(batch.rows, self.engine.kept, strict=False)]  # the engine has none where the policy stood still
        return kept_batch(batch.batch, batch.num_new, parts, self._events, self._config)

    def _minibatches(self, num_new: int, num_replayed: int, epochs: int) -> Iterator[list[int]]:
        """The groups of each minibatch: equally many new ones, nearly equally many replayed ones.

        The first epoch follows the batch's order; later ones shuffle it.
        """
        config, size = self._config, num_new // self._config.minibatches
        for epoch in range(epochs):
            new, replayed = list(range(num_new)), list(range(num_new, num_new + num_replayed))
            if epoch:
                shuffle = random.Random(f"{self._seed}-{self.version}-{epoch}")
                shuffle.shuffle(new)
                shuffle.shuffle(replayed)
            for i in range(config.minibatches):
                yield [*new[i * size : (i + 1) * size], *replayed[i :: config.minibatches]]

    def _train_critic(self, minibatches: Sequence[Sequence[TrainSequence]]) -> dict[str, float]:
        critic = self._config.critic
        if self.critic is None or critic is None:
            return {}
        metrics = self.critic.train_batch(minibatches, ValueLoss(value_clip=critic.value_clip))
        return {f"critic/{name}": value for name, value in metrics.items()}


def _mean_advantages(batch: Batch) -> list[float | None]:
    """[N] The mean over each trajectory's trained tokens; None without trained tokens."""
    sums = batch.sums(batch.advantages.double())
    return [total / count if count else None for total, count in zip(sums, batch.counts, strict=True)]
