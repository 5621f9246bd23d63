"""What is learned from each token: advantages, by any of the estimators, from groups of trajectories.

Each is computed among a group's trajectories of the same role, in float64, and is the same to the last bit in whatever
order trajectories, groups and roles come. An episode that branched into several trajectories counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from arl.algorithm.baselines import (
    RELATIVE,
    centred,
    divisor_of,
    gigpo_advantages,
    scaled_apart,
)
from arl.algorithm.batch import Batch, flat, regrouped
from arl.algorithm.pass_at_k import SUCCESS, pass_at_k_advantages
from arl.algorithm.peers import Peers, kl_penalties, peers_of, whitened
from arl.algorithm.returns import gae_advantages, normalised_process_rewards, returns_to_go
from arl.api.algorithm import (
    AdvantageConfig,
    AlgorithmConfig,
    DistillationAdvantage,
    GAEAdvantage,
    GiGPOAdvantage,
    KLConfig,
    PassAtKAdvantage,
    RejectionAdvantage,
    ReturnsAdvantage,
)
from arl.api.types import Group


def with_advantages(groups: Sequence[Group], batch: Batch, config: AlgorithmConfig) -> Batch:
    """The batch's sequences with their advantages (and, with a critic, returns) filled in: 0 where nothing is trained.

    `batch` holds the groups' sequences, with proximal and reference logprobs where a KL in the reward needs them, and
    with values for GAE. A trajectory that is masked out counts in its group's statistics of rewards, but in none over
    trained tokens. Raises TrajectoryError for rewards that the estimator needs and a group does not have.
    """
    sequences = flat(batch)
    advantages = [torch.empty(0)] * len(sequences)
    for peers in peers_of(groups, batch, config.overlong):
        for place, values in zip(peers.places, _estimated(peers, config), strict=True):
            advantages[place] = values.masked_fill(~sequences[place].loss_mask, 0.0)
    if isinstance(config.advantage, GAEAdvantage):
        pairs = zip(sequences, advantages, strict=True)
        sequences = [replace(s, returns=torch.where(s.loss_mask, a + s.values, 0.0).float()) for s, a in pairs]
    if _is_whitened(config.advantage):
        masks = [s.loss_mask for s in sequences]
        once = [(i, s.episode) for i, group in enumerate(batch) for s in group]
        advantages = whitened(advantages, masks, once if _weighs_episodes(config.advantage) else None)
    filled = [replace(s, advantages=a.float()) for s, a in zip(sequences, advantages, strict=True)]
    return regrouped(filled, batch)


def _estimated(peers: Peers, config: AlgorithmConfig) -> list[torch.Tensor]:
    """float64[T] for each of the peers, before anything that looks at the whole batch."""
    settings = config.advantage
    if isinstance(settings, ReturnsAdvantage):
        return returns_advantages(peers, settings, config.kl)
    if isinstance(settings, GAEAdvantage):
        return gae_advantages(peers, settings, config.kl)
    if isinstance(settings, GiGPOAdvantage):
        return gigpo_advantages(peers, settings)
    if isinstance(settings, DistillationAdvantage):
        return distillation_advantages(peers, settings)
    if isinstance(settings, PassAtKAdvantage):
        return _over_tokens(peers, _one_success(peers, settings.k))
    return _over_tokens(peers, rejection_advantages(peers.totals, settings))


def distillation_advantages(peers: Peers, settings: DistillationAdvantage) -> list[torch.Tensor]:
    """float64[T]: coefficient (teacher logprob - p), each trained token's own, from what the workflow saw of it.

    The reverse KL(student || teacher) of a policy pi has the gradient E[(log pi - log teacher) grad log pi], with pi
    the policy that learns. The workflow could only compare the teacher with the sampler b: b - p is added, or stale
    tokens would be pushed on after the student has reached its teacher.
    """
    advantages: list[torch.Tensor] = []
    for trajectory, sequence in zip(peers.trajectories, peers.sequences, strict=True):
        given = torch.tensor(trajectory.token_rewards or [0.0] * len(sequence), dtype=torch.float64)
        moved = sequence.behavior_logprobs.double() - sequence.proximal_logprobs.double()
        advantages.append(settings.coefficient * (given + moved))
    return advantages


def _one_success(peers: Peers, k: int) -> list[float]:
    """Each trajectory's advantage as an answer that is right or wrong among the episodes that are."""
    values = peers.of_episodes(peers.totals)
    known = {v > SUCCESS: a for v, a in zip(values, pass_at_k_advantages(values, k), strict=True)}
    return [known.get(total > SUCCESS, 0.0) for total in peers.totals]


def rejection_advantages(rewards: Sequence[float], settings: RejectionAdvantage) -> list[float]:
    """RAFT (2304.06767) and RAFT++ (2504.11343): 1 for what is kept, and 0 for what is not."""
    return [1.0 if reward > settings.threshold else 0.0 for reward in rewards]


def returns_advantages(peers: Peers, settings: ReturnsAdvantage, kl: KLConfig) -> list[torch.Tensor]:
    """float64[T]: (R - baseline) / scale, the same for each token, and the process rewards from each token on.

    Outcome and process rewards are normalised apart and added (PRIME, 2502.01456). A KL in the reward is part
    of a trajectory's outcome where the baseline is the peers' (RLOO, 2402.14740): R is R less the penalties of all its
    episode's tokens. Else it is a process reward of each token, over the outcome's scale (REINFORCE++, 2501.03262). The
    scale is that of R itself: in a group of equal rewards, penalties would be scaled up to 1.
    """
    penalties = kl_penalties(peers.sequences, kl)
    rewards = peers.outcomes
    totals = rewards
    if penalties is not None:
        sums = peers.summed([float(p.sum()) for p in penalties])
        totals = [r - p for r, p in zip(rewards, sums, strict=True)]
    divisor = divisor_of(rewards, peers, settings.scale)
    is_relative = settings.baseline in RELATIVE
    if settings.separate_rewards:
        outcomes = scaled_apart(peers, settings)
    else:
        outcomes = [c / divisor for c in centred(totals if is_relative else rewards, peers, settings.baseline)]
    advantages = _over_tokens(peers, outcomes)
    process = normalised_process_rewards(peers, settings)
    if penalties is not None and not is_relative:
        process = [-p / divisor + (process[i] if process else 0.0) for i, p in enumerate(penalties)]
    for i, later in enumerate(process or ()):
        advantages[i] += returns_to_go(later, peers.sequences[i].loss_mask, peers.trajectories[i], settings)
    return advantages


def _over_tokens(peers: Peers, values: Sequence[float]) -> list[torch.Tensor]:
    pairs = zip(peers.trajectories, values, strict=True)
    return [torch.full((len(t.token_ids),), value, dtype=torch.float64) for t, value in pairs]


def _is_whitened(settings: AdvantageConfig) -> bool:
    """Whether the batch's mean is subtracted and its standard deviation divided by, once all else is done.

    REINFORCE++ subtracts the mean (2501.03262, as do OpenRLHF and verl), and so does its variant with the
    group's mean as a baseline: longer trajectories weigh more, so that the mean over tokens is not 0 there either, and
    a group of equal rewards comes out at -mean / std.
    """
    if isinstance(settings, ReturnsAdvantage):
        return settings.scale == "batch_std" or settings.separate_rewards
    return isinstance(settings, GAEAdvantage) and settings.whiten


def _weighs_episodes(settings: AdvantageConfig) -> bool:
    """GDPO's mean and standard deviation are over episodes (2601.05242, as in TRL); all others are over tokens."""
    return isinstance(settings, ReturnsAdvantage) and settings.scale != "batch_std"
