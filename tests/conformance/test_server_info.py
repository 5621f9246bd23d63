"""What a server tells of itself, as far as arl reads it."""

from conformance.conftest import CONTEXT_LENGTH, Models
from protocol_client import Client


async def test_it_is_healthy(client: Client) -> None:
    assert (await client.get("/health")).status == 200


async def test_the_model_it_serves(client: Client, models: Models) -> None:
    await client.post("/update_weights_from_disk", {"model_path": str(models.directory_a), "weight_version": "7"})
    info = (await client.get("/model_info")).body
    assert info["weight_version"] == "7"
    assert (info["model_type"], info["architectures"]) == ("qwen3", ["Qwen3ForCausalLM"])
    assert info["is_generation"] is True
    assert isinstance(info["model_path"], str)


async def test_how_long_a_context_may_be_and_how_many_ranks_it_has(client: Client) -> None:
    (card,) = (await client.get("/v1/models")).body["data"]
    assert (card["object"], card["max_model_len"]) == ("model", CONTEXT_LENGTH)
    info = (await client.get("/server_info")).body
    assert (info["tp_size"], info["context_length"]) == (1, CONTEXT_LENGTH)


async def test_how_busy_it_is(client: Client) -> None:
    (load,) = (await client.get("/v1/loads")).body["loads"]
    assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 0)
