"""A response that was interrupted reads like one that was not, but for its versions."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from protocol_server import Engines, ProtocolServer, ask, assert_seamless, letter, outcome, token_at

from arl.api.engine import DiskWeights
from arl.api.errors import ServerError
from arl.api.types import ModelRequest, ModelResponse, SamplingParams
from arl.engine.client.server_client import Answer
from arl.engine.client.sglang import PartialResponse

WEIGHTS = Path("/weights")


async def test_a_response_over_two_updates_continues_each_time_with_what_is_left(
    server: ProtocolServer, engine_over: Engines
) -> None:
    server.is_automatic = False
    async with engine_over([server], pause_mode="abort") as engine, asyncio.TaskGroup() as group:
        call = group.create_task(engine.agenerate(ask(10, ignore_eos=True)))
        await server.until(lambda: len(server.running) == 1)
        server.advance(4)
        await engine.update_weights(DiskWeights(version=1, directory=WEIGHTS))
        await server.until(lambda: len(server.requests) == 2 and len(server.running) == 1)
        server.advance(3)
        await engine.update_weights(DiskWeights(version=2, directory=WEIGHTS))
        await server.until(lambda: len(server.requests) == 3 and len(server.running) == 1)
        server.advance(10)
        response = await call
    assert_seamless(response, 10)
    assert response.output_versions == (0,) * 4 + (1,) * 3 + (2,) * 3
    assert response.stop_reason == "length"
    assert [len(sent["input_ids"]) for sent in server.requests] == [3, 7, 10]
    assert [sent["sampling_params"]["max_new_tokens"] for sent in server.requests] == [10, 6, 3]
    assert len({sent["rid"] for sent in server.requests}) == 3


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_under_the_other_modes_the_server_itself_goes_on(
    server: ProtocolServer, engine_over: Engines, mode: str
) -> None:
    server.is_automatic = False
    async with engine_over([server], pause_mode=mode) as engine, asyncio.TaskGroup() as group:
        call = group.create_task(engine.agenerate(ask(6)))
        await server.until(lambda: len(server.running) == 1)
        server.advance(2)
        await engine.update_weights(DiskWeights(version=1, directory=WEIGHTS))
        server.advance(4)
        response = await call
    assert_seamless(response, 6)
    assert response.output_versions == (0, 0, 1, 1, 1, 1)
    assert len(server.requests) == 1


async def test_an_aborted_request_waits_until_its_server_is_resumed(
    server: ProtocolServer, other: ProtocolServer, engine_over: Engines
) -> None:
    server.is_automatic = False
    async with engine_over([server, other], pause_mode="abort") as engine, asyncio.TaskGroup() as group:
        call = group.create_task(engine.agenerate(ask(4, session="s")))
        await server.until(lambda: len(server.running) == 1)
        server.advance(2)
        await engine.pause()
        late = group.create_task(engine.agenerate(ask(4, session="s")))
        await server.until(lambda: not server.running)
        await _settle()
        assert len(server.requests) == 1
        server.is_automatic = True
        await engine.resume()
        assert_seamless(await call, 4)
        assert_seamless(await late, 4)
    assert other.requests == []


async def test_an_abort_that_nobody_asked_for_is_continued(server: ProtocolServer, engine_over: Engines) -> None:
    server.is_automatic = False
    async with engine_over([server]) as engine, asyncio.TaskGroup() as group:
        call = group.create_task(engine.agenerate(ask(5)))
        await server.until(lambda: len(server.running) == 1)
        server.advance(2)
        server.abort_running()
        await server.until(lambda: len(server.requests) == 2 and len(server.running) == 1)
        server.advance(3)
        assert_seamless(await call, 5)


async def test_aborts_that_nobody_asked_for_are_continued_max_retries_times(
    server: ProtocolServer, engine_over: Engines
) -> None:
    server.is_automatic = False
    async with engine_over([server], max_retries=1) as engine, asyncio.TaskGroup() as group:
        call = group.create_task(outcome(engine.agenerate(ask(5))))
        for attempt in (1, 2):
            await server.until(lambda n=attempt: len(server.requests) == n and len(server.running) == 1)
            server.abort_running()
        error = await call
    assert isinstance(error, ServerError)
    assert "engine.max_retries is 1" in str(error)
    assert "nobody asked for it" in str(error)


async def test_an_abort_before_the_first_token_sends_the_same_prompt_again(
    server: ProtocolServer, engine_over: Engines
) -> None:
    server.is_automatic = False
    async with engine_over([server], pause_mode="abort") as engine, asyncio.TaskGroup() as group:
        call = group.create_task(engine.agenerate(ask(4)))
        await server.until(lambda: len(server.running) == 1)
        await engine.pause()
        server.is_automatic = True
        await engine.resume()
        assert_seamless(await call, 4)
    assert [sent["input_ids"] for sent in server.requests] == [[9, 8, 7]] * 2


def _text(num_tokens: int) -> str:
    return "".join(letter(token_at(3 + i)) for i in range(num_tokens))


async def _interrupted_after(
    num_tokens: int, server: ProtocolServer, engine_over: Engines, eos_token_ids: Sequence[int] = (), **sampling: Any
) -> ModelResponse:
    """A response whose first attempt was aborted after so many tokens, and that goes on by itself then."""
    server.is_automatic = False
    async with (
        engine_over([server], pause_mode="abort", eos_token_ids=eos_token_ids) as engine,
        asyncio.TaskGroup() as group,
    ):
        call = group.create_task(engine.agenerate(ask(12, **sampling)))
        await server.until(lambda: len(server.running) == 1)
        for run in server.running:
            run.labels += [server.label] * num_tokens  # sampled without being looked at, as before an abort
        await engine.pause()
        server.is_automatic = True
        await engine.resume()
        return await call


@pytest.mark.parametrize("seam", [3, 4, 5])
async def test_a_stop_string_is_found_wherever_the_seam_cuts_it(
    server: ProtocolServer, engine_over: Engines, seam: int
) -> None:
    stop = _text(6)[2:]  # tokens 3 to 6 of the response
    response = await _interrupted_after(seam, server, engine_over, stop=(stop,))
    assert_seamless(response, 6)
    assert response.stop_reason == "stop"


async def test_the_beginning_of_a_stop_string_that_does_not_go_on_stops_nothing(
    server: ProtocolServer, engine_over: Engines
) -> None:
    stop = _text(4)[2:] + "!"
    response = await _interrupted_after(4, server, engine_over, stop=(stop,))
    assert_seamless(response, 12)
    assert response.stop_reason == "length"
    # One token alone to see that the stop string does not go on, then the rest at once.
    assert [sent["sampling_params"]["max_new_tokens"] for sent in server.requests] == [12, 1, 7]


async def test_a_stop_string_that_the_last_token_before_an_abort_completed_ends_the_response(
    server: ProtocolServer, engine_over: Engines
) -> None:
    response = await _interrupted_after(4, server, engine_over, stop=(_text(4)[2:],))
    assert_seamless(response, 4)
    assert response.stop_reason == "stop"
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("sampling", "num_tokens"),
    [({}, 3), ({"ignore_eos": True}, 12), ({"ignore_eos": True, "stop_token_ids": (token_at(5),)}, 12)],
)
async def test_an_end_token_just_before_an_abort_ends_the_response_unless_it_is_ignored(
    server: ProtocolServer, engine_over: Engines, sampling: dict[str, object], num_tokens: int
) -> None:
    response = await _interrupted_after(3, server, engine_over, eos_token_ids=[1, token_at(5)], **sampling)
    assert_seamless(response, num_tokens)
    assert response.stop_reason == ("stop" if num_tokens == 3 else "length")


async def test_an_abort_after_the_last_token_of_the_budget_is_a_response_of_full_length(
    server: ProtocolServer, engine_over: Engines
) -> None:
    response = await _interrupted_after(12, server, engine_over)
    assert_seamless(response, 12)
    assert response.stop_reason == "length"
    assert len(server.requests) == 1


async def test_a_continuation_that_no_longer_fits_ends_at_the_end_of_the_context(
    server: ProtocolServer, engine_over: Engines
) -> None:
    server.is_automatic = False
    async with engine_over([server], pause_mode="abort") as engine, asyncio.TaskGroup() as group:
        call = group.create_task(engine.agenerate(ask(10)))
        await server.until(lambda: len(server.running) == 1)
        server.advance(6)
        server.faults.append(400)
        server.error_body = {"error": {"message": "Input length (9 tokens) exceeds the maximum allowed length (8)."}}
        await engine.pause()
        await engine.resume()
        response = await call
    assert_seamless(response, 6)
    assert response.stop_reason == "length"


async def test_a_seed_is_sent_again_with_the_continuation(server: ProtocolServer, engine_over: Engines) -> None:
    await _interrupted_after(4, server, engine_over, seed=5)
    assert [sent["sampling_params"]["sampling_seed"] for sent in server.requests] == [5, 5]


def test_an_end_token_ends_the_response_also_where_a_seams_one_token_budget_was_used_up_by_it() -> None:
    partial = PartialResponse(ModelRequest(input_ids=(1,), sampling=SamplingParams(max_new_tokens=9, stop=("</x>",))))
    partial.extend(answer("ab<", [5, 6, 7], "abort"), [0, 0, 0], eos_token_ids=[2])
    assert partial.payload("r.1", "0")["sampling_params"]["max_new_tokens"] == 1
    partial.extend(answer("", [2], "length"), [1], eos_token_ids=[2])
    assert partial.stop_reason == "stop"
    assert partial.response().output_ids == (5, 6, 7, 2)


def answer(text: str, output_ids: list[int], finish: Literal["stop", "length", "abort"]) -> Answer:
    return Answer(
        output_ids=output_ids,
        output_logprobs=[-0.5] * len(output_ids),
        finish=finish,
        text=text,
        label="0",
        spans=(),
    )


async def _settle() -> None:
    """Let everything that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)
