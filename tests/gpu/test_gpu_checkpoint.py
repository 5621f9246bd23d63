"""Checkpoints of what is on a GPU: copied to pinned memory, and written from there."""

from pathlib import Path

import torch
from engine.fsdp.train_models import MakeEngine
from engine.fsdp.train_sequences import random_sequences

from arl.algorithm.losses import PolicyLoss
from arl.api.algorithm import preset
from arl.engine.fsdp import saving as checkpoint

LOSS = PolicyLoss.of(preset("decoupled_ppo", loss={"clip_high": 0.3}, correction={"upper": 2.0}, minibatches=2))


def test_the_gpus_random_numbers_continue(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    saving = engine.save(tmp_path / "checkpoint")
    expected = torch.rand(3, device="cuda")
    saving.wait()
    engine.load(tmp_path / "checkpoint")
    assert torch.equal(torch.rand(3, device="cuda"), expected)


def test_steps_do_not_change_what_is_being_written(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, sequences = make_engine(), random_sequences(4)
    before = engine.forward(sequences)
    saving = engine.save(tmp_path / "checkpoint")
    engine.train_batch([sequences], LOSS)
    saving.wait()
    engine.load(tmp_path / "checkpoint")
    for ours, expected in zip(engine.forward(sequences), before, strict=True):
        assert torch.equal(ours, expected)


def test_copies_are_in_pinned_memory() -> None:
    copies = checkpoint._copied({"model": {"weight": torch.ones(3, device="cuda")}})
    assert copies["model"]["weight"].is_pinned()
