"""How much of a bfloat16 model changes in a step of reinforcement learning, and what sending just that takes.

    python benchmarks/deltas.py --model runs/quickstart/model [--steps 30] [--learning-rates 1e-6 1e-5 1e-4]

The model is the quickstart's, after its warm start and before its training; it is made if it is not there (minutes).
Each step is one AdamW step of REINFORCE on 64 demonstrations from the distribution that the model was fitted to, with
random advantages: its gradients are as noisy as those of RL, and AdamW makes a step about as large as the learning
rate whatever their scale. Master weights are float32; what is compared are consecutive exports in bfloat16.

A run that begins with a published bfloat16 checkpoint has master weights in the middle between two roundings, and at
first few of them leave it; after many steps they lie anywhere. The first is `fresh`, the second `worn`.

Times are CPU time, of one thread, on a model of --megabytes with normal weights (sigma 0.02) that all move by the
learning rate.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "agents"))

import math_tasks
import torch
from math_agent import CALCULATOR, prompt, tiny_model
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from arl.algorithm.batch import weigh_tokens
from arl.algorithm.losses.reinforcement import PolicyLoss
from arl.api.settings.algorithm import preset
from arl.api.settings.engines import OptimizerConfig, TrainConfig
from arl.api.train_engine import TrainSequence
from arl.engine.fsdp.train_engine import FSDPTrainEngine
from arl.engine.model_files import load_tokenizer
from arl.engine.weights.delta import (
    BLOCK_HEADER,
    PREAMBLE,
    PackageHeader,
    Replica,
    built_block,
    file_digest,
    package,
    spans,
    survey,
)
from arl.run.finetuning.examples import to_demonstrations

BATCH_SIZE = 64
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One version compared with the one before. Bytes of the delta and of the model; seconds, one thread."""

    changed: float
    delta_bytes: int
    model_bytes: int
    survey_s: float
    encode_s: float
    patch_s: float


def measured(base: Replica, directory: Path, pool: Executor) -> tuple[Replica, Measured]:
    new, survey_s = timed(lambda: survey(directory, pool))
    pieces, encode_s = timed(lambda: list(package(new, 1, base, pool.map)))
    (part,) = [
        part for part in PackageHeader.parse(pieces[0][PREAMBLE.size :]).files if part.name.endswith(".safetensors")
    ]
    theirs = base.directory / part.name
    blocks = [] if part.is_kept else list(zip(spans(part.num_bytes), pieces[1:], strict=True))
    built, patch_s = timed(lambda: [built_block(theirs, span, part.width, piece) for span, piece in blocks])
    if built and file_digest([digest for _, digest in built]) != new.files[part.name][1]:
        raise RuntimeError("what was patched is not what was exported")
    count = sum(BLOCK_HEADER.unpack_from(piece)[1] for _, piece in blocks)
    return new, Measured(
        changed=count * part.width / part.num_bytes,
        delta_bytes=sum(map(len, pieces)),
        model_bytes=new.num_bytes,
        survey_s=survey_s,
        encode_s=encode_s,
        patch_s=patch_s,
    )


def timed(act: Callable[[], T]) -> tuple[T, float]:
    started = time.process_time()
    return act(), time.process_time() - started


def batches(tokenizer_of: Path, steps: int, seed: int) -> list[list[TrainSequence]]:
    """For each step its trajectories, with random advantages of mean 0."""
    tokenizer = load_tokenizer(str(tokenizer_of))
    solutions = math_tasks.solutions(0, steps * BATCH_SIZE, math_tasks.held_out(192), seed + 1)
    generator = torch.Generator().manual_seed(seed)
    rows = [solution.demonstration(prompt, CALCULATOR) for solution in solutions]
    sequences = [sequence(*shown, generator) for shown in to_demonstrations(rows, tokenizer)]
    return [sequences[i : i + BATCH_SIZE] for i in range(0, len(sequences), BATCH_SIZE)]


def sequence(token_ids: Sequence[int], mask: Sequence[int], generator: torch.Generator) -> TrainSequence:
    count, zeros = len(token_ids), torch.zeros(len(token_ids))
    advantage = torch.randn(1, generator=generator)
    return TrainSequence(
        token_ids=torch.tensor(token_ids),
        loss_mask=torch.tensor(mask, dtype=torch.bool),
        behavior_logprobs=zeros,
        proximal_logprobs=zeros,
        advantages=advantage.expand(count).clone(),
        loss_weights=zeros,
        versions=torch.zeros(count, dtype=torch.int64),
    )


def stored_as_bfloat16(model: Path, directory: Path, is_fresh: bool) -> Path:
    """The model as a directory that is served in bfloat16; fresh: its numbers are rounded to it as well."""
    shutil.copytree(model, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    if is_fresh:
        tensors = load_file(directory / "model.safetensors")
        rounded = {name: tensor.bfloat16() for name, tensor in tensors.items()}
        save_file(rounded, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def train(model: Path, lr: float, steps: Sequence[list[TrainSequence]], scratch: Path) -> list[Measured]:
    engine = FSDPTrainEngine(model, TrainConfig(optimizer=OptimizerConfig(lr=lr)))
    loss = PolicyLoss.of(preset("decoupled_ppo", weights=[{"level": "token"}]))
    out = []
    try:
        with ThreadPoolExecutor(1) as pool:
            engine.export(scratch / "version-0")
            base = survey(scratch / "version-0", pool)
            for version, batch in enumerate(steps, start=1):
                engine.train_batch([weigh_tokens(batch)], loss)
                engine.export(scratch / f"version-{version}")
                base, result = measured(base, scratch / f"version-{version}", pool)
                out.append(result)
    finally:
        engine.close()
    return out


def large(lr: float, megabytes: int, scratch: Path) -> Measured:
    """The times for a model of so many megabytes."""
    generator = torch.Generator().manual_seed(0)
    weights = {f"layer-{i}": 0.02 * torch.randn(1 << 24, generator=generator) for i in range(max(1, megabytes // 32))}
    for version, step in enumerate((0.0, lr)):
        (scratch / f"large-{version}").mkdir()
        moved = {
            name: (weight + step * torch.randn(weight.shape, generator=generator).sign()).bfloat16()
            for name, weight in weights.items()
        }
        save_file(moved, scratch / f"large-{version}" / "model.safetensors")
    with ThreadPoolExecutor(1) as pool:
        base = survey(scratch / "large-0", pool)
        results = [measured(base, scratch / "large-1", pool)[1] for _ in range(3)]
    return min(results, key=lambda result: result.encode_s + result.patch_s)


def report(rows: Sequence[tuple[str, float, list[Measured]]]) -> Table:
    table = Table("start", "learning rate", "changed, step 1", "changed, last 10", "delta / model", "bits per change")
    for start, lr, results in rows:
        last = results[-10:]
        share = median(result.delta_bytes / result.model_bytes for result in last)
        bits = median(8 * result.delta_bytes / max(1.0, result.changed * result.model_bytes / 2) for result in last)
        table.add_row(
            start,
            f"{lr:g}",
            f"{results[0].changed:.2%}",
            f"{median(result.changed for result in last):.2%}",
            f"{share:.2%}",
            f"{bits:.1f}",
        )
    return table


def report_times(rows: Sequence[tuple[float, Measured]]) -> Table:
    table = Table("learning rate", "MB", "changed", "delta / model", "hash GB/s", "encode GB/s", "patch and hash GB/s")
    for lr, result in rows:
        gigabytes = result.model_bytes / 1e9
        seconds = (result.survey_s, result.encode_s, result.patch_s)
        table.add_row(
            f"{lr:g}",
            f"{1000 * gigabytes:.0f}",
            f"{result.changed:.2%}",
            f"{result.delta_bytes / result.model_bytes:.2%}",
            *(f"{gigabytes / second:.2f}" for second in seconds),
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="What bfloat16 updates take.")
    parser.add_argument("--model", type=Path, default=Path("runs/quickstart/model"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--megabytes", type=int, default=512)
    args = parser.parse_args()
    tiny_model(args.model, math_tasks.held_out(192), 0)
    steps = batches(args.model, args.steps, seed=0)
    rows, times = [], []
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        scratch = Path(name)
        for start in ("fresh", "worn"):
            model = stored_as_bfloat16(args.model, scratch / start, is_fresh=start == "fresh")
            for lr in args.learning_rates:
                (run := scratch / f"{start}-{lr:g}").mkdir()
                rows.append((start, lr, train(model, lr, steps, run)))
                shutil.rmtree(run)
        for lr in args.learning_rates:
            (run := scratch / f"large-{lr:g}").mkdir()
            times.append((lr, large(lr, args.megabytes, run)))
            shutil.rmtree(run)
    Console().print(report(rows))
    Console().print(report_times(times))


if __name__ == "__main__":
    main()
