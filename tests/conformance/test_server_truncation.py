"""Truncated sampling on either server: each token says among what it was sampled, and sampler and trainer agree."""

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from conformance.conftest import Models
from records import grouped
from servers import Server

from arl.algorithm.batch import Batch
from arl.api.engine_config import ClientConfig, TrainConfig
from arl.api.types import NOT_SAMPLED, ModelRequest, ModelResponse, SamplingParams, Trajectory
from arl.engine.client.sglang import RemoteSGLangEngine
from arl.engine.fsdp.train_engine import FSDPTrainEngine

PROMPT = list(range(40, 60))
GRID = [
    SamplingParams(max_new_tokens=30, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, ignore_eos=True)
    for temperature, top_p, top_k, min_p in itertools.product(
        (0.3, 1.0, 2.0), (1.0, 0.95, 0.4), (-1, 1, 5, 200), (0.0, 0.05)
    )
]


def trajectory_of(response: ModelResponse, prompt: Sequence[int] = PROMPT) -> Trajectory:
    n, m = len(prompt), len(response.output_ids)
    kept = response.kept_ids
    return Trajectory(
        token_ids=[*prompt, *response.output_ids],
        loss_mask=[0] * n + [1] * m,
        behavior_logprobs=[0.0] * n + list(response.output_logprobs),
        versions=[NOT_SAMPLED] * n + list(response.output_versions),
        reward=0.0,
        temperature=response.temperature,
        kept_ids=kept and kept.joined([n, kept]),
    )


def trained_logprobs(directory: Path, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
    engine = FSDPTrainEngine(directory, TrainConfig())
    try:
        rows = engine.forward(Batch.of([grouped(*trajectories)]).sequences())
    finally:
        engine.close()
    return [row.numpy()[t.loss_mask] for row, t in zip(rows, trajectories, strict=True)]


async def responses(server: Server, params: Sequence[SamplingParams], **config: Any) -> list[ModelResponse]:
    """All at once, so that rows of different settings share a batch."""
    async with RemoteSGLangEngine([server.url], ClientConfig(request_timeout_s=60.0, **config)) as engine:
        asked = (engine.agenerate(ModelRequest(input_ids=PROMPT, sampling=sampling)) for sampling in params)
        return await asyncio.gather(*asked)


async def test_sampler_and_trainer_agree_for_any_sampling_settings(server: Server, models: Models) -> None:
    made = await responses(server, GRID)
    trained = await asyncio.to_thread(trained_logprobs, models.directory_a, [trajectory_of(r) for r in made])
    for sampling, response, wanted in zip(GRID, made, trained, strict=True):
        close = 1e-5 / min(1.0, sampling.temperature)  # a low temperature multiplies the rounding of logits
        np.testing.assert_allclose(response.output_logprobs, wanted, atol=close, rtol=0, err_msg=str(sampling))
        assert (response.kept_ids is not None) == sampling.is_filtered
