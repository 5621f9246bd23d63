"""Ranks with a part each snapshot what one rank with everything has, to the bit, beside their own training."""

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from published import sequence, towards_advantage, write_model
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from arl.api.engine_config import OptimizerConfig, TrainConfig
from arl.api.errors import TransportError
from arl.engine.fsdp import snapshot as module
from arl.engine.fsdp.train_engine import FSDPTrainEngine


def whole_weights(engine: FSDPTrainEngine, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What torch itself gathers, a tensor at a time, on the training's own groups."""
    state = engine._policy.model.state_dict()
    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}
    return {
        name: tensor.to(dtype, copy=True).contiguous() for name, tensor in whole.items() if name != "lm_head.weight"
    }


def run_rank(rank: int, num_ranks: int, dtype: torch.dtype, config: TrainConfig, directory: Path) -> None:
    torch.set_num_threads(1)
    module._CHUNK_BYTES = 3_000
    store = dist.FileStore(str(directory / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    engine = FSDPTrainEngine(directory / "model", config)
    for version in range(3):
        expected = whole_weights(engine, dtype)
        if version == 1:
            fail_once(engine, rank)
        snapshot = engine.snapshot()
        share = 0 if config.tensor_parallel > 1 else rank
        batch = [sequence(range(20 * share, 20 * share + 20), seed=version)]
        engine.train_batch([batch], towards_advantage)  # while the snapshot is put together
        if rank == 0:
            snapshot.write(directory / f"ours-{version}")
            save_file(expected, directory / f"theirs-{version}")
    engine.close()
    dist.destroy_process_group()


def fail_once(engine: FSDPTrainEngine, rank: int) -> None:
    """A snapshot that rank 1 cannot send: rank 0 still waits for it when the next one is taken."""
    whole = module.ShardGatherer._whole
    if rank == 1:
        module.ShardGatherer._whole = failing
    snapshot = engine.snapshot()
    if rank == 1:
        with pytest.raises(TransportError, match="this rank has no memory"):
            snapshot._chunks[-1].result()
    module.ShardGatherer._whole = whole
    dist.barrier()


def failing(*args: object) -> torch.Tensor:
    raise MemoryError("this rank has no memory")


@pytest.mark.parametrize(
    ("num_ranks", "dtype", "tensor_parallel"),
    [(3, torch.bfloat16, 1), pytest.param(2, torch.float32, 2, marks=pytest.mark.slow)],
)
def test_ranks_put_together_what_one_has_also_after_one_of_them_failed(
    tmp_path: Path, num_ranks: int, dtype: torch.dtype, tensor_parallel: int
):
    stored = load_file(write_model(tmp_path / "model", dtype=dtype) / "model.safetensors")
    optimizer = OptimizerConfig(lr=1e-2, eps=1e-3)
    config = TrainConfig(optimizer=optimizer, num_ranks=num_ranks, tensor_parallel=tensor_parallel)
    context = multiprocessing.get_context("spawn")
    arguments = (num_ranks, dtype, config, tmp_path)
    # Daemons, so that a rank that hangs ends with the tests.
    ranks = [context.Process(target=run_rank, args=(rank, *arguments), daemon=True) for rank in range(num_ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=90)
        assert process.exitcode == 0
    previous = stored
    for version in range(3):
        ours, theirs = (
            load_file(tmp_path / f"ours-{version}" / "model.safetensors"),
            load_file(tmp_path / f"theirs-{version}"),
        )
        assert ours.keys() == theirs.keys() == stored.keys()
        for name, tensor in ours.items():
            assert tensor.dtype == dtype
            assert torch.equal(tensor, theirs[name]), name
        assert all(torch.equal(ours[name], previous[name]) for name in ours) is (version == 0)
        previous = ours
