"""Constrained requests on either server: sampler and trainer agree, and what cannot be honoured is refused."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from conformance.conftest import Models
from protocol_client import Client
from records import grouped
from servers import Server

from arl.algorithm.batch import Batch
from arl.api.engine_config import ClientConfig, PauseMode, TrainConfig
from arl.api.errors import ServerError
from arl.api.grammar import Grammar
from arl.api.types import NOT_SAMPLED, ModelRequest, ModelResponse, SamplingParams, Trajectory
from arl.engine.client.sglang import RemoteSGLangEngine
from arl.engine.fsdp.train_engine import FSDPTrainEngine

PROMPT = list(range(40, 60))
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "is_old": {"type": "boolean"}},
    "required": ["name", "is_old"],
}
NUMBER = {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "[0-9]+"}, "end": "</a>"}
GRAMMARS = [
    Grammar(kind="regex", text="[a-f]{4}(xy)?"),
    Grammar(kind="json_schema", text=json.dumps(PERSON)),
    Grammar(kind="structural_tag", text=json.dumps({"type": "structural_tag", "format": NUMBER})),
]


def trajectory_of(response: ModelResponse) -> Trajectory:
    n, m = len(PROMPT), len(response.output_ids)
    assert response.kept_ids is not None
    return Trajectory(
        token_ids=[*PROMPT, *response.output_ids],
        loss_mask=[0] * n + [1] * m,
        behavior_logprobs=[0.0] * n + list(response.output_logprobs),
        versions=[NOT_SAMPLED] * n + list(response.output_versions),
        reward=0.0,
        temperature=response.temperature,
        kept_ids=response.kept_ids.joined([n, response.kept_ids]),
    )


async def responses(url: str) -> list[ModelResponse]:
    """Of all kinds of grammars, at once, with and without filters, at two temperatures."""
    ways = [{}, {"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.6, "temperature": 1.4}]
    async with RemoteSGLangEngine([url], ClientConfig(request_timeout_s=60.0)) as engine:
        params = [SamplingParams(max_new_tokens=40, grammar=grammar, **way) for grammar in GRAMMARS for way in ways]
        asked = (engine.agenerate(ModelRequest(input_ids=PROMPT, sampling=sampling)) for sampling in params)
        return await asyncio.gather(*asked)


async def test_the_trainer_recomputes_the_logprobs_of_constrained_tokens(
    client: Client, server: Server, models: Models
) -> None:
    trajectories = [trajectory_of(response) for response in await responses(server.url)]
    engine = await asyncio.to_thread(FSDPTrainEngine, Path(models.directory_a), TrainConfig())
    try:
        rows = await asyncio.to_thread(engine.forward, Batch.of([grouped(*trajectories)]).sequences())
    finally:
        engine.close()
    for trajectory, row in zip(trajectories, rows, strict=True):
        np.testing.assert_allclose(
            row.numpy()[trajectory.loss_mask], trajectory.behavior_logprobs[trajectory.loss_mask], atol=2e-5
        )


@pytest.mark.parametrize("mode", ["abort", "retract"])
async def test_a_pause_leaves_a_constrained_response_whole(
    client: Client, server: Server, models: Models, mode: PauseMode
) -> None:
    """An embedded server goes on behind the tokens of an aborted attempt, SGLang begins again."""
    sampling = SamplingParams(max_new_tokens=500, grammar=Grammar(kind="regex", text="([ab]c){150}"))
    async with RemoteSGLangEngine([server.url], ClientConfig(request_timeout_s=60.0, pause_mode=mode)) as engine:
        call = asyncio.create_task(engine.agenerate(ModelRequest(input_ids=PROMPT, sampling=sampling)))
        await client.until_running(1)
        await engine.pause()
        await engine.resume()
        response = await call
    assert response.sends == (2 if mode == "abort" else 1)
    assert response.stop_reason == "stop"
    said = models.tokenizer.decode(response.output_ids[:-1])
    assert len(said) == 300
    assert set(said[::2]) <= {"a", "b"}
    assert set(said[1::2]) == {"c"}


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(kind="regex", text="(("),
        Grammar(kind="json_schema", text='{"not": {}}'),
        Grammar(kind="regex", text="a\0"),
    ],
)
async def test_a_grammar_that_cannot_be_honoured_is_refused(client: Client, server: Server, grammar: Grammar) -> None:
    async with RemoteSGLangEngine([server.url], ClientConfig(request_timeout_s=60.0)) as engine:
        sampling = SamplingParams(max_new_tokens=5, grammar=grammar)
        with pytest.raises(ServerError, match=r"refused the request: .*(compile|honoured|NUL)"):
            await engine.agenerate(ModelRequest(input_ids=PROMPT, sampling=sampling))
