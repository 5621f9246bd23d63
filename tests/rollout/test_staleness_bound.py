"""The bound of docs/staleness.md over random schedules, and proof that these tests can fail."""

import pytest
from hypothesis import given, settings
from simulation import Schedule, schedules, simulate

from arl.api.errors import StalenessError
from arl.plan.virtual_time import DeadlockError
from arl.rollout.buffer import ReplayBuffer


@given(schedules)
@settings(max_examples=60, deadline=None)
def test_no_token_is_too_old_no_group_trained_twice_the_buffer_never_overfull_and_the_pipeline_never_stops(
    schedule: Schedule,
) -> None:
    simulation = simulate(schedule)
    assert len(simulation.batches) == schedule.num_versions
    for version, batch in enumerate(simulation.batches):
        assert len(batch) == schedule.batch_size
        assert all(version - group.oldest_version <= schedule.max_staleness for group in batch)
    trained = [group.group_id for batch in simulation.batches for group in batch]
    assert len(trained) == len(set(trained))
    capacity = (schedule.max_staleness + 1) * schedule.batch_size
    assert max(simulation.num_charged) <= capacity


class WithoutLookAhead(ReplayBuffer):
    def _first_overfull(self) -> None:
        return None


class UnchargedWhenTaken(ReplayBuffer):
    async def take_batch(self, version: int) -> list[object]:
        batch = await super().take_batch(version)
        for number in self._taken.pop(version):
            del self._entries[number]
        return batch


def test_random_schedules_find_the_missing_look_ahead_test() -> None:
    schedule = Schedule(batch_size=3, max_staleness=1, straggler_rate=0.05)
    with pytest.raises(ExceptionGroup) as raised:
        simulate(schedule, WithoutLookAhead)
    assert raised.group_contains(StalenessError)


def test_groups_uncharged_before_their_weights_are_published_would_stop_the_pipeline() -> None:
    schedule = Schedule(batch_size=2, max_staleness=1, update_s=3.0, train_s=0.01)
    with pytest.raises(DeadlockError):
        simulate(schedule, UnchargedWhenTaken)
