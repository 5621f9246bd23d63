"""arl's client over stock vLLM: what of its protocol no other test asks for."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance.conftest import Models
from reference import close
from servers import Server, VLLMWatch

from arl.api.engine import DiskWeights, ServedModel
from arl.api.errors import RefusedRequestError, ServerError
from arl.api.grammar import Grammar
from arl.api.routed_experts import Routing
from arl.api.types import ModelRequest, ModelResponse, SamplingParams
from arl.engine.client.remote_engine import RemoteInferenceEngine
from arl.engine.client.server_client import greet
from arl.engine.client.sglang_client import SGLangClient
from arl.engine.client.vllm_client import VLLMClient
from arl.runtime.http.client import Connections

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
ON_VLLM = pytest.mark.parametrize("server", ["vllm"], indirect=True)

PROMPT = tuple(range(40, 60))


async def ask(engine: RemoteInferenceEngine, prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> ModelResponse:
    params = SamplingParams(**{"max_new_tokens": 24, "ignore_eos": True, **sampling})
    return await engine.agenerate(ModelRequest(input_ids=prompt, sampling=params))


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 1.7])
@ON_VLLM
async def test_logprobs_are_of_the_distribution_that_it_samples_from(
    client: VLLMWatch, server: Server, served: Models, temperature: float
) -> None:
    async with RemoteInferenceEngine([server.url], server.config()) as engine:
        response = await ask(engine, temperature=temperature)
    wanted = served.a.logprobs(PROMPT, response.output_ids, response.temperature)
    close(response.output_logprobs, wanted, atol=1e-5 / min(1.0, temperature or 1.0))
    if temperature == 0:
        assert list(response.output_ids) == served.a.greedy(PROMPT, 24)


@ON_VLLM
async def test_a_seed_repeats_a_response_and_a_cut_one_goes_on(
    client: VLLMWatch, server: Server, served: Models
) -> None:
    async with RemoteInferenceEngine([server.url], server.config(pause_mode="abort")) as engine:
        first, again, other = [await ask(engine, seed=seed) for seed in (5, 5, 6)]
        call = asyncio.create_task(ask(engine, max_new_tokens=6000, seed=7))
        await client.until_running(1)
        await client.until_gained(5)
        await engine.update_weights(DiskWeights(version=1, directory=served.directory_a))
        cut = await call
    assert first.output_ids == again.output_ids != other.output_ids
    assert (cut.sends, len(cut.output_ids)) == (2, 6000)
    close(cut.output_logprobs, served.a.logprobs(PROMPT, cut.output_ids), atol=2e-4)


@ON_VLLM
async def test_a_stop_string_ends_a_response_and_stays_in_its_tokens(
    client: VLLMWatch, server: Server, served: Models
) -> None:
    async with RemoteInferenceEngine([server.url], server.config()) as engine:
        whole = await ask(engine, temperature=0.0, max_new_tokens=60)
        text = str(served.tokenizer.decode([*whole.output_ids]))
        stop = next(text[i : i + 2] for i in range(20, len(text)) if text[i : i + 2].isascii())
        response = await ask(engine, temperature=0.0, max_new_tokens=60, stop=(stop,))
    assert response.stop_reason == "stop"
    assert response.output_ids == whole.output_ids[: len(response.output_ids)]
    assert stop in str(served.tokenizer.decode([*response.output_ids]))
    close(response.output_logprobs, served.a.logprobs(PROMPT, response.output_ids))


@ON_VLLM
async def test_a_stop_token_ends_a_response_and_is_its_last_token(
    client: VLLMWatch, server: Server, served: Models
) -> None:
    async with RemoteInferenceEngine([server.url], server.config()) as engine:
        whole = await ask(engine, temperature=0.0)
        stop = whole.output_ids[5]
        response = await ask(engine, temperature=0.0, stop_token_ids=(stop,), ignore_eos=False)
        ignored = await ask(engine, temperature=0.0, stop_token_ids=(stop,), ignore_eos=True)
    assert response.stop_reason == "stop"
    assert response.output_ids == whole.output_ids[: whole.output_ids.index(stop) + 1]
    assert ignored.output_ids == whole.output_ids


@ON_VLLM
async def test_the_end_of_the_context_ends_a_response_for_length(client: VLLMWatch, server: Server) -> None:
    async with RemoteInferenceEngine([server.url], server.config()) as engine:
        response = await ask(engine, (7,) * 8180, max_new_tokens=100)
    assert (response.stop_reason, len(response.output_ids)) == ("length", 12)


@pytest.mark.parametrize(
    "sampling", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"grammar": Grammar(kind="regex", text="[0-9]{3}")}]
)
@ON_VLLM
async def test_truncation_is_refused_where_the_server_does_not_list_what_it_sampled_from(
    client: VLLMWatch, server: Server, sampling: dict[str, Any]
) -> None:
    async with RemoteInferenceEngine([server.url], server.config()) as engine:
        with pytest.raises(ServerError, match="--return-sampling-mask"):
            await ask(engine, **sampling)


@ON_VLLM
async def test_a_temperature_that_vllm_would_raise_is_refused(client: VLLMWatch, server: Server) -> None:
    async with RemoteInferenceEngine([server.url], server.config()) as engine:
        with pytest.raises(RefusedRequestError, match=r"vLLM samples at 0\.01"):
            await ask(engine, temperature=0.005)


@ON_VLLM
async def test_prefixes_are_shared_by_requests_of_one_version_alone(
    client: VLLMWatch, server: Server, served: Models
) -> None:
    prompt = tuple(np.random.default_rng(3).integers(256, size=256).tolist())
    async with RemoteInferenceEngine([server.url], server.config()) as engine:
        first, second = [await ask(engine, prompt) for _ in range(2)]
        await engine.update_weights(DiskWeights(version=1, directory=served.directory_b))
        third = await ask(engine, prompt)
    assert first.cached_tokens == 0 < second.cached_tokens
    assert third.cached_tokens == 0
    close(third.output_logprobs, served.b.logprobs(prompt, third.output_ids))


@ON_VLLM
async def test_a_directory_that_is_not_there_is_refused_before_it_ends_the_server(
    client: VLLMWatch, server: Server
) -> None:
    async with Connections() as connections:
        with pytest.raises(ServerError, match="no directory"):
            await VLLMClient(connections, server.url).load_directory(Path("/none"), version=1, flush_cache=False)
    async with RemoteInferenceEngine([server.url], server.config()) as engine:
        assert len((await ask(engine)).output_ids) == 24


@ON_VLLM
async def test_servers_of_another_kind_or_model_are_told(client: VLLMWatch, server: Server) -> None:
    async with Connections() as connections:
        with pytest.raises(ServerError, match=r"engine\.kind=vllm"):
            await greet(SGLangClient(connections, server.url))
    with pytest.raises(ServerError, match="the hidden_size is 32"):
        async with RemoteInferenceEngine(
            [server.url], server.config(), model=ServedModel(name="small", shape={"hidden_size": 32})
        ):
            pass


@ON_VLLM
async def test_a_server_that_returns_no_routes_is_refused_for_a_mixture_whose_routes_are_replayed(
    client: VLLMWatch, server: Server
) -> None:
    routing = Routing(num_layers=2, experts_per_token=2, num_experts=8)
    with pytest.raises(ServerError, match="--enable-return-routed-experts"):
        async with RemoteInferenceEngine(
            [server.url], server.config(), model=ServedModel(name="mixture", routing=routing)
        ):
            pass


@ON_VLLM
async def test_scores_are_the_logprobs_of_given_tokens(client: VLLMWatch, server: Server, served: Models) -> None:
    tokens = np.random.default_rng(1).integers(256, size=64).tolist()
    async with Connections() as connections:
        told = await VLLMClient(connections, server.url).score(tokens)
    close(told, served.a.logprobs(tokens[:1], tokens[1:]))


@ON_VLLM
async def test_an_engine_that_is_closed_while_its_server_sleeps_wakes_it(client: VLLMWatch, server: Server) -> None:
    async with RemoteInferenceEngine([server.url], server.config(pause_mode="retract")) as engine:
        await engine.release_memory()
        assert await is_sleeping(client)
    assert not await is_sleeping(client)
    await client.until_gained(1)


@ON_VLLM
async def test_a_server_whose_caches_sleep_generates_for_who_greets_it(client: VLLMWatch, server: Server) -> None:
    """Whatever its label: it was loaded, and its run died before the caches had memory again."""
    await client.post("/pause?mode=keep")
    await client.post("/sleep?level=2&mode=keep")
    await client.post("/wake_up?tags=weights")
    assert await is_sleeping(client)
    async with RemoteInferenceEngine([server.url], server.config()) as engine:
        assert not await is_sleeping(client)
        assert len((await ask(engine)).output_ids) == 24


async def is_sleeping(client: VLLMWatch) -> bool:
    """Whether vLLM says so; it also does while it is paused."""
    async with client.session.get("/is_sleeping") as response:
        return (await response.json())["is_sleeping"]
