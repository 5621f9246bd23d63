"""Checkpoints are whole or not there."""

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from records import grouped, trajectory

from arl.api.errors import CheckpointError, DamagedCheckpointError
from arl.api.fakes import ScriptedTrainEngine
from arl.api.images import Image, PlacedImage
from arl.api.types import Group
from arl.training.checkpoints import FORMAT, Checkpoints, RunState

IDENTITY = {"model": "m", "seed": 0}


def checkpoints(directory: Path, **identity: object) -> Checkpoints:
    return Checkpoints(directory, 2, {**IDENTITY, **identity})


def save(directory: Path, version: int, sync: Callable[[], None] = lambda: None) -> None:
    state = RunState(values={"version": version}, sync=sync)
    checkpoints(directory).begin(version, ScriptedTrainEngine().save, state)()


@dataclass
class Written:
    """What a train engine's `save` returns: something that does what the test says when it is waited for."""

    wait: Callable[[], object]


def fails() -> None:
    raise OSError(28, "No space left on device")


def test_the_newest_are_kept_and_the_newest_of_them_is_loaded(tmp_path: Path) -> None:
    loaded: list[Path] = []
    assert checkpoints(tmp_path / "none").load_newest(loaded.append) is None
    for version in (1, 2, 3, 4):
        save(tmp_path, version)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-00000003", "version-00000004"]
    state = checkpoints(tmp_path).load_newest(loaded.append)
    assert state is not None
    assert state.values == {"format": FORMAT, "identity": IDENTITY, "version": 4}
    assert loaded == [tmp_path / "version-00000004" / "engine"]


def test_everything_is_forced_to_the_disk_before_the_rename_and_the_rename_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, rename = list[str](), Path.rename
    monkeypatch.setattr(os, "fsync", lambda file: done.append(os.path.basename(os.readlink(f"/proc/self/fd/{file}"))))
    monkeypatch.setattr(Path, "rename", lambda old, new: (done.append("rename"), rename(old, new)))
    save(tmp_path, 1, lambda: done.append("logs"))
    assert sorted(done[:-2]) == [".writing-1-0", "groups.npz", "logs", "replay.npz", "state.json"]
    assert done[-4:] == [".writing-1-0", "logs", "rename", tmp_path.name]


def test_what_a_kill_left_half_written_or_half_deleted_is_gone_after_the_next_start(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for rest in (".writing-2", ".deleting-0"):
        (tmp_path / rest / "engine").mkdir(parents=True)
        (tmp_path / rest / "engine" / "half").write_text("x")
    state = checkpoints(tmp_path).load_newest(lambda _: None)
    assert state is not None
    assert state.values["version"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["version-00000001"]


@pytest.mark.parametrize("save_engine", [lambda _: fails(), lambda _: Written(fails)], ids=["copying", "writing"])
def test_a_full_disk_is_an_error_that_says_so_and_leaves_the_one_before_and_no_rest(
    tmp_path: Path, save_engine: Callable[[Path], Any]
) -> None:
    save(tmp_path, 1)
    said = r"version 2 .*No space left on device; earlier ones are untouched.*once the cause is fixed"
    with pytest.raises(CheckpointError, match=said):
        checkpoints(tmp_path).begin(2, save_engine, RunState(values={}))()
    assert [path.name for path in tmp_path.iterdir()] == ["version-00000001"]


def seen(number: int) -> Group:
    image = Image.kept(b"\x89PNG" + bytes([number]) * 1000, 4, 2)
    shows = trajectory(images=(PlacedImage(image=image, start=0, stop=1),))
    return grouped(shows, shows, number=number)


def test_a_checkpoint_names_its_images_which_are_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, rename, there = tmp_path / "checkpoints", Path.rename, list[set[bytes]]()

    def renamed(old: Path, new: Path) -> Path:
        there.append({path.read_bytes() for path in tmp_path.glob("images/*/*")})
        return rename(old, new)

    monkeypatch.setattr(Path, "rename", renamed)
    state = RunState(values={}, groups=[seen(1), seen(2)], replay=[seen(2), seen(3)])
    checkpoints(directory).begin(1, ScriptedTrainEngine().save, state)()
    assert there == [{seen(number).trajectories[0].images[0].image.data for number in (1, 2, 3)}]
    assert b"\x89PNG" not in b"".join(path.read_bytes() for path in directory.rglob("*.npz"))
    loaded = checkpoints(directory).load_newest(lambda _: None)
    assert loaded is not None
    assert (loaded.groups, loaded.replay) == (state.groups, state.replay)


@pytest.mark.parametrize(("damage", "said"), [(Path.unlink, "is missing from"), (Path.touch, "is damaged")])
def test_a_checkpoint_whose_image_is_missing_or_damaged_says_which_and_what_to_do(
    tmp_path: Path, damage: Callable[[Path], object], said: str
) -> None:
    directory, one = tmp_path / "checkpoints", seen(1)
    checkpoints(directory).begin(1, ScriptedTrainEngine().save, RunState(values={}, groups=[one]))()
    (path,) = tmp_path.glob("images/*/*")
    path.write_bytes(b"")
    damage(path)
    digest = one.trajectories[0].images[0].image.digest
    with pytest.raises(CheckpointError, match=rf"groups\.npz .*{digest}.* {said}.*; put .* delete .*version-00000001"):
        checkpoints(directory).load_newest(lambda _: None)


@pytest.mark.parametrize("second_version", [1, 2])
def test_a_checkpoint_that_begins_while_another_is_written_spoils_neither(tmp_path: Path, second_version: int) -> None:
    """Of the same version or another; written one after the other."""
    kept, writing, may_end = checkpoints(tmp_path), list[str](), threading.Event()
    is_writing = threading.Event()

    def writes(name: str) -> Callable[[Path], Any]:
        def save(directory: Path) -> Any:
            directory.mkdir()
            return Written(partial(write, directory, name))

        def write(directory: Path, name: str) -> None:
            assert writing == []
            writing.append(name)
            is_writing.set()
            (directory / "engine.json").write_text(name)
            may_end.wait(10)
            writing.remove(name)

        return save

    first = kept.begin(1, writes("first"), RunState(values={"version": 1}))
    second = kept.begin(second_version, writes("second"), RunState(values={"version": second_version}))
    with ThreadPoolExecutor() as threads:
        ended = [threads.submit(write) for write in (second, first)]
        assert is_writing.wait(10)
        may_end.set()
    assert [future.result() for future in ended] == [None, None]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"version-{version:08d}" for version in sorted({1, second_version})]
    for name in names:
        assert (tmp_path / name / "engine" / "engine.json").read_text() in ("first", "second")


def test_a_run_with_other_settings_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="seed=0, this run has 7"):
        checkpoints(tmp_path, seed=7).load_newest(lambda _: None)


@pytest.mark.parametrize(
    ("written", "here", "continues"),
    [
        ({"model": "runs/a/model", "model_digest": "one"}, {"model": "runs/b/model", "model_digest": "one"}, True),
        ({"model": "runs/a/model", "model_digest": "one"}, {"model": "runs/b/model", "model_digest": "two"}, False),
        ({"model": "runs/a/model"}, {"model": "runs/a/model", "model_digest": "one"}, True),
        ({"model": "runs/a/model"}, {"model": "runs/b/model", "model_digest": "one"}, False),
        ({"model": "org/a", "model_digest": None}, {"model": "org/b", "model_digest": None}, False),
    ],
    ids=["moved", "another model", "no digest", "no digest, moved", "unknown digests"],
)
def test_a_model_is_the_same_by_its_name_or_its_digest(
    tmp_path: Path, written: dict[str, Any], here: dict[str, Any], continues: bool
) -> None:
    Checkpoints(tmp_path, 2, written).begin(1, ScriptedTrainEngine().save, RunState(values={"version": 1}))()
    load = partial(Checkpoints(tmp_path, 2, here).load_newest, lambda _: None)
    if continues:
        assert load() is not None
        return
    refusal = f"written with model='{written['model']}', this run has '{here['model']}'"
    with pytest.raises(CheckpointError, match=refusal):
        load()


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    file = tmp_path / "version-00000001" / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": FORMAT - 1}))
    with pytest.raises(CheckpointError, match=f"format {FORMAT - 1}, and this arl reads {FORMAT}; continue with"):
        checkpoints(tmp_path).load_newest(lambda _: None)


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
    with pytest.raises(CheckpointError, match=r"a shard is torn; .* delete .*00000001 to continue from the begin"):
        checkpoints(tmp_path).load_newest(damaged)
