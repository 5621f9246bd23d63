"""A mixture of experts that was saved without a tokenizer: served by token ids, and updated from files."""

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import torch
from embedded_server import server_here
from protocol_client import Client
from reference import Reference
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

PROMPT = [10, 11, 12, 13]
GREEDY = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
CONFIG = Qwen3MoeConfig(
    vocab_size=288, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
    max_position_embeddings=512, initializer_range=0.3,
)  # fmt: skip


def write_experts(directory: Path, seed: int) -> str:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def experts_a(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_experts(tmp_path_factory.mktemp("experts") / "a", 0)


@pytest.fixture
async def client(experts_a: str) -> AsyncIterator[Client]:
    with server_here(experts_a) as url:
        async with aiohttp.ClientSession(url) as session:
            yield Client(session)


async def check_served(client: Client, directory: str) -> None:
    """The server says what transformers does with the weights in `directory`."""
    answer = await client.generate(input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True)
    Reference(directory).check_answer(answer, PROMPT)


async def test_experts_that_are_stored_one_by_one_are_loaded_into_the_fused_parameter_or_not_at_all(
    client: Client, experts_a: str, tmp_path: Path
) -> None:
    other = Path(write_experts(tmp_path / "b", 1))
    tensors = load_file(other / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    missing = {key: tensor for key, tensor in tensors.items() if key != name}
    for changed, sentence in (
        (missing, f"lacks {name}"),
        ({**tensors, name: torch.zeros(3, 3)}, f"{name} has shape [3, 3]; the served model's has [16, 32]"),
        (tensors, ""),
    ):
        await check_served(client, experts_a)
        save_file(changed, other / "model.safetensors", metadata={"format": "pt"})
        answer = await client.post("/update_weights_from_disk", {"model_path": str(other), "weight_version": "v1"})
        assert (answer.status, answer.body["success"]) == ((400, False) if sentence else (200, True))
        assert sentence in answer.message
    await check_served(client, str(other))


async def test_without_a_tokenizer_answers_have_ids_and_whatever_needs_text_is_refused(client: Client) -> None:
    answer = await client.generate(input_ids=PROMPT, sampling_params=GREEDY)
    assert len(answer["output_ids"]) == 8
    assert "text" not in answer
    stopping = {"input_ids": PROMPT, "sampling_params": {**GREEDY, "stop": ["x"]}}
    for path, body, sentence in (
        ("/generate", stopping, "stop needs a tokenizer"),
        ("/tokenize", {"prompt": "hello"}, "saved without a tokenizer"),
    ):
        refused = await client.post(path, body)
        assert refused.status == 400
        assert sentence in refused.message
