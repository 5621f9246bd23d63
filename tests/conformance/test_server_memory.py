"""A server lets go of its memory and takes it again. tests/engine/local/test_occupation.py has what goes, and what not."""

import asyncio

import torch
from conformance.conftest import Models
from protocol_client import Client, spans
from weight_trainer import succeeds

PROMPT = torch.randint(256, (32,), generator=torch.Generator().manual_seed(5)).tolist()
GREEDY = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}
ALL = {"tags": ["kv_cache", "weights"]}


async def calls(client: Client, *paths: str, **body: object) -> None:
    for path in paths:
        answer = await client.post(path, dict(body))
        assert answer.status == 200, (path, answer.body)


async def load(client: Client, models: Models) -> None:
    body = {"model_path": str(models.directory_b), "weight_version": "7"}
    await succeeds(client, "/update_weights_from_disk", body)


async def test_weights_that_come_after_a_release_are_served(client: Client, models: Models) -> None:
    await client.generate(input_ids=PROMPT, sampling_params=GREEDY)
    await calls(client, "/pause_generation", mode="retract")
    await calls(client, "/release_memory_occupation", "/resume_memory_occupation", **ALL)
    await load(client, models)
    await calls(client, "/continue_generation")
    answer = await client.generate(input_ids=PROMPT, sampling_params=GREEDY)
    assert answer["meta_info"]["cached_tokens"] == 0
    assert spans(answer) == [("7", 0, 40)]
    assert answer["output_ids"] == models.b.greedy(PROMPT, 40)


async def test_a_retracted_request_goes_on_with_new_weights_from_the_tokens_that_it_has(
    client: Client, models: Models
) -> None:
    sampling = {**GREEDY, "max_new_tokens": 400}
    asking = asyncio.create_task(client.generate(input_ids=PROMPT, sampling_params=sampling))
    await client.until_running(1)
    await asyncio.sleep(0.1)
    await calls(client, "/pause_generation", mode="retract")
    await calls(client, "/release_memory_occupation", "/resume_memory_occupation", **ALL)
    await load(client, models)
    await calls(client, "/continue_generation")
    answer = await asking
    (old, start, cut), (new, again, end) = spans(answer)
    assert (old, start, cut == again, new, end) == ("a", 0, True, "7", 400)
    ids = answer["output_ids"]
    assert ids[cut : cut + 20] == models.b.greedy([*PROMPT, *ids[:cut]], 20)
