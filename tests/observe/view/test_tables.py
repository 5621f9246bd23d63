"""The tables of a run hold what its record holds."""

import json
import re
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from made_run import began, life, write_run

from arl.api.version import install_command
from arl.observe.events.run_record import RunRecord, Table, read_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return read_run(write_run(tmp_path_factory.mktemp("run")))


def rows(run: RunRecord, table: Any) -> list[dict[str, Any]]:
    return run.to_arrow(table).to_pylist()


def test_episodes_are_those_of_the_record(run: RunRecord) -> None:
    table = rows(run, "episodes")
    assert [(row["life"], row["episode"]) for row in table] == [(e.life, e.episode) for e in run.episodes]
    for row, episode in zip(table, run.episodes, strict=True):
        for name in ("step", "how", "reward", "began", "ended", "error", "staleness", "is_undone", "attempts"):
            assert row[name] == getattr(episode, name), (episode.episode, name)
        assert row["group"] == (episode.group.group if episode.group else None)
        assert row["tokens"] == episode.num_tokens


def test_parts_of_rewards_are_means_over_the_trajectories_that_have_them(run: RunRecord) -> None:
    (row,) = [row for row in rows(run, "episodes") if row["episode"] == "1.1"]
    parts = [part.rewards["correct"] for part in run.episode(1, "1.1").trajectories]
    assert len(parts) == 3
    assert row["rewards/correct"] == pytest.approx(sum(parts) / 3)
    assert row["trajectories"] == 3
    (running,) = [row for row in rows(run, "episodes") if row["how"] == "running"]
    assert running["rewards/correct"] is None


def test_held_out_episodes_have_their_example_as_json_and_those_of_groups_none(run: RunRecord) -> None:
    for row, episode in zip(rows(run, "episodes"), run.episodes, strict=True):
        assert (json.loads(row["example"]) if row["example"] else episode.group.example) == episode.example


def test_groups_have_their_example_as_json(run: RunRecord) -> None:
    table = rows(run, "groups")
    assert [(row["life"], row["group"], row["step"], row["outcome"]) for row in table] == [
        (group.life, group.group, group.step, group.outcome) for group in run.groups
    ]
    assert [json.loads(row["example"]) for row in table] == [group.example for group in run.groups]


def test_steps_and_evaluations_are_the_rows_of_their_files(run: RunRecord) -> None:
    table = run.to_arrow("steps")
    assert table["version"].to_pylist() == [1, 2]
    assert table["reward"].to_pylist() == [0.5, 0.75]
    assert table["clip_fraction"].to_pylist() == [None, 0.6]
    assert rows(run, "evaluations") == [{"version": 1, "reward": 1.0}]


def test_a_column_without_a_common_type_is_text(tmp_path: Path) -> None:
    lines = [{"version": 1, "odd": 1}, {"version": 2, "odd": "one"}, {"version": 1 << 70}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = read_run(tmp_path).to_arrow("steps")
    assert table["odd"].to_pylist() == ["1", "one", None]
    assert table["version"].to_pylist() == ["1", "2", str(1 << 70)]


def test_the_metrics_of_an_evaluation_are_columns(tmp_path: Path) -> None:
    line = {"version": 3, "reward": 0.5, "metrics": {"episode/turns": 2.0, "reward": 9.0}}
    (tmp_path / "evaluations.jsonl").write_text(json.dumps(line) + "\n")
    assert rows(read_run(tmp_path), "evaluations") == [{"version": 3, "reward": 0.5, "episode/turns": 2.0}]


def test_calls_are_those_of_the_log(run: RunRecord) -> None:
    table, calls = rows(run, "calls"), list(run.calls(0.0, 1e12))
    assert [(row["event"], row["t"], row["episode"]) for row in table] == [
        (type(call).__name__, call.t, getattr(call, "episode", None)) for call in calls
    ]
    assert {row["life"] for row in table} == {1, 2}
    (tool, *_) = [row for row in table if row["event"] == "ToolEnded"]
    assert (tool["tool"], tool["failure"], tool["stop"], tool["value"]) == ("calculator", "malformed", None, None)


def test_events_are_all_other_records(run: RunRecord) -> None:
    table = rows(run, "events")
    assert [(row["life"], row["t"], row["event"]) for row in table] == [
        (life, event.t, type(event).__name__) for life, event in run.system
    ]
    (lost,) = [json.loads(row["record"]) for row in table if row["event"] == "Lost"]
    assert (lost["num_events"], lost["why"]) == (3, "full")


@pytest.mark.parametrize("table", get_args(Table))
def test_a_run_without_records_has_empty_tables(tmp_path: Path, table: Table) -> None:
    (tmp_path / "run.lock").touch()
    assert read_run(tmp_path).to_pandas(table).shape[0] == 0


def test_whole_numbers_stay_whole_in_pandas_though_some_are_missing(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path))
    episodes, calls = run.to_pandas("episodes"), run.to_pandas("calls")
    for table, name in ((episodes, "step"), (episodes, "group"), (episodes, "staleness"), (calls, "prompt")):
        assert str(table[name].dtype) == "Int64"
        assert 0 < len(table[name].dropna()) < len(table)
    assert episodes.step.dropna().tolist() == [e.step for e in run.episodes if e.step is not None]
    assert [*episodes.groupby("step").reward.mean().index] == [1, 2]
    assert set(episodes[episodes.step == 1].episode) == {e.episode for e in run.episodes if e.step == 1}


def test_an_unknown_table_is_named(tmp_path: Path) -> None:
    life(tmp_path, [began()])
    with pytest.raises(ValueError, match="there is no table turns; give one of episodes, groups"):
        read_run(tmp_path).to_arrow("turns")  # pyright: ignore[reportArgumentType]


def test_without_pandas_the_extra_is_named(run: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=re.escape(f"needs pandas: {install_command('examples')}")):
        run.to_pandas("steps")
