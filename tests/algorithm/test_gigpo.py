"""Turns compared with others that were taken in the same state."""

import statistics

import pytest
from advantage_cases import Settings, advantages_of, group, trajectory

from arl.api.types import Trajectory, TurnSpan

MASK = (0, 1, 1, 1, 1, 1)


def gigpo(**changes: object) -> Settings:
    return {"kind": "gigpo", "scale": "none", "turn_discount": 0.5} | changes


def walked(reward: float, *states: str | None, **changes: object) -> Trajectory:
    """An episode of one-token turns in these states, and trained tokens after them up to the sixth."""
    turns = tuple(TurnSpan(start=1 + j, stop=2 + j, state=state) for j, state in enumerate(states))
    return trajectory(reward, MASK, turns=turns, **changes)


def rows(*members: Trajectory, **changes: object) -> list[list[float]]:
    return [row[1:] for row in advantages_of([group(*members)], gigpo(**changes))[0]]


def close(*numbers: float) -> object:
    return pytest.approx(list(numbers), rel=1e-6, abs=1e-6)


def test_a_turn_in_a_shared_state_is_compared_by_what_it_led_to():
    first, second = rows(walked(1.0, "door"), walked(0.0, "door"), turn_discount=1.0)
    assert first == close(0.5 + 0.5, 0.5, 0.5, 0.5, 0.5)
    assert second == close(-0.5 - 0.5, -0.5, -0.5, -0.5, -0.5)


@pytest.mark.parametrize("states", [(None, None), ("door", "hall")], ids=["unknown", "alone"])
def test_a_turn_like_no_other_has_its_episodes_part_alone(states: tuple[str | None, str | None]):
    first, second = rows(*(walked(reward, state) for reward, state in zip((1.0, 0.0), states, strict=True)))
    assert first == close(*[0.5] * 5)
    assert second == close(*[-0.5] * 5)


def test_roles_and_groups_do_not_share_states():
    stranger = walked(0.0, "door", role="critic")
    assert rows(walked(1.0, "door"), stranger) == [[0.0] * 5] * 2
    apart = advantages_of([group(walked(1.0, "door")), group(walked(0.0, "door"), group_id=1)], gigpo())
    assert apart == [[[0.0] * 6]] * 2


def test_the_parts_are_scaled_by_their_groups_and_weighed():
    first, _, third = rows(walked(1.0, "door"), walked(0.0, "door"), walked(0.0), scale="group_std")
    episode = (1 - 1 / 3) / (statistics.stdev([1, 0, 0]) + 1e-6)
    step = 0.5 / (statistics.stdev([1, 0]) + 1e-6)
    assert first == close(episode + step, *[episode] * 4)
    assert third == close(*[-1 / 3 / (statistics.stdev([1, 0, 0]) + 1e-6)] * 5)
