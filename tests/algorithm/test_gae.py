"""Generalised advantage estimation on trajectories that can be checked by hand."""

import statistics
from dataclasses import replace

import pytest
import torch
from advantage_cases import config_of, group, trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from arl.algorithm.advantages import with_advantages
from arl.algorithm.batch import Batch
from arl.algorithm.returns import discounted_sums, gae_advantages
from arl.api.algorithm import GAEAdvantage, KLConfig
from arl.api.types import Trajectory

VALUES = (9.0, 0.5, 9.0, 0.25, 9.0, 2.0)
"""Those of untrained tokens are 9: whoever looks at them is found out."""
MASK = (0, 1, 0, 1, 0, 1)


def batch_of(*members: Trajectory) -> Batch:
    """The trajectories, with VALUES for the first of their tokens."""
    batch = Batch.of([group(*members)])
    return replace(batch, values=torch.tensor([v for length in batch.lengths for v in VALUES[:length]]))


def advantages_of(*members: Trajectory, **settings: float) -> list[list[float]]:
    """Of each trajectory, before whitening."""
    outcomes = [t.reward for t in members]
    batch = batch_of(*members)
    return [row.tolist() for row in batch.split(gae_advantages(batch, outcomes, GAEAdvantage(**settings), KLConfig()))]


def returns_of(member: Trajectory, **settings: float) -> list[float]:
    """What the critic learns."""
    return with_advantages(batch_of(member), config_of({"kind": "gae", **settings})).returns.tolist()


def close(*numbers: float) -> object:
    return pytest.approx(list(numbers), rel=1e-6, abs=1e-6)


def test_with_lambda_0_the_critics_next_value_is_trusted():
    (row,) = advantages_of(trajectory(1.0, MASK), discount=0.5, lam=0.0)
    assert row == close(0, 0.125 - 0.5, 0, 1.0 - 0.25, 0, 1.0 - 2.0)


def test_with_lambda_1_returns_are_what_is_still_to_come():
    (row,) = advantages_of(trajectory(1.0, MASK), discount=0.5, lam=1.0)
    assert returns_of(trajectory(1.0, MASK), discount=0.5, lam=1.0) == close(0, 0.25, 0, 0.5, 0, 1.0)
    assert row == close(0, 0.25 - 0.5, 0, 0.5 - 0.25, 0, 1.0 - 2.0)


def test_a_trajectory_that_was_cut_off_ends_with_value_zero_too():
    cut, whole = advantages_of(trajectory(1.0, MASK, is_truncated=True), trajectory(1.0, MASK))
    assert cut == whole


def test_a_trajectory_does_not_see_its_peers():
    alone, other = trajectory(1.0, MASK), trajectory(-7.0, MASK)
    assert advantages_of(alone)[0] == advantages_of(alone, other)[0]


def test_advantages_are_whitened_and_returns_are_not():
    batch = with_advantages(batch_of(trajectory(1.0, MASK), trajectory(0.0, MASK)), config_of({"kind": "gae"}))
    assert batch.returns.tolist() == close(*(0, 1.0) * 3, *(0.0,) * 6)
    trained = batch.advantages[batch.loss_mask].tolist()
    assert statistics.mean(trained) == pytest.approx(0.0, abs=1e-6)
    assert statistics.stdev(trained) == pytest.approx(1.0, abs=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), max_size=40), st.data())
def test_discounted_sums_are_those_of_a_plain_loop(rewards: list[float], data: st.DataObject):
    kept = [data.draw(st.sampled_from((0.0, 0.5, 0.99, 1.0))) for _ in rewards[1:]]
    sums, running = list(rewards), 0.0
    for t in range(len(rewards) - 1, -1, -1):
        running = rewards[t] + (kept[t] * running if t < len(kept) else 0.0)
        sums[t] = running
    found = discounted_sums(torch.tensor(rewards, dtype=torch.float64), torch.tensor(kept, dtype=torch.float64))
    assert found.tolist() == pytest.approx(sums, rel=1e-9, abs=1e-6)
