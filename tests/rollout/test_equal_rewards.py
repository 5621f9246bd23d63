"""Groups without a difference that advantages could see, and groups that lack what they would compare."""

from dataclasses import replace
from typing import Any

import pytest
from records import grouped, trajectory

from arl.api.types import TurnSpan
from arl.rollout.group import GroupRules, has_equal_rewards, why_not_comparable

ONE = trajectory((0, 0, 0), reward=1.0)
TURNS = (TurnSpan(start=1, stop=2, state="a"), TurnSpan(start=2, stop=3, state="b"))
FORM, ANSWER = {"form": 1.0, "answer": 0.0}, {"form": 0.5, "answer": 0.5}
ANY, PARTS, GIGPO = GroupRules(), GroupRules(compares_parts=True), GroupRules(compares_turns=True)
TOKENS, BASELINE = GroupRules(compares_tokens=True), GroupRules(has_baseline=True)


def test_outcomes_are_compared_within_each_role() -> None:
    critic = replace(ONE, role="critic", reward=0.0)
    assert has_equal_rewards(grouped(ONE, critic, ONE, critic), ANY)
    assert not has_equal_rewards(grouped(ONE, critic, ONE, replace(critic, reward=0.5)), ANY)


@pytest.mark.parametrize(
    ("first", "second", "rules", "expected"),
    [
        ({}, {"token_rewards": (0.0, 0.0, 0.5, 0.0)}, ANY, False),
        ({}, {"turns": (TurnSpan(start=1, stop=2, reward=0.5),)}, ANY, False),
        ({"turns": TURNS}, {"token_rewards": (0.0,) * 4}, ANY, True),  # process rewards of zero
        ({"rewards": FORM}, {"rewards": ANSWER}, ANY, True),
        ({"rewards": FORM}, {"rewards": ANSWER}, PARTS, False),
        ({"rewards": FORM}, {"rewards": {"answer": 0.0, "form": 1.0}}, PARTS, True),  # in another order
        ({"turns": TURNS}, {"turns": TURNS[1:]}, ANY, True),
        ({"turns": TURNS}, {"turns": TURNS[1:]}, GIGPO, False),  # they differ by their distance from the outcome
        ({"turns": TURNS[:1]}, {"turns": TURNS[1:]}, GIGPO, True),  # no common state
        ({"turns": TURNS, "reward": 0.0}, {"turns": TURNS[1:], "reward": 0.0}, GIGPO, True),  # no outcome
    ],
)
def test_equal_outcomes_differ_by_what_the_rules_compare(
    first: dict[str, Any], second: dict[str, Any], rules: GroupRules, expected: bool
) -> None:
    assert has_equal_rewards(grouped(replace(ONE, **first), replace(ONE, **second)), rules) is expected


NAMED = grouped(replace(ONE, rewards={"right": 1.0}), replace(ONE, rewards={"right": 0.0, "brief": 1.0}))


def test_a_group_that_lacks_what_is_compared_is_dropped_and_says_why() -> None:
    assert "named rewards ['right'] and ['brief', 'right']" in str(why_not_comparable(NAMED, PARTS))
    assert "named rewards [] and []" in str(why_not_comparable(grouped(ONE, ONE), PARTS))
    assert "have no token_rewards" in str(why_not_comparable(grouped(ONE), TOKENS))
    assert "no trajectory of role 'agent'" in str(why_not_comparable(grouped(ONE), BASELINE))
    assert why_not_comparable(NAMED, ANY) is None
    assert why_not_comparable(grouped(replace(ONE, token_rewards=(0.0, 0.0, 0.0, 0.5))), TOKENS) is None
    assert why_not_comparable(grouped(ONE, greedy_rewards={"agent": 1.0}), BASELINE) is None
