"""Snapshots: what they hold, and that nothing which comes after changes it."""

from pathlib import Path

import pytest
import torch
from published import Trainee, trainee, write_model
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

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


@pytest.mark.parametrize(
    ("chunk_bytes", "bucket_bytes", "tied", "dtype"),
    [
        (1, 5_000, True, torch.float32),
        (3_000, 1, True, torch.bfloat16),
        (3_000, 5_000, False, torch.bfloat16),
        (1 << 20, 1 << 20, False, torch.float32),
    ],
)
def test_what_is_sent_is_what_files_hold_however_it_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, bucket_bytes: int, tied: bool, dtype: torch.dtype
):
    monkeypatch.setattr(module, "_CHUNK_BYTES", chunk_bytes)
    stored = load_file(write_model(tmp_path / "model", tied=tied, dtype=dtype) / "model.safetensors")
    with trainee(tmp_path / "model", tmp_path) as trainer:
        snapshot = trainer.engine.snapshot()
        assert isinstance(snapshot, SendableSnapshot)
        assert same(sent(snapshot, bucket_bytes), stored)
        assert same(load_file(tmp_path / "version-0" / "model.safetensors"), stored)
        assert snapshot.num_bytes == sum(tensor.nbytes for tensor in stored.values())
        assert ("lm_head.weight" in stored) is not tied


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of fused experts."""
    directory = tmp_path_factory.mktemp("experts")
    tokenizer = tiny_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
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
        with pytest.raises(TransportError, match="version 0 was released"):
            snapshot.write(tmp_path / "never")
        assert not (tmp_path / "never").exists()
        with pytest.raises(TransportError, match="released"):
            snapshot._bytes(0, 1)


def test_a_failure_beside_training_is_told_to_whoever_uses_it_and_the_next_is_well(
    trainer: Trainee, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*args: object) -> torch.Tensor:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(ShardGatherer, "_whole", fail)
        with pytest.raises(TransportError, match="no memory"):
            trainer.engine.snapshot().write(tmp_path / "broken")
    trainer.engine.snapshot().write(tmp_path / "next")
    assert (tmp_path / "next" / "model.safetensors").is_file()
