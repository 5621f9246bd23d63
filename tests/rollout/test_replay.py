"""Groups trained before are trained again, within the bound, and never in the books a second time."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from players import TwoTurns, controlled, train
from simulation import Schedule, Simulation, group, schedules, trajectory
from virtual_time import run_in_virtual_time

from arl.api.errors import StalenessError
from arl.api.types import Group
from arl.rollout.buffer import Replay, ReplayBuffer, Slot


def rewarded(number: int, version: int, *rewards: float) -> Group:
    """A group of one token for each of the rewards."""
    base = group(Slot(number=number, stamp=version))
    trajectories = tuple(trajectory((version,), reward=reward) for reward in rewards or (1.0,))
    return replace(base, trajectories=trajectories, episode_indices=tuple(range(len(trajectories))))


def ids(groups: list[Group]) -> list[int]:
    return [g.group_id for g in groups]


def test_only_groups_with_a_reward_above_the_limit_are_replayed() -> None:
    replay = Replay(9, min_reward=0.5, max_staleness=2)
    replay.add([rewarded(0, 0, 0.0, 0.5), rewarded(1, 0, 0.0, 0.6), rewarded(2, 0, 1.0)], version=1)
    assert sorted(ids(replay.take(1))) == [1, 2]


def test_the_least_stale_come_first_and_no_more_than_asked_for() -> None:
    replay = Replay(3, max_staleness=5)
    replay.add([rewarded(0, 2), rewarded(1, 4), rewarded(2, 3), rewarded(3, 4), rewarded(4, 1)], version=5)
    assert ids(replay.take(5)) == [3, 1, 2]


def test_a_group_may_be_in_several_batches_and_in_each_once() -> None:
    replay = Replay(9, max_staleness=5)
    replay.add([rewarded(0, 0)], version=1)
    replay.add([rewarded(0, 0)], version=2)
    assert ids(replay.take(2)) == ids(replay.take(3)) == [0]


def test_a_group_is_replayed_up_to_the_last_version_that_may_hold_it_and_then_forgotten() -> None:
    replay = Replay(9, max_staleness=2)
    replay.add([rewarded(0, 1)], version=2)
    assert ids(replay.take(3)) == [0]
    assert replay.take(4) == []
    replay.add([], version=3)
    assert ids(list(replay.groups)) == [0]
    replay.add([], version=4)
    assert replay.groups == ()


def test_none_are_kept_where_none_are_asked_for() -> None:
    replay = Replay()
    replay.add([rewarded(0, 0)], version=0)
    assert (replay.groups, replay.take(0)) == ((), [])


def test_a_restored_one_goes_on_as_the_one_before_would_have() -> None:
    replay = Replay(2, max_staleness=3)
    replay.add([rewarded(0, 0), rewarded(1, 2), rewarded(2, 1)], version=3)
    copy = Replay(2, max_staleness=3)
    copy.restore(replay.groups, version=3)
    assert [copy.take(v) for v in (3, 4, 5)] == [replay.take(v) for v in (3, 4, 5)]


def test_a_tighter_bound_after_a_resume_forgets_what_is_past_it() -> None:
    copy = Replay(9, max_staleness=1)
    copy.restore([rewarded(0, 1), rewarded(1, 2)], version=3)
    assert ids(copy.take(3)) == [1]


class Replaying(Simulation):
    """Trains groups of earlier batches with each batch."""

    def __init__(self, schedule: Schedule, replay: Replay) -> None:
        super().__init__(schedule, ReplayBuffer(schedule.batch_size, schedule.max_staleness))
        self.replay = replay
        self.replayed: list[list[Group]] = []
        self.buffer.take_batch = self._taking(self.buffer.take_batch)  # type: ignore[method-assign]

    def _taking(self, take_batch: object) -> object:
        async def take(version: int) -> list[Group]:
            batch = await take_batch(version)
            self.replayed.append(self.replay.take(version))
            self.replay.add(batch, version + 1)
            return batch

        return take


def simulate(schedule: Schedule, kind: type[Replay] = Replay) -> Replaying:
    async def main() -> Replaying:
        simulation = Replaying(schedule, kind(3, min_reward=-1.0, max_staleness=schedule.max_staleness))
        await simulation.run()
        return simulation

    return run_in_virtual_time(main())


@given(schedules)
@settings(max_examples=15, deadline=None)
def test_no_replayed_token_is_beyond_max_staleness_whatever_the_schedule(schedule: Schedule) -> None:
    simulation = simulate(schedule)
    trained: set[int] = set()
    for version, (batch, replayed) in enumerate(zip(simulation.batches, simulation.replayed, strict=True)):
        assert all(version - g.oldest_version <= schedule.max_staleness for g in replayed)
        assert len(set(ids(replayed))) == len(replayed) <= 3
        assert set(ids(replayed)) <= trained
        trained |= set(ids(batch))
    assert len(simulation.replay.groups) <= schedule.max_staleness * schedule.batch_size


@pytest.mark.parametrize(("cap", "least", "most"), [(4, 35, 40), (1000, 0, 25)])
def test_replay_has_what_it_needs_where_fewer_rollouts_are_under_way_than_the_bound_allows(
    cap: int, least: int, most: int
) -> None:
    """A full pipeline trains groups that are as old as they may be, which nobody may train again."""

    async def main() -> int:
        controller, buffer, engine = controlled(
            TwoTurns(), 200, batch_size=2, max_staleness=4, max_concurrent_episodes=cap
        )
        batches = await train(controller, buffer, engine, range(20))
        replay, replayed = Replay(2, min_reward=-1.0, max_staleness=4), 0
        for version, batch in enumerate(batches):
            replayed += len(replay.take(version))
            replay.add(batch, version + 1)
        return replayed

    assert least <= run_in_virtual_time(main()) <= most


class Forgetful(Replay):
    """Looks at no version, neither of what it keeps nor of what it takes."""

    def _is_fresh(self, group: Group, version: int) -> bool:
        return True


def test_a_replay_that_looked_at_no_version_would_be_noticed_at_use() -> None:
    replay = Forgetful(1, max_staleness=1)
    replay.add([rewarded(0, 3)], version=4)
    with pytest.raises(StalenessError, match="version 3 in the batch for version 5; max_staleness is 1"):
        replay.take(5)
