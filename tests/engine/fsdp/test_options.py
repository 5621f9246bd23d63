"""What makes training cheaper changes no number: bfloat16, checkpointed activations, compiled layers, taking turns."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from train_models import MakeEngine, load_twin
from train_ranks import Ranks, Report
from train_sequences import LOSS, assert_same_rows, assert_same_weights, random_sequences

from arl.api.config import OptimizerConfig, TrainConfig
from arl.api.engine import PackedTokens, TokenLosses, TokenOutputs
from arl.api.errors import ConfigError
from arl.api.types import TrainSequence
from arl.engine.fsdp.logprobs import token_logprobs
from arl.engine.fsdp.parallel import loading_turn
from arl.engine.fsdp.train_engine import FSDPTrainEngine

OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, max_grad_norm=0.1)


def trained_weights(engine: FSDPTrainEngine, directory: Path) -> dict[str, torch.Tensor]:
    engine.export(directory)
    return load_twin(directory).state_dict()


def assert_trains_alike(ours: FSDPTrainEngine, theirs: FSDPTrainEngine, directory: Path, tolerance: float) -> None:
    for seed in range(3):
        minibatch = random_sequences(4 + seed, seed=seed)
        mine, reference = (engine.train_batch([minibatch], LOSS) for engine in (ours, theirs))
        assert mine == pytest.approx(reference, rel=tolerance, abs=tolerance)
    sequences = random_sequences(5, seed=9)
    assert_same_rows(ours.forward(sequences), theirs.forward(sequences), tolerance)
    ours.export(directory / "ours")
    theirs.export(directory / "theirs")
    assert_same_weights(load_twin(directory / "ours"), load_twin(directory / "theirs"), tolerance)


# bfloat16


def test_bfloat16_leaves_weights_gradients_and_moments_in_float32(make_engine: MakeEngine, tmp_path: Path):
    half, full = make_engine(dtype="bfloat16", optimizer=OPTIMIZER), make_engine(optimizer=OPTIMIZER)
    sequences = random_sequences(6)
    before = trained_weights(full, tmp_path / "before")
    for ours, theirs in zip(half.forward(sequences), full.forward(sequences), strict=True):
        assert not torch.equal(ours, theirs)
        torch.testing.assert_close(ours, theirs, rtol=0.1, atol=0.1)
    for engine in (half, full):
        engine.train_batch([sequences], LOSS)
    tensors = [*half._policy.parameters(), *pytree.tree_leaves(list(half._optimizer.state.values()))]
    assert {tensor.dtype for tensor in tensors} == {torch.float32}
    ours, theirs = trained_weights(half, tmp_path / "half"), trained_weights(full, tmp_path / "full")
    for name, start in before.items():
        moved = (theirs[name] - start).norm()
        assert (ours[name] - theirs[name]).norm() < 0.1 * moved, name


def test_bfloat16_leaves_temperatures_as_they_are(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch):
    seen: list[torch.Tensor] = []

    def spy(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor, size: int):
        seen.append(temperatures)
        return token_logprobs(hidden, weight, targets, temperatures, size)

    monkeypatch.setattr("arl.engine.fsdp.model.token_logprobs", spy)
    sequences = [dataclasses.replace(sequence, temperature=0.7) for sequence in random_sequences(3)]
    make_engine(dtype="bfloat16").forward(sequences)
    assert torch.equal(seen[0], torch.full_like(seen[0], 0.7, dtype=torch.float32))


def pair() -> list[TrainSequence]:
    """Two sequences that are a microbatch each, on one rank or on two."""
    return [sequence for sequence in random_sequences(9, seed=1) if len(sequence) > 12][:2]


HALF: dict[str, Any] = {"optimizer": OPTIMIZER, "dtype": "bfloat16", "max_tokens_per_microbatch": 24}


def train_half(rank: int, directory: Path, model_dir: Path) -> Report:
    engine = FSDPTrainEngine(model_dir, TrainConfig(**HALF))
    metrics = engine.train_batch([[pair()[rank]]], LOSS)
    engine.export(directory / "export")
    engine.close()
    return metrics


def test_gradients_of_bfloat16_ranks_are_summed_in_float32(model_dir: Path, make_engine: MakeEngine, tmp_path: Path):
    """A sum in bfloat16 would be off by up to 4e-3 of each value."""
    ranks = Ranks(train_half, 2, tmp_path / "ranks", model_dir)
    alone = make_engine(**HALF)
    expected = alone.train_batch([pair()], LOSS)
    assert expected["microbatches"] == 2
    for report in ranks.reports():
        assert report["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)
    theirs = trained_weights(alone, tmp_path / "alone")
    for name, ours in load_twin(tmp_path / "ranks" / "export").state_dict().items():
        torch.testing.assert_close(ours, theirs[name], rtol=1e-6, atol=1e-7, msg=name)


# Activation checkpointing


def test_checkpointed_activations_change_no_number(make_engine: MakeEngine, tmp_path: Path):
    checkpointed = make_engine(optimizer=OPTIMIZER, activation_checkpointing=True)
    assert_trains_alike(checkpointed, make_engine(optimizer=OPTIMIZER), tmp_path, 1e-6)


def saved_bytes(engine: FSDPTrainEngine) -> int:
    """What autograd has kept for the backward pass when the loss is computed; parameters do not count."""
    kept: dict[int, int] = {}
    weights = {cast("DTensor", p).to_local().untyped_storage().data_ptr() for p in engine._policy.parameters()}
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


def test_names_in_checkpoints_do_not_depend_on_checkpointed_activations(make_engine: MakeEngine, tmp_path: Path):
    make_engine(activation_checkpointing=True).save(tmp_path / "saved").wait()
    make_engine().load(tmp_path / "saved")


# Compiled layers

# torch's own: the import of its compiler warns, and so does a look at .grad that it silences in a way of its own.
compiling = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


def marked(marks: list[pytest.MarkDecorator]) -> Callable[[Any], Any]:
    return lambda test: functools.reduce(lambda inner, mark: mark(inner), marks, test)


@marked(compiling)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers_change_no_number(make_engine: MakeEngine, tmp_path: Path, checkpointing: bool):
    compiled = make_engine(optimizer=OPTIMIZER, compile=True, activation_checkpointing=checkpointing)
    plain = make_engine(optimizer=OPTIMIZER)
    assert_trains_alike(compiled, plain, tmp_path, 1e-5)
    compiled.save(tmp_path / "saved").wait()
    plain.load(tmp_path / "saved")


@marked(compiling)
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


def test_compiled_and_split_layers_exclude_each_other():
    with pytest.raises(ValueError, match="compile is set and tensor_parallel is above 1"):
        TrainConfig(num_ranks=2, tensor_parallel=2, compile=True)


# Loading


def take_turn(rank: int, directory: Path) -> Report:
    with loading_turn():
        began = time.monotonic()
        time.sleep(0.05)
        return {"began": began, "ended": time.monotonic()}


def test_ranks_of_a_machine_load_one_after_another(tmp_path: Path):
    reports = sorted(Ranks(take_turn, 3, tmp_path / "ranks").reports(), key=lambda report: report["began"])
    for earlier, later in itertools.pairwise(reports):
        assert earlier["ended"] <= later["began"]
