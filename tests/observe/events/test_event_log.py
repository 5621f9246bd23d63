"""The event log keeps what it is given, and never stands in the way of the run."""

import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from random_groups import random_groups
from records import trajectory

from arl.api import events
from arl.api.events import KINDS, Event, KeptTokens, Lost, Warned
from arl.api.settings.run import EventsConfig
from arl.observe.events import files as log_files
from arl.observe.events import writer
from arl.observe.events.batches import frames_of
from arl.observe.events.files import SegmentFiles, segments
from arl.observe.events.run_record import RunRecord, read_run
from arl.observe.events.writer import EventLog

SCHEMA_PAGE = Path(__file__).parents[3] / "docs" / "events.md"


def example_of(kind: Any) -> Any:
    """A value of this type, different from a field's default."""
    arguments = get_args(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = [field for field in msgspec.structs.fields(kind) if field.name != "t"]
        return kind(**{field.name: example_of(field.type) for field in fields})
    match get_origin(kind) or kind:
        case origin if origin is list:
            return [example_of(arguments[0])]
        case origin if origin is tuple:
            return tuple(map(example_of, arguments))
        case origin if origin is dict:
            return {"a": example_of(float if arguments[1] is Any else arguments[1])}
        case _ if arguments:  # X | None
            return example_of(arguments[0])
        case _:
            return {int: 3, float: 0.25, str: "some <b>text</b>\x00\u2028", bool: True}[kind]


def records_of(run_dir: Path) -> list[Event]:
    run = read_run(run_dir)
    records = [record for _, record in RunRecord(run_dir).files.new_records()]
    assert not run.problems
    return [*records, *run.calls(0.0, float("inf"))]


def lost_in(run_dir: Path) -> tuple[int, int]:
    lost = [record for record in records_of(run_dir) if isinstance(record, Lost)]
    return sum(record.num_events for record in lost), sum(record.num_episodes for record in lost)


def began(number: int) -> events.EpisodeBegan:
    return events.EpisodeBegan(episode=f"0.{number}")


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_record_comes_back_as_it_was(tmp_path: Path, kind: type[Event]):
    record = example_of(kind)
    with EventLog(tmp_path, EventsConfig()).open() as log:
        log.emit(record)
    assert record in records_of(tmp_path)


UNREADABLE_ANNOTATIONS = """
import msgspec
from arl.api.events import KINDS
from arl.observe.events.batches import TokenRow

for kind in [*KINDS.values(), TokenRow]:
    kind.__annotations__ = dict.fromkeys(kind.__annotations__, "Unknown")
for kind in [*KINDS.values(), TokenRow]:
    msgspec.json.Decoder(kind)
"""


def test_what_threads_decode_is_prepared_while_its_module_is_imported():
    """msgspec 0.22 crashes if two threads decode a type for the first time at once, when it reads annotations."""
    subprocess.run([sys.executable, "-c", UNREADABLE_ANNOTATIONS], check=True)


@pytest.mark.parametrize("name", KINDS)
def test_the_page_about_the_schema_names_each_kind_and_each_of_its_fields(name: str):
    section = SCHEMA_PAGE.read_text().split(f"### {name}\n")[1].split("\n#")[0]
    for field in msgspec.structs.fields(KINDS[name]):
        assert field.name == "t" or f"`{field.name}`" in section, field.name


def test_tokens_come_back_to_the_bit_with_what_training_computed_at_the_tokens_it_trained(tmp_path: Path):
    groups, chance = random_groups(0), np.random.default_rng(0)
    expected: dict[str, Any] = {}
    with EventLog(tmp_path, EventsConfig()).open() as log:
        for group in groups:
            rows = [(f"{group.group_id}.{i}", 0, t) for i, t in enumerate(group.trajectories)]
            values = [chance.normal(size=t.num_trained_tokens).astype(np.float32) for t in group.trajectories]
            is_trained = group.group_id != 1
            trained = {"weights": np.concatenate(values)} if is_trained else {}
            expected |= {row[0]: (row[2], own if is_trained else None) for row, own in zip(rows, values, strict=True)}
            for name, *_ in rows:
                log.emit(events.EpisodeBegan(episode=name))
            log.keep(KeptTokens(rows=rows, trained=trained))
    run = read_run(tmp_path)
    assert {episode.episode for episode in run.episodes} == expected.keys()
    for episode in run.episodes:
        (found,) = run.tokens(episode)
        t, values = expected[episode.episode]
        for name in ("token_ids", "loss_mask", "behavior_logprobs", "versions"):
            np.testing.assert_array_equal(found.columns[name], getattr(t, name))
        assert (found.row.role, found.row.temperature, found.row.reward) == (t.role, t.temperature, t.reward)
        assert (found.row.rewards, found.row.is_truncated) == (t.rewards, t.is_truncated)
        assert found.row.turns == [(turn.start, turn.stop, turn.reward) for turn in t.turns]
        assert found.row.states == [turn.state for turn in t.turns]
        if values is None or not values.size:
            assert "weights" not in found.columns
        else:
            np.testing.assert_array_equal(found.columns["weights"][t.loss_mask], values)
            assert np.isnan(found.columns["weights"][~t.loss_mask]).all()


def test_a_renamed_frame_has_its_new_names_in_the_file(tmp_path: Path):
    """As of several policies, each of which numbers its own trajectories."""
    (frame,) = frames_of([KeptTokens(rows=[("0.0", 0, trajectory()), ("0.1", 0, trajectory(reward=0.5))])])
    with EventLog(tmp_path, EventsConfig()).open() as log:
        log.keep(msgspec.structs.replace(frame, rows=[("0.0", 1), ("0.1", 2)], is_renamed=True))
    (file,) = tmp_path.glob("events/tokens-*")
    found = pa.ipc.open_stream(file).read_all().select(["episode", "trajectory", "reward"]).to_pylist()
    assert [tuple(row.values()) for row in found] == [("0.0", 1, trajectory().reward), ("0.1", 2, 0.5)]


def test_few_calls_and_tokens_wait_to_be_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log = EventLog(tmp_path, EventsConfig())
    files = SegmentFiles(log.directory, 10**9)

    def written(is_all: bool = False) -> list[str]:
        log.emit(began(0))
        log.emit(events.ToolEnded(episode="0.0", tool="calculator", seconds=0.5))
        log.keep(KeptTokens(rows=[("0.0", 0, trajectory())]))
        before = {path: path.stat().st_size for path in log.directory.glob("*")}
        log._write(files, is_all=is_all)
        return sorted(p.name.split("-")[0] for p in log.directory.glob("*") if p.stat().st_size > before.get(p, 0))

    assert written() == ["calls", "events", "tokens"]
    monkeypatch.setattr(writer, "_GATHER_S", math.inf)
    assert written() == ["events"]
    monkeypatch.setattr(writer, "_MANY_CALLS", 2)
    assert written() == ["calls", "events", "tokens"]
    assert written() == ["events"]
    assert written(is_all=True) == ["calls", "events", "tokens"]
    files.close()


IMPORTS = """
import sys
from pathlib import Path
from records import trajectory
from arl.api.settings.run import EventsConfig
from arl.api.events import EpisodeBegan, KeptTokens, ToolEnded
from arl.observe.events import writer
"""
PATHS = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def script(text: str, run_dir: Path) -> list[str]:
    """The command of a program that imports what tests do."""
    return [sys.executable, "-c", IMPORTS + text, str(run_dir)]


WITHOUT_PANDAS = """
with writer.EventLog(Path(sys.argv[1]), EventsConfig()).open() as log:
    log.emit(EpisodeBegan(episode="0.0"))
    log.emit(ToolEnded(episode="0.0", tool="calculator", seconds=0.5))
    log.keep(KeptTokens(rows=[("0.0", 0, trajectory())]))
print("pyarrow" in sys.modules, "pandas" in sys.modules)
"""


def test_writing_does_not_load_pandas(tmp_path: Path):
    """As many of pyarrow's functions do."""
    command = script(WITHOUT_PANDAS, tmp_path)
    assert subprocess.run(command, capture_output=True, text=True, check=True, env=PATHS).stdout == "True False\n"


def test_warnings_of_the_run_are_in_its_log(tmp_path: Path):
    with EventLog(tmp_path, EventsConfig()).open():
        logging.getLogger("arl.engine").warning("server %d is fenced", 3)
        logging.getLogger("arl.engine").warning("a" * 2_000_000)
    logging.getLogger("arl.engine").warning("after its end")
    said = [(record.level, record.text) for record in records_of(tmp_path) if isinstance(record, Warned)]
    assert said == [("warning", "server 3 is fenced"), ("warning", "a" * 20_000)]


def test_what_comes_faster_than_it_can_be_written_is_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    may_write = threading.Event()
    write = EventLog._write

    def late(self: EventLog, files: Any, *, is_all: bool) -> None:
        may_write.wait()
        write(self, files, is_all=is_all)

    monkeypatch.setattr(EventLog, "_write", late)
    monkeypatch.setattr(writer, "_MOST_EVENTS", 10)
    monkeypatch.setattr(writer, "_MOST_TOKENS", 100)
    with EventLog(tmp_path, EventsConfig()).open() as log:
        for number in range(25):
            log.emit(began(number))
        for number in range(25):
            log.keep(KeptTokens(rows=[(f"0.{number}", 0, trajectory(versions=(1,) * 9))]))
        may_write.set()
    assert sorted(int(episode.episode[2:]) for episode in read_run(tmp_path).episodes) == list(range(10))
    assert lost_in(tmp_path) == (15, 15)


def test_a_hanging_disk_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    is_over = threading.Event()
    monkeypatch.setattr(EventLog, "_write", lambda *_, **__: is_over.wait())
    monkeypatch.setattr(writer, "_CLOSING_S", 0.05)
    log = EventLog(tmp_path, EventsConfig())
    with log.open():
        log.emit(began(1))
    is_over.set()  # reached although the thread still waited


FULL_DISK = """
import resource
from arl.observe.events.files import SegmentFiles

log = writer.EventLog(Path(sys.argv[1]), EventsConfig())
files = SegmentFiles(log.directory, 10**9)
log.emit(EpisodeBegan(episode="0.before"))
log._write(files)
(size,) = (path.stat().st_size for path in log.directory.iterdir())
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 60, resource.RLIM_INFINITY))  # a part of a frame fits
for number in range(100):
    log.emit(EpisodeBegan(episode=f"0.{number}"))
    log.emit(ToolEnded(episode=f"0.{number}", tool="calculator", seconds=0.5))
    log.keep(KeptTokens(rows=[(f"0.{number}", 0, trajectory())]))
for _ in range(2):
    try:
        log._write(files)
    except OSError as error:
        print(error.strerror)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.emit(EpisodeBegan(episode="0.after"))
log._write(files)
"""


def test_a_disk_that_is_full_for_a_while_costs_nothing(tmp_path: Path):
    ended = subprocess.run(
        script(FULL_DISK, tmp_path), capture_output=True, text=True, check=True, timeout=60, env=PATHS
    )
    assert ended.stdout == "File too large\n" * 2
    run = read_run(tmp_path)
    names = [f"0.{number}" for number in range(100)]
    assert [episode.episode for episode in run.episodes] == ["0.before", *names, "0.after"]
    assert all(run.tokens(run.episode(1, name)) for name in names)
    assert [record.episode for record in records_of(tmp_path) if isinstance(record, events.ToolEnded)] == names
    assert lost_in(tmp_path) == (0, 0)


def test_what_cannot_be_written_for_long_is_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writer, "_PATIENCE_S", 0.0)
    place = tmp_path / "events"
    place.write_text("a file where the directory belongs")
    with EventLog(tmp_path, EventsConfig()).open() as log:
        for number in range(3):
            log.emit(began(number))
        log.keep(KeptTokens(rows=[("0.1", 0, trajectory())]))
        assert not log.flush()
        place.unlink()
        log.emit(began(3))
        assert log.flush()
    assert [episode.episode for episode in read_run(tmp_path).episodes] == ["0.3"]
    assert lost_in(tmp_path) == (4, 1), "three episodes that began and the warning; the tokens"
    assert {record.why for record in records_of(tmp_path) if isinstance(record, Lost)} == {
        f"FileExistsError: [Errno 17] File exists: '{place}'"
    }


FLUSHED = """
import os, signal

writer._EVERY_S = 1000.0
with writer.EventLog(Path(sys.argv[1]), EventsConfig()).open() as log:
    for number in range(100):
        log.emit(EpisodeBegan(episode=f"0.{number}"))
        log.emit(ToolEnded(episode=f"0.{number}", tool="calculator", seconds=0.5))
        log.keep(KeptTokens(rows=[(f"0.{number}", 0, trajectory(versions=(number,)))]))
    print(log.flush(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_after_a_flush_a_kill_takes_nothing_of_what_was_given_before(tmp_path: Path):
    ended = subprocess.run(script(FLUSHED, tmp_path), capture_output=True, text=True, timeout=60, env=PATHS)
    assert (ended.stdout, ended.returncode) == ("True\n", -signal.SIGKILL)
    run = read_run(tmp_path)
    names = [f"0.{number}" for number in range(100)]
    assert [episode.episode for episode in run.episodes] == names
    assert [run.tokens(episode)[0].columns["versions"].tolist() for episode in run.episodes] == [
        [-1, number] for number in range(100)
    ]
    assert [record.episode for record in records_of(tmp_path) if isinstance(record, events.ToolEnded)] == names


def test_a_flush_forces_all_files_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced = set[str]()

    def note(file: int) -> None:
        synced.add(os.path.basename(os.readlink(f"/proc/self/fd/{file}")))

    with EventLog(tmp_path, EventsConfig()).open() as log:
        log.emit(began(0))
        log.emit(events.ToolEnded(episode="0.0", tool="calculator", seconds=0.5))
        log.keep(KeptTokens(rows=[("0.0", 0, trajectory())]))
        monkeypatch.setattr(os, "fsync", note)
        assert log.flush()
    assert synced == {"events", *(f"{table}-0001-0001.arrows" for table in ("events", "calls", "tokens"))}


def test_a_flush_does_not_wait_for_a_hanging_disk_or_for_a_log_that_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    may_write = threading.Event()
    monkeypatch.setattr(EventLog, "_write", lambda *_, **__: may_write.wait())
    log = EventLog(tmp_path, EventsConfig())
    assert not log.flush()
    with log.open():
        assert not log.flush(timeout_s=0.01)
        assert "did not take the records of a checkpoint in 0.01 s" in caplog.text
        may_write.set()
        assert log.flush()
    assert not log.flush()


KILLED = """
import itertools

writer._EVERY_S, writer._GATHER_S = 0.001, 0.0
with writer.EventLog(Path(sys.argv[1]), EventsConfig()).open() as log:
    for number in itertools.count():
        log.emit(EpisodeBegan(episode=f"0.{number}"))
        log.keep(KeptTokens(rows=[(f"0.{number}", 0, trajectory(versions=(number,)))]))
        if number == 2000:
            assert log.flush()
        if number % 100 == 0:
            print(number, flush=True)
"""


def test_after_a_kill_all_whole_frames_are_there_and_the_next_life_goes_on_beside_them(tmp_path: Path):
    with subprocess.Popen(script(KILLED, tmp_path), stdout=subprocess.PIPE, env=PATHS) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) >= 3000:
                break
        process.send_signal(signal.SIGKILL)
    with EventLog(tmp_path, EventsConfig()).open() as log:
        log.emit(began(0))
    run = read_run(tmp_path)
    assert run.problems == []
    first = [episode for episode in run.episodes if episode.life == 1]
    assert [int(episode.episode[2:]) for episode in first] == list(range(len(first)))
    kept = [episode for episode in first if episode.places]
    assert len(kept) > 1000
    assert all(run.tokens(episode)[0].columns["versions"][1] == int(episode.episode[2:]) for episode in kept[::100])
    assert [episode.life for episode in run.episodes if episode.life > 1] == [2]


def test_old_segments_are_deleted_tokens_first_so_that_the_log_stays_below_its_bound(tmp_path: Path):
    chance, most_bytes = np.random.default_rng(0), 10_000_000
    long = trajectory(versions=(1,) * 19_999)
    long = replace(long, token_ids=chance.integers(0, 1 << 30, 20_000), behavior_logprobs=-chance.random(20_000))
    log = EventLog(tmp_path, EventsConfig(tokens="all"))
    files = SegmentFiles(log.directory, most_bytes)
    for number in range(150):
        log.emit(began(number))
        log.keep(KeptTokens(rows=[(f"0.{number}", 0, long)]))
        log._write(files)
        assert sum(path.stat().st_size for path in log.directory.iterdir()) <= most_bytes
    files.close()
    run = read_run(tmp_path)
    assert len(run.episodes) == 150
    assert Counter(name.table for name in segments(log.directory))["events"] == 1
    assert run.tokens(run.episodes[-1])
    assert not (log.directory / "tokens-0001-0001.arrows").exists()


@pytest.mark.parametrize(("tokens", "num_kept"), [("all", 20), ("sampled", 2), ("none", 0), (None, 20)])
def test_of_episodes_in_no_batch_the_settings_say_whose_tokens_are_kept(
    tmp_path: Path, tokens: Any, num_kept: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("arl.api.settings.run.SAMPLED_SHARE", 0.0)
    with EventLog(tmp_path, EventsConfig(tokens=tokens)).open() as log:
        for number in range(20):
            log.emit(began(number))
            log.keep(KeptTokens(rows=[(f"0.{number}", -1, trajectory())]))
    assert sum(bool(episode.places) for episode in read_run(tmp_path).episodes) == num_kept


def test_after_a_segment_could_not_be_opened_the_log_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(log_files._SEGMENT_BYTES, "events", 1)
    log = EventLog(tmp_path, EventsConfig())
    files = SegmentFiles(log.directory, 10**9)
    log.emit(began(0))
    log._write(files)
    (in_the_way := log.directory / "events-0001-0002.arrows").touch()
    for number in (1, 2):
        log.emit(began(number))
        with pytest.raises(OSError, match="exists"):
            log._write(files)
    in_the_way.unlink()
    log.emit(began(3))
    log._write(files)
    files.close()
    assert [episode.episode for episode in read_run(tmp_path).episodes] == ["0.0", "0.1", "0.2", "0.3"]
    assert lost_in(tmp_path) == (0, 0)


def test_a_log_that_somebody_deletes_goes_on(tmp_path: Path):
    log = EventLog(tmp_path, EventsConfig())
    files = SegmentFiles(log.directory, 10**9)
    for number in range(3):
        log.emit(began(number))
        log.keep(KeptTokens(rows=[(f"0.{number}", 0, trajectory(versions=(number,)))]))
        log._write(files)
        if number == 0:
            shutil.rmtree(log.directory)
    files.close()
    run = read_run(tmp_path)
    assert [episode.episode for episode in run.episodes] == ["0.1", "0.2"]
    assert [run.tokens(episode)[0].columns["versions"][1] for episode in run.episodes] == [1, 2]


class SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("nothing to say")


def test_the_runs_own_error_passes_even_if_it_has_no_text(tmp_path: Path):
    with pytest.raises(SilentError), EventLog(tmp_path, EventsConfig()).open():
        raise SilentError
    assert [record.how for record in records_of(tmp_path) if isinstance(record, events.RunEnded)] == ["SilentError"]


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("nothing to say")


def test_a_record_that_json_cannot_hold_costs_no_other(tmp_path: Path):
    with EventLog(tmp_path, EventsConfig()).open() as log:
        for number, value in enumerate((1, Unspeakable(), 2)):
            log.emit(events.GroupAdmitted(group=number, epoch=0, row=0, stamp=0, example={"value": value}))
        log.flush()
    assert [group.group for group in read_run(tmp_path).groups] == [0, 2]
    assert lost_in(tmp_path) == (1, 0)


def test_a_number_that_json_cannot_hold_costs_itself(tmp_path: Path):
    """A seed among the settings, for instance: without its first record, a life would not be known."""
    settings = {"seed": 10**5000, "steps": 3}
    with EventLog(tmp_path, EventsConfig()).open() as log:
        log.emit(events.RunBegan(version=0, arl="0", host="a", pid=1, workflow="W", num_examples=1, settings=settings))
    assert read_run(tmp_path).settings == {"seed": None, "steps": 3}
    assert lost_in(tmp_path) == (0, 0)


@pytest.mark.parametrize("shows", [False, True])
def test_a_script_that_configures_no_logging_sees_each_warning_once_all_the_same(
    tmp_path: Path, shows: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(logging.root, "handlers", [logging.StreamHandler(sys.stderr)] if shows else [])
    logs = [EventLog(tmp_path / name, EventsConfig()) for name in "ab"]
    with logs[0].open(), logs[1].open():
        logging.getLogger("arl.engine").warning("server %d is fenced", 3)
        logging.getLogger("arl.engine").info("nobody asked for this")
    assert capsys.readouterr().err == "server 3 is fenced\n"


def test_numpys_numbers_and_strings_come_back_as_pythons(tmp_path: Path):
    numpys: dict[str, Any] = {"rid": np.str_("a"), "seconds": np.float32(0.5), "oldest": np.int64(3)}
    turn = events.TurnEnded(episode="0.0", prompt=2, output=1, **numpys)
    with EventLog(tmp_path, EventsConfig()).open() as log:
        log.emit(turn)
    (found,) = [record for record in records_of(tmp_path) if isinstance(record, events.TurnEnded)]
    assert found == turn
