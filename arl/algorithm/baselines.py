"""One advantage for each trajectory, from its reward and those of its peers' episodes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch

from arl.algorithm.peers import Peers, Spread, spread_of
from arl.api.algorithm import GiGPOAdvantage, ReturnsAdvantage
from arl.api.errors import TrajectoryError
from arl.api.types import Trajectory

RELATIVE = ("group_mean", "leave_one_out", "length_weighted")
"""Baselines that come from the peers themselves: one that is alone, or among equals, has advantage 0 exactly."""


def scaled(rewards: Sequence[float], peers: Peers, settings: ReturnsAdvantage) -> list[float]:
    """(R - baseline) / scale, for each of the peers; batch_std is left to whoever sees the batch."""
    divisor = divisor_of(rewards, peers, settings.scale)
    return [c / divisor for c in centred(rewards, peers, settings.baseline)]


def divisor_of(rewards: Sequence[float], peers: Peers, scale: str) -> float:
    """group_std: the sample standard deviation (n - 1, as in verl, TRL and OpenRLHF) of n episodes' rewards + 1e-6;
    else 1.

    Trajectories of one episode that have rewards of their own (debaters, say) are a part of an episode each, which
    counts by its own distance from the mean: where episodes are alike, what is different within them is not scaled up.
    Where all are equal it is 1 too: nothing is scaled up to where a rounding error would count.
    """
    if scale != "group_std":
        return 1.0
    between = spread_of(peers.of_episodes(rewards))
    spreads = [spread_of([rewards[i] for i in members]) for members in peers.episodes]
    within = [s.std**2 * (len(of) - 1) / len(of) for s, of in zip(spreads, peers.episodes, strict=True)]
    if not any(within):
        return between.divisor
    variance = between.std**2 + math.fsum(within) / max(len(within) - 1, 1)
    return Spread(between.mean, math.sqrt(variance)).divisor


def centred(rewards: Sequence[float], peers: Peers, baseline: str) -> list[float]:
    """R - baseline, for n episodes, each with one reward, the mean over its trajectories', and l_i trained tokens.

        none (REINFORCE):                       R_i
        greedy (ReMax, 2310.10505):             R_i - the reward of the episode that was decoded greedily
        group_mean (GRPO, 2402.03300, 4.1.2):   R_i - mean(R)
        leave_one_out (RLOO, 2402.14740):       R_i - mean of the others' R = (R_i - mean(R)) n / (n - 1)
        length_weighted (OPO, 2505.23585):      R_i - sum(l R) / sum(l); the plain mean where nothing is trained

    Trajectories of one episode may have rewards of their own: the R_i that something is subtracted from is then the
    trajectory's. Raises TrajectoryError where a greedy baseline is asked for and the group has none for the role.
    """
    if baseline == "none":
        return list(rewards)
    if baseline == "greedy":
        return [r - _greedy_reward(peers) for r in rewards]
    if spread_of(rewards).std == 0:
        return [0.0] * len(rewards)
    values = peers.of_episodes(rewards)
    spread = spread_of(values)
    if baseline == "leave_one_out":
        return _less_the_others(rewards, values, spread.mean, peers)
    middle = spread.mean
    if baseline == "length_weighted":
        lengths = [sum(peers.trajectories[i].num_trained_tokens for i in members) for members in peers.episodes]
        if sum(lengths):
            middle = math.fsum(n * r for n, r in zip(lengths, values, strict=True)) / sum(lengths)
    return [r - middle for r in rewards]


def _less_the_others(rewards: Sequence[float], values: Sequence[float], mean: float, peers: Peers) -> list[float]:
    """Each reward less the mean of the other episodes' values; 0 where there is no other episode."""
    centred = [0.0] * len(rewards)
    if len(values) == 1:
        return centred
    factor = len(values) / (len(values) - 1)
    for members, value in zip(peers.episodes, values, strict=True):
        for i in members:
            centred[i] = (value - mean) * factor + (rewards[i] - value)
    return centred


def scaled_apart(peers: Peers, settings: ReturnsAdvantage) -> list[float]:
    """The sum of each named reward's own advantage (GDPO, 2601.05242), which is then whitened.

    `rewards` take the place of `reward`. A penalty for length is one more of them.
    Raises TrajectoryError where the peers have not all the same names, or have none.
    """
    parts = [[t.rewards[name] for t in peers.trajectories] for name in _reward_names(peers)]
    parts.append([-p for p in peers.overlong])
    return [math.fsum(column) for column in zip(*(scaled(part, peers, settings) for part in parts), strict=True)]


def _reward_names(peers: Peers) -> list[str]:
    first = peers.trajectories[0].rewards.keys()
    where = f"in group {peers.group.group_id}, role {peers.role!r}"
    if not first:
        raise TrajectoryError(f"rewards is empty {where}; advantage.separate_rewards needs each trajectory's parts")
    for trajectory in peers.trajectories:
        if different := first ^ trajectory.rewards.keys():
            name = min(different)
            raise TrajectoryError(f"rewards[{name!r}] is there for some trajectories {where} and not for others")
    return sorted(first)


def _greedy_reward(peers: Peers) -> float:
    rewards = peers.group.greedy_rewards
    if peers.role not in rewards:
        raise TrajectoryError(
            f"group {peers.group.group_id} has no greedy reward for role {peers.role!r}, only for "
            f"{sorted(rewards) or 'no role'}; the greedy episode has to return a trajectory of each role"
        )
    return rewards[peers.role]


# Advantages of turns among those taken in the same state (GiGPO, 2505.10978).


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
