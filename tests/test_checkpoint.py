"""Checkpoints are whole or not there."""

import json
from pathlib import Path

import pytest

from arl.api import ScriptedTrainEngine
from arl.api.errors import CheckpointError
from arl.checkpoint import Checkpoints

IDENTITY = {"model": "m", "seed": 0}


def checkpoints(directory: Path, keep: int = 2, **identity: object) -> Checkpoints:
    return Checkpoints(directory, keep, {**IDENTITY, **identity})


def save(directory: Path, version: int, keep: int = 2) -> None:
    checkpoints(directory, keep).save(version, ScriptedTrainEngine().save, {"version": version})


def test_the_newest_checkpoint_is_loaded(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    loaded: list[Path] = []
    state = checkpoints(tmp_path).load_newest(loaded.append)
    assert state is not None
    assert state["version"] == 2
    assert loaded == [tmp_path / "version-00000002" / "engine"]


def test_without_a_checkpoint_there_is_nothing_to_load(tmp_path: Path) -> None:
    assert checkpoints(tmp_path / "none").load_newest(lambda _: None) is None


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for version in (1, 2, 3, 4):
        save(tmp_path, version, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-00000003", "version-00000004"]


def test_a_save_that_dies_halfway_leaves_the_one_before(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def dies(directory: Path) -> None:
        directory.mkdir()
        (directory / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoints(tmp_path).save(2, dies, {})
    state = checkpoints(tmp_path).load_newest(lambda _: None)
    assert state is not None
    assert state["version"] == 1
    save(tmp_path, 2)
    assert checkpoints(tmp_path).newest_version() == 2


def test_a_full_disk_is_an_error_that_says_so_and_leaves_no_rest(tmp_path: Path) -> None:
    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"No space left on device.*Make room"):
        checkpoints(tmp_path).save(1, full, {})
    assert list(tmp_path.iterdir()) == []


def test_a_run_with_other_settings_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="seed=0, this run has 7"):
        checkpoints(tmp_path, seed=7).load_newest(lambda _: None)


def test_a_damaged_state_file_is_an_error_that_says_what_to_delete(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "version-00000001" / "state.json").write_text('{"identity": ')
    with pytest.raises(CheckpointError, match=r"delete .*version-00000001 to continue from an earlier one"):
        checkpoints(tmp_path).load_newest(lambda _: None)


def test_the_state_is_kept_beside_the_engine(tmp_path: Path) -> None:
    save(tmp_path, 3)
    state = json.loads((tmp_path / "version-00000003" / "state.json").read_text())
    assert state == {"identity": IDENTITY, "version": 3}
