"""Layers that are split over ranks train like whole ones, for every family that has a plan."""

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from train_models import MakeEngine, load_twin
from train_ranks import Ranks, Report
from train_sequences import LOSS, assert_same_metrics, assert_same_rows, assert_same_weights, random_sequences
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from arl.api.config import OptimizerConfig, TrainConfig
from arl.api.errors import ConfigError, ModelError
from arl.api.types import TrainSequence
from arl.engine.fsdp.parallel import split_layers
from arl.engine.fsdp.train_engine import FSDPTrainEngine
from arl.engine.tiny import tiny_tokenizer

OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, max_grad_norm=0.1)
BUDGET = 30
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
}
FAMILIES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "qwen3": (Qwen3Config, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "llama": (LlamaConfig, {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
}


def build(family: str, **sizes: object) -> PreTrainedModel:
    config_class, options = FAMILIES[family]
    config = config_class(vocab_size=len(tiny_tokenizer()), **SIZES | options | sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms begin as ones and biases as zeros, which would hide mistakes
            nn.init.normal_(parameter, mean=parameter[0].item(), std=0.3)
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny model of each family."""
    directory = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        build(family).save_pretrained(directory / family)
        tiny_tokenizer().save_pretrained(directory / family)
    return directory


def minibatches() -> list[list[TrainSequence]]:
    """Of the second, which is one sequence, one of two data-parallel ranks gets nothing."""
    return [random_sequences(9, seed=1), random_sequences(1, seed=2)]


def train(engine: FSDPTrainEngine, directory: Path, share: int, num_shares: int) -> Report:
    """Train, report, save; train on, and continue from what one rank had saved."""
    shares = [sequences[share::num_shares] for sequences in minibatches()]
    metrics = engine.train_batch(shares, LOSS)
    logprobs = [values.tolist() for values in engine.forward(shares[0])]
    engine.save(directory / "checkpoint").wait()
    engine.export(directory / "export")
    return {"metrics": metrics, "logprobs": logprobs}


def run_rank(rank: int, directory: Path, models: Path, families: list[str], num_shares: int) -> Report:
    config = TrainConfig(
        optimizer=OPTIMIZER,
        max_tokens_per_microbatch=BUDGET,
        num_ranks=2 * num_shares,
        tensor_parallel=2,
        activation_checkpointing=num_shares == 2,
    )
    report: Report = {}
    for family in families:
        engine = FSDPTrainEngine(models / family, config)
        report[family] = train(engine, directory / family, rank // 2, num_shares)
        report[family]["whole"] = fingerprint(engine)
        report[family]["split"] = [name for name, p in engine._policy.named_parameters() if is_split(p)]
        engine.load(models / f"{family}-alone" / "checkpoint")
        report[family]["continued"] = [values.tolist() for values in engine.forward(minibatches()[0])]
        engine.close()
    return report


def is_split(parameter: torch.Tensor) -> bool:
    """Whether the ranks of a tensor-parallel group hold different parts of it."""
    assert isinstance(parameter, DTensor)
    names = parameter.device_mesh.mesh_dim_names
    assert names is not None
    return "tp" in names and not parameter.placements[names.index("tp")].is_replicate()


def fingerprint(engine: FSDPTrainEngine) -> str:
    """Of every bit of this rank's part of the parameters that are not split over "tp"."""
    digest = hashlib.sha256()
    for parameter in engine._policy.parameters():
        if not is_split(parameter):
            digest.update(cast("DTensor", parameter).to_local().detach().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize(("num_shares", "families"), [(1, ["qwen2", "llama"]), (2, ["qwen3"])])
def test_ranks_that_split_layers_train_like_one(
    models: Path, make_engine: MakeEngine, tmp_path: Path, num_shares: int, families: list[str]
):
    expected: Report = {}
    engines: dict[str, FSDPTrainEngine] = {}
    for family in families:
        engine = engines[family] = make_engine(models / family, optimizer=OPTIMIZER, max_tokens_per_microbatch=BUDGET)
        expected[family] = train(engine, models / f"{family}-alone", 0, 1)
    ranks = Ranks(run_rank, 2 * num_shares, tmp_path / "ranks", models, families, num_shares)
    reports = ranks.reports()
    for family in families:
        check_equal([report[family] for report in reports], expected[family], num_shares)
        exports = tmp_path / "ranks" / family / "export", models / f"{family}-alone" / "export"
        assert_same_weights(*map(load_twin, exports))
        engines[family].train_batch(minibatches(), LOSS)
        engines[family].load(tmp_path / "ranks" / family / "checkpoint")
        assert_same_rows(engines[family].forward(minibatches()[0]), expected[family]["logprobs"])


def check_equal(reports: list[Report], expected: Report, num_shares: int) -> None:
    for report in reports:
        assert_same_metrics(report["metrics"], expected["metrics"])
    for rank, report in enumerate(reports):
        assert len(report["split"]) >= 2 * 7
        assert report["whole"] == reports[rank // 2 * 2]["whole"]
        mine = expected["logprobs"][rank // 2 :: num_shares]
        assert_same_rows(report["logprobs"] + report["continued"], mine + expected["logprobs"])


def mesh_of(size: int) -> DeviceMesh:
    return cast("DeviceMesh", SimpleNamespace(size=lambda: size))


def test_heads_that_the_ranks_cannot_share_are_refused_with_their_numbers():
    with pytest.raises(ModelError, match=r"tensor_parallel is 4, which does not divide this model's 2 key-value heads"):
        split_layers(build("qwen3"), mesh_of(4))
    with pytest.raises(ModelError, match=r"49 intermediate features; choose a common divisor of 4 attention heads"):
        split_layers(build("llama", intermediate_size=49), mesh_of(2))


def test_a_family_without_a_plan_is_refused():
    model = GemmaForCausalLM(GemmaConfig(vocab_size=32, **SIZES))
    with pytest.raises(ModelError, match="no plan for splitting the layers of a gemma"):
        split_layers(model, mesh_of(2))


def test_more_parts_than_ranks_are_refused(make_engine: MakeEngine):
    with pytest.raises(ConfigError, match=r"tensor_parallel is 2, which does not divide the 1 rank"):
        make_engine(num_ranks=2, tensor_parallel=2)
