"""Groups without a difference that advantages could see, and groups that lack what they would compare."""

from dataclasses import replace

import pytest
from simulation import grouped, trajectory

from arl.api.types import Trajectory, TurnSpan
from arl.rollout.group import GroupRules, has_equal_rewards, why_not_comparable

ONE = trajectory((0, 0, 0), reward=1.0)
TURNS = (TurnSpan(start=1, stop=2, state="a"), TurnSpan(start=2, stop=3, state="b"))
ANY, PARTS, GIGPO = GroupRules(), GroupRules(compares_parts=True), GroupRules(compares_turns=True)


def are_equal(*trajectories: Trajectory, rules: GroupRules = ANY) -> bool:
    return has_equal_rewards(grouped(*trajectories), rules)


def test_outcomes_are_compared_within_each_role() -> None:
    critic = replace(ONE, role="critic", reward=0.0)
    assert are_equal(ONE, critic, ONE, critic)
    assert not are_equal(ONE, critic, ONE, replace(critic, reward=0.5))


def test_process_rewards_make_a_difference_between_equal_outcomes() -> None:
    assert not are_equal(ONE, replace(ONE, token_rewards=(0.0, 0.0, 0.5, 0.0)))
    assert not are_equal(ONE, replace(ONE, turns=(TurnSpan(start=1, stop=2, reward=0.5),)))


def test_process_rewards_of_zero_make_no_difference() -> None:
    assert are_equal(ONE, replace(ONE, token_rewards=(0.0,) * 4), replace(ONE, turns=TURNS))


@pytest.mark.parametrize(("rules", "expected"), [(ANY, True), (PARTS, False)])
def test_named_rewards_make_a_difference_if_the_rules_compare_them(rules: GroupRules, expected: bool) -> None:
    first, second = (
        replace(ONE, rewards={"form": 1.0, "answer": 0.0}),
        replace(ONE, rewards={"form": 0.5, "answer": 0.5}),
    )
    assert are_equal(first, second, rules=rules) is expected
    assert are_equal(first, replace(ONE, rewards={"answer": 0.0, "form": 1.0}), rules=rules)


@pytest.mark.parametrize(("rules", "expected"), [(ANY, True), (GIGPO, False)])
def test_turns_in_a_common_state_differ_by_their_distance_from_the_outcome(rules: GroupRules, expected: bool) -> None:
    shorter = replace(ONE, turns=TURNS[1:])
    assert are_equal(replace(ONE, turns=TURNS), shorter, rules=rules) is expected


def test_turns_without_an_outcome_or_a_common_state_do_not_differ() -> None:
    lost = [replace(ONE, reward=0.0, turns=turns) for turns in (TURNS, TURNS[1:])]
    assert are_equal(*lost, rules=GIGPO)
    assert are_equal(replace(ONE, turns=TURNS[:1]), replace(ONE, turns=TURNS[1:]), rules=GIGPO)


def test_a_group_that_lacks_what_is_compared_is_dropped_and_says_why() -> None:
    named = [replace(ONE, rewards={"right": 1.0}), replace(ONE, rewards={"right": 0.0, "brief": 1.0})]
    assert "named rewards ['right'] and ['brief', 'right']" in str(why_not_comparable(grouped(*named), PARTS))
    assert "named rewards [] and []" in str(why_not_comparable(grouped(ONE, ONE), PARTS))
    assert why_not_comparable(grouped(*named), ANY) is None
    taught = GroupRules(compares_tokens=True)
    assert "have no token_rewards" in str(why_not_comparable(grouped(ONE), taught))
    assert why_not_comparable(grouped(replace(ONE, token_rewards=(0.0, 0.0, 0.0, 0.5))), taught) is None
    baseline = GroupRules(has_baseline=True)
    assert "no trajectory of role 'agent'" in str(why_not_comparable(grouped(ONE), baseline))
    assert why_not_comparable(grouped(ONE, greedy_rewards={"agent": 1.0}), baseline) is None
