"""What a request becomes on the wire, what an answer becomes, and which server gets it."""

import asyncio
from pathlib import Path

import pytest
from protocol_server import Server, ask, assert_seamless, outcome, over

from arl.api.engine import DiskWeights
from arl.api.engine_config import ClientConfig
from arl.api.errors import ConfigError, EngineClosedError, PromptTooLongError, ServerError
from arl.api.types import ModelRequest, SamplingParams
from arl.engine.client.sglang import RemoteSGLangEngine


async def test_an_answer_becomes_a_response(server: Server):
    async with over(server, version=3) as engine:
        response = await engine.agenerate(ask(4, temperature=0.5))
    assert_seamless(response, 4)
    assert response.output_versions == (3, 3, 3, 3)
    assert response.stop_reason == "length"
    assert response.temperature == 0.5


async def test_sampling_parameters_travel_under_sglangs_names(server: Server):
    sampling = SamplingParams(
        max_new_tokens=5,
        temperature=0.7,
        top_p=0.9,
        top_k=20,
        min_p=0.05,
        stop=("zz",),
        stop_token_ids=(1, 2),
        ignore_eos=True,
        seed=11,
    )
    async with over(server) as engine:
        await engine.agenerate(ModelRequest(input_ids=(1, 2, 3), sampling=sampling, rid="mine"))
    (sent,) = server.requests
    assert sent["input_ids"] == [1, 2, 3]
    assert sent["return_logprob"] is True
    assert sent["stream"] is False
    assert sent["rid"].startswith("mine.")
    assert sent["sampling_params"] == {
        "max_new_tokens": 5,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.05,
        "stop": ["zz"],
        "stop_token_ids": [1, 2],
        "ignore_eos": True,
        "sampling_seed": 11,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }


async def test_the_api_key_is_sent_as_a_bearer_token(server: Server):
    async with over(server, api_key="secret") as engine:
        await engine.agenerate(ask())
    assert server.headers[0]["Authorization"] == "Bearer secret"


async def test_a_session_stays_where_it_is_though_another_server_is_idle(server: Server, other: Server):
    server.is_automatic = False
    async with over(server, other) as engine, asyncio.TaskGroup() as group:
        await server.begin(group, engine.agenerate(ask(session="a")))
        await server.begin(group, engine.agenerate(ask(session="a")))
        server.advance(4)
    assert other.requests == []


async def test_a_request_without_session_goes_to_the_server_with_fewest_in_flight(server: Server, other: Server):
    server.is_automatic = other.is_automatic = False
    async with over(server, other) as engine, asyncio.TaskGroup() as group:
        for _ in range(6):
            group.create_task(engine.agenerate(ask()))
        await server.until(lambda: len(server.running) == 3)
        await other.until(lambda: len(other.running) == 3)
        server.advance(4)
        other.advance(4)


async def test_prefixes_are_shared_until_the_next_load_and_within_one_run(server: Server):
    for _ in range(2):
        async with over(server) as engine:
            await engine.agenerate(ask())
            await engine.agenerate(ask())
            for _ in range(2):
                await engine.update_weights(DiskWeights(version=1, directory=Path("/weights")))
                await engine.agenerate(ask())
    keys = [sent["extra_key"] for sent in server.requests]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 6


async def test_hundreds_of_requests_run_at_once(server: Server):
    server.is_automatic = False
    async with over(server) as engine, asyncio.TaskGroup() as group:
        tasks = [group.create_task(engine.agenerate(ask(1))) for _ in range(300)]
        await server.until(lambda: len(server.running) == 300)
        server.advance()
    assert all(task.result().stop_reason == "length" for task in tasks)


REFUSALS = {
    "The input (2100 tokens) is longer than the model's context length (2048 tokens).": (400, PromptTooLongError, ""),
    "Requested token count exceeds the model's maximum context length of 2048 tokens.": (400, PromptTooLongError, ""),
    "Input length (2043 tokens) exceeds the maximum allowed length (2042 tokens).": (400, PromptTooLongError, ""),
    "bad top_p": (400, ServerError, "HTTP 400: bad top_p"),
    "Unauthorized": (401, ServerError, "set engine.api_key"),
}


@pytest.mark.parametrize(("sentence", "refusal"), REFUSALS.items(), ids=lambda value: str(value)[:30])
async def test_a_refusal_is_passed_on_in_the_servers_words_and_not_repeated(
    server: Server, sentence: str, refusal: tuple[int, type[ServerError], str]
):
    status, kind, hint = refusal
    server.faults.append(status)
    server.error_body = {"error": {"message": sentence}}
    async with over(server) as engine:
        with pytest.raises(kind) as raised:
            await engine.agenerate(ask())
        assert type(raised.value) is kind
        assert sentence in str(raised.value)
        assert hint in str(raised.value)
        assert len(server.requests) == 1
        assert (await engine.agenerate(ask())).stop_reason == "length"


async def test_servers_that_are_not_there_are_named_at_the_start(server: Server):
    addresses = [server.address, "http://127.0.0.1:9"]
    with pytest.raises(ServerError, match=r"no inference server answers at http://127\.0\.0\.1:9 .*engine\.addresses"):
        async with RemoteSGLangEngine(addresses, ClientConfig()):
            pytest.fail("it opened")


@pytest.mark.parametrize("address", ["127.0.0.1:30000", "localhost", "ftp://host", "http://", ""])
def test_an_address_that_is_no_url_is_named(address: str):
    with pytest.raises(ConfigError, match=r"engine\.addresses holds .* such as http://127\.0\.0\.1:30000"):
        RemoteSGLangEngine([address], ClientConfig())


async def test_a_very_long_prompt_is_sent_whole(server: Server):
    prompt = list(range(300_000))
    async with over(server) as engine:
        await engine.agenerate(ModelRequest(input_ids=prompt, sampling=SamplingParams(max_new_tokens=1)))
    assert server.requests[0]["input_ids"] == prompt


async def test_a_server_left_paused_by_a_killed_run_is_set_going(server: Server):
    await server._on_pause_generation({"mode": "in_place"})
    async with RemoteSGLangEngine([server.address], ClientConfig()) as engine:
        assert (await engine.agenerate(ask())).stop_reason == "length"


async def test_an_engine_that_is_not_open_says_so(server: Server):
    engine = RemoteSGLangEngine([server.address], ClientConfig())
    with pytest.raises(EngineClosedError, match="async with"):
        await engine.agenerate(ask())


async def test_errors_of_the_block_leave_it_as_they_are(server: Server):
    with pytest.raises(ZeroDivisionError):
        async with over(server):
            raise ZeroDivisionError


async def test_closing_twice_is_closing_once(server: Server):
    async with over(server) as engine:
        await engine.aclose()
        await engine.aclose()
        with pytest.raises(EngineClosedError):
            await engine.agenerate(ask())


async def test_closing_aborts_what_runs_and_leaves_no_task(server: Server):
    server.is_automatic = False
    before = asyncio.all_tasks()
    async with over(server) as engine, asyncio.TaskGroup() as group:
        call = group.create_task(outcome(engine.agenerate(ask())))
        await server.until(lambda: len(server.running) == 1)
        await engine.aclose()
        assert isinstance(await call, EngineClosedError)
    assert server.aborted == [server.requests[0]["rid"]]
    await server.until(lambda: not server.running)
    assert {task for task in asyncio.all_tasks() - before if "aiohttp" not in repr(task)} == set()


async def test_a_cancelled_request_is_aborted_on_its_server(server: Server):
    server.is_automatic = False
    async with over(server) as engine, asyncio.TaskGroup() as group:
        call = await server.begin(group, engine.agenerate(ask()))
        call.cancel()
        await server.until(lambda: len(server.aborted) == 1)
        assert call.cancelled()
    assert server.aborted == [server.requests[0]["rid"]]
