"""The trial of a loaded model: what is remembered of it, what tells a wrong way, and that it leaves no trace."""

from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_families import tiny_family

from arl.engine.tiny import write_tiny_model
from arl.engine.trial import compared, in_float32, moved_states, own_states, probe_sequences, remembered


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_what_was_chosen_is_remembered_for_this_model_and_use_alone(tmp_path: Path):
    one, other = (write_tiny_model(tmp_path / str(seed), seed=seed) for seed in (0, 1))
    assert remembered(one, {"trains": "X"}, lambda: "packed") == "packed"
    assert remembered(one, {"trains": "X"}, lambda: "never asked") == "packed"
    assert remembered(one, {"serves": "X"}, lambda: "slots") == "slots"
    assert remembered(other, {"trains": "X"}, lambda: "apart") == "apart"


def test_a_cache_that_cannot_be_written_or_a_model_without_files_is_tried_each_time(tmp_path: Path):
    (tmp_path / "cache").write_text("in the way")
    model = write_tiny_model(tmp_path / "model")
    ways = iter("ab")
    assert [remembered(model, {}, lambda: next(ways)) for _ in range(2)] == ["a", "b"]
    assert remembered(tmp_path / "none", {}, lambda: "c") == "c"


@pytest.mark.parametrize("model_type", ["qwen3", "gemma2", "mamba2", "bloom"])
def test_what_float32_rounds_is_within_a_bound_that_is_small(model_type: str):
    model: Any = tiny_family(model_type)
    sequences = probe_sequences(model.config)
    own, moved = own_states(model, sequences), moved_states(model, sequences)
    exact = own_states(model.double(), sequences)
    difference, bound = compared(own, moved, [states.float() for states in exact])
    assert difference <= bound
    assert 0 < bound < 0.01 * max(states.abs().max().item() for states in own)


def test_a_model_in_bfloat16_computes_in_float32_and_is_as_before_to_the_bit():
    model: Any = tiny_family("qwen3_next").bfloat16()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sequences = probe_sequences(model.config)
    with in_float32(model):
        (states, *_) = own_states(model, sequences)
    assert torch.equal(states, own_states(model.float(), sequences)[0])
    after = model.bfloat16().state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
