"""What a request becomes on the wire, what an answer becomes, also an interrupted one; which server gets it."""

import asyncio
from typing import Any

import numpy as np
import pytest
from protocol_server import Server, ask, assert_seamless, letter, outcome, over, token_at
from scripted_weights import weights

from arl.api.engine import ServedModel
from arl.api.errors import ConfigError, EngineClosedError, PromptTooLongError, RefusedRequestError, ServerError
from arl.api.settings.engines import ClientConfig
from arl.api.types import ModelRequest, SamplingParams
from arl.engine.client.remote_engine import RemoteInferenceEngine


async def test_a_request_travels_under_sglangs_names_and_its_answer_becomes_a_response(server: Server):
    sampling = {"max_new_tokens": 5, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "ignore_eos": True}
    params = SamplingParams(**sampling, stop=("zz",), stop_token_ids=(1, 2), seed=11)
    async with over(server, version=3, api_key="secret", replay_truncation=False) as engine:
        response = await engine.agenerate(ModelRequest(input_ids=(1, 2, 3), sampling=params, rid="mine"))
    assert_seamless(response, 5)
    assert response.output_versions == (3,) * 5
    assert (response.stop_reason, response.temperature) == ("length", 0.7)
    (sent,) = server.requests
    assert (sent["input_ids"], sent["return_logprob"], sent["stream"]) == ([1, 2, 3], True, False)
    assert sent["rid"].startswith("mine.")
    assert not {"lora_path", "image_data", "return_prompt_token_ids"} & set(sent)
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
    "bad top_p": (400, RefusedRequestError, "refused the request: bad top_p"),
    "Unauthorized": (401, ServerError, "set ARL_SERVER_API_KEY"),
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


@pytest.mark.parametrize("address", ["127.0.0.1:30000", "localhost", "ftp://host", "http://", ""])
def test_an_address_that_is_no_url_is_named(address: str):
    with pytest.raises(ConfigError, match=r"engine\.addresses holds .* such as http://127\.0\.0\.1:30000"):
        RemoteInferenceEngine([address], ClientConfig())


def test_an_address_with_a_password_is_refused_and_the_password_not_shown():
    with pytest.raises(ConfigError, match=r"names a user for http://127\.0\.0\.1:9.*set ARL_SERVER_API_KEY") as caught:
        RemoteInferenceEngine(["http://joe:hidden@127.0.0.1:9"], ClientConfig())
    assert "hidden" not in str(caught.value)


async def test_a_server_that_repeats_the_key_gets_it_into_no_error(server: Server):
    async with over(server, api_key="hidden") as engine:
        server.error_body = {"error": {"message": "Bearer hidden is not known"}}
        server.faults.append(401)
        with pytest.raises(ServerError, match=r"Bearer \(the api_key\) is not known"):
            await engine.agenerate(ask())


async def test_a_server_left_paused_by_a_killed_run_is_set_going(server: Server):
    await server._on_pause_generation({"mode": "in_place"})
    async with RemoteInferenceEngine([server.address], ClientConfig()) as engine:
        assert (await engine.agenerate(ask())).stop_reason == "length"


async def test_errors_of_the_block_leave_it_as_they_are(server: Server):
    with pytest.raises(ZeroDivisionError):
        async with over(server):
            raise ZeroDivisionError


async def test_an_engine_answers_while_it_is_open_and_closing_aborts_what_runs(server: Server):
    server.is_automatic = False
    before = asyncio.all_tasks()
    with pytest.raises(EngineClosedError, match="async with"):
        await RemoteInferenceEngine([server.address], ClientConfig()).agenerate(ask())
    async with over(server) as engine, asyncio.TaskGroup() as group:
        call = await server.begin(group, outcome(engine.agenerate(ask())))
        for _ in range(2):
            await engine.aclose()
        assert isinstance(await call, EngineClosedError)
        assert isinstance(await outcome(engine.agenerate(ask())), EngineClosedError)
    assert server.aborted == [server.requests[0]["rid"]]
    await server.until(lambda: not server.running)
    assert {task for task in asyncio.all_tasks() - before if "aiohttp" not in repr(task)} == set()


async def test_a_response_over_two_updates_continues_each_time_with_what_is_left(server: Server):
    server.is_automatic = False
    async with over(server, pause_mode="abort") as engine, asyncio.TaskGroup() as group:
        call = await server.begin(group, engine.agenerate(ask(10, ignore_eos=True)))
        server.advance(4)
        await engine.update_weights(weights(1))
        await server.until(lambda: len(server.requests) == 2 and len(server.running) == 1)
        server.advance(3)
        await engine.update_weights(weights(2))
        await server.until(lambda: len(server.requests) == 3 and len(server.running) == 1)
        server.advance(10)
        response = await call
    assert_seamless(response, 10)
    assert response.output_versions == (0,) * 4 + (1,) * 3 + (2,) * 3
    assert response.stop_reason == "length"
    assert [len(sent["input_ids"]) for sent in server.requests] == [3, 7, 10]
    assert [sent["sampling_params"]["max_new_tokens"] for sent in server.requests] == [10, 6, 3]
    assert len({sent["rid"] for sent in server.requests}) == 3


async def test_a_prompt_stays_what_it_was_though_its_caller_writes_to_the_array(server: Server):
    server.is_automatic = False
    prompt: Any = np.array([9, 8, 7], dtype=np.int32)
    async with over(server, pause_mode="abort") as engine, asyncio.TaskGroup() as group:
        call = await server.begin(group, engine.agenerate(ModelRequest(input_ids=prompt)))
        prompt[:] = 1
        await engine.update_weights(weights(1))
        await server.until(lambda: len(server.requests) == 2)
        server.advance(256)
        await call
    assert [sent["input_ids"] for sent in server.requests] == [[9, 8, 7], [9, 8, 7]]


async def test_aborts_that_nobody_asked_for_are_continued_max_retries_times(server: Server):
    server.is_automatic = False
    async with over(server, max_retries=1) as engine, asyncio.TaskGroup() as group:
        call = group.create_task(outcome(engine.agenerate(ask(5))))
        for attempt in (1, 2):
            await server.until(lambda n=attempt: len(server.requests) == n and len(server.running) == 1)
            server.abort_running()
        error = await call
    assert isinstance(error, ServerError)
    assert "failed 2 times" in str(error)
    assert "nobody asked for it" in str(error)


def _text(num_tokens: int) -> str:
    return "".join(letter(token_at(3 + i)) for i in range(num_tokens))


STOP, END = _text(6)[2:], token_at(5)
"""Tokens 3 to 6 of the response as text, and token 3, which is one of the model's end tokens if it is not ignored."""
MODEL = ServedModel(name="m", end_token_ids=frozenset((1, END)))
SEAMS: dict[str, tuple[int, dict[str, Any], int, list[int]]] = {
    "before the first token": (0, {}, 12, [12, 12]),
    "a stop string after its first token": (3, {"stop": (STOP,), "ignore_eos": True}, 6, [12, 1, 1, 1]),
    "a stop string in its middle": (4, {"stop": (STOP,)}, 6, [12, 1, 1]),
    "a stop string before its last token": (5, {"stop": (STOP,)}, 6, [12, 1]),
    "the beginning of a stop string that does not go on": (4, {"stop": (STOP[:2] + "!",)}, 12, [12, 1, 7]),
    "the beginning of a stop string, and an end token after it": (2, {"stop": (_text(2)[1:] + "!",)}, 3, [12, 1]),
    "just after a stop string": (4, {"stop": (STOP[:2],)}, 4, [12]),
    "just after an end token": (3, {}, 3, [12]),
    "just after an ignored end token": (3, {"ignore_eos": True}, 12, [12, 9]),
    "just after an ignored stop token": (3, {"ignore_eos": True, "stop_token_ids": (END,)}, 12, [12, 9]),
    "after the last token of the budget": (12, {}, 12, [12]),
    "a seeded response": (4, {"seed": 5}, 12, [12, 8]),
}
"""What an abort cuts: after so many tokens, of which request; how long the response is, and the budgets asked for."""


@pytest.mark.parametrize(("seam", "sampling", "num_tokens", "budgets"), SEAMS.values(), ids=SEAMS)
async def test_a_response_ends_where_it_would_without_the_seam(
    server: Server, seam: int, sampling: dict[str, Any], num_tokens: int, budgets: list[int]
):
    server.is_automatic = False
    async with over(server, pause_mode="abort", model=MODEL) as engine, asyncio.TaskGroup() as group:
        call = await server.begin(group, engine.agenerate(ask(12, **sampling)))
        for run in server.running:
            run.labels += [server.label] * seam  # sampled without being looked at, as before an abort
        await engine.pause()
        await server.until(lambda: not server.running)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(server.requests) == 1  # nothing is sent while paused
        server.is_automatic = True
        await engine.resume()
        response = await call
    assert_seamless(response, num_tokens)
    assert response.stop_reason == ("length" if num_tokens == 12 else "stop")
    assert [sent["sampling_params"]["max_new_tokens"] for sent in server.requests] == budgets
    assert {sent["sampling_params"].get("sampling_seed") for sent in server.requests} == {sampling.get("seed")}


async def test_a_continuation_that_no_longer_fits_ends_at_the_end_of_the_context(server: Server):
    server.is_automatic = False
    async with over(server, pause_mode="abort") as engine, asyncio.TaskGroup() as group:
        call = await server.begin(group, engine.agenerate(ask(10)))
        server.advance(6)
        server.faults.append(400)
        server.error_body = {"error": {"message": "Input length (9 tokens) exceeds the maximum allowed length (8)."}}
        await engine.pause()
        await engine.resume()
        response = await call
    assert_seamless(response, 6)
    assert response.stop_reason == "length"
