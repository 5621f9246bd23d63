"""Slow references of every advantage estimator, of DPO and of KTO: in plain Python, from their definitions.

An episode counts once among its peers, as the mean of its trajectories of the role.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from arl.algorithm.batch import Batch
from arl.api.settings.algorithm import AlgorithmConfig
from arl.api.settings.objective import (
    DistillationAdvantage,
    DPOLossConfig,
    GAEAdvantage,
    GiGPOAdvantage,
    KTOLossConfig,
    LabelsAdvantage,
    MaxLikelihoodAdvantage,
    PairsAdvantage,
    PassAtKAdvantage,
    RejectionAdvantage,
    ReturnsAdvantage,
)
from arl.api.train_engine import TrainSequence
from arl.api.types import COLUMNS, Group, Trajectory

EPSILON = 1e-6
Member = tuple[Group, Any, TrainSequence, int]
"""A trajectory, with lists of Python's numbers for its columns; its group, its sequence and its episode."""
Numbers = list[float]


def reference_advantages(batch: Batch, config: AlgorithmConfig) -> Numbers:
    """Each token's advantage."""
    members = _members(batch)
    rows = []
    for me in members:
        peers = [m for m in members if m[0] is me[0] and m[1].role == me[1].role]
        place = next(i for i, m in enumerate(peers) if m is me)
        rows.append(_where_trained(_of_one(place, peers, config), me[2]))
    return list(itertools.chain(*_whitened(rows, members, config)))


def reference_returns(batch: Batch, config: AlgorithmConfig) -> Numbers:
    """The critic's target for each token, by GAE."""
    rows = []
    for _, t, s, _ in _members(batch):
        row = _where_trained([a + v for a, v in zip(_gae(t, s, config), s.values.tolist(), strict=True)], s)
        firsts = [step[0] for step in _steps(t, s, config.advantage)]
        rows += [value if t in firsts else 0.0 for t, value in enumerate(row)]
    return rows


def _members(batch: Batch) -> list[Member]:
    pairs = [(g, _plain(t), e) for g in batch.groups for t, e in zip(g.trajectories, g.episode_indices, strict=True)]
    return [(g, t, s, e) for (g, t, e), s in zip(pairs, batch.sequences(), strict=True)]


def _plain(trajectory: Trajectory) -> SimpleNamespace:
    fields = {name: getattr(trajectory, name) for name in trajectory.__slots__}
    return SimpleNamespace(**fields | {name: fields[name].tolist() for name in COLUMNS if fields[name] is not None})


def _where_trained(row: Numbers, sequence: TrainSequence) -> Numbers:
    return [value if m else 0.0 for value, m in zip(row, sequence.loss_mask.tolist(), strict=True)]


def _of_one(place: int, peers: list[Member], config: AlgorithmConfig) -> Numbers:
    _, me, sequence, _ = peers[place]
    settings = config.advantage
    if isinstance(settings, ReturnsAdvantage):
        return _returns(place, peers, config, settings)
    if isinstance(settings, GAEAdvantage):
        return _gae(me, sequence, config)
    if isinstance(settings, GiGPOAdvantage):
        return _gigpo(place, peers, config, settings)
    if isinstance(settings, DistillationAdvantage):
        given = me.token_rewards or (0.0,) * len(me.token_ids)
        moved = [
            b - p for b, p in zip(sequence.behavior_logprobs.tolist(), sequence.proximal_logprobs.tolist(), strict=True)
        ]
        return [r + m for r, m in zip(given, moved, strict=True)]
    totals = _totals(peers, config)
    if isinstance(settings, PairsAdvantage | LabelsAdvantage):
        rewards = _by_episode(totals, peers)
        trained = {e for _, _, s, e in peers if s.loss_mask.any()}
        rated = [Rated(index=e, reward=r, is_trained=e in trained) for e, r in rewards.items()]
        return [signs_of(rated, settings)[peers[place][3]]] * len(me.token_ids)
    if isinstance(settings, PassAtKAdvantage):
        is_right = [value > 0.5 for value in _by_episode(totals, peers).values()]
        return [_pass_at_k(totals[place] > 0.5, is_right, settings.k)] * len(me.token_ids)
    if isinstance(settings, MaxLikelihoodAdvantage):
        is_right = [value > 0.5 for value in _by_episode(totals, peers).values()]
        rate = statistics.mean(float(right) for right in is_right)
        reward = float(totals[place] > 0.5)
        return [(reward - rate) / rate if rate and reward in is_right else 0.0] * len(me.token_ids)
    assert isinstance(settings, RejectionAdvantage)
    return [1.0 if totals[place] > settings.threshold else 0.0] * len(me.token_ids)


# Rewards --------------------------------------------------------------------------------------------------------------


def _penalty(trajectory: Any, config: AlgorithmConfig) -> float:
    limit, buffer = config.overlong.max_tokens, config.overlong.buffer_tokens
    length = sum(trajectory.loss_mask)
    if limit is None or length <= limit - buffer:
        return 0.0
    if length >= limit:
        return config.overlong.penalty if length > limit or buffer else 0.0
    return config.overlong.penalty * (length - (limit - buffer)) / buffer


def _outcome(trajectory: Any, config: AlgorithmConfig) -> float:
    return trajectory.reward - _penalty(trajectory, config)


def _totals(peers: list[Member], config: AlgorithmConfig) -> Numbers:
    """Each outcome plus the process rewards of the whole episode."""
    process = [sum(t.token_rewards or ()) + sum(turn.reward for turn in t.turns) for _, t, *_ in peers]
    return [_outcome(t, config) + s for (_, t, *_), s in zip(peers, _summed(process, peers), strict=True)]


def _summed(values: Numbers, peers: list[Member]) -> Numbers:
    """For each of the peers the sum over its episode's."""
    return [sum(v for v, other in zip(values, peers, strict=True) if other[3] == peer[3]) for peer in peers]


def _by_episode(values: Numbers, peers: list[Member]) -> dict[int, float]:
    """episode -> the mean over its trajectories."""
    return {
        episode: statistics.mean(v for v, peer in zip(values, peers, strict=True) if peer[3] == episode)
        for episode in dict.fromkeys(peer[3] for peer in peers)
    }


def _kl(sequence: TrainSequence, config: AlgorithmConfig) -> Numbers:
    if config.kl.place == "loss":
        return [0.0] * len(sequence)
    penalties = []
    proximal, reference = sequence.proximal_logprobs.tolist(), sequence.reference_logprobs.tolist()
    for p, q, trained in zip(proximal, reference, sequence.loss_mask.tolist(), strict=True):
        d = p - q
        estimate = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[config.kl.estimator]
        penalties.append(config.kl.coefficient * estimate if trained else 0.0)
    return penalties


def _owner(trajectory: Any, token: int) -> int | None:
    """The last trained token at or before this one."""
    return next((t for t in range(token, -1, -1) if trajectory.loss_mask[t]), None)


def _credited(trajectory: Any) -> Numbers:
    """The token rewards that each trained token earns."""
    credited = [0.0] * len(trajectory.token_ids)
    for token, reward in enumerate(trajectory.token_rewards or ()):
        owner = _owner(trajectory, token)
        if owner is not None:
            credited[owner] += reward
    return credited


# Among peers ----------------------------------------------------------------------------------------------------------


def _std(numbers: Numbers) -> float:
    return statistics.stdev(numbers) if len(set(numbers)) > 1 else 0.0


def _std_of_episodes(values: Numbers, peers: list[Member]) -> float:
    """Each episode counts once, by the mean squared distance of its trajectories."""
    if len(set(values)) == 1:
        return 0.0
    means = _by_episode(values, peers)
    middle = statistics.mean(means.values())
    squares = _by_episode([(v - middle) ** 2 for v in values], peers)
    return math.sqrt(sum(squares.values()) / max(len(means) - 1, 1))


def _scaled(value: float, std: float, scale: str) -> float:
    return value / (std + EPSILON) if scale == "group_std" and std else value


def _compared(place: int, rewards: Numbers, peers: list[Member], settings: ReturnsAdvantage) -> float:
    mine, values = rewards[place], _by_episode(rewards, peers)
    others = [value for episode, value in values.items() if episode != peers[place][3]]
    if settings.baseline not in ("none", "greedy") and len(set(rewards)) == 1:
        return 0.0
    if settings.baseline == "leave_one_out" and not others:
        return 0.0
    lengths = [sum(sum(t.loss_mask) for _, t, _, e in peers if e == episode) for episode in values]
    if settings.baseline == "none":
        baseline = 0.0
    elif settings.baseline == "greedy":
        baseline = peers[place][0].greedy_rewards[peers[place][1].role]
    elif settings.baseline == "leave_one_out":
        baseline = statistics.mean(others)
    elif settings.baseline == "length_weighted" and sum(lengths):
        baseline = sum(n * r for n, r in zip(lengths, values.values(), strict=True)) / sum(lengths)
    else:
        baseline = statistics.mean(values.values())
    return mine - baseline


def _returns(place: int, peers: list[Member], config: AlgorithmConfig, settings: ReturnsAdvantage) -> Numbers:
    _, me, sequence, _ = peers[place]
    is_relative = settings.baseline not in ("none", "greedy")
    outcomes = [_outcome(t, config) for _, t, *_ in peers]
    penalties = _summed([sum(_kl(s, config)) for _, _, s, _ in peers], peers)
    totals = [o - p for o, p in zip(outcomes, penalties, strict=True)]
    std = _std_of_episodes(outcomes, peers)
    if settings.separate_rewards:
        parts = {name: [t.rewards[name] for _, t, *_ in peers] for name in me.rewards}
        parts["too long"] = [-_penalty(t, config) for _, t, *_ in peers]
        outcome = 0.0
        for name, part in parts.items():
            own = _scaled(_compared(place, part, peers, settings), _std_of_episodes(part, peers), settings.scale)
            outcome += settings.reward_weights.get(name, 1.0) * own
    else:
        value = _compared(place, totals if is_relative else outcomes, peers, settings)
        outcome = _scaled(value, std, settings.scale)
    rewards = _normalised_process(place, peers, settings)
    if not is_relative:
        rewards = [r - _scaled(k, std, settings.scale) for r, k in zip(rewards, _kl(sequence, config), strict=True)]
    return [outcome + _to_go(t, rewards, me, settings) for t in range(len(me.token_ids))]


def _to_go(start: int, rewards: Numbers, me: Any, settings: ReturnsAdvantage) -> float:
    total = 0.0
    for t in range(start, len(rewards)):
        tokens_between = sum(me.loss_mask[start + 1 : t + 1])
        turns_between = sum(start < turn.start <= t for turn in me.turns)
        if me.loss_mask[t]:
            total += settings.token_discount**tokens_between * settings.turn_discount**turns_between * rewards[t]
    return total


def _normalised_process(place: int, peers: list[Member], settings: ReturnsAdvantage) -> Numbers:
    me = peers[place][1]
    of_tokens = [
        [r for r, m in zip(_credited(t), t.loss_mask, strict=True) if m] if t.token_rewards else []
        for _, t, *_ in peers
    ]
    of_turns = [[turn.reward for turn in t.turns] for _, t, *_ in peers]
    rewards = [0.0] * len(me.token_ids)
    mine = iter(_normalised(place, of_tokens, peers, settings))
    if me.token_rewards:
        for t, trained in enumerate(me.loss_mask):
            if trained:
                rewards[t] += next(mine)
    for turn, value in zip(me.turns, _normalised(place, of_turns, peers, settings), strict=True):
        owner = _owner(me, turn.stop - 1)
        if owner is not None:
            rewards[owner] += value
    return rewards


def _normalised(place: int, rewards: list[Numbers], peers: list[Member], settings: ReturnsAdvantage) -> Numbers:
    everyone = [r for row in rewards for r in row]
    is_relative = settings.baseline not in ("none", "greedy")
    pooled = {e: [r for row, peer in zip(rewards, peers, strict=True) if peer[3] == e for r in row] for *_, e in peers}
    if is_relative and (len(pooled) == 1 or len(set(everyone)) < 2):
        return [0.0] * len(rewards[place])
    others = [statistics.mean(row) for episode, row in pooled.items() if row and episode != peers[place][3]]
    if not is_relative:
        centred = list(rewards[place])
    elif settings.baseline == "leave_one_out":
        centred = [r - statistics.mean(others) if others else 0.0 for r in rewards[place]]
    else:
        centred = [r - statistics.mean(everyone) for r in rewards[place]]
    return [_scaled(c, _std(everyone), settings.scale) for c in centred]


# The other estimators -------------------------------------------------------------------------------------------------


def _pass_at_k(success: bool, is_right: list[bool], k: int) -> float:
    """Forms every subgroup of k, and compares those that hold such an answer with all of them."""
    subgroups = list(itertools.combinations(range(len(is_right)), k))
    scores = [float(any(is_right[i] for i in subgroup)) for subgroup in subgroups]
    if len(set(scores)) < 2:
        return 0.0
    place = is_right.index(success)
    own = [score for score, subgroup in zip(scores, subgroups, strict=True) if place in subgroup]
    return (statistics.mean(own) - statistics.mean(scores)) / statistics.pstdev(scores)


def _gigpo(place: int, peers: list[Member], config: AlgorithmConfig, settings: GiGPOAdvantage) -> Numbers:
    def standing(value: float, among: Numbers) -> float:
        if len(set(among)) < 2:
            return 0.0
        return _scaled(value - statistics.mean(among), _std(among), settings.scale)

    def q(trajectory: Any, first: int) -> float:
        total = 0.0
        for j in range(first, len(trajectory.turns)):
            is_last = j == len(trajectory.turns) - 1
            stop = len(trajectory.token_ids) if is_last else trajectory.turns[j + 1].start
            reward = trajectory.turns[j].reward + (_outcome(trajectory, config) if is_last else 0.0)
            reward += sum((trajectory.token_rewards or ())[trajectory.turns[j].start : stop])
            total += settings.turn_discount ** (j - first) * reward
        return total

    me = peers[place][1]
    totals = _totals(peers, config)
    values = list(_by_episode(totals, peers).values())
    distance = totals[place] - statistics.mean(values) if len(set(totals)) > 1 else 0.0
    advantages = [_scaled(distance, _std_of_episodes(totals, peers), settings.scale)] * len(me.token_ids)
    for j, turn in enumerate(me.turns):
        if turn.state is None:
            continue
        among = [q(t, i) for _, t, *_ in peers for i, other in enumerate(t.turns) if other.state == turn.state]
        for token in range(turn.start, turn.stop):
            advantages[token] += standing(q(me, j), among)
    return advantages


def _gae(me: Any, sequence: TrainSequence, config: AlgorithmConfig) -> Numbers:
    settings = config.advantage
    assert isinstance(settings, GAEAdvantage)
    advantages = [0.0] * len(me.token_ids)
    steps = _steps(me, sequence, settings)
    if not steps:
        return advantages
    rewards = [r - k for r, k in zip(_credited(me), _kl(sequence, config), strict=True)]
    for turn in me.turns:
        owner = _owner(me, turn.stop - 1)
        if owner is not None:
            rewards[owner] += turn.reward
    rewards[steps[-1][-1]] += _outcome(me, config)
    values = [*(sequence.values[step[0]].item() for step in steps), 0.0]
    deltas = [
        sum(rewards[t] for t in step) + settings.discount * values[i + 1] - values[i] for i, step in enumerate(steps)
    ]
    lam = settings.lam
    for i, step in enumerate(steps):
        for t in step:
            advantages[t] = sum((settings.discount * lam) ** (j - i) * deltas[j] for j in range(i, len(deltas)))
    return advantages


def _steps(me: Any, sequence: TrainSequence, settings: GAEAdvantage) -> list[list[int]]:
    """The trained tokens of each step."""
    places = [t for t, trained in enumerate(sequence.loss_mask.tolist()) if trained]
    return turns_of(places, [turn.start for turn in me.turns]) if settings.level == "turn" else [[t] for t in places]


# Over the batch -------------------------------------------------------------------------------------------------------


def _whitened(rows: list[Numbers], members: list[Member], config: AlgorithmConfig) -> list[Numbers]:
    settings = config.advantage
    if isinstance(settings, LabelsAdvantage):
        pairs = [(a, (g.group_id, t.role, e)) for row, (g, t, _, e) in zip(rows, members, strict=True) for a in row]
        good, bad = lambdas([sign for sign, _ in {pair for pair in pairs if pair[0]}], settings)
        return [[a * (good if a > 0 else bad) for a in row] for row in rows]
    is_returns = isinstance(settings, ReturnsAdvantage)
    by_tokens = settings.scale == "batch_std" if is_returns else isinstance(settings, GAEAdvantage)
    if not by_tokens and not (is_returns and settings.separate_rewards):
        return rows
    trained: dict[tuple[int, int, str], Numbers] = {}
    for row, (g, t, s, episode) in zip(rows, members, strict=True):
        mine = trained.setdefault((g.group_id, episode, t.role), [])
        mine += [a for a, m in zip(row, s.loss_mask.tolist(), strict=True) if m]
    weighed = [(a, 1.0 if by_tokens else 1 / len(mine)) for mine in trained.values() for a in mine]
    count = math.fsum(weight for _, weight in weighed)
    if len({a for a, _ in weighed}) < 2 or count < 1.5:
        return [[0.0] * len(row) for row in rows]
    mean = math.fsum(a * weight for a, weight in weighed) / count
    std = math.sqrt(math.fsum((a - mean) ** 2 * weight for a, weight in weighed) / (count - 1))
    return [
        _where_trained([(a - mean) / (std + EPSILON) for a in row], s)
        for row, (_, _, s, _) in zip(rows, members, strict=True)
    ]


# Comparisons: pairs, labels and z0 from one group at a time, losses as the papers write them --------------------


@dataclass(frozen=True, kw_only=True)
class Rated:
    """An episode of a group: its index there, its reward, and whether a token of it is trained."""

    index: int
    reward: float
    is_trained: bool


def signs_of(episodes: Sequence[Rated], settings: PairsAdvantage | LabelsAdvantage) -> dict[int, float]:
    """episode index -> 1, -1 or 0, before any weight."""
    signs = {e.index: 0.0 for e in episodes}
    if isinstance(settings, LabelsAdvantage):
        rewards = [e.reward for e in episodes]
        bound = statistics.mean(rewards) if settings.threshold is None else settings.threshold
        for e in episodes:
            if e.is_trained and not (settings.threshold is None and math.isclose(e.reward, bound, rel_tol=1e-12)):
                signs[e.index] = 1.0 if e.reward > bound else -1.0
        return signs
    for best, worst in pairs_of(episodes):
        signs[best.index], signs[worst.index] = 1.0, -1.0
    return signs


def pairs_of(episodes: Sequence[Rated]) -> list[tuple[Rated, Rated]]:
    """At most one."""
    left = [e for e in episodes if e.is_trained]
    if len({e.reward for e in left}) < 2:
        return []
    best = min((e for e in left if e.reward == max(o.reward for o in left)), key=lambda e: e.index)
    worst = max((e for e in left if e.reward == min(o.reward for o in left)), key=lambda e: e.index)
    return [(best, worst)]


def lambdas(signs: Sequence[float], settings: LabelsAdvantage) -> tuple[float, float]:
    """lambda_D and lambda_U, from the signs of all labelled episodes."""
    good, bad = sum(s > 0 for s in signs), sum(s < 0 for s in signs)
    half = (good + bad) / 2
    return (half / max(good, 1), half / max(bad, 1)) if settings.balanced else (1.0, 1.0)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def dpo(better: Numbers, better_reference: Numbers, worse: Numbers, worse_reference: Numbers, config: DPOLossConfig):
    """Of one pair, from the logprobs of all trained tokens of each episode."""
    h = (sum(better) - sum(better_reference)) - (sum(worse) - sum(worse_reference))
    if config.link == "ipo":
        return (h - 1 / (2 * config.beta)) ** 2
    if config.link == "hinge":
        return max(0.0, 1 - config.beta * h)
    return -math.log(sigmoid(config.beta * h))


def kto(current: Numbers, reference: Numbers, advantage: float, z0: float, config: KTOLossConfig) -> float:
    """lambda_y - v(x, y) of one episode."""
    h = sum(current) - sum(reference)
    value = sigmoid(config.beta * (h - z0)) if advantage > 0 else sigmoid(config.beta * (z0 - h))
    return abs(advantage) - abs(advantage) * value


def z0(log_ratios: Sequence[Numbers]) -> float:
    """From p - reference of each compared episode's trained tokens."""
    return max(0.0, statistics.mean(sum(row) for row in log_ratios)) if log_ratios else 0.0


def turns_of(places: Sequence[int], starts: Sequence[int]) -> list[list[int]]:
    """The trained places of a trajectory by turns. starts: where its turns begin; none: unbroken runs are turns."""
    if not places:
        return []
    turns = [[places[0]]]
    for before, place in itertools.pairwise(places):
        if any(before < start <= place for start in starts) or (not starts and place != before + 1):
            turns.append([])
        turns[-1].append(place)
    return turns
