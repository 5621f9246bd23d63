"""Rewards along the way: which trained token each counts for, and what later ones are worth to earlier tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from arl.algorithm.baselines import RELATIVE
from arl.algorithm.peers import Peers, joined, kl_penalties, pooled_spread
from arl.api.algorithm import GAEAdvantage, KLConfig, ReturnsAdvantage
from arl.api.types import TrainSequence, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTokens:
    """Where trained tokens lie. mask bool[T]; last int64[T]: the last one at or before each token, -1: none is."""

    mask: torch.Tensor
    last: torch.Tensor

    @classmethod
    def of(cls, mask: torch.Tensor) -> TrainedTokens:
        places = torch.arange(len(mask))
        return cls(mask=mask, last=torch.where(mask, places, -1).cummax(0).values)

    def credited(self, places: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
        """float64[T]: rewards of the tokens at `places`, each given to the last trained token at or before it.

        One that comes before every trained token is left out: nothing that is trained led to it.
        """
        owners = self.last[places]
        is_earned = owners >= 0
        return torch.zeros(len(self.mask), dtype=torch.float64).index_add_(0, owners[is_earned], rewards[is_earned])


def token_rewards(trajectory: Trajectory, tokens: TrainedTokens) -> torch.Tensor:
    """float64[T]: what each trained token has of its trajectory's token_rewards."""
    rewards = trajectory.token_rewards or (0.0,) * len(tokens.mask)
    return tokens.credited(torch.arange(len(tokens.mask)), torch.tensor(rewards, dtype=torch.float64))


def turn_rewards(trajectory: Trajectory, tokens: TrainedTokens, rewards: torch.Tensor) -> torch.Tensor:
    """float64[T]: rewards of the trajectory's turns, each at the turn's last token."""
    ends = torch.tensor([turn.stop - 1 for turn in trajectory.turns], dtype=torch.int64)
    return tokens.credited(ends, rewards)


def normalised_process_rewards(peers: Peers, settings: ReturnsAdvantage) -> list[torch.Tensor] | None:
    """float64[T] for each of the peers: its process rewards as `settings` normalise them; None: there are none.

    Rewards of tokens are normalised among the peers' trained tokens, and those of turns among their turns, apart from
    each other and from the outcome (PRIME, 2502.01456; GRPO's process supervision, 2402.03300, 4.1.3):

        none, greedy:                   as they are
        group_mean, length_weighted:    less the mean over all of them
        leave_one_out:                  less the mean of the other episodes' means
        group_std:                      divided by the standard deviation over all of them + 1e-6

    A trajectory without token_rewards or turns has none and counts in no mean. With a baseline of the peers' they are
    0 where all are equal, and for an episode that is alone.
    """
    of_tokens = any(any(t.token_rewards or ()) for t in peers.trajectories)
    of_turns = any(turn.reward for t in peers.trajectories for turn in t.turns)
    if not of_tokens and not of_turns:
        return None
    trained = [TrainedTokens.of(torch.tensor(t.loss_mask, dtype=torch.bool)) for t in peers.trajectories]
    places = [torch.zeros(len(tokens.mask), dtype=torch.float64) for tokens in trained]
    if of_tokens:
        given = [token_rewards(t, tokens)[tokens.mask] for t, tokens in zip(peers.trajectories, trained, strict=True)]
        rewarded = [v if t.token_rewards else v[:0] for t, v in zip(peers.trajectories, given, strict=True)]
        for place, tokens, values in zip(places, trained, _normalised(rewarded, peers, settings), strict=True):
            if len(values):
                place[tokens.mask] = values
    if of_turns:
        rewarded = [torch.tensor([turn.reward for turn in t.turns], dtype=torch.float64) for t in peers.trajectories]
        for i, values in enumerate(_normalised(rewarded, peers, settings)):
            places[i] += turn_rewards(peers.trajectories[i], trained[i], values)
    return places


def returns_to_go(
    rewards: torch.Tensor, mask: torch.Tensor, trajectory: Trajectory, settings: ReturnsAdvantage
) -> torch.Tensor:
    """float64[T]: for each trained token the sum of its and all later rewards.

    One of n trained tokens and m turns later counts token_discount^n turn_discount^m. A trained token outside every
    turn belongs to the turn before it.
    """
    places = mask.nonzero().flatten()
    kept = torch.full((max(len(places) - 1, 0),), settings.token_discount, dtype=torch.float64)
    if settings.turn_discount < 1 and trajectory.turns:
        starts = torch.tensor([turn.start for turn in trajectory.turns])
        turn_numbers = torch.searchsorted(starts, places, right=True)
        kept = kept * settings.turn_discount ** turn_numbers.diff().double()
    sums = torch.zeros_like(rewards)
    sums[places] = discounted_sums(rewards[places], kept)
    return sums


def discounted_sums(rewards: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """y_t = rewards_t + kept_t y_{t+1} for float64[n] rewards and float64[n - 1] of what is kept from each to the next.

    By doubling: after the k-th round y_t holds the terms of 2^k tokens, and `kept` what reaches t from the one after.
    """
    sums, kept, reach = rewards.clone(), kept.clone(), 1
    while reach < len(sums):
        sums[:-reach] += kept * sums[reach:]
        kept = kept[: max(len(kept) - reach, 0)] * kept[reach:]
        reach *= 2
    return sums


def _normalised(rewards: Sequence[torch.Tensor], peers: Peers, settings: ReturnsAdvantage) -> list[torch.Tensor]:
    """Each trajectory's process rewards of one kind, less their baseline, over their scale."""
    spread = pooled_spread(rewards)
    is_relative = settings.baseline in RELATIVE
    if is_relative and (spread.std == 0 or len(peers.episodes) == 1):
        return [torch.zeros_like(r) for r in rewards]
    divisor = spread.divisor if settings.scale == "group_std" else 1.0
    if settings.baseline == "leave_one_out":
        return [(r - other) / divisor for r, other in zip(rewards, _means_of_others(rewards, peers), strict=True)]
    mean = spread.mean if is_relative else 0.0
    return [(r - mean) / divisor for r in rewards]


def _means_of_others(rewards: Sequence[torch.Tensor], peers: Peers) -> list[torch.Tensor | float]:
    """For each trajectory the mean of the other episodes' means; its own rewards where no other has any."""
    pooled = [joined([rewards[i] for i in members]) for members in peers.episodes]
    means = [float(r.mean()) for r in pooled if len(r)]
    if len(means) < 2:
        return list(rewards)
    total, others = math.fsum(means), list[torch.Tensor | float](rewards)
    for members, own in zip(peers.episodes, pooled, strict=True):
        for i in members:
            others[i] = (total - float(own.mean())) / (len(means) - 1) if len(own) else 0.0
    return others


# Generalised advantage estimation over the trained tokens of a trajectory (1506.02438).


def gae_advantages(peers: Peers, settings: GAEAdvantage, kl: KLConfig) -> list[torch.Tensor]:
    """float64[T] for each of the peers, who do not see each other. With t over its trained tokens alone (eq. 11, 16):

        delta_t = r_t + discount V_{t+1} - V_t        A_t = delta_t + discount lam A_{t+1}

    Untrained tokens in between are stepped over: the environment's answer is part of the transition. r_t are the
    process rewards since t, less the KL in the reward; the last token has the outcome too. After it V is 0, also where
    a length limit ended the trajectory, as in verl and TRL: its reward says what being cut off is worth.
    """
    penalties = kl_penalties(peers.sequences, kl) or [torch.zeros(len(s)) for s in peers.sequences]
    rows = zip(peers.trajectories, peers.sequences, peers.outcomes, penalties, strict=True)
    return [_of_one(_rewards(t, s, outcome) - penalty, s, settings) for t, s, outcome, penalty in rows]


def _rewards(trajectory: Trajectory, sequence: TrainSequence, outcome: float) -> torch.Tensor:
    """float64[T]: what each trained token is given."""
    tokens = TrainedTokens.of(sequence.loss_mask)
    rewards = tokens.credited(tokens.last[-1:].clamp(min=0), torch.tensor([outcome], dtype=torch.float64))
    if trajectory.token_rewards:
        rewards += token_rewards(trajectory, tokens)
    if trajectory.turns:
        of_turns = torch.tensor([turn.reward for turn in trajectory.turns], dtype=torch.float64)
        rewards += turn_rewards(trajectory, tokens, of_turns)
    return rewards


def _of_one(rewards: torch.Tensor, sequence: TrainSequence, settings: GAEAdvantage) -> torch.Tensor:
    places = sequence.loss_mask.nonzero().flatten()
    values = sequence.values[places].double()
    following = torch.cat((values[1:], values.new_zeros(min(len(values), 1))))
    deltas = rewards[places] + settings.discount * following - values
    kept = torch.full((max(len(places) - 1, 0),), settings.discount * settings.lam, dtype=torch.float64)
    advantages = torch.zeros(len(sequence), dtype=torch.float64)
    advantages[places] = discounted_sums(deltas, kept)
    return advantages
