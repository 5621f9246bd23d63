"""A run on the disk with checkpoints of real engines, and what these engines themselves wrote."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from arl.api.settings.engines import TrainConfig
from arl.engine.fsdp.policy import trained_parameters
from arl.engine.model_files import model_digest
from arl.engine.tiny import TinyShape
from arl.run.learner import load_train_engine
from arl.training.checkpoints import Checkpoints, RunState

SMALL = TinyShape(hidden_size=16, num_layers=1)


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def write_run(run_dir: Path, model: Path | str, **settings: Any) -> None:
    """The checkpoints of versions 1 and 2, and what the engine itself wrote of each beside them. A step moves every
    trained number."""
    identity = {"model": str(model), "model_digest": model_digest(str(model)), "seed": 0, "num_examples": 1}
    checkpoints = Checkpoints(run_dir / "checkpoints", 2, identity)
    engine: Any = load_train_engine(model, TrainConfig(**settings))
    with closing(engine):
        for version in (1, 2):
            engine.train_batch([], lambda *_: pytest.fail("nothing is trained"))
            for parameter in trained_parameters(engine._policy).values():
                parameter.data += 0.01 * torch.rand_like(parameter)
            checkpoints.begin(version, engine.save, RunState(values={"version": version}))()
            engine.export(run_dir / f"written {version}")
