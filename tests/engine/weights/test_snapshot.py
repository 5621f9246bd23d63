"""Snapshots: what they hold, and that nothing which comes after changes it."""

from pathlib import Path

import pytest
import torch
from published import Trainee, trainee, write_model
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from arl.api.engine import TensorSpec
from arl.api.errors import TransportError
from arl.engine.fsdp import snapshot as module
from arl.engine.fsdp.snapshot import RankSnapshot, ShardGatherer
from arl.engine.tiny import tiny_tokenizer
from arl.engine.weights.distributed import SendableSnapshot
from arl.engine.weights.sender import ranges, views


def sent(snapshot: RankSnapshot, bucket_bytes: int) -> dict[str, torch.Tensor]:
    """What servers receive: each range as bytes, taken apart as its specs say."""
    cuts = ranges(snapshot.specs, bucket_bytes)
    parts = [(snapshot.specs[start:stop], snapshot._bytes(start, stop)) for start, stop in cuts]
    return {spec.name: tensor for specs, flat in parts for spec, tensor in zip(specs, views(specs, flat), strict=True)}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours
    )


def test_it_can_be_sent_and_names_its_tensors_as_servers_do(trainer: Trainee):
    snapshot = trainer.engine.snapshot()
    assert isinstance(snapshot, SendableSnapshot)
    assert TensorSpec(name="model.norm.weight", dtype="float32", shape=(32,)) in snapshot.specs


def test_steps_that_follow_do_not_change_it(trainer: Trainee, tmp_path: Path):
    trainer.train()
    trainer.engine.export(tmp_path / "now")
    snapshot = trainer.engine.snapshot()
    trainer.train()
    snapshot.write(tmp_path / "later")
    assert snapshot.version == 1
    now, later = (load_file(tmp_path / name / "model.safetensors") for name in ("now", "later"))
    assert same(now, later)
    assert not same(now, load_file(trainer.directory / "version-2" / "model.safetensors"))


@pytest.mark.parametrize(("chunk_bytes", "bucket_bytes"), [(1, 5_000), (3_000, 1), (3_000, 5_000), (1 << 20, 1 << 20)])
def test_what_is_sent_is_what_is_written_however_it_is_cut(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, bucket_bytes: int
):
    monkeypatch.setattr(module, "_CHUNK_BYTES", chunk_bytes)
    with trainee(model, tmp_path) as trainer:
        snapshot = trainer.engine.snapshot()
        written = load_file(tmp_path / "version-0" / "model.safetensors")
        assert same(sent(snapshot, bucket_bytes), written)
        assert snapshot.num_bytes == sum(tensor.nbytes for tensor in written.values())


@pytest.mark.parametrize("tied", [True, False])
def test_it_has_the_dtype_and_the_names_of_the_files(tmp_path: Path, tied: bool):
    model = write_model(tmp_path / "model", tied=tied, dtype=torch.bfloat16)
    with trainee(model, tmp_path) as trainer:
        snapshot = trainer.engine.snapshot()
        assert {spec.dtype for spec in snapshot.specs} == {"bfloat16"}
        assert ("lm_head.weight" in {spec.name for spec in snapshot.specs}) is not tied
        assert same(sent(snapshot, 1 << 20), load_file(model / "model.safetensors"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of fused experts."""
    directory = tmp_path_factory.mktemp("experts")
    tokenizer = tiny_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def test_fused_experts_are_sent_apart_as_files_have_them(experts: Path, tmp_path: Path):
    stored = load_file(experts / "model.safetensors")
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in stored
    with trainee(experts, tmp_path) as trainer:
        assert same(sent(trainer.engine.snapshot(), 2_000), stored)


def test_what_is_being_sent_while_it_is_released_is_still_whole(
    experts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stored = load_file(experts / "model.safetensors")
    with trainee(experts, tmp_path) as trainer:
        snapshot = trainer.engine.snapshot()
        served = snapshot._writer.served

        def released_meanwhile(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            converted = served(tensors)
            snapshot.release()
            return converted

        monkeypatch.setattr(snapshot._writer, "served", released_meanwhile)
        (spec,) = snapshot.specs[:1]
        assert torch.equal(views([spec], snapshot._bytes(0, 1))[0], stored[spec.name])
        with pytest.raises(TransportError, match="released"):
            snapshot._bytes(0, 1)


def test_one_that_was_released_says_so(trainer: Trainee, tmp_path: Path):
    snapshot = trainer.engine.snapshot()
    snapshot.release()
    snapshot.release()
    with pytest.raises(TransportError, match="version 0 was released"):
        snapshot.write(tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_a_failure_beside_training_is_told_to_whoever_uses_it_and_the_next_is_well(
    trainer: Trainee, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*args: object) -> torch.Tensor:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(ShardGatherer, "_whole", fail)
        broken = trainer.engine.snapshot()
        with pytest.raises(TransportError, match="no memory"):
            broken.write(tmp_path / "broken")
    trainer.engine.snapshot().write(tmp_path / "well")
    assert (tmp_path / "well" / "model.safetensors").is_file()


def test_after_a_failure_with_several_ranks_no_later_one_takes_what_others_still_send_of_it(
    trainer: Trainee, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*args: object) -> torch.Tensor:
        raise MemoryError("no memory")

    monkeypatch.setattr(ShardGatherer, "_whole", fail)
    monkeypatch.setattr(trainer.engine._snapshots._gatherer, "_num_ranks", 2)
    for _ in range(2):
        with pytest.raises(TransportError, match="no memory"):
            trainer.engine.snapshot().write(tmp_path / "broken")
        monkeypatch.setattr(ShardGatherer, "_whole", lambda self, chunk, mine: mine)
