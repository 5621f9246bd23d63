"""A whole run of PRIME: the policy learns, and the reward model beside it; a continued run has both."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from arl.api.settings.run import Config
from arl.api.types import SamplingParams
from arl.engine.tiny import tiny_tokenizer, write_tiny_model
from arl.run.launch import launch
from arl.workflow.agent import SingleTurnWorkflow


def has_an_a(answer: str, data: Mapping[str, Any]) -> float:
    return float("a" in answer)


async def run(model: Path, run_dir: Path, steps: int) -> list[Any]:
    config = Config.model_validate(
        {
            "model": str(model), "run_dir": run_dir, "log": {"console": False}, "steps": steps, "seed": 2,
            "rollout": {"batch_size": 8, "group_size": 4, "max_staleness": 0, "seed_requests": True},
            "train": {"optimizer": {"lr": 1e-3}},
            "algorithm": {
                "preset": "prime", "minibatches": 2, "reward_model": {"lr": 3e-3, "beta": 0.3, "update": "before"}
            },
        }
    )  # fmt: skip
    workflow = SingleTurnWorkflow(tiny_tokenizer(), has_an_a, sampling=SamplingParams(max_new_tokens=12))
    async with launch(config, workflow=workflow, dataset=[{"question": f"{n}"} for n in range(100)]) as trainer:
        return [step async for step in trainer]


@pytest.mark.runs
@pytest.mark.timeout(600)
async def test_the_policy_learns_and_the_reward_model_says_rightly_who_wins_also_after_a_pause(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    steps = await run(model, tmp_path / "run", 8)
    steps += await run(model, tmp_path / "run", 16)
    assert [step.version for step in steps] == list(range(1, 17))
    said = [step.metrics["reward_model/accuracy"] for step in steps]
    rewards = [step.reward for step in steps]
    assert fmean(said[-3:]) > 0.8 > fmean(said[:3])
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + 0.1
