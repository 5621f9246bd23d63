"""arl's own client over each server: updates in flight lose no token, repeat none, and each names its weights."""

import asyncio

import pytest
import torch
from conformance.conftest import ON_EACH_KIND, Models
from protocol_client import Client
from reference import close, logprobs_across
from servers import Server

from arl.api.engine import DiskWeights
from arl.api.errors import PromptTooLongError
from arl.api.settings.engines import PauseMode
from arl.api.types import ModelRequest, SamplingParams
from arl.engine.client.remote_engine import RemoteInferenceEngine

PROMPTS = [(10, 11, 12, 13), (50, 60), (7,) * 30]
NUM_TOKENS = {"embedded": 500, "sglang": 100, "vllm": 2000}
"""Enough that both updates come in the middle."""
NUM_BEFORE = 5
"""The fewest tokens of each response before each update."""
pytestmark = ON_EACH_KIND


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
async def test_updates_in_flight_leave_no_mark_but_versions_and_their_logprobs(
    client: Client, server: Server, served: Models, mode: PauseMode
) -> None:
    num_tokens = NUM_TOKENS[server.kind]
    sampling = SamplingParams(max_new_tokens=num_tokens, temperature=1.0, ignore_eos=True)
    config = server.config(pause_mode=mode)
    async with RemoteInferenceEngine([server.url], config) as engine, asyncio.TaskGroup() as group:
        calls = [group.create_task(engine.agenerate(ModelRequest(input_ids=p, sampling=sampling))) for p in PROMPTS]
        for version, directory in ((1, served.directory_b), (2, served.directory_a)):
            await client.until_running(len(PROMPTS))
            await client.until_gained(NUM_BEFORE)
            await engine.update_weights(DiskWeights(version=version, directory=directory))
        assert engine.version == 2
    for call, prompt in zip(calls, PROMPTS, strict=True):
        response = call.result()
        assert len(response.output_ids) == len(response.output_logprobs) == num_tokens
        counts = [response.output_versions.count(version) for version in range(3)]
        assert list(response.output_versions) == [v for v, count in enumerate(counts) for _ in range(count)]
        assert counts[0] >= NUM_BEFORE
        assert counts[1] > 0
        assert counts[2] > 0
        parts = [(r, count) for r, count in zip((served.a, served.b, served.a), counts, strict=True) if count]
        if mode == "in_place":
            wanted = logprobs_across(parts, prompt, response.output_ids)
        else:
            whole = [reference.logprobs(prompt, response.output_ids) for reference, _ in parts]
            chosen = torch.tensor([i for i, (_, count) in enumerate(parts) for _ in range(count)])
            wanted = torch.stack(whole).gather(0, chosen[None])[0]
        close(response.output_logprobs, wanted, atol=2e-4)


async def test_a_prompt_longer_than_the_context_is_told(client: Client, server: Server) -> None:
    request = ModelRequest(input_ids=(7,) * 9000, sampling=SamplingParams(max_new_tokens=4))
    async with RemoteInferenceEngine([server.url], server.config()) as engine:
        with pytest.raises(PromptTooLongError, match="9000"):
            await engine.agenerate(request)
