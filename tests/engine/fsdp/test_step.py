"""An optimizer step is AdamW on the minibatch's gradient, clipped, scheduled, and skipped when it is not finite; what
bfloat16, checkpointed activations, compiled layers and leaving the device change of it."""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree
from train_models import MakeEngine, load_twin, write_model
from train_sequences import LOSS, assert_same_metrics, random_sequences, same, twin_steps
from train_variants import COMPILING, OPTIMIZER, assert_same_tensors, weights_of

from arl.algorithm.losses.reinforcement import PolicyLoss
from arl.algorithm.prefix_tree import Block
from arl.api.errors import ConfigError, EngineClosedError, ModelError, TrainingError
from arl.api.settings.algorithm import AlgorithmConfig
from arl.api.settings.engines import OptimizerConfig
from arl.api.train_engine import PackedTokens, TokenLosses, TokenOutputs
from arl.engine.fsdp.attention import block_attention
from arl.engine.fsdp.policy import local_shard, token_logprobs
from arl.engine.fsdp.train_engine import FSDPTrainEngine, learning_rate
from arl.engine.trial import transformer_layers


@pytest.mark.parametrize("max_grad_norm", [0.05, 1e9])
def test_steps_equal_those_of_a_plain_loop(any_model_dir: Path, make_engine: MakeEngine, tmp_path: Path, max_grad_norm):
    config = OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, max_grad_norm=max_grad_norm, warmup_steps=2)
    minibatches = [random_sequences(6, seed=1), random_sequences(5, seed=2)]
    engine = make_engine(any_model_dir, optimizer=config, max_tokens_per_microbatch=60)
    metrics = engine.train_batch(minibatches, LOSS)
    engine.export(tmp_path / "trained")

    twin = load_twin(any_model_dir)
    norms = twin_steps(twin, minibatches, LOSS, config)
    assert metrics["grad_norm"] == pytest.approx(sum(norms) / 2, rel=1e-4)
    assert metrics["lr"] == pytest.approx(0.75e-2)
    assert_same_tensors(load_twin(tmp_path / "trained").state_dict(), twin.state_dict())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "weights": [{"level": "token", "upper": 1.5}],
            "rejections": [
                {"level": "geometric", "lower": 0.9, "upper": 1.1},
                {"level": "token", "lower": 0.5, "upper": 3, "veto": True},
            ],
        },
        {"preset": "gspo", "minibatches": 1},
        {"preset": "cispo", "minibatches": 1, "aggregation": "sequence_mean"},
    ],
    ids=["truncated", "masked", "sequence ratio", "reinforce"],
)
def test_with_one_update_the_training_pass_is_the_forward_pass_for_the_proximal_logprobs(
    make_engine: MakeEngine, changes: dict[str, Any]
):
    one = PolicyLoss.of(AlgorithmConfig.model_validate(changes), max_staleness=1)
    assert one.proximal == "current"
    engine, twin = (make_engine(max_tokens_per_microbatch=60) for _ in range(2))
    sequences = random_sequences(9)
    known = [replace(s, proximal_logprobs=p) for s, p in zip(sequences, twin.forward(sequences), strict=True)]
    metrics = engine.train_batch([sequences], one)
    assert_same_metrics(metrics, twin.train_batch([known], replace(one, proximal="recomputed")), 1e-5)
    assert_same_tensors(weights_of(engine), weights_of(twin))


def test_metrics_are_token_means_and_maxima_over_the_minibatches(make_engine: MakeEngine):
    def lengths(outputs: TokenOutputs, tokens: PackedTokens) -> TokenLosses:
        return TokenLosses(
            loss=0 * outputs.logprobs, means={"advantage": tokens.advantages}, maxima={"peak": tokens.advantages}
        )

    minibatches = [random_sequences(4, seed=1), random_sequences(7, seed=2)]
    metrics = make_engine(max_tokens_per_microbatch=30).train_batch(minibatches, lengths)
    advantages = [torch.cat([s.advantages[s.loss_mask] for s in minibatch]) for minibatch in minibatches]
    assert metrics["advantage"] == pytest.approx(sum(a.mean().item() for a in advantages) / 2, rel=1e-5)
    assert metrics["peak"] == pytest.approx(max(a.max().item() for a in advantages))
    assert metrics["trained_tokens"] == sum(map(len, advantages))
    assert metrics["tokens"] == sum(len(s) for minibatch in minibatches for s in minibatch)
    assert metrics["packing_efficiency"] == pytest.approx(metrics["forwarded_tokens"] / (30 * metrics["microbatches"]))
    assert metrics["forwarded_share"] == pytest.approx(metrics["forwarded_tokens"] / metrics["tokens"])


def test_a_gradient_that_is_not_finite_is_skipped_counted_and_reported(make_engine: MakeEngine, caplog):
    poisoned = [replace(s, advantages=s.advantages * math.inf) for s in random_sequences(3)]
    sound = random_sequences(4, seed=2)
    engine, untouched = make_engine(), make_engine()
    with caplog.at_level(logging.ERROR, "arl.engine.fsdp.train_engine"):
        metrics = engine.train_batch([poisoned, sound], LOSS)
    reference = untouched.train_batch([sound], LOSS)
    assert "skipped" in caplog.text
    assert metrics["nonfinite_grads"] == 1
    assert metrics["grad_norm"] == reference["grad_norm"]
    assert same(engine.forward(sound), untouched.forward(sound))


def test_a_step_that_leaves_weights_that_are_not_finite_ends_training_with_the_first(make_engine: MakeEngine):
    engine = make_engine(optimizer=OptimizerConfig(lr=1e38, eps=1e-3, weight_decay=100.0))
    sound = random_sequences(4, seed=2)
    what = r"optimizer step 0 \(version 0, lr 1e\+38, gradient norm .*\), model\.embed_tokens\.weight is not finite"
    with pytest.raises(TrainingError, match=what):
        engine.train_batch([sound], LOSS)
    with pytest.raises(TrainingError, match=r"before optimizer step 1 .* model\.embed_tokens\.weight is not finite"):
        engine.train_batch([sound], LOSS)


def failing(*args: object, **kwargs: object) -> TokenLosses:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("interrupted", ["after a microbatch", "within a forward pass", "within a step's forward pass"])
def test_an_engine_whose_call_raised_goes_on_and_can_be_saved_as_if_nothing_had_happened(
    make_engine: MakeEngine, tmp_path: Path, interrupted: str, monkeypatch: pytest.MonkeyPatch
):
    sequences, losses = random_sequences(6), iter([LOSS, failing])
    engine, untouched, again = (make_engine(max_tokens_per_microbatch=30) for _ in range(3))
    with monkeypatch.context() as patch:
        if interrupted != "after a microbatch":
            patch.setattr(transformer_layers(engine._policy.model)[1].mlp, "forward", failing)
        if interrupted == "within a forward pass":
            call = partial(engine.forward, sequences)
        else:
            call = partial(engine.train_batch, [sequences], lambda *args: next(losses)(*args))
        with pytest.raises(RuntimeError, match="out of memory"):
            call()
    assert engine.version == 0
    engine.save(tmp_path / "checkpoint").wait()
    again.load(tmp_path / "checkpoint")
    expected = untouched.train_batch([sequences], LOSS)
    for trained in (engine, again):
        assert trained.train_batch([sequences], LOSS) == expected


def test_a_minibatch_without_trained_tokens_leaves_the_weights_alone(make_engine: MakeEngine):
    sequences = random_sequences(3)
    engine = make_engine()
    engine.train_batch([sequences], LOSS)
    before = engine.forward(sequences)
    nothing = [replace(s, loss_mask=torch.zeros_like(s.loss_mask)) for s in sequences]
    metrics = engine.train_batch([nothing], LOSS)
    assert metrics["trained_tokens"] == metrics["tokens"] == 0
    assert same(engine.forward(sequences), before)
    assert not any(values.any() for values in engine.forward(nothing))


def test_calls_use_the_configured_threads_whatever_thread_makes_them(make_engine: MakeEngine):
    engine = make_engine(num_threads=1)
    torch.set_num_threads(2)
    engine.forward(random_sequences(1))
    assert torch.get_num_threads() == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has one")
def test_a_device_that_torch_does_not_have_is_refused(make_engine: MakeEngine):
    with pytest.raises(ConfigError, match=r"train\.device is cuda, but this torch has no CUDA"):
        make_engine(device="cuda")


def test_a_closed_engine_says_so_and_closes_no_other_one_of_the_process(make_engine: MakeEngine):
    first, second = make_engine(), make_engine()
    for _ in range(2):
        first.close()
    with pytest.raises(EngineClosedError):
        first.forward(random_sequences(1))
    assert second.train_batch([random_sequences(2)], LOSS)["trained_tokens"] > 0


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ("cosine", [0.5, 1.0, 1.0, 0.8828, 0.6, 0.3172, 0.2, 0.2]),
    ],
)
def test_schedules_warm_up_and_decay_to_their_floor(schedule, expected: list[float]):
    decay = {} if schedule == "constant" else {"total_steps": 6, "min_lr_ratio": 0.2}
    config = OptimizerConfig(lr=2.0, schedule=schedule, warmup_steps=2, **decay)
    rates = [learning_rate(config, step) / 2 for step in range(8)]
    assert rates == pytest.approx(expected, abs=1e-4)


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
    sequences = [replace(sequence, temperature=0.7) for sequence in random_sequences(3)]
    make_engine(dtype="bfloat16").forward(sequences)
    assert torch.equal(seen[0], torch.full_like(seen[0], 0.7, dtype=torch.float32))


def test_every_sharded_layer_reads_the_rows_own_layout(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch):
    """A copy for each layer would be searched for tensors at each layer, and forget flex attention's masks."""
    seen: list[Sequence[Block]] = []

    def spy(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: Sequence[Block], *rest: Any):
        seen.append(blocks)
        return block_attention(query, key, value, blocks, *rest)

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


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=COMPILING)])
def test_layers_are_compiled_once_for_rows_of_any_length(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, backend: str
):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
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
    dense = replace(sequence, arrays={"latents": np.zeros((len(sequence), 2))})
    with pytest.raises(ModelError, match="sequences have arrays, which a language model does not take"):
        make_engine().forward([sequence, dense])


# Away from the device; tests/gpu has an engine that really leaves one


@pytest.mark.parametrize(
    "settings",
    [{}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "lora": {"rank": 2}}],
    ids=["plain", "sharded", "lora"],
)
def test_an_engine_that_moved_uses_nothing_of_the_memory_that_it_left(
    make_engine: MakeEngine, tmp_path: Path, settings: dict[str, Any]
):
    """It moves within the CPU's memory, and what it left becomes NaN."""
    model, left = write_model(tmp_path / "model", tied=True), list[torch.Tensor]()

    def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
        left.append(local_shard(tensor.detach()))
        return tensor.clone()

    trained: list[tuple[dict[str, float], list[torch.Tensor], list[torch.Tensor]]] = []
    for moves in (False, True):
        engine = make_engine(model, **settings)
        engine.update_reference()
        engine.train_batch([random_sequences(4, seed=1)], LOSS)
        if moves:
            engine._release_weights()
            engine._move(elsewhere)
            for tensor in left:
                if tensor.is_floating_point():
                    tensor.fill_(torch.nan)
        metrics = engine.train_batch([random_sequences(4, seed=2)], LOSS)
        sequences = random_sequences(4, seed=3)
        trained.append((metrics, engine.forward(sequences), engine.forward(sequences, "reference_logprobs")))
    num_trained = len(engine._trained)
    assert len(left) >= 4 * num_trained  # weights, two moments, reference
    stayed, moved = trained
    assert moved[0] == stayed[0]
    assert same(moved[1], stayed[1])
    assert same(moved[2], stayed[2])


def test_an_engine_that_has_left_is_saved_and_published_and_computes_nothing_until_it_is_back(
    make_engine: MakeEngine, tmp_path: Path
):
    engine, sequences = make_engine(), random_sequences(4, seed=1)
    engine.offload()
    engine.offload()
    engine.save(tmp_path / "checkpoint").wait()
    engine.export(tmp_path / "model")
    for act in (
        lambda: engine.forward(sequences),
        lambda: engine.train_batch([sequences], LOSS),
        engine.update_reference,
        engine.fingerprint,
    ):
        with pytest.raises(TrainingError, match="is offloaded, so it computes nothing; call onload first"):
            act()
    engine.load(tmp_path / "checkpoint")
    engine.onload()
    assert same(engine.forward(sequences), make_engine().forward(sequences))
