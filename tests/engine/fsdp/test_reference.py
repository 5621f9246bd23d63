"""The reference answers in the place of the weights, which are what they were afterwards; checkpoints hold it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from train_models import MakeEngine, load_twin
from train_sequences import LOSS, random_sequences, same, twin_logprobs
from train_variants import weights_of

from arl.api.engine_config import LoRAConfig
from arl.api.errors import CheckpointError, ConfigError
from arl.engine.fsdp.policy import transformer_layers
from arl.engine.fsdp.train_engine import FSDPTrainEngine


def assert_unmoved(engine: FSDPTrainEngine, expected: dict[str, torch.Tensor]) -> None:
    assert [name for name, tensor in weights_of(engine).items() if not torch.equal(tensor, expected[name])] == []


@pytest.mark.parametrize("options", [{}, {"lora": LoRAConfig(rank=2, alpha=8)}, {"dtype": "bfloat16"}])
def test_the_reference_says_what_the_weights_said_when_it_was_made(make_engine: MakeEngine, options: dict[str, Any]):
    engine, sequences = make_engine(max_tokens_per_microbatch=40, **options), random_sequences(6)
    engine.train_batch([sequences], LOSS)
    before = engine.forward(sequences)
    engine.update_reference()
    engine.train_batch([sequences], LOSS)
    trained, now = weights_of(engine), engine.forward(sequences)
    assert engine._reference.values.keys() == trained.keys()
    assert not same(now, before)
    assert same(engine.forward(sequences, "reference_logprobs"), before)
    assert_unmoved(engine, trained)
    assert same(engine.forward(sequences), now)
    never_asked = make_engine(max_tokens_per_microbatch=40, **options)
    for _ in range(3):
        never_asked.train_batch([sequences], LOSS)
    engine.train_batch([sequences], LOSS)
    assert_unmoved(engine, weights_of(never_asked))


def test_weights_are_put_back_when_the_reference_fails_to_answer(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
):
    def failing(*args: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    engine, sequences = make_engine(), random_sequences(4)
    engine.update_reference()
    reference = engine.forward(sequences)
    engine.train_batch([sequences], LOSS)
    trained, now = weights_of(engine), engine.forward(sequences)
    with monkeypatch.context() as patch:
        patch.setattr(transformer_layers(engine._policy.model)[1].mlp, "forward", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.forward(sequences, "reference_logprobs")
    assert_unmoved(engine, trained)
    assert same(engine.forward(sequences), now)
    assert same(engine.forward(sequences, "reference_logprobs"), reference)


def test_a_share_moves_each_weight_so_far_towards_the_current_one(
    make_engine: MakeEngine, model_dir: Path, tmp_path: Path
):
    engine, sequences = make_engine(model_dir), random_sequences(5)
    engine.update_reference(0.5)  # the first makes it, whatever the share
    assert same(engine.forward(sequences, "reference_logprobs"), engine.forward(sequences))
    engine.train_batch([sequences], LOSS)
    engine.update_reference(0.3)
    ours = engine.forward(sequences, "reference_logprobs")
    engine.export(tmp_path / "now")
    twin, start, now = load_twin(model_dir), load_twin(model_dir).state_dict(), load_twin(tmp_path / "now").state_dict()
    twin.load_state_dict({name: start[name] + 0.3 * (now[name] - start[name]) for name in start})
    for sequence, values in zip(sequences, ours, strict=True):
        with torch.no_grad():
            theirs, _ = twin_logprobs(twin, sequence)
        torch.testing.assert_close(values[sequence.loss_mask], theirs, rtol=1e-5, atol=1e-5)
    engine.update_reference(1.0)
    assert same(engine.forward(sequences, "reference_logprobs"), engine.forward(sequences))


def test_a_reference_answers_only_once_it_was_made_and_moves_by_a_share_of_at_most_1(make_engine: MakeEngine):
    engine = make_engine()
    with pytest.raises(ConfigError, match="call update_reference first"):
        engine.forward(random_sequences(1), "reference_logprobs")
    for share in (0.0, 1.5):
        with pytest.raises(ValueError, match=f"share is {share}"):
            engine.update_reference(share)


def test_loading_replaces_the_reference_and_refuses_a_checkpoint_without_one(make_engine: MakeEngine, tmp_path: Path):
    engine, sequences = make_engine(), random_sequences(5)
    engine.save(tmp_path / "without").wait()
    engine.update_reference()
    reference = engine.forward(sequences)
    engine.train_batch([sequences], LOSS)
    engine.save(tmp_path / "with").wait()
    moved = make_engine()
    moved.train_batch([sequences[:2]], LOSS)
    moved.update_reference()
    moved.load(tmp_path / "with")
    assert same(moved.forward(sequences, "reference_logprobs"), reference)
    with pytest.raises(CheckpointError, match="without has no reference policy, and this run needs one"):
        moved.load(tmp_path / "without")
    assert same(moved.forward(sequences), engine.forward(sequences))
