"""Routes of a mixture of experts on each kind of server: the experts that the model's routers choose, for every token
but the last, also after new weights; and sampler and trainer agree with them."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mixtures import load_mixture, own_routes, write_mixture
from servers import Server

from arl.api.engine import DiskWeights
from arl.api.routed_experts import Routes
from arl.api.settings.engines import TrainConfig
from arl.api.train_engine import TrainSequence
from arl.api.types import ModelRequest, ModelResponse, SamplingParams
from arl.engine.client.remote_engine import RemoteInferenceEngine
from arl.engine.fsdp.train_engine import FSDPTrainEngine
from arl.engine.model_files import served_model

pytestmark = pytest.mark.parametrize(
    "server",
    [
        "embedded-mixture",
        pytest.param("sglang-mixture", marks=pytest.mark.sglang),
    ],
    indirect=True,
)
SAMPLING = SamplingParams(max_new_tokens=30, ignore_eos=True)
GREEDY = replace(SAMPLING, temperature=0.0)  # SGLang heeds no seeds on a CPU, and rounding depends on the tokens
PROMPTS = [list(range(40))] * 4 + [[*range(40), 5], [*range(100, 200)]]


async def answers(engine: RemoteInferenceEngine, sampling: SamplingParams = SAMPLING) -> list[ModelResponse]:
    seeded = [replace(sampling, seed=seed) for seed in range(len(PROMPTS))]
    requests = [ModelRequest(input_ids=p, sampling=each) for p, each in zip(PROMPTS, seeded, strict=True)]
    return list(await asyncio.gather(*map(engine.agenerate, requests)))


def in_order(routes: Routes | None) -> np.ndarray:
    """The experts of each known token, ascending."""
    assert routes is not None
    return np.sort(routes.experts, axis=-1)


def check(model: Any, prompts: Sequence[Sequence[int]], said: Sequence[ModelResponse]) -> None:
    for prompt, response in zip(prompts, said, strict=True):
        own = own_routes(model, torch.tensor([*prompt, *response.output_ids]))
        assert response.routes is not None
        num_known = len(response.routes) - 1
        assert response.routes.is_known.tolist() == [True] * num_known + [False]
        assert (in_order(response.routes) == in_order(own)[:-1]).all()


def largest_gap(directory: Path, said: Sequence[ModelResponse], *, replays: bool) -> float:
    engine = FSDPTrainEngine(directory, TrainConfig())
    gap = 0.0
    for prompt, response in zip(PROMPTS, said, strict=True):
        token_ids = torch.tensor([*prompt, *response.output_ids])
        mask = torch.arange(len(token_ids)) >= len(prompt)
        sequence = TrainSequence(token_ids=token_ids, loss_mask=mask, routes=response.routes if replays else None)
        row = engine.forward([sequence])[0][mask]
        gap = max(gap, (row - torch.tensor(response.output_logprobs)).abs().max().item())
    engine.close()
    return gap


async def test_routes_are_those_of_the_weights_that_sampled_and_the_trainer_agrees(
    server: Server, mixture_model: Path, tmp_path: Path
) -> None:
    """Then other weights are loaded, whose experts files hold apart and the trainer in one tensor."""
    model = served_model(mixture_model, replay_routing=True)
    async with RemoteInferenceEngine([server.url], server.config(), model=model) as engine:
        said = await answers(engine)
        check(load_mixture(mixture_model), PROMPTS, said)
        compared = [await answers(engine, GREEDY), *([said] if server.kind == "embedded" else [])]
        for these, replays in product(compared, (True, False)):
            assert largest_gap(mixture_model, these, replays=replays) < 1e-5
        longer = [*PROMPTS[0], *said[0].output_ids, 7, 8]
        request = ModelRequest(input_ids=longer, sampling=SAMPLING, routes_from=len(longer) - 3)
        rest = (await engine.agenerate(request)).routes
        assert rest is not None
        assert rest.is_known.tolist() == [False] * (len(longer) - 3) + [True] * 32 + [False]
        other = write_mixture(tmp_path / "other", "qwen3_moe", seed=1)
        trainer = FSDPTrainEngine(other, TrainConfig())
        trainer.export(tmp_path / "exported")
        trainer.close()
        await engine.update_weights(DiskWeights(version=1, directory=tmp_path / "exported"))
        said = await answers(engine)
        check(load_mixture(other), PROMPTS, said)
        assert {version for response in said for version in response.output_versions} == {1}
        for these in (await answers(engine, GREEDY), *([said] if server.kind == "embedded" else [])):
            assert largest_gap(other, these, replays=True) < 1e-5
        await engine.update_weights(DiskWeights(version=2, directory=mixture_model))


async def test_a_response_that_pauses_cut_has_a_route_for_each_token_but_the_last(
    server: Server, mixture_model: Path
) -> None:
    model = served_model(mixture_model, replay_routing=True)
    async with RemoteInferenceEngine([server.url], server.config(pause_mode="abort"), model=model) as engine:
        calls = asyncio.ensure_future(answers(engine))
        for _ in range(10):  # where pauses fall is the server's to say
            await engine.pause()
            await engine.resume()
        said = await calls
    assert max(response.sends for response in said) > 1
    check(load_mixture(mixture_model), PROMPTS, said)
