"""Advantages of turns among those taken in the same state (GiGPO, 2505.10978)."""

from __future__ import annotations

import math
from collections import defaultdict

import torch

from arl.algorithm.baselines import centred, divisor_of
from arl.algorithm.peers import Peers
from arl.algorithm.spread import Spread, spread_of
from arl.api.algorithm import GiGPOAdvantage
from arl.api.types import Trajectory


def gigpo_advantages(peers: Peers, settings: GiGPOAdvantage) -> list[torch.Tensor]:
    """float64[T] for each of the peers: A = A_episode + step_weight * A_step (eq. 8).

        A_episode (eq. 3): (R - mean) / scale over episodes; R is an episode's outcome and process rewards, added up
        A_step (eq. 7):    (Q - mean) / scale over all turns of the peers that were taken in the same state
        Q (eq. 5):         sum over this and later turns j of turn_discount^j r_j; the outcome is the last turn's

    scale is the sample standard deviation + 1e-6, or 1. A turn whose state is None, or that is alone in its state, has
    A_step 0, and so have tokens outside every turn.
    """
    totals = peers.totals
    divisor = divisor_of(totals, peers, settings.scale)
    advantages = [
        torch.full((len(t.token_ids),), distance / divisor, dtype=torch.float64)
        for t, distance in zip(peers.trajectories, centred(totals, peers, "group_mean"), strict=True)
    ]
    pairs = zip(peers.trajectories, peers.outcomes, strict=True)
    returns = [turn_returns(t, outcome, settings.turn_discount) for t, outcome in pairs]
    for state in _states(peers):
        spread = spread_of([returns[i][j] for i, j in state])
        for i, j in state:
            turn = peers.trajectories[i].turns[j]
            step = _relative(returns[i][j], spread, settings.scale)
            advantages[i][turn.start : turn.stop] += settings.step_weight * step
    return advantages


def turn_returns(trajectory: Trajectory, outcome: float, discount: float) -> list[float]:
    """The discounted sum of each turn's and all later turns' rewards.

    A turn's rewards are its own and those of all tokens from its first up to the next turn's first; the last turn has
    the outcome too.
    """
    turns, stop = trajectory.turns, len(trajectory.token_ids)
    returns = [0.0] * len(turns)
    later = outcome
    for j in range(len(turns) - 1, -1, -1):
        rewards = (trajectory.token_rewards or ())[turns[j].start : stop]
        returns[j] = math.fsum((turns[j].reward, *rewards, later))
        later, stop = discount * returns[j], turns[j].start
    return returns


def _states(peers: Peers) -> list[list[tuple[int, int]]]:
    """(trajectory, turn) of the turns in each state."""
    states: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for i, trajectory in enumerate(peers.trajectories):
        for j, turn in enumerate(trajectory.turns):
            if turn.state is not None:
                states[turn.state].append((i, j))
    return list(states.values())


def _relative(value: float, spread: Spread, scale: str) -> float:
    if spread.std == 0:
        return 0.0
    return (value - spread.mean) / (spread.divisor if scale == "group_std" else 1.0)
