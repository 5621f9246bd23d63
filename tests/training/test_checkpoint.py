"""Checkpoints are whole or not there."""

import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from arl.api.errors import CheckpointError, DamagedCheckpointError
from arl.api.scripted import ScriptedTrainEngine
from arl.training.checkpoint import Checkpoints, RunState

IDENTITY = {"model": "m", "seed": 0}


def checkpoints(directory: Path, keep: int = 2, **identity: object) -> Checkpoints:
    return Checkpoints(directory, keep, {**IDENTITY, **identity})


def save(directory: Path, version: int, keep: int = 2) -> None:
    state = RunState(values={"version": version})
    checkpoints(directory, keep).begin(version, ScriptedTrainEngine().save, state).wait()


@dataclass
class Written:
    """What a train engine's `save` returns: something that does what the test says when it is waited for."""

    wait: Callable[[], object]


def fails() -> None:
    raise OSError(28, "No space left on device")


def test_the_newest_checkpoint_is_loaded(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    loaded: list[Path] = []
    state = checkpoints(tmp_path).load_newest(loaded.append)
    assert state is not None
    assert state.values["version"] == 2
    assert loaded == [tmp_path / "version-00000002" / "engine"]


def test_without_a_checkpoint_there_is_nothing_to_load(tmp_path: Path) -> None:
    assert checkpoints(tmp_path / "none").load_newest(lambda _: None) is None


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for version in (1, 2, 3, 4):
        save(tmp_path, version, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-00000003", "version-00000004"]


def test_until_it_is_written_the_one_before_is_the_newest(tmp_path: Path) -> None:
    save(tmp_path, 1)
    may_write = threading.Event()
    saving = checkpoints(tmp_path).begin(2, lambda _: Written(may_write.wait), RunState(values={}))
    writing = threading.Thread(target=saving.wait)
    writing.start()
    assert checkpoints(tmp_path).newest_version() == 1
    may_write.set()
    writing.join()
    assert checkpoints(tmp_path).newest_version() == 2


def test_everything_is_forced_to_the_disk_before_the_rename_and_the_rename_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, rename = list[str](), Path.rename
    monkeypatch.setattr(os, "fsync", lambda file: done.append(os.path.basename(os.readlink(f"/proc/self/fd/{file}"))))
    monkeypatch.setattr(Path, "rename", lambda old, new: (done.append("rename"), rename(old, new)))
    save(tmp_path, 1)
    assert sorted(done[:-2]) == [".writing-1", "groups.npz", "replay.npz", "state.json"]
    assert done[-3:] == [".writing-1", "rename", tmp_path.name]


@pytest.mark.parametrize("moment", ["copying", "writing", "deleting"])
def test_a_kill_leaves_the_one_before_and_its_rest_is_gone_after_the_next_start(tmp_path: Path, moment: str) -> None:
    save(tmp_path, 1)
    aside = tmp_path / ".writing-2" / "engine"
    if moment == "copying":
        aside.mkdir(parents=True)
    elif moment == "writing":
        aside.mkdir(parents=True)
        (aside / "half").write_text("x")
    else:
        (tmp_path / ".deleting-0" / "engine").mkdir(parents=True)
    state = checkpoints(tmp_path).load_newest(lambda _: None)
    assert state is not None
    assert state.values["version"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["version-00000001"]


def test_a_full_disk_while_copying_is_an_error_that_says_so_and_leaves_no_rest(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"No space left on device; earlier ones are untouched.*once the cause is repaired"
    ):
        checkpoints(tmp_path).begin(1, lambda _: fails(), RunState(values={}))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_while_writing_is_an_error_that_says_so_and_leaves_the_ones_before(tmp_path: Path) -> None:
    for version in (1, 2):
        save(tmp_path, version)
    saving = checkpoints(tmp_path).begin(3, lambda _: Written(fails), RunState(values={}))
    with pytest.raises(CheckpointError, match=r"version 3 .*No space left on device; earlier ones are untouched"):
        saving.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-00000001", "version-00000002"]


def test_a_run_with_other_settings_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="seed=0, this run has 7"):
        checkpoints(tmp_path, seed=7).load_newest(lambda _: None)


@pytest.mark.parametrize("content", ["", '{"identity": ', "[]", "{}", None])
@pytest.mark.parametrize("name", ["state.json", "groups.npz"])
def test_a_damaged_file_is_an_error_that_says_what_to_delete(tmp_path: Path, name: str, content: str | None) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    file = tmp_path / "version-00000002" / name
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    with pytest.raises(CheckpointError, match=rf"{name} is unreadable.*delete .*00000002 to continue from version 1"):
        checkpoints(tmp_path).load_newest(lambda _: None)


def test_a_damaged_engine_directory_is_an_error_that_says_what_to_delete(tmp_path: Path) -> None:
    def damaged(_: Path) -> None:
        raise DamagedCheckpointError("a shard is torn")

    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"a shard is torn; delete .*00000001 to continue from the beginning"):
        checkpoints(tmp_path).load_newest(damaged)


def test_the_state_is_kept_beside_the_engine(tmp_path: Path) -> None:
    save(tmp_path, 3)
    state = json.loads((tmp_path / "version-00000003" / "state.json").read_text())
    assert state == {"identity": IDENTITY, "version": 3}
