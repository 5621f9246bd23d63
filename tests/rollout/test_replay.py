"""Groups trained before are trained again, within the bound, and never in the books a second time."""

import pytest
from records import grouped, trajectory

from arl.api.errors import StalenessError
from arl.api.types import Group
from arl.rollout.buffer import Replay


def rewarded(number: int, version: int, *rewards: float) -> Group:
    """A group of one token for each of the rewards."""
    return grouped(*(trajectory((version,), reward) for reward in rewards or (1.0,)), number=number, stamp=version)


def ids(groups: list[Group]) -> list[int]:
    return [g.group_id for g in groups]


@pytest.mark.parametrize(("num_groups", "taken"), [(0, []), (3, [3, 1, 2]), (9, [3, 1, 2, 4])])
def test_of_groups_with_a_reward_above_the_limit_the_least_stale_are_taken(num_groups: int, taken: list[int]) -> None:
    replay = Replay(num_groups, min_reward=0.5, max_staleness=5)
    good = [rewarded(number, version, 0.0, 0.6) for number, version in ((1, 4), (2, 3), (3, 4), (4, 1))]
    replay.add([rewarded(0, 4, 0.0, 0.5), *good], version=5)
    assert ids(replay.take(5)) == taken
    assert len(replay.groups) == (4 if num_groups else 0)


def test_a_group_is_replayed_up_to_the_last_version_that_may_hold_it_and_then_forgotten() -> None:
    replay = Replay(9, max_staleness=2)
    replay.add([rewarded(0, 1)], version=2)
    assert ids(replay.take(3)) == [0]
    assert replay.take(4) == []
    replay.add([], version=3)
    assert ids(list(replay.groups)) == [0]
    replay.add([], version=4)
    assert replay.groups == ()


class Forgetful(Replay):
    """Looks at no version, neither of what it keeps nor of what it takes."""

    def _is_fresh(self, group: Group, version: int) -> bool:
        return True


def test_a_replay_that_ignored_versions_would_be_noticed_at_use() -> None:
    replay = Forgetful(1, max_staleness=1)
    replay.add([rewarded(0, 3)], version=4)
    with pytest.raises(StalenessError, match="version 3 in the batch for version 5; max_staleness is 1"):
        replay.take(5)
