"""Adapters over several ranks: trained, merged, written, saved and loaded as by one."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from train_models import MakeEngine, write_model
from train_ranks import Ranks, Report
from train_sequences import LOSS, assert_same_metrics, random_sequences, same, share_of

from arl.api.config import LoRAConfig, OptimizerConfig, TrainConfig
from arl.api.errors import CheckpointError, TransportError
from arl.api.types import TrainSequence
from arl.engine.fsdp.ray_engine import RayTrainEngine
from arl.engine.fsdp.train_engine import FSDPTrainEngine
from arl.engine.weights.adapter import AdapterEngine

# Two ranks cannot share the three rows of A evenly.
LORA = LoRAConfig(rank=3, alpha=6)
OPTIMIZER = OptimizerConfig(lr=2e-2, eps=1e-3, weight_decay=0.1, max_grad_norm=0.5)
# The second is one sequence, so that one of two ranks gets nothing.
MINIBATCHES = [random_sequences(9, seed=1), random_sequences(1, seed=2)]


def shares(rank: int, world_size: int) -> list[list[TrainSequence]]:
    return [share_of(batch, rank, world_size) for batch in MINIBATCHES]


def train(engine: FSDPTrainEngine, directory: Path, rank: int, world_size: int) -> Report:
    """Two steps; then the adapters and the merged model as files, a checkpoint, and the steps after it."""
    engine.update_reference()
    metrics = engine.train_batch(shares(rank, world_size), LOSS)
    snapshot = engine.snapshot()
    num_bytes = engine.snapshot_adapter().write_adapter(directory / "adapter")
    snapshot.write_adapter(directory / "again")
    snapshot.write(directory / "merged")
    engine.save(directory / "checkpoint").wait()
    return {"metrics": metrics, "num_bytes": num_bytes} | {"next": engine.train_batch(shares(rank, world_size), LOSS)}


def run(rank: int, directory: Path, model_dir: Path, alone: Path, other: Path) -> Report:
    engine = FSDPTrainEngine(model_dir, TrainConfig(optimizer=OPTIMIZER, lora=LORA, max_tokens_per_microbatch=40))
    report = train(engine, directory, rank, 2)
    engine.load(alone)
    report["continued"] = engine.train_batch(shares(rank, 2), LOSS)
    try:
        engine.load(other)
    except CheckpointError as error:
        report["refused"] = str(error)
    engine.close()
    return report


def test_ranks_train_publish_and_continue_like_one(model_dir: Path, make_engine: MakeEngine, tmp_path: Path):
    alone = make_engine(optimizer=OPTIMIZER, lora=LORA, max_tokens_per_microbatch=40)
    expected = train(alone, tmp_path / "alone", 0, 1)
    make_engine(lora=LoRAConfig(rank=2, alpha=6)).save(tmp_path / "other").wait()

    directory, checkpoint = tmp_path / "ranks", tmp_path / "alone" / "checkpoint"
    reports = Ranks(run, 2, directory, model_dir, checkpoint, tmp_path / "other").reports()
    for rank, report in enumerate(reports):
        assert_same_metrics(report["metrics"], expected["metrics"], 1e-4)
        assert_same_metrics(report["next"], expected["next"], 1e-4)
        assert_same_metrics(report["continued"], expected["next"], 1e-4)
        assert "train.lora.rank=2, and here it is 3" in report["refused"]
        assert report["num_bytes"] == (0 if rank else expected["num_bytes"])
    for name in ("adapter/adapter_model.safetensors", "again/adapter_model.safetensors", "merged/model.safetensors"):
        ours, theirs = (load_file(path / name) for path in (directory, tmp_path / "alone"))
        assert ours.keys() == theirs.keys()
        for key, tensor in theirs.items():
            torch.testing.assert_close(ours[key], tensor, rtol=1e-4, atol=1e-6, msg=key)
    alone.load(directory / "checkpoint")
    assert_same_metrics(alone.train_batch(shares(0, 1), LOSS), expected["next"], 1e-4)
    start = make_engine().forward(MINIBATCHES[0])
    assert same(alone.forward(MINIBATCHES[0], "reference_logprobs"), start)


def run_half(rank: int, directory: Path, model_dir: Path) -> Report:
    engine = FSDPTrainEngine(model_dir, TrainConfig(optimizer=OPTIMIZER, lora=LORA, dtype="bfloat16"))
    report = {"metrics": engine.train_batch(shares(rank, 2), LOSS)}
    engine.export(directory / "merged")
    engine.close()
    return report


def test_ranks_share_a_model_that_is_held_in_bfloat16(make_engine: MakeEngine, tmp_path: Path):
    model_dir = write_model(tmp_path / "half", tied=True, dtype=torch.bfloat16)
    alone = make_engine(model_dir, optimizer=OPTIMIZER, lora=LORA, dtype="bfloat16")
    expected = alone.train_batch(MINIBATCHES, LOSS)
    alone.export(tmp_path / "merged")
    for report in Ranks(run_half, 2, tmp_path / "ranks", model_dir).reports():
        for name in ("loss", "grad_norm"):
            assert report["metrics"][name] == pytest.approx(expected[name], rel=0.02)
    ours, theirs = (load_file(path / "merged" / "model.safetensors") for path in (tmp_path / "ranks", tmp_path))
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name].float(), tensor.float(), rtol=0.02, atol=0.01, msg=name)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rank_zero_of_ray_writes_the_adapters(model_dir: Path, make_engine: MakeEngine, tmp_path: Path):
    engine = RayTrainEngine(model_dir, TrainConfig(optimizer=OPTIMIZER, lora=LORA, num_ranks=2))
    try:
        assert isinstance(engine, AdapterEngine)
        engine.train_batch(MINIBATCHES, LOSS)
        alone, whole = engine.snapshot_adapter(), engine.snapshot()
        assert alone.write_adapter(tmp_path / "alone") == whole.write_adapter(tmp_path / "whole") > 0
        alone.release()
        with pytest.raises(TransportError, match="was released"):
            alone.write_adapter(tmp_path / "alone")
    finally:
        engine.close()
    expected = make_engine(optimizer=OPTIMIZER, lora=LORA)
    expected.train_batch(MINIBATCHES, LOSS)
    expected.snapshot_adapter().write_adapter(tmp_path / "expected")
    theirs = load_file(tmp_path / "expected" / "adapter_model.safetensors")
    for directory in ("alone", "whole"):
        ours = load_file(tmp_path / directory / "adapter_model.safetensors")
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-6, msg=name)
