"""Models whose modules carry a state, and models that compute each sequence by itself, train as packed ones do."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoder_families import write_family
from torch import nn
from train_models import load_critic, load_twin, slow_values, write_model
from train_ranks import Ranks, Report
from train_sequences import assert_same_metrics, family_sequences, score_of, share_of, twin_rows
from train_variants import VARIANTS, assert_same_tensors, weights_of
from transformers import Phi3ForCausalLM

from arl.api.errors import ModelError
from arl.api.routed_experts import Routes
from arl.api.train_engine import TrainSequence
from arl.engine.fsdp.minibatch import build_microbatch
from arl.engine.fsdp.model import load_model
from arl.engine.fsdp.ways import RowDecoder
from arl.engine.routers import find_routers
from arl.engine.trial import transformer_layers

VARIANT = VARIANTS["token mean"]
CPU = torch.device("cpu")


def train_on_a_rank(rank: int, model: Path) -> Report:
    engine = VARIANT.engine(model, num_ranks=2, activation_checkpointing=True, max_tokens_per_microbatch=60)
    metrics = engine.train_batch([share_of(part, rank, 2) for part in VARIANT.minibatches], VARIANT.loss)
    report = {"metrics": metrics, "weights": weights_of(engine)}
    engine.close()
    return report


@pytest.mark.parametrize(("family", "way"), [("qwen3_next", "mixed"), ("llama4_text", "apart"), ("gemma3", "packed")])
def test_two_ranks_in_parts_with_activations_computed_twice_train_as_one_at_once(
    family: str, way: str, tmp_path: Path, pair: Ranks
):
    engine = VARIANT.engine(write_family(family, tmp_path))
    assert engine._policy.decode.way.split()[0] == way
    metrics = engine.train_batch(VARIANT.minibatches, VARIANT.loss)
    weights = weights_of(engine)
    engine.close()
    for report in pair.run(train_on_a_rank, tmp_path):
        assert_same_metrics(report["metrics"], metrics, 1e-4)
        assert_same_tensors(report["weights"], weights)


@pytest.mark.parametrize("family", ["qwen3_next", "bloom"])
def test_a_critic_of_each_way_values_tokens_as_its_own_code_does(family: str, tmp_path: Path):
    critic = load_critic(write_family(family, tmp_path))
    torch.manual_seed(0)
    loaded = load_model(tmp_path, "value")
    assert loaded.decoder.way.split()[0] in ("mixed", "apart")
    sequences = family_sequences(2)
    nn.init.normal_(score_of(loaded.model).weight)
    score_of(critic).load_state_dict(score_of(loaded.model).state_dict())
    batch = build_microbatch(sequences, CPU)
    values = loaded.token_model()(batch).values
    expected = torch.cat([slow_values(critic, s)[s.loss_mask] for s in sequences])
    torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "way"), [("qwen3_next", "mixed"), ("qwen3_moe", "apart")])
def test_replayed_experts_go_with_their_tokens(family: str, way: str, tmp_path: Path):
    """A row of sequences that share a prefix with its experts gives what each sequence in a row of its own does."""
    loaded = load_model(write_family(family, tmp_path))
    alone = loaded.token_model()
    generator = np.random.default_rng(0)
    sequences = [
        replace(
            s,
            routes=Routes.of(
                generator.permuted(np.tile(np.arange(4, dtype=np.uint8), (len(s), 4, 1)), axis=2)[..., :2]
            ),
        )
        for s in family_sequences(2)
    ]
    routers = find_routers(loaded.model, family)
    assert routers is not None
    routers.replay_in(transformer_layers(loaded.model))
    expected = torch.cat([alone(build_microbatch([s], CPU)).logprobs for s in sequences])
    other = torch.cat([alone(build_microbatch([replace(s, routes=None)], CPU)).logprobs for s in sequences])
    if way == "apart":
        loaded.decoder.close()
        alone.decode = RowDecoder(loaded.model, "apart sdpa")
    assert alone.decode.way.startswith(way)
    torch.testing.assert_close(alone(build_microbatch(sequences, CPU)).logprobs, expected, rtol=1e-4, atol=1e-4)
    assert (expected - other).abs().mean() > 0.1


@pytest.mark.parametrize("family", ["qwen3_next", "llama4_text"])
def test_bfloat16_costs_no_more_than_in_the_models_own_code(family: str, tmp_path: Path):
    twin, sequences = load_twin(write_family(family, tmp_path)), VARIANT.minibatch()
    right = torch.cat(twin_rows(twin, sequences))
    own = torch.cat(twin_rows(twin.bfloat16(), sequences))
    engine = VARIANT.engine(tmp_path, dtype="bfloat16")
    ours = torch.cat(engine.forward(sequences))
    engine.close()
    assert 0 < (ours - right).abs().mean() < 1.5 * (own - right).abs().mean()


def test_texts_that_would_change_each_others_rotary_embeddings_are_refused(tmp_path: Path):
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config: dict[str, Any] = {
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **factors},
        "original_max_position_embeddings": 50,
        "max_position_embeddings": 160,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    write_model(tmp_path, Phi3ForCausalLM, **config)
    policy = load_model(tmp_path).token_model()
    short, long = (TrainSequence(token_ids=torch.arange(2, 2 + n), loss_mask=torch.arange(n) > 0) for n in (50, 52))
    policy(build_microbatch([short], CPU))
    with pytest.raises(ModelError, match="Phi3ForCausalLM depend on the longest text"):
        policy(build_microbatch([short, long], CPU))
