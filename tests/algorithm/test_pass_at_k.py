"""Advantages for one success in k, against all subgroups that there are."""

import itertools
import statistics

import pytest
from advantage_cases import group, of_rewards, one_each, trajectory

from arl.algorithm.advantages import pass_at_k_advantages


@pytest.mark.parametrize("k", range(1, 8))
@pytest.mark.parametrize("num_right", range(7))
def test_the_analytic_form_is_the_mean_over_all_subgroups(num_right: int, k: int):
    rewards = [1.0] * num_right + [0.0] * (6 - num_right)
    subgroups = list(itertools.combinations(range(6), k))
    scores = [max(rewards[i] for i in subgroup) for subgroup in subgroups]
    expected = [0.0] * 6
    if len(set(scores)) > 1:
        for i in range(6):
            own = [score for score, subgroup in zip(scores, subgroups, strict=True) if i in subgroup]
            expected[i] = (statistics.mean(own) - statistics.mean(scores)) / statistics.pstdev(scores)
    assert pass_at_k_advantages(rewards, k) == pytest.approx(expected, abs=1e-9)


def test_advantages_add_up_to_zero_in_a_large_group():
    values = pass_at_k_advantages([1.0] * 3 + [0.0] * 253, 16)
    assert sum(values) == pytest.approx(0.0, abs=1e-9)
    assert values[0] > 0 > values[-1]


def test_a_reward_between_0_and_1_is_a_success_above_a_half():
    likened = one_each([of_rewards(0.51, 0.5, 0.0)], {"kind": "pass_at_k", "k": 2})
    assert likened == one_each([of_rewards(1.0, 0.0, 0.0)], {"kind": "pass_at_k", "k": 2})


def test_each_role_has_its_own_successes():
    mixed = group(*(trajectory(r, role=role) for role in ("a", "b") for r in (1.0, 0.0, 0.0)))
    (alone,) = one_each([of_rewards(1.0, 0.0, 0.0)], {"kind": "pass_at_k", "k": 2})
    assert one_each([mixed], {"kind": "pass_at_k", "k": 2}) == [alone * 2]
