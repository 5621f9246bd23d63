"""An episode that branched into several trajectories counts once, however it branched."""

import random
from dataclasses import replace

import pytest
import torch
from advantage_cases import (
    ESTIMATORS,
    Settings,
    config_of,
    name_of,
    random_groups,
    returns,
    taken,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from arl.algorithm.advantages import with_advantages
from arl.algorithm.batch import Batch, loss_weights
from arl.api.algorithm import AlgorithmConfig
from arl.api.types import Trajectory

# What looks at a trajectory's own tokens in their order, or at its own length, sees another trajectory after a split:
# process rewards that reach back, turns that are discounted, GAE, and a penalty for length.
BLIND_TO_SPLITS = [
    (advantage | {"turn_discount": 1.0} if advantage["kind"] == "gigpo" else advantage, others)
    for advantage, others in ESTIMATORS
    if advantage["kind"] != "gae"
    and "overlong" not in others
    and not (advantage["kind"] == "returns" and ("token_discount" in advantage or "turn_discount" in advantage))
]


def split(whole: Trajectory, rng: random.Random) -> list[Trajectory]:
    """The episode as two branches with all its tokens, each of which trains a part of them and has their rewards."""
    length = len(whole.token_ids)
    inside = {i for turn in whole.turns for i in range(turn.start + 1, turn.stop)}
    cut = rng.choice([i for i in range(length + 1) if i not in inside])
    branches = []
    for start, stop in ((0, cut), (cut, length)):
        mask = tuple(m if start <= i < stop else 0 for i, m in enumerate(whole.loss_mask))
        rewards = whole.token_rewards and tuple(
            r if start <= i < stop else 0.0 for i, r in enumerate(whole.token_rewards)
        )
        turns = tuple(turn for turn in whole.turns if start <= turn.stop - 1 < stop)
        branches.append(replace(whole, loss_mask=mask, token_rewards=rewards, turns=turns))
    return branches


def with_a_split(batch: Batch, config: AlgorithmConfig, rng: random.Random) -> Batch:
    """The same batch, in which some episodes branched."""
    branched, origins = [], []
    first = iter(range(len(batch)))
    for g in batch.groups:
        parts = [split(t, rng) if rng.random() < 0.6 else [t] for t in g.trajectories]
        episodes = [episode for episode, branches in enumerate(parts) for _ in branches]
        origins += [i for branches, i in zip(parts, first, strict=False) for _ in branches]
        members = tuple(t for branches in parts for t in branches)
        branched.append(replace(g, trajectories=members, episode_indices=tuple(episodes)))
    made = Batch.of(branched, config.overlong)
    known = {}
    for name in ("proximal_logprobs", "reference_logprobs"):
        rows = batch.split(getattr(batch, name))
        known[name] = torch.cat([torch.zeros(0), *(rows[i] for i in origins)]) * made.loss_mask
    return replace(made, **known)


def by_token(batch: Batch, field: str) -> list[float]:
    """For each group and episode the field of each token, from the branch in which it is trained."""
    episodes: dict[tuple[int, int], list[float]] = {}
    numbers = [episode for g in batch.groups for episode in g.episode_indices]
    for key, s in zip(zip(batch.group, numbers, strict=True), batch.sequences(), strict=True):
        values = (getattr(s, field) * s.loss_mask).tolist()
        known = episodes.setdefault(key, [0.0] * len(values))
        episodes[key] = [a + b for a, b in zip(known, values, strict=True)]
    return [value for values in episodes.values() for value in values]


def prepared(seed: int, config: AlgorithmConfig) -> tuple[Batch, Batch]:
    """A batch, and the same with branches."""
    groups = random_groups(seed, has_process=config.advantage.kind not in ("returns", "gigpo"))
    batch = taken(groups, config)
    return batch, with_a_split(batch, config, random.Random(seed))


@pytest.mark.parametrize(("advantage", "others"), BLIND_TO_SPLITS, ids=name_of)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**20))
def test_advantages_are_those_of_the_same_episodes_unbranched(advantage: Settings, others: Settings, seed: int):
    config = config_of(advantage, **others)
    whole, apart = (by_token(with_advantages(batch, config), "advantages") for batch in prepared(seed, config))
    assert apart == pytest.approx(whole, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum", "group_mean"])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**20))
def test_tokens_weigh_as_much_as_if_their_episode_had_not_branched(aggregation: str, seed: int):
    config = config_of(returns(), aggregation=aggregation)
    whole, apart = (
        by_token(replace(b, loss_weights=loss_weights(b, config.aggregation, sequence_tokens=8)), "loss_weights")
        for b in prepared(seed, config)
    )
    assert apart == pytest.approx(whole, rel=1e-6)
