"""What is damaged in a file of the log costs itself alone, and a sentence."""

import random
from pathlib import Path

import msgspec
import pytest

from arl.api.errors import RunFileError
from arl.api.events import EpisodeBegan
from arl.eventlog.run_record import RunRecord, read_run
from arl.eventlog.segments import frame_heads, new_packer, packed_frame

HEAD = 52
SIZE = slice(20, 28)
"""Of a frame's packed bytes, in its head."""


def frames(number: int, records: int = 3) -> list[bytes]:
    """Each holds the beginnings of the episodes FRAME.0, FRAME.1, ..."""
    found: list[bytes] = []
    for frame in range(number):
        lines = [msgspec.json.encode(EpisodeBegan(episode=f"{frame}.{i}", t=1.0)) + b"\n" for i in range(records)]
        found.append(packed_frame(new_packer(), b"".join(lines), records, 1.0, 1.0))
    return found


def log_of(run_dir: Path, content: bytes) -> Path:
    """The file of a log that holds nothing else."""
    file = run_dir / "events" / "0001-0001.events.zst"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    return file


def read_frames(run: RunRecord) -> list[int]:
    return list(dict.fromkeys(int(episode.episode.split(".")[0]) for episode in run.episodes))


def size_of(frame: bytes, size: int) -> bytes:
    """The frame with this size in its head."""
    return frame[: SIZE.start] + size.to_bytes(8, "little") + frame[SIZE.stop :]


def test_frames_after_a_damaged_head_are_read_and_a_sentence_says_what_is_skipped(tmp_path: Path):
    parts = frames(5)
    file = log_of(tmp_path, b"".join([*parts[:2], bytes(HEAD) + parts[2][HEAD:], *parts[3:]]))
    run = read_run(tmp_path)
    begin = len(parts[0]) + len(parts[1])
    assert read_frames(run) == [0, 1, 3, 4]
    assert run.problems == [f"{file} is damaged: {len(parts[2])} bytes from byte {begin} on are skipped"]
    assert run.update() == 0
    assert len(run.problems) == 1


@pytest.mark.parametrize(
    ("size", "costs", "problems"),
    [
        (3, [2], ["71 bytes from byte 307 on are skipped", "later records can be read"]),
        (100, [], []),
        (1 << 62, [2], ["126 bytes from byte 252 on are skipped"]),
    ],
    ids=["too small", "into the next frame", "past the end"],
)
def test_a_frame_of_a_wrong_size_costs_no_other(tmp_path: Path, size: int, costs: list[int], problems: list[str]):
    parts = frames(6)
    log_of(tmp_path, b"".join([*parts[:2], size_of(parts[2], size), *parts[3:]]))
    run = read_run(tmp_path)
    assert read_frames(run) == [frame for frame in range(6) if frame not in costs]
    assert len(run.problems) == len(problems)
    assert all(part in problem for part, problem in zip(problems, run.problems, strict=True))


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_overwritten_every_other_frame_is_read(tmp_path: Path, seed: int):
    chance, parts = random.Random(seed), frames(8)
    whole = bytearray(b"".join(parts))
    begins = [sum(map(len, parts[:i])) for i in range(9)]
    first = chance.randrange(begins[1], len(whole))
    last = min(first + chance.choice([1, 8, 60, 300]), len(whole))
    schemas = {begin + place for begin in begins for place in (12, 13)}
    for place in {*range(first, last)} - schemas:
        whole[place] ^= chance.randrange(1, 256)
    log_of(tmp_path, bytes(whole))
    run = read_run(tmp_path)
    untouched = [i for i in range(8) if last <= begins[i] or begins[i + 1] <= first]
    assert {*untouched} <= {*read_frames(run)}
    assert len(run.episodes) == len({episode.episode for episode in run.episodes}), "a frame was read twice"


def test_a_last_frame_that_is_cut_short_anywhere_is_no_problem(tmp_path: Path):
    parts = frames(3)
    whole = b"".join(parts)
    for missing in range(1, len(parts[2])):
        log_of(tmp_path, whole[:-missing])
        run = read_run(tmp_path)
        assert (read_frames(run), run.problems) == ([0, 1], []), missing


def test_an_end_that_is_damaged_is_told_and_what_is_written_behind_it_is_read(tmp_path: Path):
    parts = frames(3)
    file = log_of(tmp_path, parts[0] + bytes(200))
    run = read_run(tmp_path)
    assert read_frames(run) == [0]
    assert run.problems == [f"{file} is no event log, or damaged, at byte {len(parts[0])}"]
    with file.open("ab") as more:
        more.write(parts[1])
    run.update()
    assert read_frames(run) == [0, 1]
    assert run.problems[1:] == [f"{file} is damaged: 200 bytes from byte {len(parts[0])} on are skipped"]
    with file.open("ab") as more:
        more.write(parts[2])
    run.update()
    assert read_frames(run) == [0, 1, 2]


def test_a_frame_that_is_being_written_is_not_taken_for_damage(tmp_path: Path):
    parts = frames(4)
    file = log_of(tmp_path, b"")
    run = RunRecord(tmp_path)
    for part in parts:
        for byte in part:
            with file.open("ab") as more:
                more.write(bytes([byte]))
            run.update()
    assert (read_frames(run), run.problems) == ([0, 1, 2, 3], [])


def test_records_that_a_newer_arl_added_cost_themselves_and_its_schema_the_file(tmp_path: Path):
    lines = b"".join(
        msgspec.json.encode(record) + b"\n"
        for record in (
            {"event": "EpisodeBegan", "t": 1.0, "episode": "0.0", "mood": "good"},
            {"event": "EpisodeDreamt", "t": 1.0, "episode": "0.0"},
            {"event": "EpisodeBegan", "t": 1.0, "episode": "1.0"},
        )
    )
    file = log_of(tmp_path, packed_frame(new_packer(), lines, 3, 1.0, 1.0))
    newer = bytearray(frames(1)[0])
    newer[12] = 99
    (later := file.with_name("0002-0001.events.zst")).write_bytes(newer)
    run = read_run(tmp_path)
    assert read_frames(run) == [0, 1]
    problems = sorted(run.problems)
    assert len(problems) == 2
    assert problems[0].startswith(f"{file} holds a record that this arl does not know, and leaves out: ")
    assert "EpisodeDreamt" in problems[0]
    assert problems[1] == f"{later} was written by a newer arl, in schema 99; this arl reads schemas up to 1: update it"


def test_a_directory_without_a_run_is_an_error_and_one_without_a_log_has_its_steps(tmp_path: Path):
    with pytest.raises(RunFileError, match=r"holds no run: it has none of events, metrics\.jsonl"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"version": 1}\n')
    run = read_run(tmp_path)
    assert (run.steps, run.episodes, run.problems, run.settings) == ([{"version": 1}], [], [], {})


def test_a_file_that_is_no_log_is_an_error(tmp_path: Path):
    file = log_of(tmp_path, b"text" * 100)
    with pytest.raises(RunFileError, match="is no event log, or damaged, at byte 0"):
        list(frame_heads(file))
