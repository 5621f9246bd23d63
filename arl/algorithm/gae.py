"""Generalised advantage estimation over the trained tokens of a trajectory (1506.02438)."""

from __future__ import annotations

import torch

from arl.algorithm.peers import Peers, kl_penalties
from arl.algorithm.returns import TrainedTokens, discounted_sums, token_rewards, turn_rewards
from arl.api.algorithm import GAEAdvantage, KLConfig
from arl.api.types import TrainSequence, Trajectory


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
