"""The time of a run on a machine whose clock differs from this one's."""

import time
from pathlib import Path

import pytest
from made_run import began, is_running, life
from msgspec.structs import replace

from arl.observe.view.run_clock import RunClock
from arl.observe.view.viewed_run import ViewedRun


class Clock:
    now = 10_000.0

    def __call__(self) -> float:
        return self.now


def test_a_run_of_this_machine_has_its_clock() -> None:
    clock = RunClock(Clock(), here="here")
    clock.note("here", 5_000.0)
    assert clock.now("here", 20_000.0) == 10_000.0


def test_the_smallest_difference_seen_is_that_of_the_clocks() -> None:
    here = Clock()
    clock = RunClock(here, here="here")
    assert clock.now("there", 6_000.0) == 10_000.0, "a silent run, perhaps"
    clock.note("there", 6_300.0)
    assert clock.now("there", 6_300.0) == 6_300.0
    clock.note("there", 6_400.0)
    clock.note("there", 6_350.0)
    here.now += 60.0
    assert clock.now("there", 6_400.0) == 6_460.0


def test_nothing_was_written_in_the_future() -> None:
    assert RunClock(Clock(), here="here").now("there", 13_600.0) == 13_600.0


def test_clocks_that_nearly_agree_count_as_equal() -> None:
    clock = RunClock(Clock(), here="here")
    clock.note("there", 9_996.0)
    assert clock.now("there", 9_996.0) == 10_000.0


def test_a_life_on_another_machine_has_another_clock() -> None:
    clock = RunClock(Clock(), here="here")
    clock.note("there", 9_000.0)
    assert clock.now("elsewhere", 9_000.0) == 10_000.0
    clock.note("elsewhere", 8_000.0)
    assert clock.now("elsewhere", 8_000.0) == 8_000.0


async def test_a_run_is_watched_by_its_own_clock(tmp_path: Path) -> None:
    ahead_s, run_dir = 4_000.0, tmp_path
    life(run_dir, [replace(began(t=time.time() - 60), host="there")])
    viewed = ViewedRun(run_dir, is_running)
    viewed._clock = RunClock(lambda: time.time() + ahead_s)
    try:
        await viewed.load()
        assert await viewed.ask(viewed.now) == pytest.approx(time.time() + ahead_s, abs=60)
        life(run_dir, [replace(began(t=time.time()), host="there")])
        await viewed.load()
        assert await viewed.ask(viewed.now) == pytest.approx(time.time(), abs=60)
    finally:
        viewed.close()
