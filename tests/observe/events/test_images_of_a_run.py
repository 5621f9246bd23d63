"""The images of a run on the disk, each once, whole or absent; and the event log, which names those of trajectories."""

import asyncio
import errno
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from records import grouped, trajectory

from arl.api.errors import ImageError, RunFileError
from arl.api.events import EpisodeBegan, KeptTokens
from arl.api.images import Image, PlacedImage
from arl.api.settings.run import EventsConfig
from arl.api.types import ModelRequest, ModelResponse, Trajectory
from arl.observe.events.batches import TokenRow, frames_of, packed, unpacked
from arl.observe.events.image_store import ImageStore
from arl.observe.events.records import logged_images
from arl.observe.events.run_record import RunRecord, read_run
from arl.observe.events.writer import EventLog
from arl.rollout.episode_events import EpisodeReport
from arl.training.token_log import KeptBatch, TrainedBatch, reported
from arl.training.trainer import Step, report_step


def image(number: int) -> Image:
    return Image.kept(b"\x89PNG" + np.random.default_rng(number).bytes(10_000), 4, 2)


def shows(*numbers: int) -> Trajectory:
    """A trajectory that begins with images of one placeholder each."""
    n = len(numbers)
    images = tuple(PlacedImage(image=image(number), start=i, stop=i + 1) for i, number in enumerate(numbers))
    return Trajectory(
        token_ids=[9] * n + [5, 6],
        loss_mask=[0] * (n + 1) + [1],
        behavior_logprobs=[0.0] * (n + 2),
        versions=[-1] * (n + 1) + [0],
        reward=1.0,
        images=images,
    )


def seen_in(run: RunRecord) -> list[tuple[Image, int, int]]:
    """Of all trajectories of all episodes, in order."""
    found = [tokens for episode in run.episodes for tokens in run.tokens(episode)]
    return [(one.image, one.start, one.stop) for tokens in found for one in tokens.images]


def files(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "images").glob("*/*"))


def log_of(run_dir: Path, *trajectories: Trajectory, config: EventsConfig | None = None) -> None:
    with EventLog(run_dir, config or EventsConfig()).open() as log:
        for number, one in enumerate(trajectories):
            log.emit(EpisodeBegan(episode=f"0.{number}"))
            log.keep(KeptTokens(rows=[(f"0.{number}", 0, one)]))


def test_images_come_back_at_their_places_and_each_has_one_file(tmp_path: Path) -> None:
    log_of(tmp_path, shows(1, 2), trajectory(), shows(2))
    assert seen_in(read_run(tmp_path)) == [(image(1), 0, 1), (image(2), 1, 2), (image(2), 0, 1)]
    assert files(tmp_path) == sorted(f"{image(number).digest}.png" for number in (1, 2))


def test_no_image_is_kept_of_tokens_that_are_not(tmp_path: Path) -> None:
    log_of(tmp_path, shows(1), config=EventsConfig(tokens="none"))
    assert files(tmp_path) == []


def test_an_image_that_is_gone_is_an_error_for_who_wants_it_and_for_nobody_else(tmp_path: Path) -> None:
    log_of(tmp_path, shows(1))
    run = read_run(tmp_path)
    (path,) = (tmp_path / "images").glob("*/*")
    path.unlink()
    (found,) = run.tokens(run.episodes[0])[0].images
    assert (found.digest, found.width, found.height) == (image(1).digest, 4, 2)
    with pytest.raises(ImageError, match=f"{image(1).digest} is missing"):
        _ = found.image


def test_damaged_places_are_an_error_of_the_log(tmp_path: Path) -> None:
    log_of(tmp_path, shows(1))
    run = read_run(tmp_path)
    row = TokenRow(episode="0.0", number=0, tokens=2, images=[("a" * 64, 4, 2, 1, 5)])
    with pytest.raises(ValueError, match=r"the placeholders \[1, 5\) of 2 tokens"):
        logged_images(row, run.images)
    (file,) = tmp_path.glob("events/tokens-*")
    batch = unpacked(file.read_bytes())
    outside = pa.array([[("a" * 64, 4, 2, 1, 9)]], batch.schema.field("images").type)
    file.write_bytes(packed(batch.set_column(batch.schema.get_field_index("images"), "images", outside)))
    with pytest.raises(RunFileError, match=r"the tokens of episode 0\.0 are damaged"):
        run.tokens(run.episodes[0])


def test_what_the_trainers_process_packed_has_no_files_and_the_log_keeps_them(tmp_path: Path) -> None:
    groups = [grouped(shows(1), shows(2)), grouped(trajectory(), shows(2), number=1)]
    kept = KeptBatch(rows=[0, 3], columns={"entropy": np.zeros(2, np.float32)}, numbers=[(0.0,) * 4] * 4)
    batch = reported(TrainedBatch(metrics={}, kept=kept), groups, frames_of)
    sent = pickle.dumps(batch)
    assert not any(image(number).data in sent for number in (1, 2))
    with EventLog(tmp_path, EventsConfig()).open() as log:
        log.emit(EpisodeBegan(episode="0.0"))
        log.emit(EpisodeBegan(episode="1.1"))
        loop = asyncio.new_event_loop()
        (call := loop.create_future()).set_result(batch)
        report_step(log, Step(groups=groups, replayed=(), advantages=(), began=0.0, taken=0.0, call=call), 1, 0.0)
        loop.close()
    assert seen_in(read_run(tmp_path)) == [(image(1), 0, 1), (image(2), 0, 1)]


def test_what_a_failed_episode_last_saw_has_its_images(tmp_path: Path) -> None:
    with EventLog(tmp_path, EventsConfig()).open() as log:
        report = EpisodeReport(log, "0.0")
        report.begin()
        request = ModelRequest(input_ids=(9, 5), images=(PlacedImage(image=image(1), start=0, stop=1),))
        response = ModelResponse(output_ids=(7,), output_logprobs=(-1.0,), output_versions=(0,), stop_reason="length")
        report.answered(request, response, 0.1)
        report.end((), None, 1, RuntimeError("stumbled"))
    assert seen_in(read_run(tmp_path)) == [(image(1), 0, 1)]


def test_images_that_cannot_be_written_for_a_while_are_written_later(tmp_path: Path) -> None:
    place = tmp_path / "images"
    place.write_text("a file where the directory belongs")
    with EventLog(tmp_path, EventsConfig()).open() as log:
        log.emit(EpisodeBegan(episode="0.0"))
        log.keep(KeptTokens(rows=[("0.0", 0, shows(1))]))
        assert not log.flush(timeout_s=1.0)
        place.unlink()
        assert log.flush()
    assert seen_in(read_run(tmp_path)) == [(image(1), 0, 1)]


# The files


def stored(store: ImageStore) -> list[Path]:
    return sorted(path for path in store.directory.rglob("*") if path.is_file())


def test_an_image_is_one_file_named_by_its_digest_and_comes_back_equal(tmp_path: Path) -> None:
    store, one = ImageStore(tmp_path), image(1)
    store.keep([one, one])
    store.keep([one, image(2)])
    path = tmp_path / "images" / one.digest[:2] / f"{one.digest}.png"
    assert store.path(one.digest) == path
    assert len(stored(store)) == 2
    again = ImageStore(tmp_path).image(one.digest, 4, 2)
    assert (again, again.data, again.width, again.height) == (one, one.data, 4, 2)


def test_an_image_that_is_kept_is_not_written_again_unless_its_file_is_gone_or_damaged(tmp_path: Path) -> None:
    store, one = ImageStore(tmp_path), image(1)
    store.keep([one])
    (path,) = stored(store)
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
    (path,) = stored(store)
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
    assert stored(store) == []
    store.keep([one])
    assert [path.read_bytes() for path in stored(store)] == [one.data]


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
    assert [path.read_bytes() for path in stored(ImageStore(tmp_path))] == [one.data]


def test_what_a_kill_left_half_written_is_removed(tmp_path: Path) -> None:
    store, one = ImageStore(tmp_path), image(1)
    store.keep([one])
    (store.directory / f".writing-{one.digest}-1-1").touch()
    store.remove_unfinished()
    assert [path.name for path in stored(store)] == [f"{one.digest}.png"]
