"""What arl asks of vLLM, and what it reads in its answers, where no vLLM runs; tests/conformance asks a real one."""

import base64
import io
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from arl.api.errors import PromptTooLongError, RefusedRequestError, ServerError, ServerFailedError
from arl.api.grammar import Grammar
from arl.api.settings.engines import RELEASED
from arl.api.types import SamplingParams
from arl.engine.client.server_client import MIXTURE, GenerateCall, UnfitServerError, greet
from arl.engine.client.vllm_client import _FLAGS, VLLMClient, _parse_answer
from arl.runtime.http.client import Connections, Reply


def client(**facts: Any) -> VLLMClient:
    made = VLLMClient(cast(Any, None), "http://127.0.0.1:9")
    for name, value in facts.items():
        setattr(made, name, value)
    return made


def asked(made: VLLMClient, *, num_continued: int = 0, **sampling: Any) -> dict[str, Any]:
    call = GenerateCall(
        rid="r", input_ids=np.arange(4, dtype=np.int32), num_continued=num_continued,
        sampling=SamplingParams(**sampling), max_new_tokens=9, cache_key="k",
    )  # fmt: skip
    return made._payload(call)["sampling_params"]


def answered(**choice: Any) -> dict[str, Any]:
    whole = {
        "finish_reason": "length", "token_ids": [3, 4], "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}]},
        "weight_versions": [{"version": "5", "start": 0, "end": 1}, {"version": "6", "start": 1, "end": 2}], **choice,
    }  # fmt: skip
    return {"choices": [whole], "usage": {"completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 16}}}


def test_a_continued_request_draws_other_noise_than_its_beginning() -> None:
    seeds = [asked(client(), num_continued=count, seed=5)["seed"] for count in (0, 1, 2, 1)]
    assert seeds[0] == 5
    assert seeds[1] == seeds[3]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_a_server_that_lists_what_it_sampled_from_gets_a_top_k_with_each_request() -> None:
    lists = client(lists_kept_ids=True)
    assert [asked(lists, top_k=k)["top_k"] for k in (-1, 7)] == [1024, 7]
    greedy = asked(lists, temperature=0.0)
    assert (greedy["temperature"], greedy["top_k"]) == (1.0, 1)
    assert (asked(client())["top_k"], asked(client(), temperature=0.0)["temperature"]) == (0, 0.0)


def test_grammars_and_stop_tokens_are_asked_for_in_its_words() -> None:
    grammar = asked(client(), grammar=Grammar(kind="json_schema", text='{"type": "object"}'))
    assert grammar["structured_outputs"] == {"json": '{"type": "object"}'}
    assert asked(client(), stop_token_ids=(7,))["stop_token_ids"] == [7]
    assert "stop_token_ids" not in asked(client(), stop_token_ids=(7,), ignore_eos=True)


def test_an_answer_has_versions_sets_and_routes() -> None:
    file = io.BytesIO()
    np.save(file, np.arange(5 * 2 * 2, dtype=np.uint8).reshape(5, 2, 2))  # four prompt tokens and the first sampled one
    routes = base64.b64encode(file.getvalue()).decode()
    answer = _parse_answer(answered(sampling_mask=[[3, 9], [4]], routed_experts=routes), routes_from=1)
    assert (answer.output_ids, answer.output_logprobs, answer.cached_tokens) == ([3, 4], [-1.0, -2.0], 16)
    assert (answer.spans, answer.label) == ([("5", 0, 1), ("6", 1, 2)], "6")
    assert answer.kept_ids is not None
    assert answer.kept_ids.allows(np.array([9, 4], np.int32)).all()
    assert answer.experts is not None
    assert answer.experts.shape == (4, 2, 2)
    assert answer.experts[0].tolist() == [[4, 5], [6, 7]]


def test_an_abort_before_the_first_token_is_an_empty_answer() -> None:
    answer = _parse_answer(answered(finish_reason="abort", token_ids=[], logprobs=None, weight_versions=[]), None)
    assert (answer.output_ids, answer.finish, answer.label) == ([], "abort", "")


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_ids": [3]}, {"finish_reason": "error"}, {"token_ids": [3, -4]}, {"sampling_mask": [[3], [5]]},
        {"logprobs": {"content": [{"logprob": -1.0}, {"logprob": 0.5}]}}, {"weight_versions": [{"version": "5"}]},
    ],
)  # fmt: skip
def test_an_impossible_answer_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((LookupError, TypeError, ValueError)):
        _parse_answer(answered(**wrong), None)


@pytest.mark.parametrize(
    ("status", "said", "error"),
    [
        (400, "The decoder prompt (length 9) is longer than the maximum model length of 8.", PromptTooLongError),
        (400, "Token id 9999 is out of vocabulary", RefusedRequestError),
        (404, "The model `v3` does not exist.", UnfitServerError),
        (500, "EngineCore encountered an issue.", ServerFailedError),
    ],
)
def test_errors_say_whether_another_server_may_answer(status: int, said: str, error: type[ServerError]) -> None:
    body = b'{"error": {"message": "%s"}}' % said.encode()
    reply = Reply(url="u", path="/inference/v1/generate", status=status, headers=(), body=body)
    assert type(client().error_of(reply)) is error


MODEL = {"model": "/m", "dtype": "torch.float32", "logprobs_mode": "processed_logprobs", "return_sampling_mask": False}


@asynccontextmanager
async def told(
    paths: Sequence[str] = tuple(_FLAGS), *, parallel: dict[str, Any] | None = None, **model: Any
) -> AsyncIterator[VLLMClient]:
    """A client of what describes itself as vLLM would that lacks something, which nobody can start here."""
    settings = {"model_config": {**MODEL, **model}, "parallel_config": parallel or {}, "device_config": {}}
    answers: dict[str, Any] = {
        "/version": {"version": "0.19.0"},
        "/openapi.json": {"paths": {path: {} for path in paths}},
        "/server_info": {"vllm_config": settings},
        "/weight_info": {"weight_version": "default"},
        "/get_world_size": {"world_size": 4},
    }

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(answers[request.path]) if request.path in answers else web.Response(status=404)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server, Connections() as connections:
        yield VLLMClient(connections, f"http://127.0.0.1:{server.port}")


async def test_a_server_without_a_call_that_arl_needs_is_named_with_what_brings_it() -> None:
    lacking = [path for path in _FLAGS if path not in ("/pause", "/inference/v1/generate")]
    async with told(lacking) as made:
        with pytest.raises(ServerError) as raised:
            await greet(made, sets_going=False)
    said = (
        "is vLLM 0.19.0 without /inference/v1/generate, /pause; vLLM 0.32 has it, started with --enable-scale-out and"
    )
    assert said in str(raised.value)
    assert "VLLM_SERVER_DEV_MODE=1" in str(raised.value)


async def test_logprobs_of_another_distribution_are_refused_when_a_server_is_greeted() -> None:
    async with told(logprobs_mode="raw_logprobs") as made:
        with pytest.raises(ServerError, match=r"returns raw_logprobs.*--logprobs-mode processed_logprobs"):
            await greet(made, sets_going=False)


async def test_a_greeting_tells_the_ranks_and_whether_calls_reach_all_of_the_server() -> None:
    async with told(return_sampling_mask=True) as made:
        greeting = await greet(made, sets_going=False)
        assert (made.num_ranks, made.lists_kept_ids, greeting.is_exact, greeting.unreached) == (4, True, True, None)
    async with told(parallel={"_api_process_count": 2}) as made:
        assert (await greet(made, sets_going=False)).unreached == (
            "--api-server-count=2: an abort reaches only one of them; leave the option out"
        )


class SleepingServer:
    """What vLLM's /sleep and /wake_up do to its memory, and the label of its weights."""

    def __init__(self) -> None:
        self.asleep: set[str] = set()
        self.label = "3"
        self.calls: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        told: dict[str, Any] = {}
        match request.path:
            case "/sleep":
                self.asleep = {"weights", "kv_cache"}
            case "/wake_up":
                self.asleep -= {request.query["tags"]}
            case "/update_weight_version":
                self.label = body["new_version"]
            case "/version":
                told = {"version": "0.32"}
            case "/is_sleeping":
                told = {"is_sleeping": bool(self.asleep)}
            case "/weight_info":
                told = {"weight_version": self.label}
            case "/server_info":
                told = {"vllm_config": {"model_config": MODEL, "parallel_config": {}, "device_config": {}}}
        if request.method == "POST" and request.path != "/update_weight_version":
            self.calls.append(request.path_qs)
        return web.json_response(told)


@asynccontextmanager
async def sleeping(num_clients: int) -> AsyncIterator[tuple[SleepingServer, list[VLLMClient]]]:
    vllm, app = SleepingServer(), web.Application()
    app.router.add_route("*", "/{path:.*}", vllm.answer)
    async with TestServer(app) as server, Connections() as connections:
        yield vllm, [VLLMClient(connections, f"http://127.0.0.1:{server.port}") for _ in range(num_clients)]


SLEEP = ["/pause?mode=keep&clear_cache=false", "/reset_prefix_cache?reset_running_requests=true"]
SLEEP += ["/sleep?level=2&mode=keep"]


@pytest.mark.parametrize("has_loaded", [False, True])
async def test_a_server_gets_its_weights_before_its_caches_also_from_another_run(has_loaded: bool) -> None:
    """The first run dies while the server sleeps, or before the caches have memory again; then the label is no help."""
    async with sleeping(2) as (vllm, (first, second)):
        await first.pause("retract")
        await first.release_memory()
        assert (vllm.calls, vllm.asleep, vllm.label) == (SLEEP, {"weights", "kv_cache"}, RELEASED)
        if has_loaded:
            await first.resume_memory()
            assert (vllm.asleep, vllm.label) == ({"kv_cache"}, MIXTURE)
            await first._label("4")
        await greet(second)
        woken = [call for call in vllm.calls if call.startswith(("/wake_up", "/resume"))]
        assert (vllm.asleep, woken) == (set(), ["/wake_up?tags=weights", "/wake_up?tags=kv_cache", "/resume"])


async def test_new_weights_make_it_forget_what_it_saw_with_the_old_ones(tmp_path: Path) -> None:
    async with sleeping(1) as (vllm, (client,)):
        await client.load_directory(tmp_path, version=1, flush_cache=False)
        await client.begin_update()
        await client.end_update()
    loading = ["/collective_rpc", "/reset_encoder_cache"]
    assert vllm.calls == [*loading, "/start_weight_update", "/reset_encoder_cache", "/finish_weight_update"]
