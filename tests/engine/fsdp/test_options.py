"""bfloat16, checkpointed activations and compiled layers do what they are for."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree
from train_models import MakeEngine
from train_sequences import LOSS, random_sequences
from train_variants import OPTIMIZER, weights_of

from arl.algorithm.prefix_tree import Block
from arl.api.errors import ConfigError, ModelError
from arl.api.train_engine import PackedTokens, TokenLosses, TokenOutputs
from arl.engine.fsdp.attention import block_attention
from arl.engine.fsdp.policy import local_shard, token_logprobs
from arl.engine.fsdp.train_engine import FSDPTrainEngine

# bfloat16


def test_bfloat16_leaves_weights_gradients_and_moments_in_float32(make_engine: MakeEngine):
    half, full = make_engine(dtype="bfloat16", optimizer=OPTIMIZER), make_engine(optimizer=OPTIMIZER)
    sequences = random_sequences(6)
    before = weights_of(full)
    for ours, theirs in zip(half.forward(sequences), full.forward(sequences), strict=True):
        assert not torch.equal(ours, theirs)
        torch.testing.assert_close(ours, theirs, rtol=0.1, atol=0.1)
    for engine in (half, full):
        engine.train_batch([sequences], LOSS)
    tensors = [*half._policy.parameters(), *pytree.tree_leaves(list(half._optimizer.state.values()))]
    assert {tensor.dtype for tensor in tensors} == {torch.float32}
    ours, theirs = weights_of(half), weights_of(full)
    for name, start in before.items():
        moved = (theirs[name] - start).norm()
        assert (ours[name] - theirs[name]).norm() < 0.1 * moved, name


def test_bfloat16_leaves_temperatures_as_they_are(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch):
    seen: list[torch.Tensor] = []

    def spy(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor, *rest: Any):
        seen.append(temperatures)
        return token_logprobs(hidden, weight, targets, temperatures, *rest)

    monkeypatch.setattr("arl.engine.fsdp.policy.token_logprobs", spy)
    sequences = [dataclasses.replace(sequence, temperature=0.7) for sequence in random_sequences(3)]
    make_engine(dtype="bfloat16").forward(sequences)
    assert torch.equal(seen[0], torch.full_like(seen[0], 0.7, dtype=torch.float32))


def test_every_sharded_layer_reads_the_rows_own_layout(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch):
    """A copy for each layer would be searched for tensors at each layer, and forget flex attention's masks."""
    seen: list[Sequence[Block]] = []

    def spy(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: Sequence[Block], scaling: float):
        seen.append(blocks)
        return block_attention(query, key, value, blocks, scaling)

    engine = make_engine(dtype="bfloat16")
    assert isinstance(engine._policy, FSDPModule)
    monkeypatch.setattr("arl.engine.fsdp.attention.block_attention", spy)
    engine.train_batch([random_sequences(3)], LOSS)
    assert len(seen) > 1
    assert all(blocks is seen[0] for blocks in seen)


# Activation checkpointing


def saved_bytes(engine: FSDPTrainEngine) -> int:
    """What autograd has kept for the backward pass when the loss is computed; parameters do not count."""
    kept: dict[int, int] = {}
    weights = {local_shard(p).untyped_storage().data_ptr() for p in engine._policy.parameters()}
    at_loss: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def loss(outputs: TokenOutputs, tokens: PackedTokens) -> TokenLosses:
        at_loss.append(sum(kept.values()))
        return LOSS(outputs, tokens)

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.train_batch([random_sequences(24)], loss)
    return at_loss[0]


def test_checkpointed_activations_take_less_memory(make_engine: MakeEngine):
    plain, checkpointed = (saved_bytes(make_engine(activation_checkpointing=on)) for on in (False, True))
    assert checkpointed < plain / 2


# Compiled layers


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_layers_are_compiled_once_for_rows_of_any_length(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    engine = make_engine(compile=True)
    engine.train_batch([random_sequences(3, seed=0)], LOSS)
    counters = torch._dynamo.utils.counters["stats"]
    graphs = counters["unique_graphs"]
    assert graphs > 0
    for seed in range(1, 6):
        engine.train_batch([random_sequences(2 + seed, seed=seed)], LOSS)
    assert counters["unique_graphs"] == graphs


def test_compiling_without_a_compiler_is_refused_at_once(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"train\.compile needs a compiler, and none .* g\+\+"):
        make_engine(compile=True)


# What it does not take


def test_arrays_which_are_for_models_of_another_kind_are_an_error(make_engine: MakeEngine):
    (sequence,) = random_sequences(1)
    dense = dataclasses.replace(sequence, arrays={"latents": np.zeros((len(sequence), 2))})
    with pytest.raises(ModelError, match="sequences have arrays, which a language model does not take"):
        make_engine().forward([sequence, dense])
