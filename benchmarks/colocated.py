"""What taking turns costs (engine.colocated): memory that the server lets go of, and seconds of each part of a turn.

    python benchmarks/colocated.py --hidden_size 512 --num_layers 12 --steps 5

It trains a Qwen3 of random weights over one embedded server, both on `--device`, and prints what is in memory in each
phase. On a CPU the server's memory is that of its process (anonymous pages), and the trainer has nothing to move.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path

import arl
from arl.api.settings.run import Config
from arl.engine.tiny import TinyShape, tiny_tokenizer, write_tiny_model
from arl.training.metrics_log import read_jsonl


class Speaking(arl.RolloutWorkflow):
    """Answers of a fixed length; the reward is arbitrary."""

    tokenizer = tiny_tokenizer()

    async def arun_episode(self, engine: arl.Sampler, data: arl.Example) -> list[arl.Trajectory]:
        chat = arl.Conversation(self.tokenizer, [{"role": "user", "content": f"Say {data['number']}"}])
        await chat.agenerate(engine, arl.SamplingParams(max_new_tokens=64, ignore_eos=True))
        return list(chat.trajectories(reward=float(data["number"] % 2)))


def resident_mb(pid: int) -> float:
    """The anonymous memory of a process, in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024 / 1e6


def state_of(address: str) -> dict[str, object]:
    with urllib.request.urlopen(f"{address}/server_info", timeout=30) as answer:
        return json.loads(answer.read())["internal_states"][0]


async def sample(address: str, pid: int, awake: list[float], asleep: list[float]) -> None:
    while True:
        state = await asyncio.to_thread(state_of, address)
        now = await asyncio.to_thread(resident_mb, pid)
        after = await asyncio.to_thread(state_of, address)
        if state["released"] == after["released"]:
            (asleep if state["released"] else awake).append(now)
        await asyncio.sleep(0.01)


def measure(args: argparse.Namespace, directory: Path) -> None:
    shape = TinyShape(
        hidden_size=args.hidden_size, intermediate_size=4 * args.hidden_size, num_layers=args.num_layers,
        num_heads=args.hidden_size // 64, num_kv_heads=args.hidden_size // 64, head_dim=64,
    )  # fmt: skip
    model = write_tiny_model(directory / "model", shape=shape)
    command = [sys.executable, "-m", "arl.engine.local", "--model", str(model), "--device", args.device]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = f"http://127.0.0.1:{json.loads(server.stdout.readline())['port']}"
            config = Config.model_validate(
                {
                    "model": str(model),
                    "run_dir": directory / "run",
                    "steps": args.steps,
                    "engine": {"kind": "sglang", "addresses": [address], "colocated": True},
                    "rollout": {"batch_size": 4, "group_size": 4, "max_staleness": 1},
                    "train": {"device": args.device},
                    "log": {"console": False},
                }
            )
            awake, asleep = list[float](), list[float]()
            asyncio.run(train(config, partial(sample, address, server.pid, awake, asleep)))
            report(read_jsonl(config.run_dir / "metrics.jsonl"), awake, asleep, model)
        finally:
            server.terminate()


async def train(config: Config, sampling: Callable[[], Coroutine[None, None, None]]) -> None:
    examples = [{"number": n} for n in range(999)]
    async with arl.launch(config, workflow=Speaking(), dataset=examples) as trainer:
        task = asyncio.create_task(sampling())
        async for _ in trainer:
            pass
        task.cancel()


def report(rows: list[dict[str, float]], awake: list[float], asleep: list[float], model: Path) -> None:
    size = sum(file.stat().st_size for file in model.glob("*.safetensors")) / 1e6
    say(f"model: {size:.0f} MB")
    say(f"server's memory while it generates: {statistics.median(awake):.0f} MB (median of {len(awake)} samples)")
    say(f"server's memory while it sleeps: {statistics.median(asleep):.0f} MB ({len(asleep)} samples)")
    for name in ("turns/release_s", "turns/onload_s", "turns/offload_s", "turns/resume_s", "weights/pause_s"):
        values = [row[name] for row in rows]
        say(f"{name}: {statistics.median(values):.3f} s ({min(values):.3f} to {max(values):.3f})")
    say(f"time/train_s: {statistics.median(row['time/train_s'] for row in rows):.2f} s")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden_size", type=int, default=512)
    parser.add_argument("--num_layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        measure(args, Path(directory))


if __name__ == "__main__":
    main()
