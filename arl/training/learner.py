"""The training of one batch: a Learner turns groups into optimizer steps. It blocks.

groups --> sequences --> logprobs, values --> advantages --> minibatches | --> critic, policy --> metrics
                         forward passes                      selected, weighed
`prepare`, which changes no weights                                      | `train`
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
from arl.api.errors import CheckpointError
from arl.api.train_sequence import TrainSequence
from arl.api.types import Group
from arl.api.weight_prints import TensorPrint
from arl.training.kept_tokens import KeptBatch, TrainedBatch, kept_batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedBatch:
    """A batch that is ready for training."""

    minibatches: list[FlatSequences]
    """The sequences of each optimizer step."""
    of_critic: list[FlatSequences]
    """The same for the critic: of a critic of turns the first token of each turn is trained. Empty without a critic."""
    advantages: list[float | None]
    """For each trajectory of the new groups, the mean over its trained tokens; None without trained tokens."""
    batch: Batch
    num_new: int
    """How many of its groups are new."""
    rows: list[list[int]]
    """The places in `batch` of each minibatch's trajectories."""
    metrics: dict[str, float]
    """What the losses cannot say of it."""


class Learner:
    """Applies the algorithm to a batch, with the train engines of the policy and of the critic, if any.

    `close` closes the engines.
    """

    def __init__(
        self,
        engine: TrainEngine,
        config: AlgorithmConfig,
        *,
        critic: TrainEngine | None = None,
        max_staleness: int = 0,
        seed: int = 0,
        events: EventsConfig | None = None,
    ) -> None:
        """events: what `train` keeps of a batch's tokens; None: nothing."""
        self.engine = engine
        self._events = events
        self.critic = critic
        self._config = config
        self._max_staleness = max_staleness
        self._seed = seed
        if config.needs_reference:
            engine.update_reference()

    @property
    def version(self) -> int:
        return self.engine.version

    def prepare(self, groups: Sequence[Group], replayed: Sequence[Group] = ()) -> PreparedBatch:
        """Compute logprobs, advantages and minibatches under the current weights. Changes no weights.

        replayed: groups of earlier batches, spread over the new groups' minibatches.
        """
        config = self._config
        batch = arranged(Batch.of([*groups, *replayed], config.overlong), config)
        batch = with_advantages(self._with_forward_passes(batch), config)
        minibatches, of_critic = list[FlatSequences](), list[FlatSequences]()
        members, rows = batch.members, list[list[int]]()
        for indices in self._minibatches(len(groups), len(replayed)):
            part = batch.take(indices)
            part = replace(part, selected=selected_tokens(part, config.selection, seed=self._seed + self.version))
            minibatches.append(self._weighed(part))
            if self.critic:
                of_critic.append(self._weighed(self._valued(part)) if config.has_critic_of_turns else minibatches[-1])
            rows.append([i for group in indices for i in members[group]])
        num_new = sum(len(group.trajectories) for group in groups)
        return PreparedBatch(
            minibatches=minibatches,
            of_critic=of_critic,
            advantages=_mean_advantages(batch)[:num_new],
            batch=batch,
            num_new=len(groups),
            rows=rows,
            metrics=comparison_metrics(batch, config),
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
        for engine in self._engines:
            engine.offload()

    def onload(self) -> None:
        for engine in self._engines:
            engine.onload()

    @property
    def _engines(self) -> list[TrainEngine]:
        return [self.engine] if self.critic is None else [self.engine, self.critic]

    def fingerprint(self) -> dict[str, TensorPrint]:
        """The fingerprints of all trained tensors; those of the critic are named `critic.NAME`."""
        prints = dict(self.engine.fingerprint())
        if self.critic:
            prints |= {f"critic.{name}": one for name, one in self.critic.fingerprint().items()}
        return prints

    def save(self, directory: Path) -> Saving:
        if self.critic is None:
            return self.engine.save(directory)
        directory.mkdir(parents=True, exist_ok=True)
        return _BothSavings(self.engine.save(directory / "policy"), self.critic.save(directory / "critic"))

    def load(self, directory: Path) -> None:
        """Raises CheckpointError, which names the mismatch."""
        has_critic = (directory / "critic").is_dir()
        if has_critic != (self.critic is not None):
            wrote, has = ("with", "none") if has_critic else ("without", "one")
            raise CheckpointError(
                f"{directory} was written {wrote} a critic, and this run has {has}: set algorithm.critic as it was, or "
                "use another run_dir"
            )
        if self.critic is None:
            self.engine.load(directory)
            return
        self.engine.load(directory / "policy")
        self.critic.load(directory / "critic")

    def close(self) -> None:
        try:
            self.engine.close()
        finally:
            if self.critic:
                self.critic.close()

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

    def _minibatches(self, num_new: int, num_replayed: int) -> Iterator[list[int]]:
        """The groups of each minibatch: equally many new ones, nearly equally many replayed ones.

        The first epoch follows the batch's order; later ones shuffle it.
        """
        config, size = self._config, num_new // self._config.minibatches
        for epoch in range(config.epochs):
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


@dataclass(frozen=True, slots=True)
class _BothSavings:
    policy: Saving
    critic: Saving

    def wait(self) -> None:
        try:
            self.policy.wait()
        finally:
            self.critic.wait()


def _mean_advantages(batch: Batch) -> list[float | None]:
    """[N] The mean over each trajectory's trained tokens; None without trained tokens."""
    sums = batch.sums(batch.advantages.double())
    return [total / count if count else None for total, count in zip(sums, batch.counts, strict=True)]
