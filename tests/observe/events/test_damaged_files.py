"""Damage in a file of the log costs the batch it is in, or what follows in that file, and a sentence."""

import random
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from arl.api.errors import RunFileError
from arl.api.events import EpisodeBegan
from arl.observe.events.batches import SCHEMA_KEY, SCHEMAS, packed, records_batch
from arl.observe.events.run_record import RunRecord, read_run

HEAD = SCHEMAS["events"].serialize().to_pybytes()


def messages(number: int) -> list[bytes]:
    """Each holds the beginnings of the episodes MESSAGE.0, MESSAGE.1 and MESSAGE.2."""
    lines = [[msgspec.json.encode(EpisodeBegan(episode=f"{n}.{i}", t=1.0)) for i in range(3)] for n in range(number)]
    return [packed(records_batch("events", one)).removeprefix(HEAD) for one in lines]


def log_of(run_dir: Path, content: bytes) -> Path:
    """The file of a log that holds nothing else."""
    file = run_dir / "events" / "events-0001-0001.arrows"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    return file


def read_messages(run: RunRecord) -> list[int]:
    assert len(run.episodes) == len({episode.episode for episode in run.episodes}), "a batch was read twice"
    return list(dict.fromkeys(int(episode.episode.split(".")[0]) for episode in run.episodes))


def test_a_damaged_body_costs_its_batch(tmp_path: Path):
    parts = messages(5)
    parts[2] = parts[2][:-60] + bytes(60)
    file = log_of(tmp_path, HEAD + b"".join(parts))
    run = read_run(tmp_path)
    assert read_messages(run) == [0, 1, 3, 4]
    (problem,) = run.problems
    assert problem.startswith(f"{file} is damaged at byte {len(HEAD) + len(parts[0]) + len(parts[1])}: ")
    assert run.update() == 0
    assert len(run.problems) == 1


def test_after_a_damaged_head_the_rest_of_the_file_is_left_out_and_the_next_file_is_read(tmp_path: Path):
    parts = messages(4)
    file = log_of(tmp_path, HEAD + parts[0] + bytes(200) + parts[1])
    file.with_name("events-0001-0002.arrows").write_bytes(HEAD + parts[2])
    run = read_run(tmp_path)
    assert read_messages(run) == [0, 2]
    place = len(HEAD) + len(parts[0])
    assert run.problems == [f"{file} is no event log, or damaged, at byte {place}: what follows is left out"]
    assert run.files.num_bytes_waiting == 0
    with file.with_name("events-0001-0002.arrows").open("ab") as more:
        more.write(parts[3])
    run.update()
    assert read_messages(run) == [0, 2, 3]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_overwritten_what_is_before_it_is_read(tmp_path: Path, seed: int):
    chance, parts = random.Random(seed), messages(8)
    whole = bytearray(HEAD + b"".join(parts))
    ends = [len(HEAD) + sum(map(len, parts[: i + 1])) for i in range(8)]
    first = chance.randrange(ends[0], len(whole))
    for place in range(first, min(first + chance.choice([1, 8, 60, 300]), len(whole))):
        whole[place] ^= chance.randrange(1, 256)
    log_of(tmp_path, bytes(whole))
    assert {i for i in range(8) if ends[i] <= first} <= {*read_messages(read_run(tmp_path))}


def test_a_last_batch_that_is_cut_short_anywhere_is_no_problem(tmp_path: Path):
    parts = messages(3)
    whole = HEAD + b"".join(parts)
    for missing in range(1, len(parts[2])):
        log_of(tmp_path, whole[:-missing])
        run = read_run(tmp_path)
        assert (read_messages(run), run.problems, run.files.num_bytes_waiting) == ([0, 1], [], 0), missing


def test_a_file_that_is_being_written_is_not_taken_for_damage(tmp_path: Path):
    file = log_of(tmp_path, b"")
    run = RunRecord(tmp_path)
    for byte in HEAD + b"".join(messages(2)):
        with file.open("ab") as more:
            more.write(bytes([byte]))
        run.update()
    assert (read_messages(run), run.problems) == ([0, 1], [])


def test_records_that_a_newer_arl_added_cost_themselves_and_its_schema_the_file(tmp_path: Path):
    records = (
        {"event": "EpisodeBegan", "t": 1.0, "episode": "0.0", "mood": "good"},
        {"event": "EpisodeDreamt", "t": 1.0, "episode": "0.0"},
        {"event": "EpisodeBegan", "t": 1.0, "episode": "1.0"},
    )
    file = log_of(tmp_path, packed(records_batch("events", [msgspec.json.encode(record) for record in records])))
    newer = SCHEMAS["events"].with_metadata({SCHEMA_KEY: "99"})
    (later := file.with_name("events-0002-0001.arrows")).write_bytes(newer.serialize().to_pybytes())
    run = read_run(tmp_path)
    assert read_messages(run) == [0, 1]
    known, unknown = sorted(run.problems)
    assert known.startswith(f"{file} holds a record that this arl does not know, and leaves out: ")
    assert "EpisodeDreamt" in known
    assert unknown == f"{later} was written by a newer arl, in schema 99; this arl reads schemas up to 2: update it"


def test_files_of_other_programs_are_named(tmp_path: Path):
    file = log_of(tmp_path, pa.schema([("t", pa.string())]).serialize().to_pybytes())
    assert read_run(tmp_path).problems == [f"{file} is no event log, or damaged: it has no column t of double"]


def test_a_directory_without_a_run_is_an_error_and_one_without_a_log_has_its_steps(tmp_path: Path):
    with pytest.raises(RunFileError, match=r"holds no run: it has none of events, metrics\.jsonl"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"version": 1}\n')
    run = read_run(tmp_path)
    assert (run.steps, run.episodes, run.problems, run.settings) == ([{"version": 1}], [], [], {})
