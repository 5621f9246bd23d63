"""arl's own client over each server: updates in flight lose no token, repeat none, and each names its weights; so do
those of a server that let go of its memory.

On a CPU stock servers answer calls to release memory alike, and keep it: that leaves their order and labels to test.
"""

import asyncio

import pytest
import torch
from conformance.conftest import ON_EACH_KIND, Models
from protocol_client import Client, spans
from reference import close, logprobs_across
from servers import Server
from weight_trainer import succeeds

from arl.api.engine import DiskWeights
from arl.api.errors import PromptTooLongError
from arl.api.settings.engines import RELEASED, PauseMode
from arl.api.types import ModelRequest, ModelResponse, SamplingParams
from arl.engine.client.remote_engine import RemoteInferenceEngine
from arl.engine.client.server_client import MIXTURE

PROMPT = torch.randint(256, (32,), generator=torch.Generator().manual_seed(5)).tolist()
PROMPTS = [(10, 11, 12, 13), (50, 60), (7,) * 30]
GREEDY = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}
GREEDY_TURN = SamplingParams(max_new_tokens=3, temperature=0.0, ignore_eos=True)
NUM_TOKENS = {"embedded": 800, "sglang": 400, "vllm": 4000}
"""Enough that both updates come in the middle."""
NUM_BEFORE = 5
"""The fewest tokens of each response before each update."""
ALL = {"tags": ["kv_cache", "weights"]}


@ON_EACH_KIND
@pytest.mark.parametrize(
    ("mode", "releases"),
    [("in_place", False), ("retract", False), ("abort", False), ("retract", True), ("abort", True)],
)
async def test_updates_in_flight_leave_no_mark_but_versions_and_their_logprobs(
    client: Client, server: Server, served: Models, mode: PauseMode, releases: bool
) -> None:
    num_tokens = NUM_TOKENS[server.kind]
    sampling = SamplingParams(max_new_tokens=num_tokens, temperature=1.0, ignore_eos=True)
    config = server.config(pause_mode=mode)
    async with RemoteInferenceEngine([server.url], config) as engine, asyncio.TaskGroup() as group:
        calls = [group.create_task(engine.agenerate(ModelRequest(input_ids=p, sampling=sampling))) for p in PROMPTS]
        for version, directory in ((1, served.directory_b), (2, served.directory_a)):
            await client.until_running(len(PROMPTS))
            await client.until_gained(NUM_BEFORE)
            late = list[asyncio.Task[ModelResponse]]()
            if releases:
                await engine.release_memory()
                assert await label_of(engine) == RELEASED
                late.append(group.create_task(engine.agenerate(ModelRequest(input_ids=(7,), sampling=GREEDY_TURN))))
            await engine.update_weights(DiskWeights(version=version, directory=directory))
            assert [(await one).output_versions for one in late] == [(version,) * 3] * releases
        assert engine.version == 2
    for call, prompt in zip(calls, PROMPTS, strict=True):
        response = call.result()
        assert len(response.output_ids) == len(response.output_logprobs) == num_tokens
        counts = [response.output_versions.count(version) for version in range(3)]
        assert list(response.output_versions) == [v for v, count in enumerate(counts) for _ in range(count)]
        assert counts[0] >= NUM_BEFORE
        assert min(counts) > 0
        references = (served.a, served.b, served.a)
        if mode == "in_place":
            wanted = logprobs_across([*zip(references, counts, strict=True)], prompt, response.output_ids)
        else:
            whole = torch.stack([reference.logprobs(prompt, response.output_ids) for reference in references])
            wanted = whole.gather(0, torch.tensor(response.output_versions)[None])[0]
        close(response.output_logprobs, wanted, atol=2e-4)


@ON_EACH_KIND
async def test_a_prompt_longer_than_the_context_is_told(client: Client, server: Server) -> None:
    request = ModelRequest(input_ids=(7,) * 9000, sampling=SamplingParams(max_new_tokens=4))
    async with RemoteInferenceEngine([server.url], server.config()) as engine:
        with pytest.raises(PromptTooLongError, match="9000"):
            await engine.agenerate(request)


async def calls(client: Client, *paths: str, **body: object) -> None:
    for path in paths:
        answer = await client.post(path, dict(body))
        assert answer.status == 200, (path, answer.body)


async def label_of(engine: RemoteInferenceEngine) -> str:
    return await engine._pool.servers[0].client.weight_label()


async def load(client: Client, models: Models) -> None:
    body = {"model_path": str(models.directory_b), "weight_version": "7"}
    await succeeds(client, "/update_weights_from_disk", body)


async def test_weights_that_come_after_a_release_are_served(client: Client, models: Models) -> None:
    await client.generate(input_ids=PROMPT, sampling_params=GREEDY)
    await calls(client, "/pause_generation", mode="retract")
    await calls(client, "/release_memory_occupation", "/resume_memory_occupation", **ALL)
    await load(client, models)
    await calls(client, "/continue_generation")
    answer = await client.generate(input_ids=PROMPT, sampling_params=GREEDY)
    assert answer["meta_info"]["cached_tokens"] == 0
    assert spans(answer) == [("7", 0, 40)]
    assert answer["output_ids"] == models.b.greedy(PROMPT, 40)


async def test_a_retracted_request_goes_on_with_new_weights_from_the_tokens_that_it_has(
    client: Client, models: Models
) -> None:
    sampling = {**GREEDY, "max_new_tokens": 800}
    asking = asyncio.create_task(client.generate(input_ids=PROMPT, sampling_params=sampling))
    await client.until_running(1)
    await client.until_gained(5)
    await calls(client, "/pause_generation", mode="retract")
    await calls(client, "/release_memory_occupation", "/resume_memory_occupation", **ALL)
    await load(client, models)
    await calls(client, "/continue_generation")
    answer = await asking
    (old, start, cut), (new, again, end) = spans(answer)
    assert (old, start, cut == again, new, end) == ("a", 0, True, "7", 800)
    ids = answer["output_ids"]
    assert ids[cut : cut + 20] == models.b.greedy([*PROMPT, *ids[:cut]], 20)


@ON_EACH_KIND
async def test_a_client_that_greets_a_server_without_memory_wakes_it(
    client: Client, server: Server, served: Models
) -> None:
    config = server.config(pause_mode="retract")
    async with RemoteInferenceEngine([server.url], config) as dying:
        await dying.release_memory()
        async with RemoteInferenceEngine([server.url], config) as engine:
            assert await label_of(engine) == (RELEASED if server.kind == "embedded" else MIXTURE)
            await engine.update_weights(DiskWeights(version=1, directory=served.directory_b))
            response = await engine.agenerate(ModelRequest(input_ids=tuple(PROMPT), sampling=GREEDY_TURN))
            assert list(response.output_ids) == served.b.greedy(PROMPT, 3)


async def test_an_engine_that_is_closed_while_its_server_sleeps_wakes_it(
    client: Client, server: Server, models: Models
) -> None:
    async with RemoteInferenceEngine([server.url], server.config(pause_mode="retract")) as engine:
        await engine.release_memory()
    await load(client, models)
    assert (await client.generate(input_ids=PROMPT, sampling_params=GREEDY))["output_ids"] == models.b.greedy(
        PROMPT, 40
    )
