"""The math agent trains on stock SGLang, through its own command line."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import aiohttp
import numpy as np
import pytest
from protocol_client import Client
from servers import Server

from arl.observe.events.run_record import read_run

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parents[2] / "examples" / "agents" / "math_agent.py"
NUM_STEPS, MAX_STALENESS = 20, 2


def train(server: Server, run_dir: Path, transport: str) -> None:
    command = [
        sys.executable, str(SCRIPT), "--run_dir", str(run_dir), "--steps", str(NUM_STEPS),
        "--engine.kind", "sglang", "--engine.addresses", server.url, "--weights.transport", transport,
        "--rollout.batch_size", "4", "--rollout.group_size", "8", "--rollout.max_staleness", str(MAX_STALENESS),
        "--train.optimizer.total_steps", str(NUM_STEPS), "--num_held_out", "48", "--evaluation.every", "100",
        "--no-log.console",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]


def rows(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / f"{name}.jsonl").read_text().splitlines()]


def check_versions(columns: dict[str, np.ndarray], version: int) -> set[int]:
    """The versions of a trajectory's sampled tokens, which lie within the bound for the step that made `version`."""
    sampled = columns["versions"][columns["loss_mask"]].tolist()
    assert (columns["versions"][~columns["loss_mask"]] == -1).all()
    assert sampled == sorted(sampled)
    trained_at = version - 1
    assert trained_at - MAX_STALENESS <= sampled[0] <= sampled[-1] <= trained_at
    return set(sampled)


@pytest.mark.parametrize("server", ["sglang-math"], indirect=True)
@pytest.mark.parametrize("transport", ["disk", "distributed"])
async def test_twenty_steps_raise_the_reward_within_the_bound_on_staleness(
    server: Server, math_model: Path, tmp_path: Path, transport: str
) -> None:
    async with aiohttp.ClientSession(server.url) as session:
        client = Client(session)
        reset = {"model_path": str(math_model), "weight_version": "default"}
        assert (await client.post("/update_weights_from_disk", reset)).body["success"]
        shutil.copytree(math_model, tmp_path / "model")
        train(server, tmp_path, transport)
        assert (await client.get("/model_info")).body["weight_version"] == str(NUM_STEPS)
    steps = rows(tmp_path, "metrics")
    assert [step["version"] for step in steps] == list(range(1, NUM_STEPS + 1))
    assert max(step["staleness/max"] for step in steps) <= MAX_STALENESS
    assert max(step["staleness/max"] for step in steps) > 0
    rewards = [step["reward"] for step in steps]
    assert mean(rewards[-5:]) > mean(rewards[:5]) - 0.1
    # The first batch is of the trainer's own weights: its ratio is 1, or server and trainer disagree on logprobs.
    assert steps[0]["staleness/max"] == 0
    assert abs(steps[0]["behavior_weight_max"] - 1) < 1e-3
    run = read_run(tmp_path)
    trained = [(tokens, episode.step) for episode in run.episodes if episode.step for tokens in run.tokens(episode)]
    seen = [check_versions(tokens.columns, version) for tokens, version in trained]
    assert len(seen) == NUM_STEPS * 32
    assert len(set.union(*seen)) > NUM_STEPS / 2
