"""Constrained requests on either server: sampler and trainer agree, and what cannot be honoured is refused."""

import asyncio
import json
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
from conformance.conftest import Models
from protocol_client import Client
from records import grouped
from reference import Reference, chosen, close
from servers import Server

from arl.algorithm.batch import Batch
from arl.api.engine import DiskWeights
from arl.api.errors import ServerError
from arl.api.grammar import Grammar
from arl.api.settings.engines import ClientConfig, PauseMode, TrainConfig
from arl.api.types import NOT_SAMPLED, ModelRequest, ModelResponse, SamplingParams, Trajectory
from arl.endpoint.proxy import OpenAIProxy
from arl.engine.client.remote_engine import RemoteInferenceEngine
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
    async with RemoteInferenceEngine([url], ClientConfig(request_timeout_s=60.0)) as engine:
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
    async with RemoteInferenceEngine([server.url], ClientConfig(request_timeout_s=60.0, pause_mode=mode)) as engine:
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


@pytest.mark.parametrize("mode", ["abort", "retract"])
async def test_an_update_in_the_middle_of_a_constrained_response_shows_in_its_versions_alone(
    client: Client, server: Server, models: Models, mode: PauseMode
) -> None:
    """It goes on within its grammar, each token has its set, and the trainer recomputes them with any weights."""
    sampling = SamplingParams(max_new_tokens=500, temperature=0.7, grammar=Grammar(kind="regex", text="([ab]c){150}"))
    async with RemoteInferenceEngine([server.url], ClientConfig(request_timeout_s=60.0, pause_mode=mode)) as engine:
        call = asyncio.create_task(engine.agenerate(ModelRequest(input_ids=PROMPT, sampling=sampling)))
        await client.until_running(1)
        await client.until_gained(5)
        await engine.update_weights(DiskWeights(version=1, directory=models.directory_b))
        response = await call
    seam = response.output_versions.count(0)
    assert response.output_versions == (0,) * seam + (1,) * (301 - seam)
    assert seam < 301
    assert (seam > 0) == (mode == "retract" or server.kind == "embedded"), "SGLang begins an aborted response again"
    assert set(models.tokenizer.decode(response.output_ids[1:-1:2])) == {"c"}
    trajectory = trajectory_of(response)
    by_a, by_b = (logprobs_among(reference, response) for reference in (models.a, models.b))
    close(response.output_logprobs, torch.cat((by_a[:seam], by_b[seam:])), atol=2e-5)
    trainer = await asyncio.to_thread(FSDPTrainEngine, Path(models.directory_b), TrainConfig())
    try:
        (row,) = await asyncio.to_thread(trainer.forward, Batch.of([grouped(trajectory)]).sequences())
    finally:
        trainer.close()
    close(row.numpy()[trajectory.loss_mask].tolist(), by_b, atol=2e-5)


def logprobs_among(reference: Reference, response: ModelResponse) -> torch.Tensor:
    """Of the response's tokens, each among its kept ids alone, by plain transformers."""
    assert response.kept_ids is not None
    logits = reference.logits(PROMPT, response.output_ids) / response.temperature
    mask = torch.from_numpy(response.kept_ids.mask(logits.shape[-1]))
    return chosen(logits.masked_fill(~mask, -torch.inf), response.output_ids)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(kind="regex", text="(("),
        Grammar(kind="json_schema", text='{"not": {}}'),
        Grammar(kind="regex", text="a\0"),
    ],
)
async def test_a_grammar_that_cannot_be_honoured_is_refused(client: Client, server: Server, grammar: Grammar) -> None:
    async with RemoteInferenceEngine([server.url], ClientConfig(request_timeout_s=60.0)) as engine:
        sampling = SamplingParams(max_new_tokens=5, grammar=grammar)
        with pytest.raises(ServerError, match=r"refused the request: .*(compile|honoured|NUL)"):
            await engine.agenerate(ModelRequest(input_ids=PROMPT, sampling=sampling))


async def test_a_program_behind_the_endpoint_gets_json_by_its_schema(
    client: Client, server: Server, models: Models
) -> None:
    """So hot that an untrained model leaves white space behind."""
    point = {"type": "object", "properties": {"x": {"enum": [1, 2]}, "y": {"type": "boolean"}}, "required": ["x", "y"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "point", "schema": point}}
    ask = [{"role": "user", "content": "Where is it?"}]
    async with (
        RemoteInferenceEngine([server.url], ClientConfig(request_timeout_s=60.0)) as engine,
        OpenAIProxy(models.tokenizer, sampling=SamplingParams(max_new_tokens=300, temperature=4.0)) as proxy,
        proxy.episode(engine) as session,
        openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as program,
    ):
        said = (await program.chat.completions.create(model="any", messages=ask, response_format=wanted)).choices[0]
        (made,) = session.trajectories(1.0)
    assert said.finish_reason == "stop"
    answer = json.loads(said.message.content or "")
    assert (answer["x"] in (1, 2), type(answer["y"])) == (True, bool)
    assert made.kept_ids is not None
    assert (made.kept_ids.index >= 0).tolist() == made.loss_mask.tolist()
