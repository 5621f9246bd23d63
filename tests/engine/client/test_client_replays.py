"""What training replays: the ids among which tokens were sampled, and the routes of a mixture of experts.

They are asked for, checked, and put together over attempts.
"""

import asyncio
from base64 import b64encode
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from protocol_server import Server, ask, assert_seamless, experts_at, over, token_at

from arl.api.engine import ServedModel
from arl.api.errors import ServerError
from arl.api.routed_experts import Routes, Routing
from arl.api.sampling_mask import KeptIds

Answer = dict[str, Any]


@pytest.fixture
def masking(server: Server) -> Server:
    server.tells["server_info"] = {"sampling_mask_max_tokens": 100}
    return server


def with_masks(answer: Answer) -> None:
    """As SGLang adds them: each token was sampled among itself and id 1, the likelier first."""
    masks = [[token, 1] for token in answer["output_ids"]]
    answer["meta_info"] |= {"output_token_sampling_mask": masks, "output_token_sampling_logprobs": [-0.5] * len(masks)}


def without_the_sampled_token(answer: Answer) -> None:
    with_masks(answer)
    answer["meta_info"]["output_token_sampling_mask"][2] = [1, 2]


def of_fewer_tokens(answer: Answer) -> None:
    with_masks(answer)
    answer["meta_info"]["output_token_sampling_mask"].pop()


@pytest.mark.parametrize(
    ("sampling", "top_k"),
    [({"top_p": 0.9}, 50), ({"min_p": 0.1}, 50), ({"top_k": 7}, 7), ({"top_k": 1}, 1), ({"top_k": 100}, 100)],
)
async def test_a_truncated_request_asks_for_kept_ids_under_a_finite_top_k(
    masking: Server, sampling: dict[str, Any], top_k: int
) -> None:
    masking.distortions.append(with_masks)
    async with over(masking) as engine:
        response = await engine.agenerate(ask(**sampling))
    (sent,) = masking.requests
    assert sent["return_sampling_mask"] is True
    assert sent["sampling_params"]["top_k"] == top_k
    assert response.output_logprobs == (-0.5,) * 4
    assert response.kept_ids == KeptIds.of([[1, token] for token in response.output_ids])


@pytest.mark.parametrize(
    ("sampling", "settings"),
    [({}, {}), ({"top_p": 0.5, "temperature": 0.0}, {}), ({"top_p": 0.5}, {"replay_truncation": False})],
)
async def test_others_do_not(server: Server, sampling: dict[str, Any], settings: dict[str, Any]) -> None:
    async with over(server, **settings) as engine:
        response = await engine.agenerate(ask(**sampling))
    assert_seamless(response, 4)
    assert response.kept_ids is None
    assert "return_sampling_mask" not in server.requests[0]
    assert server.requests[0]["sampling_params"]["top_k"] == -1


async def test_kept_ids_are_joined_over_interruptions(masking: Server) -> None:
    masking.is_automatic = False
    masking.distortions.extend([with_masks] * 3)
    async with over(masking, pause_mode="abort") as engine, asyncio.TaskGroup() as group:
        call = await masking.begin(group, engine.agenerate(ask(top_p=0.9)))
        masking.advance(3)
        await engine.pause()
        masking.is_automatic = True
        await engine.resume()
        response = await call
    assert [len(sent["input_ids"]) for sent in masking.requests] == [3, 6]
    assert response.kept_ids == KeptIds.of([[1, token_at(position)] for position in range(3, 7)])


async def test_a_server_that_cannot_tell_is_named_before_it_is_asked_with_the_setting_that_does_without(
    server: Server,
) -> None:
    async with over(server) as engine:
        with pytest.raises(ServerError, match=rf"{server.address} does not say .*engine\.replay_truncation=false"):
            await engine.agenerate(ask(top_p=0.9))
        assert not server.requests
        assert_seamless(await engine.agenerate(ask()), 4)


async def test_a_top_k_above_what_a_server_lists_is_an_error(masking: Server) -> None:
    async with over(masking) as engine:
        with pytest.raises(ServerError, match=r"top_k is 101, but http.* lists at most 100 .*--sampling-mask-max-tok"):
            await engine.agenerate(ask(top_k=101))
    assert not masking.requests


@pytest.mark.parametrize(
    ("distort", "words"),
    [
        (lambda answer: None, r"under top_p, top_k or min_p, and does not say .*engine\.replay_truncation=false"),
        (without_the_sampled_token, r"\(output_token_sampling_mask\) lack a token"),
        (of_fewer_tokens, r"\(output_token_sampling_mask\) lack a token"),
    ],
)
async def test_an_answer_with_impossible_kept_ids_is_the_servers_fault(
    masking: Server, distort: Any, words: str
) -> None:
    masking.distortions.extend([distort] * 2)
    async with over(masking, max_retries=1) as engine:
        with pytest.raises(ServerError, match=rf"failed 2 times; .*{words}"):
            await engine.agenerate(ask(top_p=0.9))
    assert len(masking.requests) == 2


MIXTURE = ServedModel(
    name="m", vocab_size=31, routing=Routing(num_layers=2, experts_per_token=3, num_experts=40)
)  # fmt: skip
ABLE = {"server_info": {"enable_return_routed_experts": True}}


def wanted(first: int, last: int, num_tokens: int) -> Routes | None:
    """Those of the tokens first..last-1, among so many."""
    return Routes.joined([first, Routes.of(experts_at(range(first, last)).astype(np.uint8)), num_tokens - last])


def experts(numbers: np.ndarray | None) -> Any:
    def change(answer: dict[str, Any]) -> None:
        if numbers is None:
            del answer["meta_info"]["routed_experts"]
        else:
            answer["meta_info"]["routed_experts"] = b64encode(numbers.astype(np.int32).tobytes()).decode()

    return change


async def test_a_response_has_the_routes_of_prompt_and_answer_but_of_the_last_token(server: Server) -> None:
    server.tells = ABLE
    async with over(server, model=MIXTURE) as engine:
        response = await engine.agenerate(ask(4))
        assert response.routes == wanted(0, 6, 7)
        response = await engine.agenerate(replace(ask(4), routes_from=2))
        assert response.routes == wanted(2, 6, 7)
    assert [r["routed_experts_start_len"] for r in server.requests] == [0, 2]


async def cut_short(server: Server, num_tokens: int, **settings: Any) -> None:
    """A response of five tokens, which a pause cuts after so many."""
    server.tells, server.is_automatic = ABLE, False
    async with over(server, model=MIXTURE, pause_mode="abort", **settings) as engine, asyncio.TaskGroup() as group:
        call = await server.begin(group, engine.agenerate(ask(5)))
        server.advance(num_tokens)
        await engine.pause()
        await engine.resume()
        await server.until(lambda: len(server.requests) == 2 and bool(server.running))
        server.advance(5)
        response = await call
    assert_seamless(response, 5)
    assert response.routes == wanted(0, 7, 8)


async def test_attempts_ask_for_what_the_ones_before_did_not_bring(server: Server) -> None:
    await cut_short(server, 2)
    assert [r["routed_experts_start_len"] for r in server.requests] == [0, 4]


async def test_tokens_whose_routes_an_abort_lost_are_sampled_again(server: Server) -> None:
    """SGLang returns none for a request that waits, retracted, when it is aborted."""
    server.distortions.append(experts(None))
    await cut_short(server, 2)
    assert server.requests[1]["input_ids"] == [9, 8, 7]


async def test_an_abort_within_the_prompt_may_bring_the_routes_of_a_part_of_it(server: Server) -> None:
    server.distortions.append(experts(experts_at(range(1))))
    await cut_short(server, 0, max_retries=0)


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        (experts_at(range(5)), r"returned routes of shape \(30,\), which are not those of \[6, 2, 3\]"),
        (experts_at(range(7)), r"returned routes of shape \(42,\)"),
        (experts_at(range(6)) + 30, "routed a token to expert 40, but a layer has 40"),
        (experts_at(range(6)) - 1, "routed a token to expert"),
        (None, "does not say which experts it used; engine.replay_routing=false does without"),
    ],
    ids=["too few", "too many", "too large", "below 0", "none"],
)
async def test_routes_of_another_shape_are_refused(server: Server, numbers: np.ndarray | None, told: str) -> None:
    server.tells = ABLE
    server.distortions.append(experts(numbers))
    async with over(server, model=MIXTURE, max_retries=0) as engine:
        with pytest.raises(ServerError, match=told):
            await engine.agenerate(ask(4))


async def test_a_server_that_cannot_return_routes_is_named_at_the_start(server: Server, other: Server) -> None:
    server.tells, other.tells = ABLE, {"server_info": {"enable_return_routed_experts": False}}
    with pytest.raises(ServerError, match=r"set engine\.replay_routing=false to do without") as raised:
        async with over(server, other, model=MIXTURE):
            pass
    assert other.address in str(raised.value)
    assert "--enable-return-routed-experts" in str(raised.value)


async def test_a_dense_models_servers_are_not_asked_for_routes(server: Server) -> None:
    async with over(server, model=replace(MIXTURE, routing=None)) as engine:
        assert (await engine.agenerate(ask(4))).routes is None
    assert "return_routed_experts" not in server.requests[0]
