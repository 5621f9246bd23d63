"""The training of one batch: a Learner turns groups into optimizer steps. It blocks.

groups --> sequences --> logprobs, values --> advantages --> minibatches | --> critic, policy --> metrics
                         process rewards                     selected,   |     reward model
                         forward passes                      weighed     |
`prepare`, which changes no weights, but those of a reward model         | `train`
that learns before it is asked

The implicit process reward model (PRIME) learns beside the policy:

after:    batch --> process rewards | --> learn, policy          one forward pass of each token, beside the reference's
before:   batch --> learn --> process rewards | --> policy       two: PRIME's double forward
          `judge`                             | `train`

Its version is one ahead of the policy's between both updates. So a batch that is judged again, after an interruption
or from a checkpoint, is not learned from twice.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from arl.algorithm.advantages import arranged, with_advantages
from arl.algorithm.batch import Batch, loss_weights, selected_tokens
from arl.algorithm.flat_sequences import FlatSequences
from arl.algorithm.groups import comparison_metrics
from arl.algorithm.losses.reinforcement import PolicyLoss, ValueLoss
from arl.algorithm.returns import ImplicitRewardLoss, lesson_of, outcomes_of, read_sequences
from arl.api.errors import CheckpointError
from arl.api.settings.algorithm import AlgorithmConfig
from arl.api.settings.objective import RewardModelConfig
from arl.api.settings.run import EventsConfig
from arl.api.train_engine import Saving, TensorPrint, TrainEngine
from arl.api.types import Group
from arl.training.token_log import KeptBatch, TrainedBatch, kept_batch

BESIDE = ("critic", "reward_model")
"""The roles of models that are trained beside the policy; each is a section of `algorithm`, too."""


@dataclass(frozen=True, slots=True)
class _Savings:
    parts: tuple[Saving, ...]

    def wait(self) -> None:
        with ExitStack() as stack:
            for saving in reversed(self.parts):
                stack.callback(saving.wait)


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
        rewards = self._config.beta * (torch.cat(self._engine.forward(texts)).double() - reference.double())
        return Judged(batch=replace(batch, implicit_rewards=rewards), lesson=lesson, metrics=metrics)

    def learn(self, lesson: Sequence[FlatSequences]) -> dict[str, float]:
        """One optimizer step for each minibatch. Returns the metrics."""
        if not lesson:
            return {}
        metrics = self._engine.train_batch(lesson, ImplicitRewardLoss(beta=self._config.beta))
        return {f"reward_model/{name}": value for name, value in metrics.items()}


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
        beside = {"critic": critic, "reward_model": reward_model}
        self.engines = {"policy": engine} | {role: one for role, one in beside.items() if one is not None}
        """By role."""
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
        judged = Judged(batch=batch)
        if self._reward_model:
            parts = self._minibatches(len(groups), len(replayed), 1)
            judged = self._reward_model.judge(batch, parts, self.version)
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
        sums = batch.sums(batch.advantages.double())
        return PreparedBatch(
            minibatches=minibatches,
            of_critic=of_critic,
            advantages=[total / count if count else None for total, count in zip(sums, batch.counts, strict=True)],
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
        metrics = dict(batch.metrics)
        if self.critic and config.critic:
            learned = self.critic.train_batch(batch.of_critic, ValueLoss(value_clip=config.critic.value_clip))
            metrics |= {f"critic/{name}": value for name, value in learned.items()}
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
        for engine in self.engines.values():
            engine.offload()

    def onload(self) -> None:
        for engine in self.engines.values():
            engine.onload()

    def fingerprint(self) -> dict[str, TensorPrint]:
        """The fingerprints of all trained tensors; those of models beside the policy are named `ROLE.NAME`."""
        return {
            name if role == "policy" else f"{role}.{name}": one
            for role, engine in self.engines.items()
            for name, one in engine.fingerprint().items()
        }

    def save(self, directory: Path) -> Saving:
        """Save the policy's own files; with models beside it, a directory for each role."""
        if len(self.engines) == 1:
            return self.engine.save(directory)
        directory.mkdir(parents=True, exist_ok=True)
        return _Savings(tuple(engine.save(directory / role) for role, engine in self.engines.items()))

    def load(self, directory: Path) -> None:
        """Raises CheckpointError, which names the mismatch."""
        for role in BESIDE:
            was_there = (directory / role).is_dir()
            if was_there != (role in self.engines):
                wrote, has = ("with", "none") if was_there else ("without", "one")
                raise CheckpointError(
                    f"{directory} was written {wrote} a {role.replace('_', ' ')}, and this run has {has}: set "
                    f"algorithm.{role} as it was, or use another run_dir"
                )
        for role, engine in self.engines.items():
            engine.load(directory if len(self.engines) == 1 else directory / role)

    def close(self) -> None:
        """Close all engines, whichever fails."""
        with ExitStack() as stack:
            for engine in reversed([*self.engines.values()]):
                stack.callback(engine.close)

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
        if self._events is None:
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
