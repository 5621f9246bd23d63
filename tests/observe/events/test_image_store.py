"""The images of a run on the disk: each once, whole or absent, and checked when they are read."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from arl.api.errors import ImageError
from arl.api.images import Image
from arl.observe.events.image_store import ImageStore


def image(number: int) -> Image:
    return Image.kept(b"\x89PNG" + bytes([number]) * 1000, 4, 2)


def files(store: ImageStore) -> list[Path]:
    return sorted(path for path in store.directory.rglob("*") if path.is_file())


def test_an_image_is_one_file_named_by_its_digest_and_comes_back_equal(tmp_path: Path) -> None:
    store, one = ImageStore(tmp_path), image(1)
    store.keep([one, one])
    store.keep([one, image(2)])
    path = tmp_path / "images" / one.digest[:2] / f"{one.digest}.png"
    assert store.path(one.digest) == path
    assert len(files(store)) == 2
    again = ImageStore(tmp_path).image(one.digest, 4, 2)
    assert (again, again.data, again.width, again.height) == (one, one.data, 4, 2)


def test_an_image_that_is_kept_is_not_written_again_unless_its_file_is_gone_or_damaged(tmp_path: Path) -> None:
    store, one = ImageStore(tmp_path), image(1)
    store.keep([one])
    (path,) = files(store)
    first = path.stat().st_ino
    store.keep([one])
    ImageStore(tmp_path).keep([one])  # as after a restart
    assert path.stat().st_ino == first
    path.unlink()
    store.keep([one])
    assert path.read_bytes() == one.data
    path.write_bytes(b"cut")  # as by a power cut
    ImageStore(tmp_path).keep([one])
    assert path.read_bytes() == one.data


def test_a_missing_and_a_damaged_file_are_named(tmp_path: Path) -> None:
    store, one = ImageStore(tmp_path), image(1)
    with pytest.raises(ImageError, match=f"the image {one.digest} is missing from {store.directory}; put its file"):
        store.image(one.digest, 4, 2)
    store.keep([one])
    (path,) = files(store)
    path.write_bytes(one.data[:-1])
    with pytest.raises(ImageError, match=rf"the image {path} is damaged: its SHA-256 is .*; put the right file back"):
        store.image(one.digest, 4, 2)


@pytest.mark.parametrize("digest", ["../../secret", "", "ab", "A" * 64, "a" * 63 + "/", "a" * 64 + "\n"])
def test_what_is_no_digest_has_no_file(tmp_path: Path, digest: str) -> None:
    (tmp_path / "secret.png").touch()
    assert ImageStore(tmp_path / "run").path(digest) is None


def test_a_full_disk_leaves_no_file_and_the_image_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, one = ImageStore(tmp_path), image(1)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            store.keep([one])
    assert files(store) == []
    store.keep([one])
    assert [path.read_bytes() for path in files(store)] == [one.data]


def test_when_a_file_has_its_name_its_content_is_on_the_disk_and_then_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = list[str]()
    replaced, synced = Path.replace, os.fsync

    def told(path: Path, target: Path) -> Path:
        done.append("named")
        return replaced(path, target)

    def sync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        done.append("content" if path.is_file() else f"names in {path.relative_to(tmp_path)}")
        synced(descriptor)

    monkeypatch.setattr(Path, "replace", told)
    monkeypatch.setattr(os, "fsync", sync)
    ImageStore(tmp_path / "run").keep([one := image(1)])
    directories = {f"names in {path}" for path in ("run", "run/images", f"run/images/{one.digest[:2]}")}
    assert (done[:2], set(done[2:])) == (["content", "named"], directories)
    done.clear()
    ImageStore(tmp_path / "run").keep([one])  # somebody else may only just have named it
    assert (done[0], set(done[1:])) == ("content", directories)


def test_several_may_write_the_same_image_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, all_have_written, synced = image(1), threading.Barrier(2, timeout=10), os.fsync

    def sync(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_file():
            all_have_written.wait()
        synced(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    with ThreadPoolExecutor(2) as threads:
        for kept in [threads.submit(ImageStore(tmp_path).keep, [one]) for _ in range(2)]:
            kept.result()
    assert [path.read_bytes() for path in files(ImageStore(tmp_path))] == [one.data]


def test_what_a_kill_left_half_written_is_removed(tmp_path: Path) -> None:
    store, one = ImageStore(tmp_path), image(1)
    store.keep([one])
    (store.directory / f".writing-{one.digest}-1-1").touch()
    store.remove_unfinished()
    assert [path.name for path in files(store)] == [f"{one.digest}.png"]
