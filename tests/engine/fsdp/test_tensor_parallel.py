"""Layers that are split over ranks train like whole ones, for every family that has a plan."""

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
from train_sequences import (
    LOSS,
    assert_same_metrics,
    assert_same_rows,
    assert_same_weights,
    random_sequences,
    same,
)
from train_variants import OPTIMIZER
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from arl.api.engine_config import TrainConfig
from arl.api.errors import ConfigError, ModelError
from arl.api.types import TrainSequence
from arl.engine.fsdp.parallel import split_layers
from arl.engine.fsdp.policy import local_shard
from arl.engine.fsdp.train_engine import FSDPTrainEngine
from arl.engine.tiny import tiny_tokenizer

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


def minibatches() -> list[list[TrainSequence]]:
    """The second is one sequence, so that one of two data-parallel ranks gets nothing."""
    return [random_sequences(9, seed=1), random_sequences(1, seed=2)]


def train(engine: FSDPTrainEngine, directory: Path, share: int, num_shares: int) -> Report:
    shares = [sequences[share::num_shares] for sequences in minibatches()]
    report = {"metrics": engine.train_batch(shares, LOSS), "logprobs": engine.forward(shares[0])}
    engine.save(directory / "checkpoint").wait()
    engine.export(directory / "export")
    return report


def train_on_a_rank(rank: int, model: Path, directory: Path, num_shares: int) -> Report:
    config = TrainConfig(
        optimizer=OPTIMIZER,
        max_tokens_per_microbatch=BUDGET,
        num_ranks=2 * num_shares,
        tensor_parallel=2,
        activation_checkpointing=num_shares == 2,
    )
    engine = FSDPTrainEngine(model, config)
    report = train(engine, directory / "ranks", rank // 2, num_shares)
    report["whole"] = [local_shard(p.detach()).clone() for p in engine._policy.parameters() if not is_split(p)]
    report["num_split"] = sum(is_split(p) for p in engine._policy.parameters())
    engine.load(directory / "alone" / "checkpoint")
    report["continued"] = engine.forward(minibatches()[0])
    engine.close()
    return report


def is_split(parameter: torch.Tensor) -> bool:
    """Whether the ranks of a tensor-parallel group hold different parts of it."""
    assert isinstance(parameter, DTensor)
    names = parameter.device_mesh.mesh_dim_names
    assert names is not None
    return "tp" in names and not parameter.placements[names.index("tp")].is_replicate()


@pytest.mark.parametrize(("family", "num_shares"), [("qwen2", 1), ("llama", 1), ("qwen3", 2)])
def test_ranks_that_split_layers_train_like_one(
    make_engine: MakeEngine, pair: Ranks, tmp_path: Path, family: str, num_shares: int
):
    build(family).save_pretrained(tmp_path / family)
    tiny_tokenizer().save_pretrained(tmp_path / family)
    ranks = pair if num_shares == 1 else Ranks(4, tmp_path)
    calls = ranks.start(train_on_a_rank, tmp_path / family, tmp_path, num_shares)
    alone = make_engine(tmp_path / family, optimizer=OPTIMIZER, max_tokens_per_microbatch=BUDGET)
    expected = train(alone, tmp_path / "alone", 0, 1)
    reports = ranks.reports(calls)
    for rank, report in enumerate(reports):
        assert_same_metrics(report["metrics"], expected["metrics"])
        assert report["num_split"] >= 2 * 7
        assert same(report["whole"], reports[rank // 2 * 2]["whole"])
        assert_same_rows(report["logprobs"], expected["logprobs"][rank // 2 :: num_shares])
        assert_same_rows(report["continued"], expected["logprobs"])
    assert_same_weights(load_twin(tmp_path / "ranks" / "export"), load_twin(tmp_path / "alone" / "export"))
    alone.train_batch(minibatches(), LOSS)
    alone.load(tmp_path / "ranks" / "checkpoint")
    assert_same_rows(alone.forward(minibatches()[0]), expected["logprobs"])


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
