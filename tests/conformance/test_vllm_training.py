"""Whole runs on stock vLLM: the math agent, through its own command line, on servers that the run starts."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest
from conformance.test_server_training import MAX_STALENESS, NUM_STEPS, SCRIPT, check_versions, rows
from servers import VLLM_PYTHON, vllm_python

from arl.observe.events.run_record import read_run

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        VLLM_PYTHON not in os.environ, reason="needs vLLM: make test-vllm"
    ),  # before the warm start of its model
]
OPTIONS = ["--dtype=float32", "--enforce-eager", "--max-model-len=1024"]


def train(model: Path, run_dir: Path, *settings: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    shutil.copytree(model, run_dir / "model")
    command = [
        sys.executable, str(SCRIPT), "--run_dir", str(run_dir), "--steps", str(NUM_STEPS),
        "--engine.kind", "vllm_processes", "--engine.python", vllm_python(), "--engine.gpus_per_server", "0",
        "--engine.arguments", str(OPTIONS).replace("'", '"'), *settings,
        "--rollout.batch_size", "4", "--rollout.group_size", "8", "--rollout.max_staleness", str(MAX_STALENESS),
        "--train.optimizer.total_steps", str(NUM_STEPS), "--num_held_out", "48", "--evaluation.every", "100",
        "--no-log.console",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_twenty_steps_raise_the_reward_within_the_bound_on_staleness(
    math_model: Path, tmp_path: Path, mode: str
) -> None:
    ended = train(math_model, tmp_path, "--engine.pause_mode", mode)
    assert ended.returncode == 0, ended.stderr[-3000:]
    steps = rows(tmp_path, "metrics")
    assert [step["version"] for step in steps] == list(range(1, NUM_STEPS + 1))
    assert 0 < max(step["staleness/max"] for step in steps) <= MAX_STALENESS
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


def test_a_server_that_keeps_a_part_of_its_old_weights_ends_the_run(math_model: Path, tmp_path: Path) -> None:
    ended = train(math_model, tmp_path, ARL_LEAVE_PACKED="1")
    assert ended.returncode != 0
    assert "does not compute with the weights of version" in ended.stderr
    assert "packs linear layers" in ended.stderr
    assert len(rows(tmp_path, "metrics")) < NUM_STEPS
