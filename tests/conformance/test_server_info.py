"""What a server tells of itself, as far as arl reads it."""

from conformance.conftest import CONTEXT_LENGTH, Models
from protocol_client import Client


async def test_what_a_server_tells_of_itself(client: Client, models: Models) -> None:
    assert (await client.get("/health")).status == 200
    await client.post("/update_weights_from_disk", {"model_path": str(models.directory_a), "weight_version": "7"})
    info = (await client.get("/model_info")).body
    assert (info["weight_version"], info["model_type"], info["is_generation"]) == ("7", "qwen3", True)
    assert info["architectures"] == ["Qwen3ForCausalLM"]
    assert isinstance(info["model_path"], str)
    (card,) = (await client.get("/v1/models")).body["data"]
    assert (card["object"], card["max_model_len"]) == ("model", CONTEXT_LENGTH)
    info = (await client.get("/server_info")).body
    assert (info["tp_size"], info["context_length"]) == (1, CONTEXT_LENGTH)
    (load,) = (await client.get("/v1/loads")).body["loads"]
    assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 0)
