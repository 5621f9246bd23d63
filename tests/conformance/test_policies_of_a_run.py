"""Two policies on servers that run already: each role is answered by what the trainer of its policy published last."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.conftest import Models
from embedded_server import server_process
from reference import Reference
from servers import Server

from arl.api.engine import Sampler
from arl.api.settings.run import Config
from arl.api.types import Example, ModelRequest, ModelResponse, SamplingParams, Trajectory
from arl.api.workflow import RolloutWorkflow
from arl.engine.tiny import tiny_tokenizer
from arl.run.launch import launch
from arl.workflow.conversation import Conversation

pytestmark = pytest.mark.usefixtures("client")  # the server begins with the model, and ends with it

PROMPT = (5, 6, 7)
POLICIES = {"author": "writer", "critic": "reader"}
SAMPLING = SamplingParams(max_new_tokens=16, ignore_eos=True)
STEPS = 3


class EvenOrOdd(RolloutWorkflow):
    """The author is rewarded for even tokens, the critic for odd ones, so that both learn from almost every group."""

    declared_roles = frozenset(POLICIES)

    async def arun_episode(self, engine: Sampler, data: Example) -> list[Trajectory]:
        made: list[Trajectory] = []
        for parity, role in enumerate(POLICIES):
            chat = Conversation(tiny_tokenizer(), [{"role": "user", "content": f"{data['number']}"}], role=role)
            turn = await chat.agenerate(engine, SamplingParams(max_new_tokens=6, ignore_eos=True))
            made += chat.trajectories(float(sum(token % 2 == parity for token in turn.output_ids)))
        return made


def settings(server: Server, models: Models, run_dir: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": str(models.directory_a),
        "run_dir": run_dir,
        "steps": STEPS,
        "engine": {"kind": "sglang", "addresses": [server.url]},
        "policies": {policy: {"roles": [role]} for role, policy in POLICIES.items()},
        "rollout": {"batch_size": 2, "group_size": 4, "max_staleness": 0},
        "log": {"console": False},
        **changes,
    }


def distance(reference: Reference, answer: ModelResponse) -> float:
    """The largest difference of a token's logprobs."""
    wanted = reference.logprobs(PROMPT, answer.output_ids)
    return float((wanted - torch.tensor(answer.output_logprobs)).abs().max())


async def check_run(given: dict[str, Any], models: Models, exported: Path) -> None:
    """Train; each step's tokens, and answers afterwards, have the logprobs of their role's trainer, and of no other."""
    async with launch(
        Config.model_validate(given), workflow=EvenOrOdd(), dataset=[{"number": n} for n in range(9)]
    ) as run:
        async for step in run:
            for policy in POLICIES.values():
                assert step.metrics[f"policies/{policy}/behavior_weight_max"] == pytest.approx(1.0, abs=1e-3)
        await run.export(exported)
        trained = {role: Reference(exported / policy) for role, policy in POLICIES.items()}
        for role in trained:
            request = ModelRequest(input_ids=PROMPT, role=role, sampling=SAMPLING)
            answer = await run.inference_engine.agenerate(request)
            assert set(answer.output_versions) == {STEPS}
            apart = {name: distance(one, answer) for name, one in {**trained, "untrained": models.a}.items()}
            assert apart.pop(role) < 2e-4 < 1e-2 < min(apart.values()), f"{role} is answered by another model: {apart}"


@pytest.mark.parametrize(
    "server",
    [pytest.param("embedded", marks=pytest.mark.runs), pytest.param("sglang", marks=pytest.mark.sglang)],
    indirect=True,
)
async def test_each_policys_weights_go_to_its_own_servers(server: Server, models: Models, tmp_path: Path) -> None:
    with server_process(str(models.directory_b)) as other:
        given = settings(server, models, tmp_path / "run", train={"optimizer": {"lr": 1e-2}})
        given["policies"]["reader"] |= {"model": str(models.directory_b), "addresses": [other.address]}
        await check_run(given, models, tmp_path / "exported")


@pytest.mark.parametrize(
    "server",
    [pytest.param("embedded", marks=pytest.mark.runs), pytest.param("sglang-lora", marks=pytest.mark.sglang)],
    indirect=True,
)
async def test_policies_are_adapters_beside_each_other(server: Server, models: Models, tmp_path: Path) -> None:
    train = {"optimizer": {"lr": 1e-2}, "lora": {"rank": 4, "alpha": 8}}
    given = settings(server, models, tmp_path / "run", train=train, weights={"transport": "adapter"})
    await check_run(given, models, tmp_path / "exported")
