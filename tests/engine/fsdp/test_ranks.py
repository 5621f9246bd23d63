"""Ranks that share the data, or the layers, train, publish and continue like one process with everything."""

import itertools
import resource
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from train_models import write_model
from train_ranks import Ranks, Report
from train_sequences import (
    LOSS,
    assert_same_metrics,
    assert_same_rows,
    random_sequences,
    same,
    share_of,
)
from train_variants import LORA, OPTIMIZER, VARIANTS, Variant, assert_same_tensors
from transformers import LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from arl.algorithm.losses.reinforcement import PolicyLoss
from arl.api.errors import CheckpointError
from arl.api.settings.engines import TrainConfig
from arl.api.train_engine import TrainSequence
from arl.engine.fsdp.parallel import loading_turn
from arl.engine.fsdp.policy import local_shard
from arl.engine.fsdp.snapshot import export_weights
from arl.engine.fsdp.train_engine import FSDPTrainEngine

MODELS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "qwen3": (Qwen3ForCausalLM, {}),
    "tied qwen3": (Qwen3ForCausalLM, {"tied": True}),
    "tied qwen2": (Qwen2ForCausalLM, {"tied": True}),
    "llama with biases": (LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
}


def tell(engine: FSDPTrainEngine, variant: Variant, directory: Path, share: int, num_shares: int) -> Report:
    """A step, what is written after it, and the next step; the first share alone has sequences to forward."""
    shares = [share_of(sequences, share, num_shares) for sequences in variant.minibatches]
    if variant.head != "value":
        engine.update_reference()
    loss = replace(variant.loss, keeps_tokens=True) if isinstance(variant.loss, PolicyLoss) else variant.loss
    report: Report = {"metrics": engine.train_batch(shares, loss), "kept": engine.kept}
    saving = engine.save(directory / "checkpoint")
    engine.export(directory / "model")
    if "lora" in variant.options:
        report["adapter_bytes"] = engine.snapshot_adapter().write(directory / "adapter")
    forwarded = variant.minibatch() if share == 0 else []
    report["outputs"] = [row for output in variant.outputs for row in engine.forward(forwarded, output)]
    report["next"] = engine.train_batch(shares, variant.loss)
    saving.wait()
    return report


def continued(engine: FSDPTrainEngine, variant: Variant, checkpoint: Path, share: int, num_shares: int) -> Report:
    engine.load(checkpoint)
    return engine.train_batch([share_of(part, share, num_shares) for part in variant.minibatches], variant.loss)


def train_on_a_rank(rank: int, name: str, model: Path, directory: Path, num_shares: int, num_parts: int) -> Report:
    """One of `num_parts` neighbouring ranks, which hold parts of the layers and compute one share of the data."""
    variant, share = VARIANTS[name], rank // num_parts
    options = {"num_ranks": num_shares * num_parts, "tensor_parallel": num_parts}
    recomputes = num_shares == num_parts == 2
    engine = variant.engine(model, max_tokens_per_microbatch=60, activation_checkpointing=recomputes, **options)
    report = tell(engine, variant, directory / "ranks", share, num_shares)
    if num_parts > 1:
        parameters = list(engine._policy.parameters())
        assert sum(is_split(p) for p in parameters) >= 2 * 7
        report["whole"] = [local_shard(p.detach()).clone() for p in parameters if not is_split(p)]
    report["continued"] = continued(engine, variant, directory / "alone" / "checkpoint", share, num_shares)
    engine.close()
    return report


def is_split(parameter: torch.Tensor) -> bool:
    """Whether the ranks of a tensor-parallel group hold different parts of it."""
    assert isinstance(parameter, DTensor)
    names = parameter.device_mesh.mesh_dim_names
    assert names is not None
    return "tp" in names and not parameter.placements[names.index("tp")].is_replicate()


@pytest.mark.parametrize(
    ("name", "model", "num_shares", "num_parts"),
    [
        *((name, "qwen3", 2, 1) for name in VARIANTS),
        ("value", "qwen3", 1, 2),
        pytest.param("token mean", "tied qwen2", 1, 2, marks=pytest.mark.runs),
        pytest.param("token mean", "llama with biases", 1, 2, marks=pytest.mark.runs),
        pytest.param("token mean", "tied qwen3", 2, 2, marks=pytest.mark.slow),
    ],
)
def test_ranks_train_publish_and_continue_like_one(
    pair: Ranks, tmp_path: Path, name: str, model: str, num_shares: int, num_parts: int
) -> None:
    model_class, config = MODELS[model]
    directory = write_model(tmp_path / "stored", model_class, **config)
    ranks = pair if num_shares * num_parts == 2 else Ranks(4, tmp_path)
    variant = VARIANTS[name]
    alone = variant.engine(directory)
    try:
        expected = tell(alone, variant, tmp_path / "alone", 0, 1)
        reports = ranks.run(train_on_a_rank, name, directory, tmp_path, num_shares, num_parts)
        again = continued(alone, variant, tmp_path / "ranks" / "checkpoint", 0, 1)
    finally:
        alone.close()
    for rank, report in enumerate(reports):
        for key, metrics in (("metrics", "metrics"), ("next", "next"), ("continued", "next")):
            is_split = key == "metrics" and num_parts > 1
            assert_same_metrics(report[key], expected[metrics], 1e-5 if is_split else 1e-4)
        assert num_parts == 1 or same(report["whole"], reports[rank // num_parts * num_parts]["whole"])
        for kept, of_one in zip(report["kept"], expected["kept"], strict=True) if num_shares == 1 else ():
            assert kept.keys() == of_one.keys()
            for column, values in of_one.items():
                torch.testing.assert_close(kept[column], values, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert_same_metrics(again, expected["next"], 1e-4)
    for report in reports[:num_parts]:
        assert_same_rows(report["outputs"], expected["outputs"])
    if name == "adapters":
        assert [report["adapter_bytes"] for report in reports] == [expected["adapter_bytes"], 0]
    for file in (tmp_path / "alone").glob("*/*.safetensors"):
        assert_same_tensors(load_file(tmp_path / "ranks" / file.relative_to(tmp_path / "alone")), load_file(file))
    if variant.head != "value":
        assert_exports_are_what_the_engine_wrote(tmp_path / "ranks", directory)


def assert_exports_are_what_the_engine_wrote(told: Path, model: Path) -> None:
    """Bit for bit, from the checkpoint of all ranks."""
    for name in ("model", "adapter"):
        if (told / name).exists():
            export_weights(told / "checkpoint", str(model), told / "exported" / name, adapter=name == "adapter")
            written, exported = (
                {file.name: file.read_bytes() for file in where.iterdir()}
                for where in (told / name, told / "exported" / name)
            )
            assert exported == written


# bfloat16


def halves() -> list[TrainSequence]:
    """Two sequences that are a microbatch each, on one rank or on two."""
    return [sequence for sequence in random_sequences(9, seed=1) if len(sequence) > 12][:2]


def train_halves(sequences: list[TrainSequence], model_dir: Path, directory: Path, **options: Any) -> Report:
    engine = FSDPTrainEngine(model_dir, TrainConfig(optimizer=OPTIMIZER, dtype="bfloat16", **options))
    metrics = engine.train_batch([sequences], LOSS)
    engine.export(directory)
    engine.close()
    return metrics


def train_a_half(rank: int, model_dir: Path, directory: Path, options: dict[str, Any]) -> Report:
    return train_halves([halves()[rank]], model_dir, directory, **options)


@pytest.mark.parametrize(
    ("options", "dtype", "precise", "rtol", "atol"),
    [
        # A sum in bfloat16 would be off by up to 4e-3 of each value.
        ({"max_tokens_per_microbatch": 24}, torch.float32, 1e-6, 1e-6, 1e-7),
        ({"lora": LORA}, torch.bfloat16, 0.02, 0.02, 0.01),
    ],
    ids=["gradients are summed in float32", "a model that is held in bfloat16"],
)
def test_ranks_compute_in_bfloat16_as_one_does(
    pair: Ranks, tmp_path: Path, options: dict[str, Any], dtype: torch.dtype, precise: float, rtol: float, atol: float
) -> None:
    model_dir = write_model(tmp_path / "model", tied=True, dtype=dtype)
    calls = pair.start(train_a_half, model_dir, tmp_path / "ranks", options)
    expected = train_halves(halves(), model_dir, tmp_path / "alone", **options)
    for report in pair.reports(calls):
        assert report["grad_norm"] == pytest.approx(expected["grad_norm"], rel=precise)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ranks", "alone"))
    assert_same_tensors(ours, theirs, rtol, atol)


# Checkpoints


def save_on_a_rank(rank: int, model_dir: Path, directory: Path) -> Report:
    engine = FSDPTrainEngine(model_dir, TrainConfig())
    torch.manual_seed(rank)
    engine.save(directory).wait()
    saved = torch.rand(3)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    failure = ""
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000 if rank == 1 else soft, hard))
        engine.save(directory).wait()
    except CheckpointError as error:
        failure = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    engine.load(directory)
    report = {"saved": saved, "loaded": torch.rand(3), "failure": failure}
    engine.close()
    return report


def test_each_rank_has_its_own_random_state_and_the_full_disk_of_one_fails_all(
    pair: Ranks, model_dir: Path, tmp_path: Path
) -> None:
    reports = pair.run(save_on_a_rank, model_dir, tmp_path / "checkpoint")
    for report in reports:
        assert torch.equal(report["saved"], report["loaded"])
        assert "File too large" in report["failure"]
    assert not torch.equal(reports[0]["saved"], reports[1]["saved"])
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


# Loading


def take_turn(rank: int) -> Report:
    with loading_turn():
        began = time.monotonic()
        time.sleep(0.05)
        return {"began": began, "ended": time.monotonic()}


def test_ranks_of_a_machine_load_one_after_another(pair: Ranks) -> None:
    reports = sorted(pair.run(take_turn), key=lambda report: report["began"])
    for earlier, later in itertools.pairwise(reports):
        assert earlier["ended"] <= later["began"]
