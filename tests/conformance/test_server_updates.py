"""New weights, the labels under which they are served, and requests that are aborted, paused or see weights change.

test_server_engine has their logprobs.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from conformance.conftest import Models
from protocol_client import Client, fresh_rid, spans
from reference import logprobs_of
from safetensors.torch import load_file
from weight_trainer import Trainer, announcing, succeeds, trainer_of

PROMPT = torch.randint(256, (32,), generator=torch.Generator().manual_seed(3)).tolist()
GREEDY = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}


async def greedy(client: Client, prompt: list[int] = PROMPT) -> Any:
    return await client.generate(input_ids=prompt, sampling_params=GREEDY, return_logprob=True)


async def weights_of(client: Client, models: Models) -> str:
    """Which weights the server computes with, by the logprobs of what it says to a prompt that it has not seen."""
    prompt = torch.randint(256, (8,)).tolist()
    answer = await greedy(client, prompt)
    told = torch.tensor(logprobs_of(answer))
    named = {"a": models.a, "b": models.b}
    fits = [n for n, r in named.items() if torch.allclose(told, r.logprobs(prompt, answer["output_ids"]), atol=1e-4)]
    return ", ".join(fits)


async def label_of(client: Client) -> str:
    return (await client.get("/model_info")).body["weight_version"]


async def load_b(client: Client, models: Models, **more: Any) -> None:
    body = {"model_path": str(models.directory_b), "weight_version": "7", **more}
    await succeeds(client, "/update_weights_from_disk", body)


async def test_weights_from_a_directory_are_served_under_their_label_and_a_flush_forgets_old_prefixes(
    client: Client, models: Models
) -> None:
    await greedy(client)
    assert (await greedy(client))["meta_info"]["cached_tokens"] == 31
    assert (await client.post("/flush_cache")).status == 200
    assert (await greedy(client))["meta_info"]["cached_tokens"] == 0
    await load_b(client, models, flush_cache=True)
    assert (await label_of(client), await weights_of(client, models)) == ("7", "b")
    answer = await greedy(client)
    assert spans(answer) == [("7", 0, 6)]
    assert answer["meta_info"]["cached_tokens"] == 0
    assert answer["output_ids"] == models.b.greedy(PROMPT, 6)


async def test_without_a_flush_another_extra_key_keeps_clear_of_old_weights(client: Client, models: Models) -> None:
    body = {"input_ids": PROMPT, "sampling_params": GREEDY}
    await client.generate(**body, extra_key="old")
    await load_b(client, models, flush_cache=False)
    answer = await client.generate(**body, extra_key="new")
    assert answer["meta_info"]["cached_tokens"] == 0
    assert answer["output_ids"] == models.b.greedy(PROMPT, 6)


async def test_a_directory_that_is_not_there_is_refused_and_nothing_changes(client: Client, models: Models) -> None:
    body = {"model_path": "/nonexistent", "weight_version": "7"}
    answer = await client.post("/update_weights_from_disk", body)
    assert (answer.status, answer.body["success"]) == (400, False)
    assert (await label_of(client), await weights_of(client, models)) == ("a", "a")


@asynccontextmanager
async def joined(client: Client, others: int = 0) -> AsyncIterator[Trainer]:
    """A trainer and the server in one group, which both leave at the end."""
    async with trainer_of(client, others) as trainer:
        try:
            yield trainer
        finally:
            await succeeds(client, "/destroy_weights_update_group", {"group_name": trainer.name})
            trainer.leave()


@pytest.fixture(scope="module")
def buckets(models: Models) -> list[dict[str, torch.Tensor]]:
    """The tensors of weights b, in buckets of several and a last one of a single one."""
    tensors = list(load_file(models.directory_b / "model.safetensors").items())
    cuts = [0, 7, 15, len(tensors) - 1, len(tensors)]
    return [dict(tensors[start:end]) for start, end in itertools.pairwise(cuts)]


async def test_weights_sent_in_buckets_are_served_when_the_update_ends_and_a_group_serves_many(
    client: Client, models: Models, buckets: list[dict[str, torch.Tensor]]
) -> None:
    a = load_file(models.directory_a / "model.safetensors")
    async with joined(client) as trainer:
        for label, sent, weights in (("b", buckets, "b"), ("2", [a], "a"), ("3", buckets, "b")):
            await greedy(client)
            await succeeds(client, "/begin_weight_update", {})
            for bucket in sent[:-1]:
                await trainer.send(bucket, weight_version="mixture")
            await trainer.send(sent[-1], weight_version=label, flush_cache=True)
            await succeeds(client, "/end_weight_update", {})
            assert (await label_of(client), await weights_of(client, models)) == (label, weights)
        answer = await greedy(client)
    assert answer["meta_info"]["cached_tokens"] == 0
    assert spans(answer) == [("3", 0, 6)]


async def test_servers_that_share_a_group_receive_one_broadcast(
    client: Client, models: Models, buckets: list[dict[str, torch.Tensor]]
) -> None:
    """This one has the last rank, and another has the one before it."""
    async with joined(client, others=1) as trainer:
        await succeeds(client, "/begin_weight_update", {})
        for bucket in buckets:
            await trainer.send(bucket, weight_version="b")
        await succeeds(client, "/end_weight_update", {})
        assert (await label_of(client), await weights_of(client, models)) == ("b", "b")


async def test_requests_in_flight_go_on_while_weights_are_sent_to_a_paused_server(
    client: Client, models: Models, buckets: list[dict[str, torch.Tensor]]
) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}, "rid": fresh_rid()}
    async with joined(client) as trainer:
        running = asyncio.create_task(client.generate(**body))
        await client.until_running(1)
        await client.until_gained(1)
        await client.post("/pause_generation", {"mode": "in_place"})
        await succeeds(client, "/begin_weight_update", {})
        for bucket in buckets:
            await trainer.send(bucket, weight_version="b")
        await succeeds(client, "/end_weight_update", {})
        await client.post("/continue_generation")
        await client.until_gained(1)
        await client.post("/abort_request", {"rid": body["rid"]})
    (old, start, seam), (new, resumed, end) = spans(answer := await running)
    assert (old, start, new, resumed, end) == ("a", 0, "b", seam, len(answer["output_ids"]))
    assert await weights_of(client, models) == "b"


async def test_calls_out_of_order_are_refused(client: Client) -> None:
    async def refused(path: str, body: Any = None) -> str:
        answer = await client.post(path, body)
        assert (answer.status, answer.body["success"]) == (400, False)
        return answer.message.partition(";")[0]

    async with joined(client) as trainer:
        pass
    left = await refused("/destroy_weights_update_group", {"group_name": trainer.name})
    assert left == "The group to be destroyed does not exist."
    body = announcing({"model.norm.weight": torch.ones(64)}, "nobody", weight_version="7")
    outside = await refused("/update_weights_from_distributed", body)
    assert "between begin_weight_update() and end_weight_update()" in outside
    await succeeds(client, "/begin_weight_update", {})
    assert await refused("/begin_weight_update") == "a weight-update session is already open"
    assert "nobody" in await refused("/update_weights_from_distributed", body)
    await client.post("/end_weight_update")
    assert await refused("/end_weight_update") == "no weight-update session is open"
    assert await label_of(client) == "a"


FEW = [10, 11, 12, 13]
SHORT = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
ENDLESS = {"max_new_tokens": 4000, "temperature": 0, "ignore_eos": True}
GOING_ON = {"flush_cache": False, "abort_all_requests": False}


def start(client: Client, rid: str) -> asyncio.Task[Any]:
    body = {"input_ids": FEW, "sampling_params": ENDLESS, "return_logprob": True, "rid": rid}
    return asyncio.create_task(client.generate(**body))


def check_aborted(answer: Any, models: Models) -> None:
    """It has everything that is known of the tokens it has."""
    info, output, num_tokens = answer["meta_info"], answer["output_ids"], len(answer["output_ids"])
    assert info["finish_reason"]["type"] == "abort"
    assert info["completion_tokens"] == num_tokens < 4000
    assert spans(answer) == ([("a", 0, num_tokens)] if num_tokens else [])
    models.a.check_answer(answer, FEW)
    assert output[:20] == models.a.greedy(FEW, 20)[:num_tokens]


async def test_an_aborted_request_answers_what_it_has_and_others_go_on(client: Client, models: Models) -> None:
    rids = [fresh_rid(), fresh_rid()]
    mine, other = (start(client, rid) for rid in rids)
    await client.until_running(2)
    await client.until_gained(5)
    assert (await client.post("/abort_request", {"rid": rids[0]})).status == 200
    answer = await mine
    assert len(answer["output_ids"]) >= 5
    check_aborted(answer, models)
    assert not other.done()
    await client.post("/abort_request", {"rid": rids[1]})
    check_aborted(await other, models)
    assert (await client.post("/abort_request", {"rid": "nobody"})).status == 200


async def test_a_client_that_goes_away_aborts_its_request(client: Client) -> None:
    running = start(client, fresh_rid())
    await client.until_running(1)
    running.cancel()
    await client.until_running(0)


async def test_a_rid_that_is_under_way_is_refused_until_it_is_done(client: Client) -> None:
    running = start(client, "mine")
    await client.until_running(1)
    again = await client.post("/generate", {"input_ids": FEW, "sampling_params": SHORT, "rid": "mine"})
    assert again.status == 400
    assert "Duplicate request ID detected" in again.message
    await client.post("/abort_request", {"rid": "mine"})
    await running
    await client.generate(input_ids=FEW, sampling_params=SHORT, rid="mine")


async def test_of_several_updates_in_one_pause_the_last_is_seen(client: Client, models: Models) -> None:
    running = start(client, rid := fresh_rid())
    await client.until_running(1)
    await client.until_gained(5)
    await client.post("/pause_generation", {"mode": "in_place"})
    for label in ("1", "2"):
        await load_b(client, models, weight_version=label, **GOING_ON)
    await client.post("/continue_generation")
    await client.until_gained(5)
    await client.post("/abort_request", {"rid": rid})
    (first, start_, seam), (second, resumed, end) = spans(answer := await running)
    assert (first, start_, second, resumed, end) == ("a", 0, "2", seam, len(answer["output_ids"]))


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
async def test_a_request_sent_while_paused_waits_until_generation_continues(
    client: Client, models: Models, mode: str
) -> None:
    await client.post("/pause_generation", {"mode": mode})
    waiting = asyncio.create_task(client.generate(input_ids=FEW, sampling_params=SHORT))
    await load_b(client, models, weight_version="b", **GOING_ON)
    await asyncio.wait([waiting], timeout=0.2)
    assert not waiting.done()
    await client.post("/continue_generation")
    answer = await waiting
    assert spans(answer) == [("b", 0, 4)]
    assert answer["output_ids"] == models.b.greedy(FEW, 4)


async def test_abort_is_the_mode_when_none_is_named(client: Client, models: Models) -> None:
    running = start(client, fresh_rid())
    await client.until_running(1)
    await client.post("/pause_generation", {})
    check_aborted(await running, models)
