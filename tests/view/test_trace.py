"""A run's trace keeps to the Trace Event Format, and holds what the run's record holds."""

import gzip
import io
import json
import math
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_run import SERVER, T0, began, episode, group, life, step, trajectory, write_run

from arl.__main__ import main
from arl.api.events import (
    CheckpointWritten,
    EpisodeBegan,
    EpisodeEnded,
    GroupAdmitted,
    RewardEnded,
    ServerJoined,
    TrainerRecovered,
    TurnEnded,
)
from arl.eventlog.run_record import read_run
from arl.view.episode_table import EpisodeTable
from arl.view.health import health
from arl.view.trace import nested, write_trace

EVER = (0.0, math.inf)
Events = list[dict[str, Any]]


def trace_of(run_dir: Path, window: tuple[float, float] = EVER) -> Events:
    return counted_trace_of(run_dir, window)[0]


def counted_trace_of(run_dir: Path, window: tuple[float, float] = EVER) -> tuple[Events, Counter[str]]:
    run, file = read_run(run_dir), io.BytesIO()
    table = EpisodeTable(run)
    table.refresh()
    counts = write_trace(run, table, file, window)
    return checked(json.loads(file.getvalue())), counts


def checked(trace: dict[str, Any]) -> Events:
    """The events of a trace, which must be as the Trace Event Format demands."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    found = trace["traceEvents"]
    for event in found:
        assert event["ph"] in ("M", "X", "C", "s", "f")
        assert isinstance(event["name"], str)
        assert event["name"]
        assert all(type(event[name]) is int and event[name] >= 0 for name in ("pid", "tid", "ts"))
    check_names(found)
    check_spans(found)
    check_counters(found)
    check_flows(found)
    return found


def check_names(found: Events) -> None:
    named = {(e["name"], e["pid"], e["tid"]) for e in found if e["ph"] == "M"}
    for event in found:
        if event["ph"] == "M":
            assert set(event["args"]) == {"name" if event["name"].endswith("_name") else "sort_index"}
        else:
            assert ("process_name", event["pid"], 0) in named
        if event["ph"] in ("X", "s", "f"):
            assert {
                ("thread_name", event["pid"], event["tid"]),
                ("thread_sort_index", event["pid"], event["tid"]),
            } <= named


def check_spans(found: Events) -> None:
    """In the order of time, and nested, within each thread."""
    threads: defaultdict[tuple[int, int], Events] = defaultdict(list)
    for event in found:
        if event["ph"] == "X":
            assert type(event["dur"]) is int
            assert event["dur"] >= 0
            assert isinstance(event["cat"], str)
            assert isinstance(event["args"], dict)
            threads[event["pid"], event["tid"]].append(event)
    for spans in threads.values():
        open_until: list[int] = []
        for span in spans:
            while open_until and open_until[-1] <= span["ts"]:
                open_until.pop()
            assert not open_until or span["ts"] + span["dur"] <= open_until[-1], span
            open_until.append(span["ts"] + span["dur"])
        assert all(a["ts"] <= b["ts"] for a, b in pairwise(spans))


def check_counters(found: Events) -> None:
    last: dict[str, int] = {}
    for event in found:
        if event["ph"] == "C":
            assert event["args"]
            assert all(type(value) in (int, float) for value in event["args"].values())
            assert last.get(event["name"], 0) <= event["ts"]
            last[event["name"]] = event["ts"]


def check_flows(found: Events) -> None:
    """A beginning and an end for each id, both within a span of their thread."""
    flows: defaultdict[int, Events] = defaultdict(list)
    for event in found:
        if event["ph"] in ("s", "f"):
            flows[event["id"]].append(event)
    for ends in flows.values():
        start, finish = ends
        assert (start["ph"], finish["ph"], finish["bp"]) == ("s", "f", "e")
        assert (start["name"], start["cat"]) == (finish["name"], finish["cat"])
        assert start["ts"] <= finish["ts"]
        for end in ends:
            own = [e for e in found if e["ph"] == "X" and (e["pid"], e["tid"]) == (end["pid"], end["tid"])]
            assert any(e["ts"] <= end["ts"] <= e["ts"] + e["dur"] for e in own), end


def spans_of(found: Events, kind: str) -> Events:
    return [event for event in found if event["ph"] == "X" and event["cat"] == kind]


def test_it_has_every_episode_call_and_span_of_a_run(tmp_path: Path) -> None:
    run, found = read_run(write_run(tmp_path)), trace_of(tmp_path)
    episodes = [episode for episode in run.episodes if episode.how != "lost"]
    assert Counter(e["name"] for e in spans_of(found, "episode")) == Counter(e.episode for e in episodes)
    calls = [e for kind in ("turn", "tool", "reward") for e in spans_of(found, kind)]
    assert len(calls) == len(list(run.calls(0.0, math.inf)))
    kinds = Counter(event["cat"] for event in found if event["ph"] == "X")
    assert (kinds["waiting"], kinds["training"], kinds["publishing"], kinds["loading"]) == (3, 3, 3, 3)
    assert (kinds["checkpoint"], kinds["evaluation"], kinds["paused"], kinds["fenced"]) == (1, 1, 3, 1)


def test_times_are_microseconds_since_the_run_began(tmp_path: Path) -> None:
    found = trace_of(write_run(tmp_path))
    (first,) = [e for e in spans_of(found, "episode") if e["name"] == "0.0"]
    assert (first["ts"], first["dur"], first["args"]["reward"], first["args"]["step"]) == (1_000_000, 4_000_000, 1.0, 1)
    (turn,) = [e for e in spans_of(found, "turn") if (e["tid"], e["ts"]) == (first["tid"], first["ts"])]
    assert (turn["dur"], turn["args"]["server"]) == (1_000_000, SERVER)


def test_turns_that_overlap_lie_in_threads_beside_each_other(tmp_path: Path) -> None:
    turns = [
        TurnEnded(episode="0.0", rid="r", seconds=2.0, prompt=1, output=1, t=T0 + end, stop="stop")
        for end in (3.0, 4.0, 4.5)
    ]
    late = RewardEnded(episode="0.0", reward="late", seconds=0.5, t=T0 + 5.4)
    began_0, *_, ended_0 = episode("0.0", T0 + 1, [trajectory("a", "b")])
    admitted = GroupAdmitted(group=0, epoch=0, row=0, stamp=0, t=T0)
    life(tmp_path, [began(), admitted, began_0, *turns, ended_0, late])
    found = trace_of(tmp_path)
    assert len({e["tid"] for e in spans_of(found, "turn")}) == 3
    (whole,), (reward,) = spans_of(found, "episode"), spans_of(found, "reward")
    assert reward["ts"] + reward["dur"] == whole["ts"] + whole["dur"]


def test_threads_are_numbered_in_the_order_of_their_lanes(tmp_path: Path) -> None:
    """Perfetto shows them in the order of their numbers, whatever episode ends first."""
    episodes = [EpisodeEnded(episode=f"0.{k}", how="finished", began=T0 + k, t=T0 + 1000 - 100 * k) for k in range(4)]
    turns = [
        TurnEnded(episode="0.0", rid="r", seconds=2.0, prompt=1, output=1, t=T0 + 5 + k, stop="stop") for k in range(2)
    ]
    life(tmp_path, [began(), ServerJoined(server=SERVER, t=T0), *turns, *reversed(episodes)])
    found = trace_of(tmp_path)
    names = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    assert [names[tid] for tid in sorted(names)] == [
        "trainer", "publishing", "evaluations", f"server {SERVER}", "episodes 1", "episodes 1, beside (1)",
        "episodes 2", "episodes 3", "episodes 4",
    ]  # fmt: skip
    assert all(e["args"]["sort_index"] == e["tid"] for e in found if e["name"] == "thread_sort_index")


def test_more_spans_side_by_side_than_a_lane_has_numbers_for_get_threads_of_their_own(tmp_path: Path) -> None:
    turns = [
        TurnEnded(episode="0.0", rid="r", seconds=200.0, prompt=1, output=1, t=T0 + 200 + k, stop="stop")
        for k in range(150)
    ]
    ended = [EpisodeEnded(episode=f"0.{k}", how="finished", began=T0, t=T0 + 400) for k in range(2)]
    life(tmp_path, [began(), *turns, *ended])
    found = trace_of(tmp_path)
    names = [e for e in found if e["name"] == "thread_name"]
    assert len({e["tid"] for e in names}) == len(names) > 150


def test_a_checkpoint_that_is_written_beside_training_has_its_own_thread(tmp_path: Path) -> None:
    life(tmp_path, [began(), *step(1, [], T0 + 10), CheckpointWritten(version=1, seconds=7.0, t=T0 + 11)])
    found = trace_of(tmp_path)
    (checkpoint,), (training,) = spans_of(found, "checkpoint"), spans_of(found, "training")
    assert checkpoint["tid"] != training["tid"]


def test_a_lost_trainers_process_shows_in_the_lane_of_the_trainer_and_among_the_restarts(tmp_path: Path) -> None:
    reason = "the trainer's process was ended by SIGKILL"
    recovered = TrainerRecovered(version=1, from_version=0, num_batches=1, seconds=7.0, reason=reason, t=T0 + 20)
    life(tmp_path, [began(), *step(1, [], T0 + 10), recovered])
    (span,) = spans_of(trace_of(tmp_path), "recovering")
    assert span["dur"] == 7_000_000
    (restart,) = health(read_run(tmp_path))["restarts"]
    assert (restart["name"], restart["how"]) == (
        "trainer",
        f"{reason}; after 7.0 s another one held version 1",
    )


def test_a_window_has_what_overlaps_it(tmp_path: Path) -> None:
    found = trace_of(write_run(tmp_path), (0.5, 2.5))
    assert {e["name"] for e in spans_of(found, "episode")} == {"0.0", "0.1", "1.0"}
    assert spans_of(found, "training") == []
    assert all(500_000 <= e["ts"] <= 2_500_000 for e in found if e["ph"] == "C")


def test_counters_say_what_runs_and_how_the_steps_went(tmp_path: Path) -> None:
    found = trace_of(write_run(tmp_path))
    values: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
    for event in found:
        if event["ph"] == "C":
            values[event["name"]].append(event["args"])
    assert [v["reward"] for v in values["reward"]] == [0.5, 0.75, 0.75]
    assert max(v["episodes"] for v in values["episodes running"]) == 4
    assert values["groups"][0] == {"running": 1, "waiting to be trained": 0}
    assert max(v["waiting to be trained"] for v in values["groups"]) == 2
    assert all(min(v.values()) >= 0 for v in values["groups"])
    assert max(v["requests"] for v in values[SERVER]) == 2


def test_a_call_that_comes_too_late_in_the_log_is_counted_and_breaks_no_order(tmp_path: Path) -> None:
    """An episode is written when calls from long after it come."""
    records = [
        record for number in range(4) for record in episode(f"0.{number}", T0 + 100 * number, [trajectory("a", "b")])
    ]
    life(tmp_path, [began(), GroupAdmitted(group=0, epoch=0, row=0, stamp=0, t=T0), *records[5:], *records[:5]])
    found, counts = counted_trace_of(tmp_path)
    assert len(spans_of(found, "episode")) == 4
    assert counts == {"episodes": 4, "calls": 9, "late": 3}


@pytest.mark.parametrize(
    "records", [[], [began()], [EpisodeBegan(episode="0.0", t=T0)]], ids=["none", "life", "episode"]
)
def test_a_run_that_has_just_begun_has_a_trace(tmp_path: Path, records: list[Any]) -> None:
    life(tmp_path, records)
    assert len(spans_of(trace_of(tmp_path), "episode")) == sum(isinstance(r, EpisodeBegan) for r in records)


def test_times_that_no_run_can_have_cost_no_trace(tmp_path: Path) -> None:
    ended = EpisodeEnded(episode="0.0", how="finished", began=T0 + 5, t=T0 - 50)
    turn = TurnEnded(episode="0.0", rid="r", server=SERVER, seconds=-3.0, prompt=1, output=1, t=T0 + 6)
    life(tmp_path, [began(), EpisodeBegan(episode="0.0", t=T0 + 5), turn, ended, *group(1, T0 + 1, ["a"])])
    trace_of(tmp_path)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 10))))
def test_spans_of_one_place_nest_and_none_is_lost(spans: list[tuple[int, int]]) -> None:
    placed = list(nested([(start, start + dur, {}) for start, dur in spans]))
    assert Counter((start, stop - start) for _, start, stop, _ in placed) == Counter(spans)
    for i, (place, start, stop, _) in enumerate(placed):
        for other, first, last, _ in placed[:i]:
            if other == place:
                assert last <= start or (first <= start and stop <= last)


def test_the_command_writes_a_file_that_gzip_packs_if_its_name_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "adder")
    monkeypatch.chdir(tmp_path)
    main(["trace", "adder"])
    main(["trace", "adder", "-o", "plain.json", "--from", "0", "--to", "30"])
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "adder.trace.json.gz: 13 episodes, 27 turns, tools and rewards",
        "plain.json: 7 episodes, 21 turns, tools and rewards",
    ]
    assert len(checked(json.loads(gzip.decompress(Path("adder.trace.json.gz").read_bytes())))) > 100
    assert len(checked(json.loads(Path("plain.json").read_bytes()))) > 50
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adder", "adder.trace.json.gz", "plain.json"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["old"], "old has no event log, so there is no timeline to write"),
        (["."], "holds 2 runs; name one of new, old"),
        (["new", "-o", "no/such/file"], "no/such/file cannot be written: No such file or directory"),
        (["new", "--from", "3", "--to", "2"], "--from is 3 and --to is 2"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    life(tmp_path / "new", [began()])
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text('{"version": 1}\n')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        main(["trace", *arguments])
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err
