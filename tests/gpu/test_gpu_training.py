"""A step on a GPU is the step that a CPU takes, whatever makes it cheaper."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine.fsdp.train_models import MakeEngine, load_twin, write_model
from engine.fsdp.train_sequences import LOSS, assert_same_rows, random_sequences, same
from torch.utils import _pytree as pytree

from arl.engine.fsdp import saving
from arl.engine.fsdp.train_engine import FSDPTrainEngine


def train(engine: FSDPTrainEngine) -> dict[str, float]:
    """Metrics of the second of two batches."""
    engine.train_batch([random_sequences(9, seed=1)], LOSS)
    return engine.train_batch([random_sequences(5, seed=2), random_sequences(4, seed=3)], LOSS)


def weights(engine: FSDPTrainEngine, directory: Path) -> dict[str, torch.Tensor]:
    engine.export(directory)
    return load_twin(directory).state_dict()


def assert_alike(ours: FSDPTrainEngine, theirs: FSDPTrainEngine, directory: Path, tolerance: float) -> None:
    assert train(ours) == pytest.approx(train(theirs), rel=tolerance, abs=tolerance)
    sequences = random_sequences(6, seed=4)
    assert_same_rows(ours.forward(sequences), theirs.forward(sequences), tolerance)
    expected = weights(theirs, directory / "theirs")
    for name, value in weights(ours, directory / "ours").items():
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance, msg=name)


def test_a_step_on_a_gpu_equals_one_on_a_cpu(make_engine: MakeEngine, tmp_path: Path):
    assert_alike(make_engine(), make_engine(device="cpu"), tmp_path, 1e-4)


def test_heads_too_small_for_flex_attention_train_alike(make_engine: MakeEngine, tmp_path: Path):
    small = write_model(tmp_path / "small", tied=True, head_dim=8)
    assert_alike(make_engine(small), make_engine(small, device="cpu"), tmp_path, 1e-4)


@pytest.mark.parametrize("option", ["activation_checkpointing", "cpu_offload"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saving_memory_changes_no_number(make_engine: MakeEngine, tmp_path: Path, dtype: str, option: str):
    tolerance = 1e-4 if dtype == "float32" else 2e-2
    assert_alike(make_engine(dtype=dtype, **{option: True}), make_engine(dtype=dtype), tmp_path, tolerance)


@pytest.mark.parametrize("cpu_offload", [False, True])
def test_the_reference_answers_in_the_place_of_the_weights(make_engine: MakeEngine, cpu_offload: bool):
    engine, sequences = make_engine(cpu_offload=cpu_offload), random_sequences(6, seed=4)
    before = engine.forward(sequences)
    engine.update_reference()
    engine.train_batch([sequences], LOSS)
    now = torch.cat(engine.forward(sequences))
    torch.testing.assert_close(engine.forward(sequences, "reference_logprobs"), before, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.cat(engine.forward(sequences)), now, rtol=1e-4, atol=1e-4)
    assert (now - torch.cat(before)).abs().max() > 1e-2


@pytest.mark.slow
def test_compiled_layers_change_no_number(make_engine: MakeEngine, tmp_path: Path):
    assert_alike(make_engine(compile=True), make_engine(), tmp_path, 1e-4)


def test_offloaded_weights_and_moments_lie_in_the_cpus_memory(make_engine: MakeEngine):
    engine = make_engine(cpu_offload=True, dtype="bfloat16")
    train(engine)
    tensors: list[Any] = [*engine._policy.parameters(), *pytree.tree_leaves(list(engine._optimizer.state.values()))]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}


@pytest.mark.parametrize("saved_on", ["cpu", "cuda", "offloaded"])
@pytest.mark.parametrize("loaded_on", ["cpu", "cuda", "offloaded"])
def test_a_checkpoint_continues_on_another_device(
    make_engine: MakeEngine, tmp_path: Path, saved_on: str, loaded_on: str
):
    def make(where: str) -> FSDPTrainEngine:
        return make_engine(cpu_offload=True) if where == "offloaded" else make_engine(device=where)

    saved, loaded = make(saved_on), make(loaded_on)
    train(saved)
    saved.save(tmp_path / "checkpoint").wait()
    loaded.load(tmp_path / "checkpoint")
    assert train(loaded) == pytest.approx(train(saved), rel=1e-4, abs=1e-4)


def test_what_was_copied_aside_is_not_changed_by_the_step_after_it(make_engine: MakeEngine, tmp_path: Path):
    engine, sequences = make_engine(), random_sequences(4)
    before, logprobs = weights(engine, tmp_path / "before"), engine.forward(sequences)
    snapshot, written = engine.snapshot(), engine.save(tmp_path / "checkpoint")
    expected = torch.rand(3, device="cuda")
    train(engine)
    snapshot.write(tmp_path / "snapshot")
    snapshot.release()
    written.wait()
    copied, after = load_twin(tmp_path / "snapshot").state_dict(), weights(engine, tmp_path / "after")
    assert all(torch.equal(copied[name], before[name]) for name in before)
    assert not all(torch.equal(after[name], before[name]) for name in before)
    engine.load(tmp_path / "checkpoint")
    assert torch.equal(torch.rand(3, device="cuda"), expected)
    assert same(engine.forward(sequences), logprobs)


def test_copies_are_in_pinned_memory():
    copies = saving._copied({"model": {"weight": torch.ones(3, device="cuda")}})
    assert copies["model"]["weight"].is_pinned()


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "lora": {"rank": 2}}])
def test_an_engine_that_leaves_the_gpu_and_comes_back_trains_on_to_the_bit(
    make_engine: MakeEngine, tmp_path: Path, options: dict[str, Any]
):
    engines = [make_engine(**options) for _ in range(2)]
    for engine in engines:
        engine.update_reference()
        train(engine)
    before = torch.cuda.memory_allocated()
    engines[0].offload()
    held = sum(p.numel() * 4 for p in engines[0]._trained.values())
    assert before - torch.cuda.memory_allocated() >= 4 * held  # weights, two moments, reference
    engines[0].save(tmp_path / "checkpoint").wait()
    for name, value in weights(engines[0], tmp_path / "away").items():
        torch.testing.assert_close(value, weights(engines[1], tmp_path / "stayed")[name], rtol=0, atol=0, msg=name)
    engines[0].load(tmp_path / "checkpoint")
    engines[0].onload()
    assert train(engines[0]) == train(engines[1])
    assert same(*(engine.forward(random_sequences(6, seed=4)) for engine in engines))
