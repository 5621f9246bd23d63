"""Ranks that die or hang are replaced, and the weights are those of a run that lost none, to the bit."""

import os
import signal
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from random_groups import random_groups
from train_models import learner_config

from arl.api.errors import ProcessLostError
from arl.api.settings.run import Config
from arl.engine.fsdp import ray_engine
from arl.run.learner import host_learner
from arl.training.learner_process import LearnerHost, RemoteLearner
from arl.training.learner_recovery import RecoveringLearner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where Ray writes. The name of tmp_path is too long for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp") as directory:
        monkeypatch.setenv("TMPDIR", directory)
        # Where the trainer's process finds this module and what it imports.
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(Path(__file__).parents[i]) for i in (0, 2)))
        yield


def host_impatient_learner(config: Config) -> LearnerHost:
    ray_engine.RANK_TIMEOUT_S = 4.0
    return host_learner(config)


def ranks(model_dir: Path, directory: Path) -> RecoveringLearner:
    config = learner_config(model_dir, train={"num_ranks": 2}, algorithm={"minibatches": 2}, run_dir=directory)
    start = partial(RemoteLearner, partial(host_impatient_learner, config), directory / "trainer.log", 1)
    return RecoveringLearner(start, directory / "checkpoints", config.train)


def train(learner: RecoveringLearner, seed: int) -> dict[str, float]:
    return learner.train(learner.prepare(random_groups(seed))).metrics


def weights(learner: RecoveringLearner, directory: Path) -> bytes:
    learner.engine.snapshot().write(directory)
    return (directory / "model.safetensors").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_rank_that_dies_or_hangs_is_replaced_and_the_weights_are_as_if_it_had_not(
    model_dir: Path, tmp_path: Path, number: signal.Signals
) -> None:
    learner, saved = ranks(model_dir, tmp_path), tmp_path / "checkpoints" / "version-00000001" / "engine"
    try:
        train(learner, 0)
        learner.save(saved).wait()
        expected = [train(learner, seed) for seed in (1, 2)]
        whole = weights(learner, tmp_path / "whole")
        learner.load(saved)
        found, snapshot = [train(learner, 1)], learner.engine.snapshot()
        pid = learner.placed().parts[1].pid
        assert pid is not None
        os.kill(pid, number)
        found.append(train(learner, 2))
        assert found == expected
        assert weights(learner, tmp_path / "lost") == whole
        assert (learner.version, learner.num_recoveries) == (3, 1)
        with pytest.raises(ProcessLostError, match=r"rank 1 does not answer|rank 1 of 2 died"):
            snapshot.write(tmp_path / "never")
    finally:
        learner.close()
