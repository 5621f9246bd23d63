"""Advantages of a batch's tokens, among a group's trajectories of the same role, in float64.

The order of trajectories, groups and roles does not change a bit of them. An episode that branched counts once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

import torch

from arl.algorithm.batch import Batch, token_rewards
from arl.algorithm.groups import Peers, Spread, compared, kl_penalties, peers_of, reference_points, spread_of, whitened
from arl.algorithm.returns import (
    TrainedTokens,
    gae_advantages,
    process_rewards,
    returns_to_go,
    turn_advantages,
    turn_starts,
)
from arl.api.errors import TrajectoryError
from arl.api.settings.algorithm import AlgorithmConfig
from arl.api.settings.objective import (
    DistillationAdvantage,
    GAEAdvantage,
    GiGPOAdvantage,
    LabelsAdvantage,
    MaxLikelihoodAdvantage,
    PairsAdvantage,
    PassAtKAdvantage,
    RejectionAdvantage,
    ReturnsAdvantage,
)

SUCCESS = 0.5
"""A reward above this is a success. Rewards should be 0 and 1, but penalties may have moved them."""


def arranged(batch: Batch, config: AlgorithmConfig) -> Batch:
    """The batch with what does not depend on forward passes: which episodes are compared, and where turns begin.

    What need not be forwarded is no longer trained. Doing it again changes nothing.
    """
    if config.compares_episodes:
        batch = compared(batch, config)
    looks_at_turns = config.has_critic_of_turns or config.has_ratios_of_turns
    return replace(batch, turn_starts=turn_starts(batch)) if looks_at_turns else batch


def with_advantages(batch: Batch, config: AlgorithmConfig) -> Batch:
    """Fill in the batch's advantages, and with a critic its returns: 0 where nothing is trained.

    `batch` must hold proximal and reference logprobs for a KL in the reward, values for GAE, and a reward model's
    implicit rewards. A masked-out trajectory counts in its group's reward statistics, but in no statistic over trained
    tokens. A statistic over the batch is one over the groups of the same task. Raises TrajectoryError.
    """
    batch = arranged(batch, config)
    if config.compares_episodes:
        return replace(batch, values=reference_points(batch)) if config.loss.kind == "kto" else batch
    settings, returns = config.advantage, batch.returns
    advantages = torch.where(batch.loss_mask, _estimated(batch, peers_of(batch, config.overlong), config), 0.0)
    if isinstance(settings, GAEAdvantage):
        valued = batch.turn_starts if config.has_critic_of_turns else batch.loss_mask
        returns = torch.where(valued, advantages + batch.values, 0.0).float()
        advantages = whitened(batch, advantages)
    elif isinstance(settings, ReturnsAdvantage) and settings.scale == "batch_std":
        # REINFORCE++ subtracts the mean (2501.03262, OpenRLHF, verl). With the group's mean as a baseline it is not 0,
        # as longer trajectories weigh more: a group of equal rewards gets -mean / std.
        advantages = whitened(batch, advantages)
    elif isinstance(settings, ReturnsAdvantage) and settings.separate_rewards:
        advantages = whitened(batch, advantages, by_episode=True)  # GDPO, 2601.05242, as in TRL
    return replace(batch, advantages=advantages.float(), returns=returns)


def _estimated(batch: Batch, peers: Sequence[Peers], config: AlgorithmConfig) -> torch.Tensor:
    """float64[T]: the estimate before any whitening over the batch."""
    match config.advantage:
        case ReturnsAdvantage() as settings:
            return returns_advantages(batch, peers, settings, config)
        case GAEAdvantage() as settings:
            outcomes = _of_each(batch, peers, lambda one: one.outcomes)
            return gae_advantages(batch, outcomes, settings, config.kl)
        case GiGPOAdvantage() as settings:
            standing = _of_each(batch, peers, lambda one: scaled(one.totals, one, "group_mean", settings.scale))
            return batch.over_tokens(standing) + turn_advantages(batch, peers, settings)
        case PairsAdvantage() | LabelsAdvantage():
            return batch.advantages.double()
        case DistillationAdvantage():
            # KL(pi || teacher) has the gradient E[(log pi - log teacher) grad log pi], with pi the policy that learns.
            # The workflow compares the teacher with the sampler b, so this adds b - p. Without it, training would go on
            # pushing stale tokens after the student has reached its teacher.
            return token_rewards(batch) + (batch.behavior_logprobs.double() - batch.proximal_logprobs.double())
        case PassAtKAdvantage() as settings:
            k = settings.k
            of_success = _of_each(batch, peers, lambda one: _by_success(one, lambda r: pass_at_k_advantages(r, k)))
            return batch.over_tokens(of_success)
        case MaxLikelihoodAdvantage():
            return batch.over_tokens(_of_each(batch, peers, lambda one: _by_success(one, max_likelihood_advantages)))
        case RejectionAdvantage() as settings:
            # RAFT (2304.06767) and RAFT++ (2504.11343): 1 for kept trajectories, 0 for others.
            kept = _of_each(batch, peers, lambda one: [float(total > settings.threshold) for total in one.totals])
            return batch.over_tokens(kept)


def _of_each(batch: Batch, peers: Sequence[Peers], estimate: Callable[[Peers], Sequence[float]]) -> list[float]:
    """[N] The value that `estimate` gives each trajectory among its peers."""
    values = [0.0] * len(batch)
    for one in peers:
        for i, value in zip(one.members, estimate(one), strict=True):
            values[i] = value
    return values


def returns_advantages(
    batch: Batch, peers: Sequence[Peers], settings: ReturnsAdvantage, config: AlgorithmConfig
) -> torch.Tensor:
    """float64[T]: (R - baseline) / scale, the same for each token, and the process rewards from each token on.

    Outcome and process rewards are normalised separately and added (PRIME, 2502.01456). If peers give the baseline,
    a KL in the reward is part of the outcome (RLOO, 2402.14740): R loses the penalties of all its episode's tokens.
    With another baseline it is a process reward of each token, over the outcome's scale (REINFORCE++, 2501.03262). The
    scale is that of R without penalties: with them, penalties would be scaled up to 1 in a group of equal rewards.
    """
    _check_weighed(batch, settings)
    penalties = kl_penalties(batch, config.kl)
    sums = batch.sums(penalties) if penalties is not None and settings.is_relative else None

    def outcomes(one: Peers) -> list[float]:
        if settings.separate_rewards:
            return scaled_apart(one, settings)
        penalised = one.outcomes
        if sums is not None:
            own = one.summed([sums[i] for i in one.members])
            penalised = [r - p for r, p in zip(penalised, own, strict=True)]
        divisor = divisor_of(one.outcomes, one, settings.scale)
        return [c / divisor for c in centred(penalised, one, settings.baseline)]

    advantages = batch.over_tokens(_of_each(batch, peers, outcomes))
    has_process = batch.implicit_rewards is not None or any(any(t.process_rewards) for t in batch.trajectories)
    has_penalties = penalties is not None and not settings.is_relative
    if not has_process and not has_penalties:
        return advantages
    trained = TrainedTokens.of(batch)
    rewards = process_rewards(batch, peers, settings, trained)
    if penalties is not None and has_penalties:
        divisors = _of_each(batch, peers, lambda one: [divisor_of(one.outcomes, one, settings.scale)] * len(one))
        rewards = rewards - penalties / batch.over_tokens(divisors)
    return advantages + returns_to_go(rewards, batch, settings, trained)


def _by_success(peers: Peers, estimate: Callable[[Sequence[float]], list[float]]) -> list[float]:
    """[n] What `estimate` gives an episode that succeeds, and one that does not."""
    values = peers.of_episodes(peers.totals)
    known = {v > SUCCESS: a for v, a in zip(values, estimate(values), strict=True)}
    return [known.get(total > SUCCESS, 0.0) for total in peers.totals]


def max_likelihood_advantages(rewards: Sequence[float]) -> list[float]:
    """[n] Advantages for the logarithm of the chance p of success (MaxRL, 2602.02710).

    With a share rho of successes among n answers: (1 - rho) / rho for them, -1 for the others; 0 without a success.
    The expected gradient is that of log p, expanded in 1 - p up to the order n - 1: short of it by a share of
    (1 - p)^(n - 1).
    """
    num_right = sum(reward > SUCCESS for reward in rewards)
    if num_right == 0:
        return [0.0] * len(rewards)
    right, wrong = (len(rewards) - num_right) / num_right, -1.0
    return [right if reward > SUCCESS else wrong for reward in rewards]


def pass_at_k_advantages(rewards: Sequence[float], k: int) -> list[float]:
    """[n] Advantages for the chance that one of k answers is right (Pass@k Training, 2508.10751, analytic form).

    Of n answers c are right. A subgroup of k has reward 1 if one of them is right. Over all subgroups the mean reward
    is rho and the standard deviation sigma. An answer's advantage is the mean advantage of its subgroups:

        rho = 1 - C(n - c, k) / C(n, k)       sigma = sqrt(rho (1 - rho))
        right: (1 - rho) / sigma              wrong: (1 - rho - C(n - c - 1, k - 1) / C(n - 1, k - 1)) / sigma

    All are 0 if all subgroups have the same reward: with n <= k, if all are wrong, and if fewer than k are wrong.
    k = 1 is GRPO with the population's standard deviation.
    """
    n, num_right = len(rewards), sum(reward > SUCCESS for reward in rewards)
    num_wrong = n - num_right
    if n <= k or num_right == 0 or num_wrong < k:
        return [0.0] * n
    all_wrong = Fraction(math.comb(num_wrong, k), math.comb(n, k))
    all_wrong_beside = Fraction(math.comb(num_wrong - 1, k - 1), math.comb(n - 1, k - 1))
    sigma = math.sqrt(all_wrong * (1 - all_wrong))
    right, wrong = float(all_wrong) / sigma, float(all_wrong - all_wrong_beside) / sigma
    return [right if reward > SUCCESS else wrong for reward in rewards]


def scaled(rewards: Sequence[float], peers: Peers, baseline: str, scale: str) -> list[float]:
    """[n] (R - baseline) / scale of the peers. batch_std divides by nothing here: it needs the whole batch."""
    divisor = divisor_of(rewards, peers, scale)
    return [c / divisor for c in centred(rewards, peers, baseline)]


def divisor_of(rewards: Sequence[float], peers: Peers, scale: str) -> float:
    """group_std: the sample standard deviation (n - 1, as in verl, TRL and OpenRLHF) of n episodes' rewards + 1e-6.

    It is 1 for another scale, and where all rewards are equal. If the trajectories of one episode differ in their
    rewards (debaters, say), each counts by its own distance from the mean: differences within episodes are not scaled
    up where the episodes are alike.
    """
    if scale != "group_std":
        return 1.0
    between = spread_of(peers.of_episodes(rewards))
    if len(peers.episodes) == len(peers):
        return between.divisor
    spreads = [spread_of([rewards[i] for i in members]) for members in peers.episodes]
    within = [s.std**2 * (len(of) - 1) / len(of) for s, of in zip(spreads, peers.episodes, strict=True)]
    if not any(within):
        return between.divisor
    variance = between.std**2 + math.fsum(within) / max(len(within) - 1, 1)
    return Spread(between.mean, math.sqrt(variance)).divisor


def centred(rewards: Sequence[float], peers: Peers, baseline: str) -> list[float]:
    """R - baseline, for n episodes. An episode's reward is the mean over its trajectories; it has l_i trained tokens.

        none (REINFORCE):                       R_i
        greedy (ReMax, 2310.10505):             R_i - the reward of the episode that was decoded greedily
        group_mean (GRPO, 2402.03300, 4.1.2):   R_i - mean(R)
        leave_one_out (RLOO, 2402.14740):       R_i - mean of the others' R = (R_i - mean(R)) n / (n - 1)
        length_weighted (OPO, 2505.23585):      R_i - sum(l R) / sum(l); the plain mean where nothing is trained

    If the trajectories of one episode differ in their rewards, the first R_i is the trajectory's. Raises
    TrajectoryError if the greedy baseline has no reward for the role.
    """
    if baseline == "none":
        return list(rewards)
    if baseline == "greedy":
        greedy = peers.group.greedy_rewards
        if peers.role not in greedy:
            raise TrajectoryError(
                f"group {peers.group.group_id} has no greedy reward for role {peers.role!r}, only for "
                f"{sorted(greedy) or 'no role'}; the greedy episode must return a trajectory of each role"
            )
        return [r - greedy[peers.role] for r in rewards]
    if spread_of(rewards).std == 0:
        return [0.0] * len(rewards)
    values = peers.of_episodes(rewards)
    middle = spread_of(values).mean
    if baseline == "leave_one_out":
        found, n = [0.0] * len(rewards), len(values)
        for members, value in zip(peers.episodes, values, strict=True):
            for i in members if n > 1 else ():
                found[i] = (value - middle) * (n / (n - 1)) + (rewards[i] - value)
        return found
    if baseline == "length_weighted":
        lengths = [sum(peers.trajectories[i].num_trained_tokens for i in members) for members in peers.episodes]
        if sum(lengths):
            middle = math.fsum(n * r for n, r in zip(lengths, values, strict=True)) / sum(lengths)
    return [r - middle for r in rewards]


def scaled_apart(peers: Peers, settings: ReturnsAdvantage) -> list[float]:
    """[n] The weighted sum of the advantages of all named rewards (GDPO, 2601.05242), before whitening.

    `rewards` replace `reward`. A penalty for length is one more of them, of weight 1. Raises TrajectoryError.
    """
    names = {tuple(sorted(t.rewards)) for t in peers.trajectories}
    if len(names) > 1 or () in names:
        raise TrajectoryError(
            f"trajectories of group {peers.group.group_id}, role {peers.role!r}, have the named rewards "
            f"{' and '.join(map(str, map(list, sorted(names))))}; advantage.separate_rewards needs the same ones of all"
        )
    weights = [(name, settings.reward_weights.get(name, 1.0)) for name in names.pop()]
    parts = [(w, [t.rewards[name] for t in peers.trajectories]) for name, w in weights]
    parts.append((1.0, [-p for p in peers.overlong]))
    columns = ([w * a for a in scaled(part, peers, settings.baseline, settings.scale)] for w, part in parts)
    return [math.fsum(column) for column in zip(*columns, strict=True)]


def _check_weighed(batch: Batch, settings: ReturnsAdvantage) -> None:
    """Raise TrajectoryError for a weight of a reward that no trajectory has. Roles may have rewards of other names; so
    may tasks, some of which a batch may lack."""
    if any(group.task for group in batch.groups):
        return
    named = {name for trajectory in batch.trajectories for name in trajectory.rewards}
    if named and (unknown := sorted(settings.reward_weights.keys() - named)):
        raise TrajectoryError(
            f"advantage.reward_weights has {unknown[0]!r}, but the batch's trajectories have the named rewards "
            f"{sorted(named)}; correct it, or let the workflow name that part in Trajectory.rewards"
        )
