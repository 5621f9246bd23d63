"""The times of a log's records do not go back with the system's clock."""

import time
from pathlib import Path

import pytest

from arl.api.events import ToolEnded, _Clock
from arl.api.settings.run import EventsConfig
from arl.observe.events.run_record import read_run
from arl.observe.events.writer import EventLog
from arl.rollout.episode_events import EpisodeReport

HOUR = 3600.0


@pytest.mark.parametrize("back_s", [30.0, HOUR])
def test_an_episode_has_all_its_calls_though_the_clock_is_set_back_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, back_s: float
):
    right = time.time
    with EventLog(tmp_path, EventsConfig()).open() as log:
        report = EpisodeReport(log, "0.0")
        report.begin()
        log.emit(ToolEnded(episode="0.0", tool="before", seconds=0.1))
        monkeypatch.setattr(time, "time", lambda: right() - back_s)
        log.emit(ToolEnded(episode="0.0", tool="after", seconds=0.1))
        report.end((), None, 1, None)
    run = read_run(tmp_path)
    (episode,) = run.episodes
    assert [call.tool for call in run.calls_of(episode) if isinstance(call, ToolEnded)] == ["before", "after"]
    assert episode.ended is not None
    assert 0.0 <= episode.ended - episode.began < back_s


def test_the_times_of_records_follow_a_clock_that_is_set_forward(monkeypatch: pytest.MonkeyPatch):
    """As after the sleep of a machine, whose monotonic clock stands still meanwhile."""
    right, clock = time.time, _Clock()
    first = clock()
    assert first == pytest.approx(right(), abs=60.0)
    monkeypatch.setattr(time, "time", lambda: right() + HOUR)
    later = clock()
    assert later - first >= HOUR
    monkeypatch.setattr(time, "time", right)
    assert clock() >= later
