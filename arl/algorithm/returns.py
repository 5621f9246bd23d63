"""Process rewards: which token gets each, the discounted sums for earlier tokens, and a model that gives them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from arl.algorithm.batch import Batch, joined, loss_weights, token_rewards
from arl.algorithm.flat_sequences import FlatSequences
from arl.algorithm.groups import Peers, kl_penalties, mean, spread_of
from arl.algorithm.losses.preferences import of_units, share_won
from arl.algorithm.losses.surrogates import ROUNDING
from arl.api.errors import TrajectoryError
from arl.api.settings.objective import GAEAdvantage, GiGPOAdvantage, KLConfig, ReturnsAdvantage
from arl.api.train_engine import PackedTokens, TokenLosses, TokenOutputs
from arl.api.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedTokens:
    """The M trained tokens among a batch's T tokens, including those of masked-out trajectories."""

    places: torch.Tensor
    """int64[M], ascending."""
    owners: torch.Tensor
    """int64[M]: the number of each trained token's trajectory."""
    last: torch.Tensor
    """int64[T]: the last trained token at or before each token, in its trajectory; -1: none."""
    starts: list[int]
    """[N + 1] Where each trajectory's tokens begin, and T."""

    @classmethod
    def of(cls, batch: Batch) -> TrainedTokens:
        mask = joined((t.loss_mask for t in batch.trajectories), np.bool_)
        owners, starts = batch.owners, batch.starts
        last = torch.where(mask, torch.arange(len(mask)), -1).cummax(0).values
        is_own = last >= torch.tensor(starts, dtype=torch.int64)[owners]
        places = mask.nonzero().flatten()
        return cls(places=places, owners=owners[places], last=torch.where(is_own, last, -1), starts=starts)

    @property
    def goes_on(self) -> torch.Tensor:
        """bool[M - 1]: whether the next trained token belongs to the same trajectory."""
        return self.owners[1:] == self.owners[:-1]

    def begins_turn(self, batch: Batch) -> torch.Tensor:
        """bool[M]: whether the token is the first trained one of its trajectory or of a turn.

        A trained token outside every turn belongs to the turn before it; those before the first turn are a turn of
        their own. In a trajectory without turns each unbroken run of trained tokens is one.
        """
        pairs = zip(self.starts, batch.trajectories, strict=False)
        begins = joined(([start + turn.start for turn in t.turns] for start, t in pairs), np.int64)
        numbers = torch.searchsorted(begins, self.places, right=True)
        has_turns = torch.tensor([bool(t.turns) for t in batch.trajectories], dtype=torch.bool)[self.owners]
        is_new = torch.where(has_turns[1:], numbers.diff() > 0, self.places.diff() > 1)
        return torch.cat((torch.ones_like(has_turns[:1]), is_new | ~self.goes_on))

    def credited(self, places: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
        """float64[T]: the rewards at `places`, each given to the last trained token at or before it, if any."""
        earners = self.last[places]
        is_earned = earners >= 0
        return torch.zeros(len(self.last), dtype=torch.float64).index_add_(0, earners[is_earned], rewards[is_earned])

    def token_rewards(self, batch: Batch) -> torch.Tensor:
        """float64[T]: each trained token's part of the trajectories' token_rewards."""
        return self.credited(torch.arange(len(self.last)), token_rewards(batch))

    def turn_rewards(self, batch: Batch, rewards: torch.Tensor) -> torch.Tensor:
        """float64[T]: one reward for each turn of the batch, given at the turn's last token."""
        pairs = zip(self.starts, batch.trajectories, strict=False)
        ends = joined(([start + turn.stop - 1 for turn in t.turns] for start, t in pairs), np.int64)
        return self.credited(ends, rewards)


def process_rewards(
    batch: Batch, peers: Sequence[Peers], settings: ReturnsAdvantage, trained: TrainedTokens
) -> torch.Tensor:
    """float64[T]: process rewards, normalised among peers as `settings` say; 0 without process rewards.

    Rewards of tokens are normalised among the peers' trained tokens, and rewards of turns among their turns. The
    outcome is not part of either, and a reward model's rewards are a kind of their own (PRIME, 2502.01456, eq. 5;
    GRPO's process supervision, 2402.03300, 4.1.3):

        none, greedy:                   unchanged
        group_mean, length_weighted:    minus the mean over all of them
        leave_one_out:                  minus the mean of the other episodes' means
        group_std:                      divided by the standard deviation over all of them + 1e-6

    A trajectory without token_rewards or turns counts in no mean. If the baseline comes from peers, equal rewards
    become 0, and so do the rewards of an episode without peers.
    """
    rewards = torch.zeros(len(trained.last), dtype=torch.float64)
    rows = trained.places.split(torch.bincount(trained.owners, minlength=len(batch)).tolist())
    if batch.implicit_rewards is not None:
        of_model = batch.implicit_rewards
        values = _normalised([of_model[row].tolist() for row in rows], peers, settings)
        rewards[trained.places] = joined(values, np.float64)
    if any(t.token_rewards is not None and t.token_rewards.any() for t in batch.trajectories):
        given = trained.token_rewards(batch)
        has = [row[:0] if t.token_rewards is None else row for row, t in zip(rows, batch.trajectories, strict=True)]
        values = _normalised([given[row].tolist() for row in has], peers, settings)
        rewards[torch.cat(has)] += joined(values, np.float64)
    if any(turn.reward for t in batch.trajectories for turn in t.turns):
        values = _normalised([[turn.reward for turn in t.turns] for t in batch.trajectories], peers, settings)
        rewards += trained.turn_rewards(batch, joined(values, np.float64))
    return rewards


def _normalised(
    rewards: Sequence[list[float]], peers: Sequence[Peers], settings: ReturnsAdvantage
) -> list[list[float]]:
    """(rewards - baseline) / scale, for process rewards of one kind: a list for each trajectory of the batch."""
    normalised: list[list[float]] = [[]] * len(rewards)
    for one in peers:
        episodes = [[r for i in members for r in rewards[one.members[i]]] for members in one.episodes]
        spread = spread_of([r for row in episodes for r in row])
        divisor = spread.divisor if settings.scale == "group_std" else 1.0
        means = [math.fsum(row) / len(row) for row in episodes if row]
        others = max(len(means) - 1, 1)
        has_peers = spread.std != 0 and len(episodes) > 1
        for members, row in zip(one.episodes, episodes, strict=True):
            baseline: float | None = 0.0  # None: the rewards become 0
            if settings.is_relative and settings.baseline == "leave_one_out":
                own = math.fsum(row) / max(len(row), 1)
                baseline = (math.fsum(means) - own) / others if has_peers and len(means) > 1 else None
            elif settings.is_relative:
                baseline = spread.mean if has_peers else None
            for i in members:
                own_row = rewards[one.members[i]]
                normalised[one.members[i]] = [0.0 if baseline is None else (r - baseline) / divisor for r in own_row]
    return normalised


def returns_to_go(
    rewards: torch.Tensor, batch: Batch, settings: ReturnsAdvantage, trained: TrainedTokens
) -> torch.Tensor:
    """float64[T]: for each trained token the discounted sum of its own and all later rewards of its trajectory.

    A reward n trained tokens and m turns later has the weight token_discount^n turn_discount^m. A trained token outside
    every turn belongs to the turn before it.
    """
    kept = settings.token_discount * trained.goes_on.double()
    if settings.turn_discount < 1:
        pairs = zip(trained.starts, batch.trajectories, strict=False)
        starts = joined(([start + turn.start for turn in t.turns] for start, t in pairs), np.int64)
        turn_numbers = torch.searchsorted(starts, trained.places, right=True)
        kept = kept * settings.turn_discount ** turn_numbers.diff().double()
    sums = torch.zeros_like(rewards)
    sums[trained.places] = discounted_sums(rewards[trained.places], kept)
    return sums


def discounted_sums(rewards: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """y_t = rewards_t + kept_t y_{t+1}. rewards: float64[n]. kept: float64[n - 1], the factor between neighbours.

    By doubling: after round k, y_t holds the terms of 2^k tokens, and `kept` the factor of the token after them.
    """
    sums, kept, reach = rewards.clone(), kept.clone(), 1
    while kept.any():
        sums[:-reach] += kept * sums[reach:]
        kept = kept[: max(len(kept) - reach, 0)] * kept[reach:]
        reach *= 2
    return sums


def gae_advantages(batch: Batch, outcomes: Sequence[float], settings: GAEAdvantage, kl: KLConfig) -> torch.Tensor:
    """float64[T]: generalised advantage estimation (1506.02438, eq. 11, 16), with t over the steps of a trajectory:

        delta_t = r_t + discount V_{t+1} - V_t        A_t = delta_t + discount lam A_{t+1}

    With level=token a step is a trained token. With level=turn it is a turn (MDPs of turns: ArCHer, 2402.19446;
    Turn-PPO, 2512.17008), V_t is the value of the context in which its first token was sampled, and all its tokens have
    A_t.
    Untrained tokens in between are skipped: the environment's answer is part of the transition. r_t are the process
    rewards since t, minus the KL in the reward; the last step gets the outcome too. After it V is 0, even if a length
    limit ended the trajectory (as in verl and TRL): the reward already values the cut.
    """
    trained = TrainedTokens.of(batch)
    ends = torch.tensor(trained.starts[1:], dtype=torch.int64) - 1
    rewards = trained.credited(ends, torch.tensor(outcomes, dtype=torch.float64)) + trained.token_rewards(batch)
    of_turns = joined(([turn.reward for turn in t.turns] for t in batch.trajectories), np.float64)
    rewards += trained.turn_rewards(batch, of_turns)
    penalties = kl_penalties(batch, kl)
    if penalties is not None:
        rewards -= penalties
    is_first = trained.begins_turn(batch) if settings.level == "turn" else torch.ones_like(trained.owners).bool()
    steps, owners = is_first.cumsum(0) - 1, trained.owners[is_first]
    goes_on, values = (owners[1:] == owners[:-1]).double(), batch.values[trained.places[is_first]].double()
    of_steps = torch.zeros_like(values).index_add_(0, steps, rewards[trained.places])
    following = torch.cat((goes_on * values[1:], values.new_zeros(min(len(values), 1))))
    deltas = of_steps + settings.discount * following - values
    advantages = torch.zeros_like(rewards)
    advantages[trained.places] = discounted_sums(deltas, settings.discount * settings.lam * goes_on)[steps]
    return advantages


def turn_starts(batch: Batch) -> torch.Tensor:
    """bool[T]: the first trained token of each turn, without those of masked-out trajectories."""
    trained = TrainedTokens.of(batch)
    starts = torch.zeros_like(batch.loss_mask)
    starts[trained.places[trained.begins_turn(batch)]] = True
    return starts & batch.loss_mask


def turn_advantages(batch: Batch, peers: Sequence[Peers], settings: GiGPOAdvantage) -> torch.Tensor:
    """float64[T]: GiGPO's A_step (2505.10978, eq. 5 and 7). It compares turns that peers took in the same state.

        A_step = (Q - mean) / scale over all turns in the state     scale: the sample standard deviation + 1e-6, or 1
        Q = sum over this and later turns j of turn_discount^j r_j; the outcome is the last turn's

    It is 0 for a turn without a state, for the only turn in a state, and for tokens outside every turn.
    """
    advantages, starts = torch.zeros(sum(batch.lengths), dtype=torch.float64), batch.starts
    for one in peers:
        pairs = zip(one.trajectories, one.outcomes, strict=True)
        returns = [turn_returns(t, outcome, settings.turn_discount) for t, outcome in pairs]
        states: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)  # (peer, turn)
        for i, trajectory in enumerate(one.trajectories):
            for j, turn in enumerate(trajectory.turns):
                if turn.state is not None:
                    states[turn.state].append((i, j))
        for state in states.values():
            spread = spread_of([returns[i][j] for i, j in state])
            divisor = spread.divisor if settings.scale == "group_std" else 1.0
            for i, j in state:
                start, turn = starts[one.members[i]], one.trajectories[i].turns[j]
                if spread.std:
                    advantages[start + turn.start : start + turn.stop] = (returns[i][j] - spread.mean) / divisor
    return advantages


def turn_returns(trajectory: Trajectory, outcome: float, discount: float) -> list[float]:
    """The discounted sum of each turn's and all later turns' rewards; the last turn has the outcome too.

    A turn's rewards are its own and those of all tokens from its first up to the next turn's first.
    """
    turns, stop = trajectory.turns, len(trajectory.token_ids)
    of_tokens = [] if trajectory.token_rewards is None else trajectory.token_rewards.tolist()
    returns = [0.0] * len(turns)
    later = outcome
    for j in range(len(turns) - 1, -1, -1):
        returns[j] = math.fsum((turns[j].reward, *of_tokens[turns[j].start : stop], later))
        later, stop = discount * returns[j], turns[j].start
    return returns


# The implicit process reward model of PRIME (2502.01456): what it reads of a batch, and its loss
#
#     r_t = beta log(pi(y_t) / pi_ref(y_t))           eq. 3; pi learns, pi_ref is its first model; t over trained tokens
#     loss = mean over episodes of CE(sigmoid(sum r_t), R)          algorithm 1, line 8; R the outcome, between 0 and 1
#
# So sigmoid(sum r_t) is the chance of success that the model sees in an episode, and r_t is what token t adds to its
# logit. With rewards of 0 and 1 this is the log-likelihood of a classifier. It learns from outcomes alone.


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
        logits, outcomes = of_units(rewards, tokens), tokens.returns
        says = torch.where(logits.abs() > self.beta * ROUNDING, logits, 0.0).detach()
        won = torch.where(outcomes > 0.5, 1.0, -1.0)
        return TokenLosses(
            loss=F.binary_cross_entropy_with_logits(logits, outcomes, reduction="none"),
            means={"process_reward": rewards.detach()},
            weighted={"accuracy": share_won(says * won), "success": logits.detach().sigmoid()},
        )
