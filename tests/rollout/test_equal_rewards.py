"""Groups without a difference that advantages could see, and groups that lack what they would compare."""

import random
from dataclasses import replace
from typing import Any

import pytest
from one_turn import OneTurn
from records import grouped, trajectory

from arl.algorithm.advantages import arranged
from arl.algorithm.batch import Batch
from arl.api.settings.algorithm import preset
from arl.api.types import TurnSpan
from arl.rollout.group import GroupRules, has_equal_rewards, why_not_comparable
from arl.run.inputs import RunTask, group_rules

ONE = trajectory((0, 0, 0), reward=1.0)
TURNS = (TurnSpan(start=1, stop=2, state="a"), TurnSpan(start=2, stop=3, state="b"))
FORM, ANSWER = {"form": 1.0, "answer": 0.0}, {"form": 0.5, "answer": 0.5}
ANY, PARTS, GIGPO = GroupRules(), GroupRules(compares_parts=True), GroupRules(compares_turns=True)
TOTALS = GroupRules(compares_totals=True)
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
        ({"reward": 0.5, "token_rewards": (0.0, 0.0, 0.5, 0.0)}, {"token_rewards": (0.0,) * 4}, TOTALS, True),
        ({"reward": 0.3}, {"reward": 0.1, "token_rewards": (0.0, 0.0, 0.2, 0.0)}, TOTALS, True),  # up to rounding
        ({"token_rewards": (0.0, 0.5, 0.0, 0.0)}, {"token_rewards": (0.0, 0.0, 0.0, 0.25)}, TOTALS, False),
        ({"rewards": FORM}, {"rewards": ANSWER}, TOTALS, True),
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


@pytest.mark.parametrize("name", ["online_dpo", "kto"])
def test_groups_without_a_pair_or_label_are_those_of_equal_totals(name: str) -> None:
    """Over random branches, roles and process rewards, against what the algorithm compares."""
    config, chance, seen = preset(name), random.Random(7), set[bool]()
    rules = group_rules(config, RunTask(workflow=OneTurn(), dataset=[{}], eval_dataset=None))
    for _ in range(300):
        group = grouped(
            *(
                trajectory(
                    reward=chance.choice((0.1, 0.3)),
                    token_rewards=(0.0, chance.choice((0.0, 0.2)), 0.0),
                    role=chance.choice(("agent", "critic")),
                )
                for _ in range(4)
            ),
            episode_indices=chance.choice(((0, 1, 2, 3), (0, 0, 1, 2), (0, 1, 1, 2))),
        )
        is_compared = bool(arranged(Batch.of([group]), config).loss_mask.any())
        assert has_equal_rewards(group, rules) is not is_compared
        seen.add(is_compared)
    assert seen == {True, False}


NAMED = grouped(replace(ONE, rewards={"right": 1.0}), replace(ONE, rewards={"right": 0.0, "brief": 1.0}))


def test_a_group_that_lacks_what_is_compared_is_dropped_and_says_why() -> None:
    assert "named rewards ['right'] and ['brief', 'right']" in str(why_not_comparable(NAMED, PARTS))
    assert "named rewards [] and []" in str(why_not_comparable(grouped(ONE, ONE), PARTS))
    assert "have no token_rewards" in str(why_not_comparable(grouped(ONE), TOKENS))
    assert "no trajectory of role 'agent'" in str(why_not_comparable(grouped(ONE), BASELINE))
    assert why_not_comparable(NAMED, ANY) is None
    assert why_not_comparable(grouped(replace(ONE, token_rewards=(0.0, 0.0, 0.0, 0.5))), TOKENS) is None
    assert why_not_comparable(grouped(ONE, greedy_rewards={"agent": 1.0}), BASELINE) is None
