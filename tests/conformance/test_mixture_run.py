"""A whole run of a mixture of experts on stock SGLang: after each update the trainer uses the server's experts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from protocol_client import Client
from servers import Server

from arl.api.settings.run import Config
from arl.api.types import SamplingParams
from arl.engine.tiny import tiny_tokenizer
from arl.run.launch import launch
from arl.workflow.agent import SingleTurnWorkflow

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]
NUM_STEPS = 4


def vowels(answer: str, data: Mapping[str, Any]) -> float:
    return sum(answer.count(vowel) for vowel in "aeiou") / 10


@pytest.mark.parametrize("server", ["sglang-mixture"], indirect=True)
@pytest.mark.parametrize("transport", ["disk", "distributed"])
async def test_ratios_are_1_after_each_update(
    server: Server, mixture_model: Path, tmp_path: Path, transport: str
) -> None:
    config = Config.model_validate(
        {
            "model": str(mixture_model), "run_dir": tmp_path, "log": {"console": False}, "steps": NUM_STEPS,
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
        assert (await client.get("/model_info")).body["weight_version"] == str(NUM_STEPS)
        assert (await client.post("/update_weights_from_disk", reset)).body["success"]
    gaps = [abs(step.metrics["behavior_kl_proximal"]) for step in steps]
    assert len(gaps) == NUM_STEPS
    assert max(gaps) < 1e-8
