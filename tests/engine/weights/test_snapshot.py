"""Snapshots: what they hold, from one rank or several, and that nothing which comes after changes it."""

import logging
from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from engine.fsdp.train_ranks import Ranks, Report
from published import Trainee, sequence, towards_advantage, trainee, write_model
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from arl.api.errors import TransportError
from arl.api.settings.engines import OptimizerConfig, TrainConfig
from arl.engine.fsdp import snapshot as module
from arl.engine.fsdp.snapshot import RankSnapshot, ShardGatherer
from arl.engine.fsdp.train_engine import FSDPTrainEngine
from arl.engine.tiny import tiny_tokenizer
from arl.engine.weights.distributed import SendableSnapshot, ranges, views


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


def whole_weights(engine: FSDPTrainEngine, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What torch itself gathers, a tensor at a time, on the training's own groups."""
    state = engine._policy.model.state_dict()
    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}
    return {
        name: tensor.to(dtype, copy=True).contiguous() for name, tensor in whole.items() if name != "lm_head.weight"
    }


def publish_three_versions(rank: int, dtype: torch.dtype, config: TrainConfig, directory: Path) -> Report:
    module._CHUNK_BYTES = 3_000
    engine = FSDPTrainEngine(directory / "model", config)
    for version in range(3):
        expected = whole_weights(engine, dtype)
        if version == 1:
            fail_once(engine, rank)
        snapshot = engine.snapshot()
        share = 0 if config.tensor_parallel > 1 else rank
        batch = [sequence(range(20 * share, 20 * share + 20), seed=version)]
        engine.train_batch([batch], towards_advantage)  # while the snapshot is put together
        if rank == 0:
            snapshot.write(directory / f"ours-{version}")
            save_file(expected, directory / f"theirs-{version}")
    engine.close()
    logging.disable()  # a send of the failed snapshot still waits for rank 0, and fails when that ends
    return {}


def fail_once(engine: FSDPTrainEngine, rank: int) -> None:
    """A snapshot that rank 1 cannot send: rank 0 still waits for it when the next one is taken."""
    whole = module.ShardGatherer._whole
    if rank == 1:
        module.ShardGatherer._whole = failing
    snapshot = engine.snapshot()
    if rank == 1:
        with pytest.raises(TransportError, match="this rank has no memory"):
            snapshot._chunks[-1].result()
    module.ShardGatherer._whole = whole
    dist.barrier()


def failing(*args: object) -> torch.Tensor:
    raise MemoryError("this rank has no memory")


@pytest.mark.parametrize(
    ("num_ranks", "dtype", "tensor_parallel"),
    [
        pytest.param(2, torch.bfloat16, 1, marks=pytest.mark.runs),
        pytest.param(3, torch.bfloat16, 1, marks=pytest.mark.slow),
        pytest.param(2, torch.float32, 2, marks=pytest.mark.slow),
    ],
)
def test_ranks_put_together_what_one_has_also_after_one_of_them_failed(
    tmp_path: Path, num_ranks: int, dtype: torch.dtype, tensor_parallel: int
):
    stored = load_file(write_model(tmp_path / "model", dtype=dtype) / "model.safetensors")
    optimizer = OptimizerConfig(lr=1e-2, eps=1e-3)
    config = TrainConfig(optimizer=optimizer, num_ranks=num_ranks, tensor_parallel=tensor_parallel)
    with closing(Ranks(num_ranks, tmp_path)) as ranks:
        ranks.run(publish_three_versions, dtype, config, tmp_path)
    previous = stored
    for version in range(3):
        ours, theirs = (
            load_file(tmp_path / f"ours-{version}" / "model.safetensors"),
            load_file(tmp_path / f"theirs-{version}"),
        )
        assert ours.keys() == theirs.keys() == stored.keys()
        for name, tensor in ours.items():
            assert tensor.dtype == dtype
            assert torch.equal(tensor, theirs[name]), name
        assert all(torch.equal(ours[name], previous[name]) for name in ours) is (version == 0)
        previous = ours
