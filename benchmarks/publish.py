"""What a publish costs: from the trainer's weights to a server that samples with them, while it has requests to serve.

    python benchmarks/publish.py                                          the embedded server
    python benchmarks/publish.py --sglang-python .venv-sglang/bin/python  stock SGLang on this CPU
    python benchmarks/publish.py --address http://host:30000 --model DIR  a server that runs already, of this model

The model is, unless named, a Qwen3 of 4 layers and hidden size 256 in float32. Each publish follows a step of training.
Times are in ms, medians (and the best and worst) over publishes: what training waited for (snapshot), from then until
the server serves the new version (deliver), how long it did not generate in between (pause), and both together.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from arl.api.engine import WeightTransport
from arl.api.settings.engines import (
    ClientConfig,
    DiskWeightsConfig,
    DistributedWeightsConfig,
    LocalEngineConfig,
    SGLangProcessesConfig,
    TrainConfig,
)
from arl.api.train_engine import PackedTokens, TokenLosses, TokenOutputs, TrainSequence
from arl.api.types import ModelRequest, SamplingParams
from arl.engine.client.remote_engine import RemoteInferenceEngine
from arl.engine.client.server_processes import started_here
from arl.engine.fsdp.train_engine import FSDPTrainEngine
from arl.engine.tiny import TinyShape, write_tiny_model
from arl.engine.weights.disk import DiskTransport
from arl.engine.weights.distributed import DistributedTransport

ROOT = Path(__file__).parents[1]
REFERENCE = TinyShape(hidden_size=256, intermediate_size=768, num_layers=4, num_heads=8, num_kv_heads=8, head_dim=32)
WARM_UP = 2


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One publish. Times in seconds."""

    snapshot_s: float
    deliver_s: float
    pause_s: float
    num_bytes: int

    @property
    def total_s(self) -> float:
        return self.snapshot_s + self.deliver_s


def loss(outputs: TokenOutputs, tokens: PackedTokens) -> TokenLosses:
    return TokenLosses(loss=-outputs.logprobs * tokens.advantages)


def random_batch(seed: int, length: int = 64) -> list[list[TrainSequence]]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(length) > 0
    sequence = TrainSequence(
        token_ids=torch.randint(0, 128, (length,), generator=generator),
        loss_mask=mask,
        behavior_logprobs=torch.zeros(length),
        proximal_logprobs=torch.zeros(length),
        advantages=torch.randn(length, generator=generator),
        loss_weights=mask / length,
        versions=torch.zeros(length, dtype=torch.int64),
    )
    return [[sequence]]


@asynccontextmanager
async def servers(args: argparse.Namespace, model: Path) -> AsyncIterator[Sequence[str]]:
    if args.address:
        yield [args.address]
    elif args.sglang_python:
        flags = (ROOT / "scripts" / "sglang_cpu" / "arguments").read_text().split()
        config = SGLangProcessesConfig(python=args.sglang_python, gpus_per_server=0, arguments=tuple(flags))
        async with started_here(str(model), config, args.run_dir / "logs") as started:
            yield started.addresses
    else:
        async with started_here(str(model), LocalEngineConfig(), args.run_dir / "logs") as started:
            yield started.addresses


@asynccontextmanager
async def requests(client: RemoteInferenceEngine, count: int) -> AsyncIterator[None]:
    """Keep so many requests running inside the block."""
    sampling = SamplingParams(max_new_tokens=256, ignore_eos=True)

    async def ask(index: int) -> None:
        while True:
            await client.agenerate(ModelRequest(input_ids=[index, 1, 2, 3], sampling=sampling))

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(index)) for index in range(count)]
        yield
        for task in tasks:
            task.cancel()


async def publish(transport: WeightTransport, trainer: FSDPTrainEngine, client: RemoteInferenceEngine) -> Cost:
    await asyncio.to_thread(trainer.train_batch, random_batch(trainer.version), loss)
    began = time.perf_counter()
    update = await asyncio.to_thread(transport.snapshot, trainer)
    taken = time.perf_counter()
    stats = await transport.deliver(update, client)
    return Cost(
        snapshot_s=taken - began,
        deliver_s=time.perf_counter() - taken,
        pause_s=stats.pause_s,
        num_bytes=update.num_bytes,
    )


async def measure(args: argparse.Namespace, model: Path) -> dict[str, list[Cost]]:
    trainer = FSDPTrainEngine(model, TrainConfig(device=args.device))
    transports: dict[str, WeightTransport] = {
        "disk": DiskTransport(DiskWeightsConfig(), args.run_dir),
        "distributed": DistributedTransport(DistributedWeightsConfig()),
    }
    costs: dict[str, list[Cost]] = {}
    async with (
        servers(args, model) as addresses,
        RemoteInferenceEngine(addresses, ClientConfig(pause_mode=args.pause_mode)) as client,
    ):
        for name, transport in transports.items():
            async with requests(client, args.requests):
                found = [await publish(transport, trainer, client) for _ in range(WARM_UP + args.publishes)]
            costs[name] = found[WARM_UP:]
            transport.close()
    trainer.close()
    return costs


def milliseconds(values: Sequence[float]) -> str:
    best, middle, worst = (1000 * value for value in (min(values), median(values), max(values)))
    return f"{middle:.1f} ({best:.1f} to {worst:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description="Times of publishing weights, per transport.")
    parser.add_argument("--address", help="a server that runs already; needs --model")
    parser.add_argument("--model", type=Path, help="a model directory; the reference model if not given")
    parser.add_argument("--sglang-python", type=Path, help="a Python interpreter with SGLang, to start a server of it")
    parser.add_argument("--device", default="cpu", help="where to train")
    parser.add_argument("--pause-mode", default="in_place", choices=("in_place", "retract", "abort"))
    parser.add_argument("--requests", type=int, default=8, help="running at the server meanwhile")
    parser.add_argument("--publishes", type=int, default=20, help="for each transport")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/publish"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.address and not args.model:
        parser.error("--address needs --model: the model that the server serves")
    model = args.model or args.run_dir / "reference"
    if not model.is_dir():
        write_tiny_model(model, shape=REFERENCE)
    costs = asyncio.run(measure(args, model.absolute()))
    kind = args.address or ("stock SGLang" if args.sglang_python else "the embedded server")
    table = Table(title=f"{args.publishes} publishes to {kind}, {args.requests} requests running, {args.pause_mode}")
    for column in ("transport", "snapshot (ms)", "deliver (ms)", "pause (ms)", "total (ms)", "MB"):
        table.add_column(column, justify="left" if column == "transport" else "right")
    for name, found in costs.items():
        columns = ("snapshot_s", "deliver_s", "pause_s", "total_s")
        times = (milliseconds([getattr(cost, column) for cost in found]) for column in columns)
        table.add_row(name, *times, f"{found[-1].num_bytes / 1e6:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
