"""A whole run on a constrained workflow: servers, workers, buffer, checkpoint and trainer agree on what was sampled."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from arl.api.events import ServerWorked, TokensCounted
from arl.api.grammar import Grammar
from arl.api.settings.run import Config
from arl.api.types import SamplingParams, Trajectory
from arl.engine.tiny import TinyShape, tiny_tokenizer, write_tiny_model
from arl.observe.events.run_record import read_run
from arl.run.launch import launch
from arl.training.batch_codec import read_groups
from arl.workflow.agent import SingleTurnWorkflow

TOKENIZER = tiny_tokenizer()
SCHEMA = {
    "type": "object",
    "properties": {"digits": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 2, "maxItems": 4}},
    "required": ["digits"],
    "additionalProperties": False,
}


def mostly_ones(answer: str, data: Mapping[str, Any]) -> float:
    return answer.count("1") / 4


def config_of(run_dir: Path, model: Path, **settings: Any) -> Config:
    return Config.model_validate(
        {
            "model": str(model), "run_dir": run_dir, "log": {"console": False},
            "rollout": {"batch_size": 2, "group_size": 4, "max_staleness": 2, "extra_episodes": 2},
            "train": {"optimizer": {"lr": 1e-2}}, "checkpoint": {"every": 1},
            "algorithm": {"kl": {"coefficient": 0.01}},
            **settings,
        }
    )  # fmt: skip


@pytest.mark.runs
@pytest.mark.timeout(600)
async def test_ratios_of_constrained_tokens_are_1_and_a_resumed_run_has_their_sets(tmp_path: Path) -> None:
    """A trainer that computed them over the whole vocabulary would be wrong by several nats."""
    shape = TinyShape(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=2)
    model = write_tiny_model(tmp_path / "model", shape=shape)
    grammar = Grammar(kind="json_schema", text=json.dumps(SCHEMA))
    sampling = SamplingParams(max_new_tokens=200, temperature=0.7, grammar=grammar)
    workflow = SingleTurnWorkflow(TOKENIZER, mostly_ones, sampling=sampling)
    rows = [{"question": f"{n}"} for n in range(100)]
    seen: list[Any] = []
    for steps in (2, 3):
        config = config_of(tmp_path / "run", model, steps=steps)
        async with launch(config, workflow=workflow, dataset=rows) as trainer:
            seen += [step async for step in trainer]
            await trainer.inference_engine.pause()  # the servers say what they have generated
        check_tokens(tmp_path / "run")
        if steps == 2:
            newest = max((tmp_path / "run" / "checkpoints").glob("*/groups.npz"))
            with newest.open("rb") as file:
                waiting = [t for group in read_groups(file) for t in group.trajectories]
            assert waiting
            assert all(has_sets(trajectory) for trajectory in waiting)
    assert [step.version for step in seen] == [1, 2, 3]
    assert max(step.max_staleness_seen for step in seen) > 0
    of_current_version = [
        kl for step in seen if (kl := step.metrics.get("staleness_0/behavior_kl_proximal")) is not None
    ]
    assert of_current_version
    assert max(map(abs, of_current_version)) < 1e-8
    assert abs(seen[0].metrics["behavior_weight_max"] - 1) < 1e-4
    assert all(0 < step.metrics["entropy"] < 3 for step in seen)


def check_tokens(run_dir: Path) -> None:
    """What the server of this start says that it generated was received, or was asked for by requests that were cut."""
    run = read_run(run_dir)
    records = [record for number, record in run.system if number == max(run.lives)]
    worked = [record for record in records if isinstance(record, ServerWorked)][-1]
    counted = [record for record in records if isinstance(record, TokensCounted)]
    told = sum(sums.decoded + sums.begun for sums in worked.iterations)
    first, last = counted[0], counted[-1]
    assert last.received - first.received <= told <= last.asked - first.asked
    assert last.asked == last.received + last.unreceived
    assert last.unanswered > 0
    assert json.loads((run_dir / "tokens.json").read_text())["asked"] == last.asked


def has_sets(trajectory: Trajectory) -> bool:
    return trajectory.kept_ids is not None and bool((trajectory.kept_ids.index[trajectory.loss_mask] >= 0).all())
