"""A whole run of a mixture of experts: servers, buffer, checkpoint and trainer agree on who computed each token."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from mixtures import SHAPE

from arl.api.settings.run import Config
from arl.api.types import SamplingParams
from arl.engine.tiny import tiny_tokenizer, write_tiny_model
from arl.run.launch import launch
from arl.training.batch_codec import read_groups
from arl.workflow.agent import SingleTurnWorkflow


def vowels(answer: str, data: Mapping[str, Any]) -> float:
    return sum(answer.count(vowel) for vowel in "aeiou") / 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("mixture") / "model", shape=SHAPE, family="qwen3_moe")


async def run(model: Path, run_dir: Path, steps: int, max_staleness: int = 2, **settings: Any) -> list[Any]:
    config = Config.model_validate(
        {
            "model": str(model), "run_dir": run_dir, "log": {"console": False}, "steps": steps,
            "rollout": {"batch_size": 2, "group_size": 4, "max_staleness": max_staleness},
            "train": {"optimizer": {"lr": 1e-2}}, "checkpoint": {"every": 1},
            **settings,
        }
    )  # fmt: skip
    workflow = SingleTurnWorkflow(tiny_tokenizer(), vowels, sampling=SamplingParams(max_new_tokens=40))
    async with launch(config, workflow=workflow, dataset=[{"question": f"{n}"} for n in range(100)]) as trainer:
        return [step async for step in trainer]


def kls(steps: list[Any]) -> list[float]:
    """Of tokens that the weights of the moment sampled."""
    return [abs(kl) for step in steps if (kl := step.metrics.get("staleness_0/behavior_kl_proximal")) is not None]


@pytest.mark.runs
@pytest.mark.timeout(600)
async def test_groups_in_a_checkpoint_have_their_routes_and_a_resumed_run_trains_them(
    model: Path, tmp_path: Path
) -> None:
    steps = await run(model, tmp_path / "run", 2)
    newest = max((tmp_path / "run" / "checkpoints").glob("*/groups.npz"))
    with newest.open("rb") as file:
        waiting = [t for group in read_groups(file) for t in group.trajectories]
    assert waiting
    for trajectory in waiting:
        assert trajectory.routes is not None
        assert trajectory.routes.is_known[:-1].all()
    steps += await run(model, tmp_path / "run", 3)
    assert [step.version for step in steps] == [1, 2, 3]
    assert max(kls(steps)) < 1e-8


@pytest.mark.runs
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["disk", "distributed"])
async def test_servers_get_the_trained_experts_and_ratios_are_1(model: Path, tmp_path: Path, transport: str) -> None:
    """Files have experts apart, and the trainer has them in one tensor."""
    steps = await run(model, tmp_path / "run", 3, max_staleness=0, weights={"transport": transport})
    gaps = [abs(step.metrics["behavior_kl_proximal"]) for step in steps]
    assert len(gaps) == 3
    assert max(gaps) < 1e-8
