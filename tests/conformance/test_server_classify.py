"""A served reward model: the score of a sequence is its head's at the last token."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp
import pytest
import torch
from conformance.conftest import write_reward_model
from protocol_client import Client
from servers import Server
from transformers import AutoModelForSequenceClassification

from arl.engine.tiny import tiny_tokenizer
from arl.workflow.teachers import RewardModelClient

pytestmark = pytest.mark.parametrize(
    "server", ["embedded-reward", pytest.param("sglang-reward", marks=pytest.mark.sglang)], indirect=True
)

SEQUENCES = [[7], list(range(40)), list(range(30, 0, -1)), [*range(35), 1, 2, 3]]


@pytest.fixture
async def scorer(server: Server, reward_model: Path) -> AsyncIterator[Client]:
    """A client of the reward server, which afterwards has its first weights again."""
    async with aiohttp.ClientSession(server.url) as session:
        client = Client(session)
        yield client
        await client.post("/update_weights_from_disk", {"model_path": str(reward_model), "weight_version": "default"})


@torch.no_grad()
def scores_by_transformers(directory: Path, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    return torch.stack([model(torch.tensor([list(sequence)])).logits[0, 0] for sequence in sequences])


async def scores(scorer: Client, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """The scores of sequences that are sent at once."""
    answers = await asyncio.gather(*(scorer.post("/classify", {"input_ids": sequence}) for sequence in sequences))
    assert all(answer.status == 200 and len(answer.body["embedding"]) == 1 for answer in answers)
    return torch.tensor([answer.body["embedding"][0] for answer in answers])


async def test_scores_are_those_that_transformers_computes(scorer: Client, reward_model: Path) -> None:
    wanted = scores_by_transformers(reward_model, SEQUENCES)
    assert wanted.std() > 0.1
    torch.testing.assert_close(await scores(scorer, SEQUENCES), wanted, atol=1e-4, rtol=0)
    torch.testing.assert_close(await scores(scorer, SEQUENCES[::-1]), wanted.flip(0), atol=1e-4, rtol=0)
    meta = (await scorer.post("/classify", {"input_ids": SEQUENCES[1], "rid": "mine"})).body["meta_info"]
    assert (meta["id"], meta["prompt_tokens"], meta["weight_version"]) == ("mine", 40, "default")
    assert meta["finish_reason"] == {"type": "length", "length": 0}


async def test_new_weights_give_their_own_scores(scorer: Client, reward_model: Path, tmp_path: Path) -> None:
    before = await scores(scorer, SEQUENCES)
    other = write_reward_model(tmp_path / "other", 1)
    answer = await scorer.post("/update_weights_from_disk", {"model_path": str(other), "weight_version": "next"})
    assert answer.body["success"], answer.body
    after = await scores(scorer, SEQUENCES)
    torch.testing.assert_close(after, scores_by_transformers(other, SEQUENCES), atol=1e-4, rtol=0)
    assert (after - before).abs().min() > 1e-2
    assert (await scorer.get("/model_info")).body["weight_version"] == "next"


async def test_it_says_that_it_generates_nothing_and_how_long_a_sequence_may_be(scorer: Client) -> None:
    info = (await scorer.get("/model_info")).body
    assert info["is_generation"] is False
    assert info["architectures"] == ["LlamaForSequenceClassification"]
    assert (await scorer.get("/health")).status == 200
    answer = await scorer.post("/classify", {"input_ids": [1] * 3000})
    assert answer.status == 400
    assert "longer than the model's context" in answer.message


async def test_a_request_for_tokens_is_refused_with_a_sentence(scorer: Client, server: Server) -> None:
    if server.kind == "sglang":
        pytest.skip("a /generate ends the process of a stock SGLang server that has a reward model")
    answer = await scorer.post("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}})
    assert answer.status == 400
    assert "this server has a reward model" in answer.message


async def test_a_reward_model_client_is_told_the_score(scorer: Client, server: Server, reward_model: Path) -> None:
    async with RewardModelClient(server.url, tokenizer=tiny_tokenizer()) as judge:
        told = [await judge.score(sequence) for sequence in SEQUENCES]
    assert told == pytest.approx(scores_by_transformers(reward_model, SEQUENCES).tolist(), abs=1e-4)
