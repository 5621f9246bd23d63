"""Truncated requests get the ids that their tokens were sampled among, or say why they cannot."""

import asyncio
from typing import Any

import pytest
from protocol_server import Server, ask, assert_seamless, over, token_at

from arl.api.errors import ServerError
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
