"""The implicit process reward model of PRIME (2502.01456): what it reads of a batch, and its loss.

    r_t = beta log(pi(y_t) / pi_ref(y_t))           eq. 3; pi learns, pi_ref is its first model; t over trained tokens
    loss = mean over episodes of CE(sigmoid(sum r_t), R)          algorithm 1, line 8; R the outcome, between 0 and 1

So sigmoid(sum r_t) is the chance of success that the model sees in an episode, and r_t is what token t adds to its
logit. With rewards of 0 and 1 this is the log-likelihood of a classifier. It learns from outcomes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from arl.algorithm.batch import Batch, joined, loss_weights
from arl.algorithm.flat_sequences import FlatSequences
from arl.algorithm.groups import mean
from arl.algorithm.losses.surrogates import ROUNDING
from arl.api.errors import TrajectoryError
from arl.api.train_engine import PackedTokens, TokenLosses, TokenOutputs


def read_sequences(batch: Batch) -> FlatSequences:
    """[N] The trajectories as a reward model reads them: those that are masked out, too, because the process rewards of
    all peers are compared."""
    return _as_text(batch, loss_mask=joined((t.loss_mask for t in batch.trajectories), np.bool_))


def lesson_of(batch: Batch) -> FlatSequences:
    """[N] A minibatch from which a reward model learns. `batch` has its reference's logprobs, and outcomes as returns.

    The trajectories of an episode, of one role, are a unit: their log-ratios are added up, because together they are
    the tokens that the agent chose. An episode weighs 1 / (S n) for each of its n trained tokens, S episodes in the
    batch.
    """
    return replace(_as_text(batch, loss_weights=loss_weights(batch, "sequence_mean")), units=batch.episode)


def _as_text(batch: Batch, **columns: torch.Tensor) -> FlatSequences:
    """[N] Sequences with these columns, whatever temperature, ids and experts they were sampled with.

    Beside arrays a temperature is no taste of the sampler's, but what the user's model takes it for: it stays.
    """
    own = batch.sequences()
    temperatures = tuple(t.temperature if t.arrays else 1.0 for t in batch.trajectories)
    return replace(own, columns={**own.columns, **columns}, temperatures=temperatures, kept_ids=None, routes=None)


def outcomes_of(batch: Batch) -> list[float]:
    """[N] The outcome of each trajectory's episode: the mean reward of its trajectories of the role, without penalties
    for length. Raises TrajectoryError for a reward that is no probability."""
    members: dict[int, list[float]] = {}
    for trajectory, episode, group in zip(batch.trajectories, batch.episode, batch.group, strict=True):
        if not 0 <= trajectory.reward <= 1:
            raise TrajectoryError(
                f"a trajectory of group {batch.groups[group].group_id}, role {trajectory.role!r}, has reward "
                f"{trajectory.reward:g}, and algorithm.reward_model learns the chance of success from rewards between "
                "0 and 1; scale the workflow's reward, or leave reward_model out"
            )
        members.setdefault(episode, []).append(trajectory.reward)
    return [mean(members[episode]) for episode in batch.episode]


def implicit_rewards(logprobs: Sequence[torch.Tensor], reference: torch.Tensor, beta: float) -> torch.Tensor:
    """float64[T]: r_t; 0 where nothing was sampled for training. logprobs: of each trajectory. reference: [T]."""
    return beta * (torch.cat([*logprobs]).double() - reference.double())


@dataclass(frozen=True, slots=True, kw_only=True)
class ImplicitRewardLoss:
    """The cross-entropy of sigmoid(sum r_t) and an episode's outcome; each token of the episode carries all of it.

    Metrics: accuracy (share of episodes of which sum r_t > 0 says rightly whether R > 1/2; sums that are rounding count
    half, as before the first update), success (sigmoid(sum r_t), mean over episodes), process_reward (r_t, mean over
    tokens).
    """

    beta: float

    def __call__(self, outputs: TokenOutputs, tokens: PackedTokens) -> TokenLosses:
        rewards = self.beta * (outputs.logprobs - tokens.reference_logprobs)
        num_units = int(tokens.unit_ids.max()) + 1 if len(tokens.unit_ids) else 0
        logits = rewards.new_zeros(num_units).index_add(0, tokens.unit_ids, rewards)[tokens.unit_ids]
        outcomes = tokens.returns
        says = torch.where(logits.abs() > self.beta * ROUNDING, logits, 0.0).detach()
        won = torch.where(outcomes > 0.5, 1.0, -1.0)
        return TokenLosses(
            loss=F.binary_cross_entropy_with_logits(logits, outcomes, reduction="none"),
            means={"process_reward": rewards.detach()},
            weighted={"accuracy": ((says * won).sign() + 1) / 2, "success": logits.detach().sigmoid()},
        )
