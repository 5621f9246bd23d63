"""One success in k: its estimate (2107.03374), and advantages for it (Pass@k Training, 2508.10751)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

SUCCESS = 0.5
"""A reward above this is a success. Rewards should be 0 and 1, but penalties may have moved them."""


def pass_at_k(num_episodes: int, num_right: int, k: int) -> float:
    """The chance that at least one of k episodes is right: the unbiased estimate from n >= k episodes, c of them right.

    pass@k = 1 - C(n - c, k) / C(n, k), eq. 1 of "Evaluating Large Language Models Trained on Code" (2107.03374), in
    whole numbers up to the division. Raises ValueError for fewer than k episodes.
    """
    if not 0 <= num_right <= num_episodes or not 1 <= k <= num_episodes:
        raise ValueError(f"pass@{k} of {num_right} right among {num_episodes} episodes; it needs at least k of them")
    return float(1 - Fraction(math.comb(num_episodes - num_right, k), math.comb(num_episodes, k)))


def pass_at_k_advantages(rewards: Sequence[float], k: int) -> list[float]:
    """Each answer's advantage for the chance that one of k is right: the paper's analytic form.

    Of n answers c are right. A subgroup of k answers has reward 1 if one of them is right. Over all subgroups the mean
    reward is rho and the standard deviation sigma. An answer's advantage is the mean advantage of its subgroups:

        rho = 1 - C(n - c, k) / C(n, k)       sigma = sqrt(rho (1 - rho))
        right: (1 - rho) / sigma              wrong: (1 - rho - C(n - c - 1, k - 1) / C(n - 1, k - 1)) / sigma

    All are 0 if all subgroups have the same reward: with n <= k, if all are wrong, and if fewer than k are wrong. The
    computation is in whole numbers up to the last division. k = 1 is GRPO with the population's standard deviation.
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
