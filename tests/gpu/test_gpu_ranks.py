"""Two GPUs over NCCL train like one: data-parallel, with split layers, and offloaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine.fsdp.train_models import MakeEngine
from engine.fsdp.train_ranks import Ranks, Report
from engine.fsdp.train_sequences import LOSS, assert_same_rows, random_sequences

from arl.api.settings.engines import OptimizerConfig, TrainConfig
from arl.engine.fsdp.train_engine import FSDPTrainEngine

OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1)

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def train_on_a_rank(rank: int, directory: Path, model_dir: Path, options: dict[str, Any]) -> Report:
    config = TrainConfig(optimizer=OPTIMIZER, device="cuda", max_tokens_per_microbatch=60, num_ranks=2, **options)
    engine = FSDPTrainEngine(model_dir, config)
    sequences = random_sequences(9, seed=1)
    share = sequences if config.tensor_parallel == 2 else sequences[rank::2]
    steps = [engine.train_batch([share], LOSS) for _ in range(2)]
    engine.save(directory / "checkpoint").wait()
    engine.export(directory / "export")
    engine.close()
    return {"steps": steps}


@pytest.mark.parametrize(
    "options", [{}, {"tensor_parallel": 2}, {"cpu_offload": True}, {"tensor_parallel": 2, "cpu_offload": True}]
)
def test_two_gpus_train_like_one(model_dir: Path, make_engine: MakeEngine, tmp_path: Path, options: dict[str, Any]):
    ranks = Ranks(2, tmp_path, "cpu:gloo,cuda:nccl")
    calls = ranks.start(train_on_a_rank, tmp_path, model_dir, options)
    alone = make_engine(optimizer=OPTIMIZER)
    expected = [alone.train_batch([random_sequences(9, seed=1)], LOSS) for _ in range(2)]
    for report in ranks.reports(calls):
        for ours, theirs in zip(report["steps"], expected, strict=True):
            for name in ("loss", "grad_norm", "entropy", "trained_tokens"):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name
    resumed = make_engine(optimizer=OPTIMIZER)
    resumed.load(tmp_path / "checkpoint")
    sequences = random_sequences(4, seed=2)
    assert_same_rows(resumed.forward(sequences), alone.forward(sequences), 1e-4)
