"""What a server with a language model says of /classify; tests/conformance asks one that has a reward model."""

from __future__ import annotations

from protocol_client import Client


async def test_a_language_model_scores_nothing_and_says_which_models_do(client: Client) -> None:
    answer = await client.post("/classify", {"input_ids": [1, 2]})
    assert answer.status == 400
    assert "this server has a language model" in answer.message
    assert "ForSequenceClassification" in answer.message


async def test_it_tells_how_many_tokens_it_knows(client: Client) -> None:
    assert (await client.get("/model_info")).body["vocab_size"] == 288
