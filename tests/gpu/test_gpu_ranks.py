"""Two GPUs over NCCL train like one: data-parallel, with split layers, and offloaded."""

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine.fsdp.train_models import MakeEngine
from engine.fsdp.train_sequences import LOSS, random_sequences

from arl.api.engine_config import OptimizerConfig, TrainConfig
from arl.engine.fsdp.train_engine import FSDPTrainEngine

OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1)

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def run_rank(rank: int, directory: Path, model_dir: Path, options: dict[str, Any]) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    store = dist.FileStore(str(directory / "store"), 2)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=2)
    config = TrainConfig(optimizer=OPTIMIZER, device="cuda", max_tokens_per_microbatch=60, num_ranks=2, **options)
    engine = FSDPTrainEngine(model_dir, config)
    sequences = random_sequences(9, seed=1)
    share = sequences if config.tensor_parallel == 2 else sequences[rank::2]
    reports = [engine.train_batch([share], LOSS) for _ in range(2)]
    engine.save(directory / "checkpoint").wait()
    engine.export(directory / "export")
    engine.close()
    dist.destroy_process_group()
    (directory / f"{rank}.json").write_text(json.dumps(reports))


@pytest.mark.parametrize(
    "options", [{}, {"tensor_parallel": 2}, {"cpu_offload": True}, {"tensor_parallel": 2, "cpu_offload": True}]
)
def test_two_gpus_train_like_one(model_dir: Path, make_engine: MakeEngine, tmp_path: Path, options: dict[str, Any]):
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=run_rank, args=(r, tmp_path, model_dir, options), daemon=True) for r in range(2)]
    for process in ranks:
        process.start()
    alone = make_engine(optimizer=OPTIMIZER)
    expected = [alone.train_batch([random_sequences(9, seed=1)], LOSS) for _ in range(2)]
    for process in ranks:
        process.join(timeout=100)
        assert process.exitcode == 0
    for rank in range(2):
        for ours, theirs in zip(json.loads((tmp_path / f"{rank}.json").read_text()), expected, strict=True):
            for name in ("loss", "grad_norm", "entropy", "trained_tokens"):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name
    resumed = make_engine(optimizer=OPTIMIZER)
    resumed.load(tmp_path / "checkpoint")
    sequences = random_sequences(4, seed=2)
    for ours, theirs in zip(resumed.forward(sequences), alone.forward(sequences), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
