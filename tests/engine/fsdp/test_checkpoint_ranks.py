"""A checkpoint of N ranks continues on M, with each rank's own random state; one rank's full disk fails all."""

import resource
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from train_models import MakeEngine
from train_ranks import Ranks, Report
from train_sequences import LOSS, assert_same_metrics, random_sequences, share_of

from arl.api.config import OptimizerConfig, TrainConfig
from arl.api.errors import CheckpointError
from arl.engine.fsdp.train_engine import FSDPTrainEngine

OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1)
BATCHES = [random_sequences(8, seed=1), random_sequences(8, seed=2)]


def after_loading(engine: FSDPTrainEngine, directory: Path, rank: int, world_size: int) -> Report:
    """What the checkpoint says, and how the step after it goes."""
    engine.load(directory)
    version = engine.version
    return {"version": version, **engine.train_batch([share_of(BATCHES[1], rank, world_size)], LOSS)}


def save_and_load(rank: int, directory: Path, model_dir: Path, world_size: int, others: Sequence[Path]) -> Report:
    """Train a batch, save it beside the next one, and continue from it and from the checkpoints of others."""
    engine = FSDPTrainEngine(model_dir, TrainConfig(optimizer=OPTIMIZER))
    engine.train_batch([share_of(BATCHES[0], rank, world_size)], LOSS)
    torch.manual_seed(rank)
    saving = engine.save(directory / "checkpoint")
    expected_random = torch.rand(3).tolist()
    beside = {"version": 1, **engine.train_batch([share_of(BATCHES[1], rank, world_size)], LOSS)}
    saving.wait()
    report = {other.parent.name: after_loading(engine, other, rank, world_size) for other in others}
    engine.load(directory / "checkpoint")
    report |= {"beside": beside, "random": [expected_random, torch.rand(3).tolist()]}
    report["failure"] = fail_on_the_last_rank(engine, directory / "checkpoint", rank == world_size - 1)
    report["own"] = after_loading(engine, directory / "checkpoint", rank, world_size)
    engine.close()
    return report


def fail_on_the_last_rank(engine: FSDPTrainEngine, directory: Path, is_last: bool) -> str:
    """Save where one rank may write 1000 bytes to a file; returns the error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000 if is_last else soft, hard))
        engine.save(directory).wait()
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return "nothing"


@pytest.mark.parametrize("world_sizes", [(2,), pytest.param((2, 4), marks=pytest.mark.slow)], ids=["2", "2 and 4"])
def test_checkpoints_continue_on_other_numbers_of_ranks(
    model_dir: Path, make_engine: MakeEngine, tmp_path: Path, world_sizes: tuple[int, ...]
) -> None:
    """On 2 ranks that of 1, on 4 those of 1 and 2, and on 1 all of them."""
    alone = make_engine(optimizer=OPTIMIZER)
    alone.train_batch([BATCHES[0]], LOSS)
    alone.save(tmp_path / "1" / "checkpoint").wait()
    expected = {"version": 1, **alone.train_batch([BATCHES[1]], LOSS)}

    paths: list[Path] = [tmp_path / "1" / "checkpoint"]
    for world_size in world_sizes:
        directory = tmp_path / str(world_size)
        for report in Ranks(save_and_load, world_size, directory, model_dir, world_size, tuple(paths)).reports():
            for name in ("beside", "own", *(path.parent.name for path in paths)):
                assert_same_metrics(report[name], expected)
            assert report["random"][0] == report["random"][1]
            assert "File too large" in report["failure"]
        assert [path.name for path in directory.iterdir() if path.is_dir()] == ["checkpoint"]
        paths.append(directory / "checkpoint")
    for path in paths:
        assert_same_metrics(after_loading(alone, path, 0, 1), expected)
