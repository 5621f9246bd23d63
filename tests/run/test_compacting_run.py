"""A whole run of an agent whose task does not fit into its context, on the embedded server and in a worker process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import arl
from arl.api.errors import ConfigError
from arl.api.settings.algorithm import preset
from arl.engine.tiny import TinyShape, tiny_tokenizer, write_tiny_model
from arl.rewards import InlineReward
from arl.run.engines import _check_room
from arl.run.inputs import RunTask
from arl.workflow.agent import MultiTurnWorkflow
from arl.workflow.compacting import Compaction

ROOM, TURNS = 256, 8
MORE = "And then? " * 6


def vowels(answer: str, data: Mapping[str, Any]) -> float:
    return sum(answer.count(vowel) for vowel in "aeiou") / 10


async def more(answer: str, data: Mapping[str, Any], attempt: int) -> str:
    return MORE


def storyteller(context_length: int = ROOM) -> MultiTurnWorkflow:
    return MultiTurnWorkflow(
        tiny_tokenizer(),
        InlineReward(vowels),
        sampling=arl.SamplingParams(max_new_tokens=8),
        feedback=more,
        max_turns=TURNS,
        compaction=Compaction(context_length=context_length, summary_tokens=8, instruction="Sum up."),
    )


@pytest.mark.runs
def test_every_context_fits_and_the_trainer_recomputes_the_samplers_logprobs(tmp_path: Path) -> None:
    shape = TinyShape(hidden_size=32, num_layers=1, head_dim=8, context_length=ROOM)
    model = write_tiny_model(tmp_path / "model", shape=shape)
    config = {"model": str(model), "rollout": {"num_workers": 1}, "log": {"console": False}}
    rows = arl.train(
        workflow=storyteller(),
        dataset=[{"question": f"Tell {n}"} for n in range(20)],
        steps=2,
        batch_size=2,
        group_size=4,
        max_staleness=0,
        lr=1e-3,
        run_dir=tmp_path / "run",
        algorithm=preset("decoupled_ppo"),
        config=arl.Config.model_validate(config),
    ).metrics
    assert TURNS * len(MORE) > 1.5 * ROOM
    assert len(rows) == 2
    for row in rows:
        assert (row["episode/turns"], row["episode/context_full"]) == (TURNS, 0)
        assert row["branches"] == row["episode/compactions"] >= 2
        assert row["length/tokens_max"] <= ROOM
        assert row["behavior_weight_max"] == pytest.approx(1.0, abs=1e-4)
        assert abs(row["behavior_kl_proximal"]) < 1e-6


def test_a_compaction_for_a_longer_context_than_there_is_ends_the_start() -> None:
    task = RunTask(workflow=storyteller(300), dataset=[{}], eval_dataset=None)
    with pytest.raises(ConfigError, match=r"compaction\.context_length is 300, and .* room for 256 tokens together"):
        _check_room(arl.Config.model_validate({"model": "m"}), task, ROOM)
