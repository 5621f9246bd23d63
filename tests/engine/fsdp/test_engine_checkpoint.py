"""A checkpoint continues bit for bit, or is refused by name; a failed save leaves the older one."""

import json
import os
import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch
from train_models import MakeEngine, write_model
from train_sequences import LOSS, random_sequences, same
from train_variants import VARIANTS

from arl.api.engine import Output
from arl.api.engine_config import OptimizerConfig
from arl.api.errors import CheckpointError, DamagedCheckpointError
from arl.engine.fsdp import saving as checkpoint

DECAYING = OptimizerConfig(lr=1e-2, schedule="cosine", warmup_steps=1, total_steps=6)


@pytest.mark.parametrize("name", ["token mean", "adapters", "value"])
def test_a_loaded_run_continues_bit_for_bit(any_model_dir: Path, tmp_path: Path, name: str):
    variant = VARIANTS[name]
    outputs: list[Output] = [variant.output] if variant.head == "value" else [variant.output, "reference_logprobs"]
    uninterrupted, resumed = (variant.engine(any_model_dir, optimizer=DECAYING) for _ in range(2))
    with closing(uninterrupted), closing(resumed):
        if variant.head != "value":
            uninterrupted.update_reference()
        uninterrupted.train_batch(variant.minibatches, variant.loss)
        uninterrupted.save(tmp_path / "checkpoint").wait()
        resumed.forward(variant.minibatch(), variant.output)  # leaves nothing behind that load would not replace
        resumed.load(tmp_path / "checkpoint")
        assert resumed.version == 1
        for _ in range(2):
            ours, theirs = (one.train_batch(variant.minibatches, variant.loss) for one in (resumed, uninterrupted))
            assert ours == theirs
        for output in outputs:
            assert same(*(one.forward(variant.minibatch(), output) for one in (resumed, uninterrupted)))


def test_the_random_state_continues(make_engine: MakeEngine, tmp_path: Path):
    engine = make_engine()
    engine.save(tmp_path / "checkpoint").wait()
    expected = torch.rand(3)
    engine.load(tmp_path / "checkpoint")
    assert torch.equal(torch.rand(3), expected)


def test_saving_again_replaces_the_checkpoint_and_leaves_nothing_beside_it(make_engine: MakeEngine, tmp_path: Path):
    engine = make_engine()
    engine.save(tmp_path / "checkpoint").wait()
    engine.train_batch([random_sequences(2)], LOSS)
    engine.save(tmp_path / "checkpoint").wait()
    engine.load(tmp_path / "checkpoint")
    assert engine.version == 1
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint"]


def test_files_are_forced_to_the_disk_before_the_checkpoint_has_its_name(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    done, replace = list[str](), checkpoint.replace_directory
    monkeypatch.setattr(os, "fsync", lambda file: done.append(os.path.basename(os.readlink(f"/proc/self/fd/{file}"))))
    monkeypatch.setattr(checkpoint, "replace_directory", lambda *paths: (done.append("rename"), replace(*paths)))
    make_engine().save(tmp_path / "checkpoint").wait()
    assert done[0].endswith(".distcp")
    assert done[-4] == "progress.json"
    assert done[-3].startswith(".checkpoint.")
    assert done[-2:] == ["rename", tmp_path.name]


def test_a_save_that_fails_says_so_and_leaves_the_older_checkpoint_and_the_next_one_works(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch
):
    engine = make_engine()
    engine.save(tmp_path / "checkpoint").wait()
    engine.train_batch([random_sequences(2)], LOSS)
    with monkeypatch.context() as broken:
        broken.setattr(checkpoint, "_sync", lambda _: os.stat(tmp_path / "gone"))
        failed = engine.save(tmp_path / "checkpoint")
        with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*No such file"):
            failed.wait()
    engine.load(tmp_path / "checkpoint")
    assert engine.version == 0
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint"]
    engine.train_batch([random_sequences(2)], LOSS)
    engine.save(tmp_path / "checkpoint").wait()
    make_engine().load(tmp_path / "checkpoint")


class HeldBack:
    """Lets DCP write nothing until told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_write = threading.Event()
        write = checkpoint.save_tensors
        monkeypatch.setattr(checkpoint, "save_tensors", lambda *a, **k: self.may_write.wait(60) and write(*a, **k))


def test_steps_neither_wait_for_a_checkpoint_nor_change_it(make_engine: MakeEngine, tmp_path: Path, monkeypatch):
    engine, held = make_engine(), HeldBack(monkeypatch)
    (expected,) = engine.forward(random_sequences(1))
    saving = engine.save(tmp_path / "checkpoint")
    engine.train_batch([random_sequences(2)], LOSS)
    assert list(tmp_path.iterdir()) == []
    held.may_write.set()
    saving.wait()
    engine.load(tmp_path / "checkpoint")
    assert engine.version == 0
    assert torch.equal(engine.forward(random_sequences(1))[0], expected)


def test_a_saving_follows_the_one_before(make_engine: MakeEngine, tmp_path: Path, monkeypatch):
    engine, held, savings = make_engine(), HeldBack(monkeypatch), []
    engine.save(tmp_path / "first")
    second = threading.Thread(target=lambda: savings.append(engine.save(tmp_path / "second")))
    second.start()
    second.join(timeout=0.2)
    assert second.is_alive()
    held.may_write.set()
    second.join()
    savings[0].wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]


def test_closing_waits_for_a_checkpoint_under_way(make_engine: MakeEngine, tmp_path: Path):
    engine = make_engine()
    engine.save(tmp_path / "checkpoint")
    engine.close()
    make_engine().load(tmp_path / "checkpoint")


def test_another_models_checkpoint_is_refused_naming_the_parameter(make_engine: MakeEngine, tmp_path: Path):
    make_engine(write_model(tmp_path / "tied", tied=True)).save(tmp_path / "checkpoint").wait()
    with pytest.raises(CheckpointError, match=r"model\.lm_head\.weight is absent there"):
        make_engine().load(tmp_path / "checkpoint")


def test_a_parameter_of_another_shape_is_refused_with_both_shapes(make_engine: MakeEngine, tmp_path: Path):
    engine = make_engine()
    engine.save(tmp_path / "checkpoint").wait()
    file = tmp_path / "checkpoint" / "progress.json"
    progress = json.loads(file.read_text())
    progress["parameters"]["model.model.norm.weight"] = [7]
    file.write_text(json.dumps(progress))
    with pytest.raises(CheckpointError, match=r"model\.model\.norm\.weight is \[7\] there, \[32\] here"):
        engine.load(tmp_path / "checkpoint")


def test_a_missing_or_damaged_checkpoint_says_which_file(make_engine: MakeEngine, tmp_path: Path):
    engine = make_engine()
    with pytest.raises(DamagedCheckpointError, match=r"has no progress\.json"):
        engine.load(tmp_path / "nowhere")
    engine.save(tmp_path / "checkpoint").wait()
    (shard,) = (tmp_path / "checkpoint").glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(DamagedCheckpointError, match=r"checkpoint .* is damaged"):
        engine.load(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "progress.json").write_text('{"version": 1')
    with pytest.raises(DamagedCheckpointError, match=r"progress\.json"):
        engine.load(tmp_path / "checkpoint")
