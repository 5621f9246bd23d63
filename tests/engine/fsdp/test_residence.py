"""What leaves a train engine's device between turns; tests/gpu has an engine that really leaves one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine.fsdp.train_models import MakeEngine, write_model
from engine.fsdp.train_sequences import LOSS, random_sequences, same

from arl.api.errors import TrainingError
from arl.engine.fsdp.policy import local_shard


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
            engine._residence.move(elsewhere)
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
