"""New weights for a model that sees: the tower's come with the others, under the names that files have."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest
from embedded_server import server_process
from protocol_client import Client
from reference import close, logprobs_of
from safetensors.torch import load_file
from sighted import SEEING_FAMILIES, SeeingReference, laid_out, noise, write_sighted
from weight_trainer import succeeds, trainer_of

ONE = noise(40, 25, 0)


@pytest.fixture(params=SEEING_FAMILIES)
def references(request: pytest.FixtureRequest, tmp_path: Path) -> list[SeeingReference]:
    """Of two versions of a model's weights."""
    return [SeeingReference(write_sighted(tmp_path / f"{seed}", request.param, seed=seed)) for seed in (0, 1)]


async def check(client: Client, reference: SeeingReference) -> None:
    tokens, placed = laid_out(reference.processor, [5, 6], ONE, [7])
    sampling: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True}
    answer = await client.generate(
        input_ids=tokens, image_data=[ONE.data_url], sampling_params=sampling, return_logprob=True
    )
    close(logprobs_of(answer), reference.logprobs_of(placed, tokens, answer["output_ids"]))


async def test_weights_of_a_directory_and_of_a_broadcast_reach_the_tower(references: list[SeeingReference]) -> None:
    first, second = references
    with server_process(first.processor.model) as process:
        async with aiohttp.ClientSession(process.address) as session, trainer_of(client := Client(session)) as trainer:
            await check(client, first)
            body = {"model_path": second.processor.model, "weight_version": "1"}
            await succeeds(client, "/update_weights_from_disk", body)
            await check(client, second)
            await succeeds(client, "/begin_weight_update")
            await trainer.send(load_file(Path(first.processor.model, "model.safetensors")), weight_version="2")
            await succeeds(client, "/end_weight_update")
            await check(client, first)
            state = (await client.get("/server_info")).body["internal_states"][0]
            assert state["images_computed"] == 3
            trainer.leave()
