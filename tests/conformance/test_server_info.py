"""What a server tells of itself, as far as arl reads it."""

from __future__ import annotations

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
    assert isinstance(info["tokenizer_path"], str)
    assert (await client.get("/get_model_info")).body == info


async def test_how_long_a_context_may_be(client: Client) -> None:
    (card,) = (await client.get("/v1/models")).body["data"]
    assert (card["object"], card["max_model_len"]) == ("model", CONTEXT_LENGTH)


async def test_how_many_ranks_it_has(client: Client) -> None:
    info = (await client.get("/server_info")).body
    assert (info["tp_size"], info["pp_size"], info["dp_size"]) == (1, 1, 1)
    assert info["context_length"] == CONTEXT_LENGTH
    assert len(info["internal_states"]) == 1


async def test_how_busy_it_is(client: Client) -> None:
    (load,) = (await client.get("/v1/loads")).body["loads"]
    assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 0)


async def test_how_it_tokenizes(client: Client, models: Models) -> None:
    text = "Agent 12345 said:\n\t'déjà vu' <|im_start|>user\n# 你好"
    one = (await client.post("/tokenize", {"prompt": text})).body
    tokens = models.tokenizer.encode(text)
    assert one == {"tokens": tokens, "count": len(tokens), "max_model_len": CONTEXT_LENGTH}
    two = (await client.post("/tokenize", {"prompt": [text, "ab"]})).body
    assert (two["tokens"], two["count"]) == ([tokens, models.tokenizer.encode("ab")], [len(tokens), 2])


async def test_a_prompt_that_is_no_text_is_refused(client: Client) -> None:
    for body in ({"prompt": 3}, {"prompt": [3]}, {}):
        answer = await client.post("/tokenize", body)
        assert (answer.status, answer.body["object"]) == (400, "error"), body
