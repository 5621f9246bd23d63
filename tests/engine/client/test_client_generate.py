"""What a request becomes on the wire, what an answer becomes, and which server gets it."""

import asyncio

import pytest
from protocol_server import Server, ask, assert_seamless, outcome, over
from scripted_weights import weights

from arl.api.engine_config import ClientConfig
from arl.api.errors import ConfigError, EngineClosedError, PromptTooLongError, ServerError
from arl.api.types import ModelRequest, SamplingParams
from arl.engine.client.sglang import RemoteSGLangEngine


async def test_a_request_travels_under_sglangs_names_and_its_answer_becomes_a_response(server: Server):
    sampling = {"max_new_tokens": 5, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "ignore_eos": True}
    params = SamplingParams(**sampling, stop=("zz",), stop_token_ids=(1, 2), seed=11)
    async with over(server, version=3, api_key="secret") as engine:
        response = await engine.agenerate(ModelRequest(input_ids=(1, 2, 3), sampling=params, rid="mine"))
    assert_seamless(response, 5)
    assert response.output_versions == (3,) * 5
    assert (response.stop_reason, response.temperature) == ("length", 0.7)
    (sent,) = server.requests
    assert (sent["input_ids"], sent["return_logprob"], sent["stream"]) == ([1, 2, 3], True, False)
    assert sent["rid"].startswith("mine.")
    assert "lora_path" not in sent
    added = {"sampling_seed": 11, "skip_special_tokens": False, "no_stop_trim": True}
    assert sent["sampling_params"] == {**sampling, "stop": ["zz"], "stop_token_ids": [1, 2], **added}
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
                await engine.update_weights(weights(1))
                await engine.agenerate(ask())
    keys = [sent["extra_key"] for sent in server.requests]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 6


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


def test_an_address_with_a_password_is_refused_and_the_password_not_shown():
    with pytest.raises(ConfigError, match=r"names a user for http://127\.0\.0\.1:9.*engine\.api_key") as caught:
        RemoteSGLangEngine(["http://joe:hidden@127.0.0.1:9"], ClientConfig())
    assert "hidden" not in str(caught.value)


async def test_a_server_that_repeats_the_key_gets_it_into_no_error(server: Server):
    async with over(server, api_key="hidden") as engine:
        server.error_body = {"error": {"message": "Bearer hidden is not known"}}
        server.faults.append(401)
        with pytest.raises(ServerError, match=r"Bearer \(the api_key\) is not known"):
            await engine.agenerate(ask())


async def test_a_server_left_paused_by_a_killed_run_is_set_going(server: Server):
    await server._on_pause_generation({"mode": "in_place"})
    async with RemoteSGLangEngine([server.address], ClientConfig()) as engine:
        assert (await engine.agenerate(ask())).stop_reason == "length"


async def test_errors_of_the_block_leave_it_as_they_are(server: Server):
    with pytest.raises(ZeroDivisionError):
        async with over(server):
            raise ZeroDivisionError


async def test_an_engine_answers_while_it_is_open_and_closing_aborts_what_runs(server: Server):
    server.is_automatic = False
    before = asyncio.all_tasks()
    with pytest.raises(EngineClosedError, match="async with"):
        await RemoteSGLangEngine([server.address], ClientConfig()).agenerate(ask())
    async with over(server) as engine, asyncio.TaskGroup() as group:
        call = await server.begin(group, outcome(engine.agenerate(ask())))
        for _ in range(2):
            await engine.aclose()
        assert isinstance(await call, EngineClosedError)
        assert isinstance(await outcome(engine.agenerate(ask())), EngineClosedError)
    assert server.aborted == [server.requests[0]["rid"]]
    await server.until(lambda: not server.running)
    assert {task for task in asyncio.all_tasks() - before if "aiohttp" not in repr(task)} == set()
