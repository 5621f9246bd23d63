"""Truncated and constrained requests on either server: each token says among what it was sampled, sampler and trainer
agree, and what cannot be honoured is refused."""

import asyncio
import itertools
import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
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
from arl.api.settings.engines import PauseMode, TrainConfig
from arl.api.types import NOT_SAMPLED, ModelRequest, ModelResponse, SamplingParams, Trajectory
from arl.endpoint.proxy import OpenAIProxy
from arl.engine.client.remote_engine import RemoteInferenceEngine
from arl.engine.fsdp.train_engine import FSDPTrainEngine
from arl.workflow.conversation import Conversation

PROMPT = list(range(40, 60))
GRID = [
    SamplingParams(max_new_tokens=30, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, ignore_eos=True)
    for temperature, top_p, top_k, min_p in itertools.product(
        (0.3, 1.0, 2.0), (1.0, 0.95, 0.4), (-1, 1, 5, 200), (0.0, 0.05)
    )
]
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
LONG = Grammar(kind="regex", text="([ab]c){150}")
TRUNCATED = SamplingParams(max_new_tokens=400, temperature=0.8, top_p=0.9, ignore_eos=True, seed=2)
CONSTRAINED = SamplingParams(max_new_tokens=500, temperature=0.7, grammar=LONG, seed=0)


def trajectory_of(response: ModelResponse) -> Trajectory:
    n, m, kept = len(PROMPT), len(response.output_ids), response.kept_ids
    return Trajectory(
        token_ids=[*PROMPT, *response.output_ids],
        loss_mask=[0] * n + [1] * m,
        behavior_logprobs=[0.0] * n + list(response.output_logprobs),
        versions=[NOT_SAMPLED] * n + list(response.output_versions),
        reward=0.0,
        temperature=response.temperature,
        kept_ids=kept and kept.joined([n, kept]),
    )


async def trained_logprobs(directory: Path, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
    def forward() -> list[np.ndarray]:
        engine = FSDPTrainEngine(directory, TrainConfig())
        try:
            rows = engine.forward(Batch.of([grouped(*trajectories)]).sequences())
        finally:
            engine.close()
        return [row.numpy()[one.loss_mask] for row, one in zip(rows, trajectories, strict=True)]

    return await asyncio.to_thread(forward)


def logprobs_among(reference: Reference, response: ModelResponse) -> torch.Tensor:
    """Of the response's tokens, each among its kept ids alone, by plain transformers."""
    assert response.kept_ids is not None
    logits = reference.logits(PROMPT, response.output_ids) / response.temperature
    mask = torch.from_numpy(response.kept_ids.mask(logits.shape[-1]))
    return chosen(logits.masked_fill(~mask, -torch.inf), response.output_ids)


def exact(reference: Reference) -> Reference:
    """In double precision: half of the rounding was the reference's own."""
    return Reference(deepcopy(reference.model).double())


async def responses(server: Server, params: Sequence[SamplingParams]) -> list[ModelResponse]:
    """All at once, so that rows of different settings share a batch; seeded, because rounding depends on the tokens."""
    seeded = [replace(sampling, seed=seed) for seed, sampling in enumerate(params)]
    async with RemoteInferenceEngine([server.url], server.config()) as engine:
        asked = (engine.agenerate(ModelRequest(input_ids=PROMPT, sampling=sampling)) for sampling in seeded)
        return await asyncio.gather(*asked)


async def updated_in_the_middle(
    client: Client, server: Server, models: Models, mode: PauseMode, sampling: SamplingParams
) -> ModelResponse:
    """A response of weights a that goes on under weights b, as version 1."""
    async with RemoteInferenceEngine([server.url], server.config(pause_mode=mode)) as engine:
        call = asyncio.create_task(engine.agenerate(ModelRequest(input_ids=PROMPT, sampling=sampling)))
        await client.until_running(1)
        await client.until_gained(5)
        await engine.update_weights(DiskWeights(version=1, directory=models.directory_b))
        return await call


async def test_sampler_and_trainer_agree_for_any_sampling_settings(server: Server, models: Models) -> None:
    made = await responses(server, GRID)
    trained = await trained_logprobs(models.directory_a, [trajectory_of(r) for r in made])
    means = []
    for sampling, response, wanted in zip(GRID, made, trained, strict=True):
        sharp = 1 / min(1.0, sampling.temperature)  # a low temperature multiplies the rounding of logits
        # One token of thousands may be rounded by 1e-5, which depends on the processor; on average it is 7e-7.
        np.testing.assert_allclose(response.output_logprobs, wanted, atol=3e-5 * sharp, rtol=0, err_msg=str(sampling))
        means.append(np.abs(response.output_logprobs - wanted).mean() / sharp)
        assert (response.kept_ids is not None) == sampling.is_filtered
    assert np.mean(means) < 3e-6


async def test_the_trainer_recomputes_the_logprobs_of_constrained_tokens(
    client: Client, server: Server, models: Models
) -> None:
    """Of all kinds of grammars, with and without filters, at several temperatures."""
    ways = [{}, {"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.6, "temperature": 1.4}]
    params = [SamplingParams(max_new_tokens=40, grammar=grammar, **way) for grammar in GRAMMARS for way in ways]
    made = await responses(server, params)
    assert all(response.kept_ids is not None for response in made)
    trained = await trained_logprobs(models.directory_a, [trajectory_of(r) for r in made])
    for response, wanted in zip(made, trained, strict=True):
        np.testing.assert_allclose(response.output_logprobs, wanted, atol=2e-5)


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
async def test_an_update_in_the_middle_of_a_truncated_response_shows_in_its_versions_alone(
    client: Client, server: Server, models: Models, mode: PauseMode
) -> None:
    """Each token has its set before and after, and each logprob is of its version (in place, over the old keys)."""
    response = await updated_in_the_middle(client, server, models, mode, TRUNCATED)
    seam = response.output_versions.count(0)
    assert 0 < seam < 400
    assert response.output_versions == (0,) * seam + (1,) * (400 - seam)
    assert response.sends == (2 if mode == "abort" else 1)
    assert response.kept_ids is not None
    assert (response.kept_ids.index >= 0).sum() > 200
    if mode != "in_place":
        by_a, by_b = (logprobs_among(exact(reference), response) for reference in (models.a, models.b))
        close(response.output_logprobs, torch.cat((by_a[:seam], by_b[seam:])), atol=2e-5)


@pytest.mark.parametrize("mode", ["abort", "retract"])
async def test_an_update_in_the_middle_of_a_constrained_response_shows_in_its_versions_alone(
    client: Client, server: Server, models: Models, mode: PauseMode
) -> None:
    """It goes on within its grammar, each token has its set, and the trainer recomputes them with any weights. An
    embedded server goes on behind the tokens of an aborted attempt, SGLang begins again."""
    response = await updated_in_the_middle(client, server, models, mode, CONSTRAINED)
    assert (response.sends, response.stop_reason) == (2 if mode == "abort" else 1, "stop")
    seam = response.output_versions.count(0)
    assert response.output_versions == (0,) * seam + (1,) * (301 - seam)
    assert seam < 301
    assert (seam > 0) == (mode == "retract" or server.kind == "embedded")
    said = models.tokenizer.decode(response.output_ids[:-1])
    assert len(said) == 300
    assert set(said[::2]) <= {"a", "b"}
    assert set(said[1::2]) == {"c"}
    by_a, by_b = (logprobs_among(exact(reference), response) for reference in (models.a, models.b))
    close(response.output_logprobs, torch.cat((by_a[:seam], by_b[seam:])), atol=2e-5)
    (trained,) = await trained_logprobs(models.directory_b, [trajectory_of(response)])
    close(trained.tolist(), logprobs_among(models.b, response), atol=2e-5)


async def test_the_turns_of_a_conversation_are_replayed(client: Client, server: Server, models: Models) -> None:
    chat = Conversation(models.tokenizer, [{"role": "user", "content": "What?"}])
    ways = [{"top_p": 0.7}, {}, {"top_k": 3}, {"min_p": 0.2}]
    async with RemoteInferenceEngine([server.url], server.config()) as engine:
        for seed, way in enumerate(ways):
            await chat.agenerate(engine, SamplingParams(max_new_tokens=12, temperature=1.3, seed=seed, **way))
            chat.add({"role": "user", "content": "And then?"})
    made = chat.trajectories(1.0)
    trained = await trained_logprobs(models.directory_a, made)
    for trajectory, wanted in zip(made, trained, strict=True):
        np.testing.assert_allclose(trajectory.behavior_logprobs[trajectory.loss_mask], wanted, atol=1e-5, rtol=0)
    has_set = [made[0].kept_ids.index[turn.start : turn.stop] >= 0 for turn in made[0].turns if made[0].kept_ids]
    assert [bool(of_turn.any()) for of_turn in has_set] == [True, False, True, True]


async def test_grammars_that_cannot_be_honoured_are_refused(client: Client, server: Server) -> None:
    refused = [("regex", "(("), ("json_schema", '{"not": {}}'), ("regex", "a\0")]
    async with RemoteInferenceEngine([server.url], server.config()) as engine:
        for kind, text in refused:
            sampling = SamplingParams(max_new_tokens=5, grammar=Grammar(kind=kind, text=text))  # pyright: ignore[reportArgumentType]
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
        RemoteInferenceEngine([server.url], server.config()) as engine,
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
