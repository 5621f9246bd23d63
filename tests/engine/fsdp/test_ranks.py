"""Two ranks with a share each train like one rank with everything."""

import json
import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from train_models import MakeEngine, load_twin
from train_sequences import random_sequences

from arl.algorithm.losses import PolicyLoss
from arl.algorithm.packing import balanced_shares
from arl.api.algorithm import preset
from arl.api.config import OptimizerConfig, TrainConfig
from arl.api.types import TrainSequence
from arl.engine.fsdp.train_engine import FSDPTrainEngine

LOSS = PolicyLoss.of(preset("decoupled_ppo", loss={"clip_high": 0.3}, correction={"upper": 2.0}, minibatches=2))
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, max_grad_norm=0.1)
BUDGET = 30


def minibatches() -> list[list[TrainSequence]]:
    """Of the second, which is one sequence, one of two ranks gets nothing."""
    return [random_sequences(9, seed=1), random_sequences(1, seed=2)]


def share(sequences: list[TrainSequence], rank: int) -> list[TrainSequence]:
    return [sequences[i] for i in balanced_shares(sequences, 2)[rank]]


def run_rank(rank: int, model_dir: Path, directory: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    engine = FSDPTrainEngine(model_dir, TrainConfig(optimizer=OPTIMIZER, max_tokens_per_microbatch=BUDGET))
    shares = [share(sequences, rank) for sequences in minibatches()]
    metrics = engine.train_batch(shares, LOSS)
    logprobs = [values.tolist() for values in engine.forward(shares[0])]
    engine.save(directory / "checkpoint").wait()
    engine.train_batch(shares, LOSS)
    engine.load(directory / "checkpoint")
    engine.export(directory / "export")
    engine.close()
    assert dist.is_initialized()  # the group was the caller's, and is left to it
    dist.destroy_process_group()
    (directory / f"rank{rank}.json").write_text(json.dumps({"metrics": metrics, "logprobs": logprobs}))


def test_two_ranks_train_like_one(model_dir: Path, make_engine: MakeEngine, tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    # Daemons, so that a rank that hangs ends with the tests.
    ranks = [context.Process(target=run_rank, args=(rank, model_dir, tmp_path), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()

    alone = make_engine(optimizer=OPTIMIZER, max_tokens_per_microbatch=BUDGET)
    expected = alone.train_batch(minibatches(), LOSS)
    logprobs = alone.forward(minibatches()[0])
    alone.export(tmp_path / "alone")

    for process in ranks:
        process.join(timeout=90)
        assert process.exitcode == 0
    reports = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert reports[0]["metrics"] == reports[1]["metrics"]
    for name in expected.keys() - {"microbatches", "packing_efficiency"}:
        assert reports[0]["metrics"][name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name

    shards = balanced_shares(minibatches()[0], 2)
    for report, shard in zip(reports, shards, strict=True):
        for values, index in zip(report["logprobs"], shard, strict=True):
            torch.testing.assert_close(torch.tensor(values), logprobs[index], rtol=1e-5, atol=1e-5)

    theirs = load_twin(tmp_path / "alone").state_dict()
    for name, ours in load_twin(tmp_path / "export").state_dict().items():
        torch.testing.assert_close(ours, theirs[name], rtol=1e-5, atol=1e-5, msg=name)

    resharded = make_engine(optimizer=OPTIMIZER, max_tokens_per_microbatch=BUDGET)
    resharded.load(tmp_path / "checkpoint")
    assert resharded.version == 1
    for ours, values in zip(resharded.forward(minibatches()[0]), logprobs, strict=True):
        torch.testing.assert_close(ours, values, rtol=1e-5, atol=1e-5)
