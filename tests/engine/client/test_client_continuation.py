"""A response that was interrupted reads like one that was not, but for its versions."""

import asyncio
from typing import Any

import pytest
from protocol_server import Server, ask, assert_seamless, letter, outcome, over, token_at
from scripted_weights import weights

from arl.api.engine import ServedModel
from arl.api.errors import ServerError


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


async def test_aborts_that_nobody_asked_for_are_continued_max_retries_times(server: Server):
    server.is_automatic = False
    async with over(server, max_retries=1) as engine, asyncio.TaskGroup() as group:
        call = group.create_task(outcome(engine.agenerate(ask(5))))
        for attempt in (1, 2):
            await server.until(lambda n=attempt: len(server.requests) == n and len(server.running) == 1)
            server.abort_running()
        error = await call
    assert isinstance(error, ServerError)
    assert "engine.max_retries is 1" in str(error)
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
