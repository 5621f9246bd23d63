"""Whole runs on stock servers: the math agent, through its own command line, and a mixture of experts."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import aiohttp
import numpy as np
import pytest
from protocol_client import Client
from servers import PYTHONS, Server, python_of

from arl.api.settings.run import Config
from arl.api.types import SamplingParams
from arl.engine.tiny import tiny_tokenizer
from arl.observe.events.run_record import read_run
from arl.run.launch import launch
from arl.workflow.agent import SingleTurnWorkflow

SCRIPT = Path(__file__).parents[2] / "examples" / "agents" / "math_agent.py"
NUM_STEPS, MAX_STALENESS = 20, 2
VLLM_OPTIONS = ["--dtype=float32", "--enforce-eager", "--max-model-len=1024"]
ON_VLLM = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        PYTHONS["vllm"] not in os.environ, reason="needs vLLM: make test-vllm"
    ),  # before the warm start of its model
]
ON_SGLANG = [pytest.mark.sglang, pytest.mark.timeout(600)]


def train(model: Path, run_dir: Path, *settings: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    shutil.copytree(model, run_dir / "model")
    command = [
        sys.executable, str(SCRIPT), "--run_dir", str(run_dir), "--steps", str(NUM_STEPS), *settings,
        "--rollout.batch_size", "4", "--rollout.group_size", "8", "--rollout.max_staleness", str(MAX_STALENESS),
        "--train.optimizer.total_steps", str(NUM_STEPS), "--num_held_out", "48", "--evaluation.every", "100",
        "--no-log.console",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def train_on_vllm(model: Path, run_dir: Path, mode: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    own = (
        "--engine.kind", "vllm_processes", "--engine.python", python_of("vllm"), "--engine.gpus_per_server", "0",
        "--engine.arguments", str(VLLM_OPTIONS).replace("'", '"'), "--engine.pause_mode", mode,
    )  # fmt: skip
    return train(model, run_dir, *own, HF_HUB_OFFLINE="1", **variables)


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


def check_run(run_dir: Path) -> None:
    """Twenty steps have raised the reward within the bound on staleness."""
    steps = rows(run_dir, "metrics")
    assert [step["version"] for step in steps] == list(range(1, NUM_STEPS + 1))
    assert 0 < max(step["staleness/max"] for step in steps) <= MAX_STALENESS
    rewards = [step["reward"] for step in steps]
    assert mean(rewards[-5:]) > mean(rewards[:5]) - 0.1
    # The first batch is of the trainer's own weights: its ratio is 1, or server and trainer disagree on logprobs.
    assert steps[0]["staleness/max"] == 0
    assert abs(steps[0]["behavior_weight_max"] - 1) < 1e-3
    run = read_run(run_dir)
    trained = [(tokens, episode.step) for episode in run.episodes if episode.step for tokens in run.tokens(episode)]
    seen = [check_versions(tokens.columns, version) for tokens, version in trained]
    assert len(seen) == NUM_STEPS * 32
    assert len(set.union(*seen)) > NUM_STEPS / 2


@pytest.mark.parametrize("server", [pytest.param("sglang-math", marks=ON_SGLANG)], indirect=True)
@pytest.mark.parametrize("transport", ["disk", "distributed"])
async def test_twenty_steps_on_sglang(server: Server, math_model: Path, tmp_path: Path, transport: str) -> None:
    async with aiohttp.ClientSession(server.url) as session:
        client = Client(session)
        reset = {"model_path": str(math_model), "weight_version": "default"}
        assert (await client.post("/update_weights_from_disk", reset)).body["success"]
        own = ("--engine.kind", "sglang", "--engine.addresses", server.url, "--weights.transport", transport)
        ended = train(math_model, tmp_path, *own)
        assert ended.returncode == 0, ended.stderr[-3000:]
        assert (await client.get("/model_info")).body["weight_version"] == str(NUM_STEPS)
    check_run(tmp_path)


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=ON_VLLM) for mode in ("in_place", "retract")])
def test_twenty_steps_on_vllm(math_model: Path, tmp_path: Path, mode: str) -> None:
    ended = train_on_vllm(math_model, tmp_path, mode)
    assert ended.returncode == 0, ended.stderr[-3000:]
    check_run(tmp_path)


@pytest.mark.parametrize("mode", [pytest.param("in_place", marks=ON_VLLM)])
def test_a_server_that_keeps_a_part_of_its_old_weights_ends_the_run(
    math_model: Path, tmp_path: Path, mode: str
) -> None:
    ended = train_on_vllm(math_model, tmp_path, mode, ARL_LEAVE_PACKED="1")
    assert ended.returncode != 0
    assert "does not compute with the weights of version" in ended.stderr
    assert "packs linear layers" in ended.stderr
    assert len(rows(tmp_path, "metrics")) < NUM_STEPS


def vowels(answer: str, data: Mapping[str, Any]) -> float:
    return sum(answer.count(vowel) for vowel in "aeiou") / 10


@pytest.mark.parametrize("server", [pytest.param("sglang-mixture", marks=ON_SGLANG)], indirect=True)
@pytest.mark.parametrize("transport", ["disk", "distributed"])
async def test_ratios_of_a_mixture_are_1_after_each_update(
    server: Server, mixture_model: Path, tmp_path: Path, transport: str
) -> None:
    """The trainer uses the server's experts."""
    num_steps = 4
    config = Config.model_validate(
        {
            "model": str(mixture_model), "run_dir": tmp_path, "log": {"console": False}, "steps": num_steps,
            "engine": {"kind": "sglang", "addresses": [server.url]}, "weights": {"transport": transport},
            "rollout": {"batch_size": 4, "group_size": 4, "max_staleness": 0}, "train": {"optimizer": {"lr": 1e-2}},
        }
    )  # fmt: skip
    workflow = SingleTurnWorkflow(tiny_tokenizer(), vowels, sampling=SamplingParams(max_new_tokens=40))
    async with aiohttp.ClientSession(server.url) as session:
        client = Client(session)
        reset = {"model_path": str(mixture_model), "weight_version": "default"}
        assert (await client.post("/update_weights_from_disk", reset)).body["success"]
        async with launch(config, workflow=workflow, dataset=[{"question": f"{n}"} for n in range(100)]) as trainer:
            steps = [step async for step in trainer]
        assert (await client.get("/model_info")).body["weight_version"] == str(num_steps)
        assert (await client.post("/update_weights_from_disk", reset)).body["success"]
    gaps = [abs(step.metrics["behavior_kl_proximal"]) for step in steps]
    assert len(gaps) == num_steps
    assert max(gaps) < 1e-8
