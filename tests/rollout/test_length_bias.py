"""The test of length bias finds planted ones, whatever cuts hide, and does not accuse runs without one."""

from collections.abc import Callable

import numpy as np
import pytest

from arl.rollout.monitors import LengthWatch

Lengths = np.ndarray
"""What the episodes of a group want to be: [group_size]."""
Fates = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Of each: its tokens by its end, whether it ended by itself, whether it is trained."""


def watched(
    chance: np.random.Generator, fate: Callable[[np.random.Generator, Lengths], Fates], groups: int = 300
) -> LengthWatch:
    """A run of groups of 4. Each example has a length of its own, and its episodes vary around it."""
    watch = LengthWatch()
    for _ in range(groups):
        wanted = np.exp(chance.normal(5, 1) + chance.normal(0, 0.5, 4)).astype(int) + 1
        tokens, is_whole, is_trained = fate(chance, wanted)
        rows = {i: (int(tokens[i]), bool(is_whole[i])) for i in range(4)}
        watch.note(rows, [i for i in range(4) if is_trained[i]])
    return watch


def whole(wanted: Lengths, is_trained: np.ndarray | bool) -> Fates:
    return wanted, np.full(4, True), np.broadcast_to(is_trained, 4)


def cut_at(wanted: Lengths, limit: np.ndarray | int) -> Fates:
    is_whole = wanted <= limit
    return np.minimum(wanted, limit), is_whole, is_whole


def group_filter(chance: np.random.Generator, wanted: Lengths) -> Fates:
    return whole(wanted, chance.random() < 0.6)


def episode_filter(chance: np.random.Generator, wanted: Lengths) -> Fates:
    return whole(wanted, chance.random(4) < 0.8)


def rare_failure_anywhere(chance: np.random.Generator, wanted: Lengths) -> Fates:
    """A tenth fails, somewhere on its way, short or long alike."""
    fails = chance.random(4) < 0.1
    return np.where(fails, wanted * chance.random(4), wanted).astype(int), ~fails, ~fails


def failure_at_the_end(chance: np.random.Generator, wanted: Lengths) -> Fates:
    fails = chance.random(4) < 0.2
    return wanted, ~fails, ~fails


def failure_at_the_beginning(chance: np.random.Generator, wanted: Lengths) -> Fates:
    fails = chance.random(4) < 0.2
    return np.where(fails, 0, wanted), ~fails, ~fails


def timeouts(chance: np.random.Generator, wanted: Lengths) -> Fates:
    return cut_at(wanted, 400)


def over_sampling(chance: np.random.Generator, wanted: Lengths) -> Fates:
    """The first 3 of 4 that end are kept."""
    return cut_at(wanted, int(np.sort(wanted)[2]))


def easy_groups_filtered(chance: np.random.Generator, wanted: Lengths) -> Fates:
    """Groups of short episodes are more often solved by all, and rejected."""
    return whole(wanted, chance.random() < min(wanted.mean() / 200, 0.9))


def straggling_groups(chance: np.random.Generator, wanted: Lengths) -> Fates:
    """A group with an episode that is far longer than usual is cut."""
    is_cut = wanted.max() > 600
    return np.minimum(wanted, 600), wanted <= 600, np.full(4, not is_cut)


UNBIASED = [group_filter, episode_filter, rare_failure_anywhere, failure_at_the_end, failure_at_the_beginning]
BIASED = {timeouts: "shorter", over_sampling: "shorter", straggling_groups: "shorter", easy_groups_filtered: "longer"}


@pytest.mark.parametrize("fate", UNBIASED)
def test_a_run_whose_losses_do_not_look_at_lengths_is_not_accused(fate: Callable[..., Fates]) -> None:
    chance = np.random.default_rng(18)
    accused = [bias for _ in range(40) if (bias := watched(chance, fate, 100).bias()) and bias.direction]
    assert accused == []


@pytest.mark.parametrize(("fate", "direction"), BIASED.items())
def test_a_planted_bias_is_found(fate: Callable[..., Fates], direction: str) -> None:
    chance = np.random.default_rng(18)
    biases = [watched(chance, fate).bias() for _ in range(10)]
    assert [bias.direction for bias in biases if bias] == [direction] * 10
    assert all(bias and direction in str(bias.remark()) for bias in biases)


def test_nothing_is_said_of_few_groups_or_where_all_or_none_are_trained() -> None:
    chance = np.random.default_rng(18)
    assert watched(chance, timeouts, groups=20).bias() is None
    for is_trained in (True, False):
        assert watched(chance, lambda _, wanted, all_=is_trained: whole(wanted, all_)).bias() is None
    assert LengthWatch().summary() == {}


@pytest.mark.slow
@pytest.mark.parametrize("fate", [*UNBIASED, *BIASED])
def test_the_rate_of_accusations_over_a_thousand_runs(fate: Callable[..., Fates]) -> None:
    chance, expected = np.random.default_rng(7), BIASED.get(fate)
    found = [(watched(chance, fate, 100).bias() or None) for _ in range(1000)]
    told = [bias.direction for bias in found if bias]
    if expected is None:
        assert 1000 - told.count(None) <= 5
    else:
        assert told.count(expected) >= 800
        assert set(told) <= {expected, None}
