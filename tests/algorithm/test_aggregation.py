"""Loss weights are shares of the whole minibatch, in which an episode that branched counts once."""

from collections.abc import Sequence
from typing import get_args

import pytest
from advantage_cases import random_groups
from hypothesis import given, settings
from hypothesis import strategies as st

from arl.algorithm.batch import Batch, loss_weights
from arl.api.settings.algorithm import Aggregation
from arl.api.types import Group


def reference(groups: Sequence[Group], aggregation: Aggregation, sequence_tokens: int) -> list[float]:
    """Each token's weight, found by counting for it alone."""
    rows = [
        ((g.group_id, episode, t.role), t.loss_mask.tolist())
        for g in groups
        for t, episode in zip(g.trajectories, g.episode_indices, strict=True)
    ]
    episodes, weights = {key for key, mask in rows if any(mask)}, list[float]()
    for mine, mask in rows:
        share = {
            "token_mean": sum(sum(m) for _, m in rows),
            "sequence_mean": len(episodes) * sum(sum(m) for key, m in rows if key == mine),
            "sequence_sum": len(episodes) * sequence_tokens,
            "group_mean": len({g for g, *_ in episodes}) * sum(sum(m) for key, m in rows if key[0] == mine[0]),
        }[aggregation]
        weights += [1 / share if token else 0.0 for token in mask]
    return weights


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**20), size=st.integers(0, 4), sequence_tokens=st.integers(1, 64))
def test_weights_agree_with_counting(aggregation: Aggregation, seed: int, size: int, sequence_tokens: int):
    groups = random_groups(seed, has_branches=True)[:size]
    found = loss_weights(Batch.of(groups), aggregation, sequence_tokens=sequence_tokens)
    assert found.tolist() == pytest.approx(reference(groups, aggregation, sequence_tokens), rel=1e-6, abs=1e-9)
