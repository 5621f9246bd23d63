"""What trajectories take: bytes a token, and the CPU time of building, batching and flattening them.

    python benchmarks/trajectories.py --number 10000 --tokens 32768

Half of a trajectory's tokens are sampled. Memory is what the process holds more with all of them than before. Times are
CPU time on one thread, the best of several.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from arl.algorithm.advantages import with_advantages
from arl.algorithm.batch import Batch, loss_weights
from arl.api.settings.algorithm import AlgorithmConfig
from arl.api.types import Group, Trajectory
from arl.training.batch_codec import flatten, restore

GROUP_SIZE = 8


def trajectory(tokens: int, generator: np.random.Generator) -> Trajectory:
    mask = np.arange(tokens) >= (tokens + 1) // 2
    return Trajectory(
        token_ids=generator.integers(0, 150_000, tokens, np.int32),
        loss_mask=mask,
        behavior_logprobs=-generator.random(tokens, np.float32) * mask,
        versions=np.where(mask, 3, -1),
        reward=float(generator.integers(2)),
        metrics={"turns": 1.0},
    )


def groups_of(number: int, tokens: int) -> list[Group]:
    generator = np.random.default_rng(0)
    return [
        Group(
            group_id=i,
            example_id=(0, i),
            stamp=3,
            trajectories=tuple(trajectory(tokens, generator) for _ in range(GROUP_SIZE)),
            episode_indices=tuple(range(GROUP_SIZE)),
        )
        for i in range(number // GROUP_SIZE)
    ]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_ms(work: Callable[[], object], rounds: int) -> float:
    def once() -> float:
        began = time.process_time()
        work()
        return time.process_time() - began

    return 1e3 * min(once() for _ in range(rounds))


def building(tokens: int, rounds: int) -> dict[str, float]:
    """Of one trajectory, in ms."""
    made = trajectory(tokens, np.random.default_rng(0))
    arrays = {name: getattr(made, name) for name in ("token_ids", "loss_mask", "behavior_logprobs", "versions")}
    lists = {name: array.tolist() for name, array in arrays.items()}
    return {
        "from lists": cpu_ms(lambda: Trajectory(**lists, reward=1.0), rounds),
        "from arrays": cpu_ms(lambda: Trajectory(**arrays, reward=1.0), rounds),
    }


def batching(groups: Sequence[Group], rounds: int) -> dict[str, float]:
    config = AlgorithmConfig()
    batch = Batch.of(groups)
    header, arrays = flatten(groups)
    return {
        "Batch.of": cpu_ms(lambda: Batch.of(groups), rounds),
        "advantages": cpu_ms(lambda: with_advantages(batch, config), rounds),
        "loss weights": cpu_ms(lambda: loss_weights(batch, "token_mean"), rounds),
        "sequences": cpu_ms(batch.sequences, rounds),
        "flatten": cpu_ms(lambda: flatten(groups), rounds),
        "restore": cpu_ms(lambda: restore(header, arrays), rounds),
    }


def table_of(title: str, rows: dict[str, dict[str, float]]) -> Table:
    table = Table("", *next(iter(rows.values())), title=title)
    for name, row in rows.items():
        table.add_row(name, *(f"{value:,.3f}" for value in row.values()))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=1000, help="trajectories held at once, for the memory")
    parser.add_argument("--tokens", type=int, default=32_768, help="tokens of each of them")
    args = parser.parse_args()
    console = Console()
    torch.set_num_threads(1)
    sizes = {20: 2000, 28_000: 20}
    console.print(table_of("CPU ms of one trajectory", {f"{n:,} tokens": building(n, r) for n, r in sizes.items()}))
    batches = {(128, 20): 50, (8192, 20): 5, (64, 32_768): 3}
    rows = {f"{n:,} of {tokens:,} tokens": batching(groups_of(n, tokens), r) for (n, tokens), r in batches.items()}
    console.print(table_of("CPU ms of a batch", rows))
    before = resident_bytes()
    held = groups_of(args.number, args.tokens)
    total = resident_bytes() - before
    num_tokens = sum(len(t.token_ids) for group in held for t in group.trajectories)
    console.print(f"{num_tokens:,} tokens take {total / 1e9:.2f} GB: {total / num_tokens:.2f} bytes a token")


if __name__ == "__main__":
    main()
