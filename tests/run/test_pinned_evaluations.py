"""Evaluations at a pinned version, and the best model: runs on embedded servers with real weights."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_script import TOKENIZER
from reference import Reference
from scripted_launch import small

from arl.api.engine import Sampler
from arl.api.types import Example, SamplingParams, Trajectory
from arl.api.workflow import RolloutWorkflow
from arl.engine.tiny import write_tiny_model
from arl.run.launch import launch
from arl.training.trainer import Trainer
from arl.workflow.conversation import Conversation

pytestmark = pytest.mark.runs
DATASET: Any = [{"number": n, "held_out": False} for n in range(64)]
HELD_OUT: Any = [{"number": n, "held_out": True} for n in range(3)]
STEPS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", ["Say a number"])


class Patient(RolloutWorkflow):
    """Between the two turns of a held-out episode, training goes on until the end of the run, or as far as it may."""

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead
        """How far training goes meanwhile from the evaluated version, if steps are left."""
        self.trained = {version: asyncio.Event() for version in range(1, STEPS + 1)}
        self.held_out: list[Trajectory] = []

    async def arun_episode(self, engine: Sampler, data: Example) -> Sequence[Trajectory]:
        chat = Conversation(TOKENIZER, [{"role": "user", "content": f"Say a number {data['number']}"}])
        sampling = SamplingParams(max_new_tokens=6, ignore_eos=True)
        turn = await chat.agenerate(engine, sampling)
        if not data["held_out"]:
            return chat.trajectories(float(turn.output_ids[0] % 2))
        assert turn.response is not None
        began = turn.response.output_versions[0]
        async with asyncio.timeout(30):
            await self.trained[min(began + self.ahead, STEPS)].wait()
        chat.add({"role": "user", "content": "Say a number"})
        await chat.agenerate(engine, sampling)
        made = chat.trajectories(float(began == STEPS))  # the last evaluation is the best
        self.held_out += made
        return made


async def evaluated(
    run_dir: Path, model: Path, ahead: int, transport: str = "disk", **evaluation: Any
) -> tuple[Trainer, list[Trajectory]]:
    """A whole run, evaluated after step 2 and at its end."""
    workflow = Patient(ahead)
    config = small(
        run_dir,
        model=str(model),
        steps=STEPS,
        engine={"kind": "local"},
        train={"optimizer": {"lr": 1e-2}, "lora": {"rank": 4, "alpha": 8} if transport == "adapter" else None},
        weights={"transport": transport},
        rollout={"max_staleness": 2},
        evaluation={"every": 2, **evaluation},
    )
    async with launch(config, workflow=workflow, dataset=DATASET, eval_dataset=HELD_OUT) as trainer:
        async for step in trainer:
            workflow.trained[step.version].set()
    return trainer, workflow.held_out


def versions(trajectories: Sequence[Trajectory]) -> list[set[int]]:
    return [set(one.versions[one.loss_mask].tolist()) for one in trajectories]


def largest_difference(model: Reference, trajectory: Trajectory) -> float:
    """Between the logprobs of its sampled tokens and those that the model gives them, in nats."""
    tokens, mask = trajectory.token_ids.tolist(), np.flatnonzero(trajectory.loss_mask)
    wanted = model.logprobs(tokens[:1], tokens[1:]).numpy()
    return float(abs(trajectory.behavior_logprobs[mask] - wanted[mask - 1]).max())


@pytest.mark.parametrize("transport", ["disk", "adapter"])
async def test_held_weights_stay_until_the_evaluation_ends_while_training_goes_on_and_the_best_model_is_theirs(
    model: Path, tmp_path: Path, transport: str
) -> None:
    trainer, held_out = await evaluated(tmp_path, model, 2, transport, hold_weights=True, keep_best="reward")
    found = versions(held_out)
    assert [len(one) for one in found] == [1] * len(found)
    assert (found[:3], found[-3:]) == ([{2}] * 3, [{STEPS}] * 3)
    assert all(one.metrics["at_version"] == 1.0 for one in trainer.evaluations.values())
    assert json.loads((tmp_path / "best" / "best.json").read_text())["version"] == STEPS
    best = Reference(tmp_path / "best")
    off = [largest_difference(best, one) for one in held_out]
    assert max(off[-3:]) < 1e-4
    assert min(off[:3]) > 1e-2, "version 2 is another model"
