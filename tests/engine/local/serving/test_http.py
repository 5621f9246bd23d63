"""What the embedded server alone does: updates without a pause, aborts while paused, a sentence for each refusal."""

import asyncio
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from embedded_server import server_here
from protocol_client import Client, spans
from reference import Reference
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

PROMPT = [10, 11, 12, 13]
SHORT = {"max_new_tokens": 4, "ignore_eos": True}
ENDLESS = {"max_new_tokens": 8000, "ignore_eos": True}


async def test_weights_are_updated_in_flight_without_a_pause(client: Client, model_b: str) -> None:
    running = asyncio.create_task(client.generate(input_ids=PROMPT, sampling_params=ENDLESS, rid="mine"))
    await client.until_running(1)
    await client.until_gained(1)
    await client.post("/update_weights_from_disk", {"model_path": model_b, "weight_version": "v1"})
    await client.until_gained(1)
    await client.post("/abort_request", {"rid": "mine"})
    assert [label for label, _, _ in spans(await running)] == ["v0", "v1"]


async def test_a_request_sent_while_paused_waits_and_can_be_aborted(client: Client) -> None:
    await client.post("/pause_generation", {"mode": "in_place"})
    assert (await client.get("/health")).status == 200
    waiting = asyncio.create_task(client.generate(input_ids=PROMPT, sampling_params=SHORT, rid="first"))
    aborted = asyncio.create_task(client.generate(input_ids=PROMPT, sampling_params=SHORT, rid="second"))
    await client.until_waiting(2)
    await client.post("/abort_request", {"rid": "second"})
    assert (await aborted)["output_ids"] == []
    assert not waiting.done()
    await client.post("/continue_generation")
    assert len((await waiting)["output_ids"]) == 4


async def test_empty_fields_that_it_does_not_know_are_accepted(client: Client) -> None:
    answer = await client.generate(
        input_ids=PROMPT, sampling_params={**SHORT, "json_schema": None, "stop": None}, lora_path=None, stream=False
    )
    assert len(answer["output_ids"]) == 4


ANY = {"input_ids": PROMPT, "sampling_params": SHORT}
BAD_BODIES: list[tuple[Any, str]] = [
    ({"sampling_params": SHORT}, "input_ids is missing"),
    ({**ANY, "input_ids": []}, "input_ids cannot be empty."),
    ({**ANY, "input_ids": "abc"}, 'input_ids is "abc"; it must be a list of integers'),
    ({**ANY, "input_ids": [100000]}, "input_ids holds a token outside the model's vocabulary of 288 tokens."),
    ({**ANY, "sampling_params": "hot"}, 'sampling_params is "hot"; it must be a JSON object'),
    ({**ANY, "stream": True}, "stream (here true): it is not known here"),
    ({**ANY, "lora_path": "x"}, "LoRA adapter x is not loaded. Loaded adapters: none"),
    ({**ANY, "logprob_start_len": -2}, "logprob_start_len is -2; it must be at least -1"),
    ({**ANY, "never_heard_of": 1}, "never_heard_of (here 1)"),
    ({**ANY, "input_ids": [1] * 100_000}, "The input (100000 tokens) is longer than the model's context length (8192"),
    *(({**ANY, name: "x" * 1025}, f'{name} is "xxx') for name in ("rid", "extra_key", "lora_path")),
]
BAD_SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature is -1.0; it must be 0 (greedy) or at least 0.001"),
    ({"max_new_tokens": None}, "max_new_tokens is missing"),
    ({"max_new_tokens": -1}, "max_new_tokens is -1; it must be at least 1"),
    ({"stop": [""]}, "none of them empty"),
    ({"max_new_tokens": 10**9}, "exceeds the model's maximum context length of 8192 tokens"),
    ({"stop": ["a"] * 257}, "256 strings at most, each of at most 1024 characters"),
    ({"stop_token_ids": [1] * 4097}, "it must be of length 4096 at most"),
]
LONG = "x" * 1025
DISK, GROUP, SENT = "/update_weights_from_disk", "/init_weights_update_group", "/update_weights_from_distributed"
AT = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
AT |= {"group_name": "g", "backend": "gloo"}
ONE = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "weight_version": "1", "group_name": "g"}
ONE |= {"load_format": "flattened_bucket"}
BAD_CONTROL: list[tuple[str, Any, str]] = [
    ("/generate", [1], "a JSON object"),
    ("/pause_generation", {"mode": "nicely"}, "mode is \"nicely\"; it must be 'in_place', 'retract' or 'abort'"),
    ("/abort_request", {"abort_all": True}, "abort_all (here true): it is not known here"),
    ("/classify", {"input_ids": [1]}, "this server has a language model; /classify is for ForSequenceClassification"),
    (DISK, {"model_path": "/"}, "weight_version is missing"),
    (DISK, {"model_path": "relative/x", "weight_version": "1"}, "send the absolute path"),
    (DISK, {"model_path": "/nonexistent", "weight_version": "1"}, "'/nonexistent', which is not a directory"),
    (DISK, {"model_path": "/", "abort_all_requests": True}, "abort_all_requests (here true): it is not known here"),
    (SENT, {**ONE, "names": ["a", "b"]}, "names, dtypes and shapes have 2, 1 and 1 entries"),
    (SENT, {**ONE, "shapes": [[-1]]}, "shapes[0][0] is -1; it must be at least 0"),
    (SENT, {**ONE, "load_format": "auto"}, 'load_format is "auto"; it must be'),
    (GROUP, {**AT, "rank_offset": 0}, "rank_offset=0 must be above 0 and below world_size=2"),
    (GROUP, {**AT, "backend": "carrier"}, "backend 'carrier' is not available here"),
    ("/load_lora_adapter", {"lora_name": "", "lora_path": "/x"}, 'lora_name is ""; it must be'),
    ("/tokenize", {"prompt": "x" * (32 * 8192 + 1)}, "prompt has 262145 characters; this model's context has room for"),
    (GROUP, {**AT, "world_size": 10**9}, "world_size is 1000000000; it must be at most 4096"),
    (SENT, {**ONE, "names": [""] * ((1 << 17) + 1)}, "it must be of length 131072 at most"),
    (SENT, {**ONE, "shapes": [[1 << 49]]}, "it must be at most 281474976710656"),
]


async def test_bad_bodies_are_refused_with_a_sentence_that_names_the_field(client: Client) -> None:
    sampling = [({**ANY, "sampling_params": {**SHORT, **fields}}, sentence) for fields, sentence in BAD_SAMPLING]
    generating = [("/generate", body, sentence) for body, sentence in BAD_BODIES + sampling]
    for path, body, sentence in generating + BAD_CONTROL:
        answer = await client.post(path, body)
        assert answer.status == 400, (path, body)
        assert sentence in answer.message, (path, body)


async def test_a_body_or_an_announcement_of_more_than_the_model_holds_is_refused_before_it_takes_memory(
    client: Client,
) -> None:
    await client.post("/begin_weight_update")
    answer = await client.post(SENT, {**ONE, "shapes": [[1 << 40]]})
    assert (answer.status, "the tensors have 4398046511104 bytes; the served" in answer.message) == (400, True)
    await client.post("/end_weight_update")
    async with client.session.post("/generate", data=io.BytesIO(bytes(33 << 20))) as response:
        assert (response.status, "Maximum request body size 33554432 exceeded" in await response.text()) == (413, True)


async def test_a_full_queue_refuses_requests(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arl.engine.local.generate._MAX_REQUESTS", 1)
    waiting = asyncio.create_task(client.generate(input_ids=PROMPT, sampling_params=ENDLESS, rid="first"))
    await client.until_running(1)
    answer = await client.post("/generate", ANY)
    assert (answer.status, answer.message) == (503, "The request queue is full: this server takes 1 requests at once")
    await client.post("/abort_request", {"rid": "first"})
    await waiting


# A mixture of experts that was saved without a tokenizer: served by token ids, and updated from files.

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
async def mixture(experts_a: str) -> AsyncIterator[Client]:
    with server_here(experts_a) as url:
        async with aiohttp.ClientSession(url) as session:
            yield Client(session)


async def check_served(client: Client, directory: str) -> None:
    """The server says what transformers does with the weights in `directory`."""
    answer = await client.generate(input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True)
    Reference(directory).check_answer(answer, PROMPT)


async def test_experts_that_are_stored_one_by_one_are_loaded_into_the_fused_parameter_or_not_at_all(
    mixture: Client, experts_a: str, tmp_path: Path
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
        await check_served(mixture, experts_a)
        save_file(changed, other / "model.safetensors", metadata={"format": "pt"})
        answer = await mixture.post("/update_weights_from_disk", {"model_path": str(other), "weight_version": "v1"})
        assert (answer.status, answer.body["success"]) == ((400, False) if sentence else (200, True))
        assert sentence in answer.message
    await check_served(mixture, str(other))


async def test_without_a_tokenizer_answers_have_ids_and_whatever_needs_text_is_refused(mixture: Client) -> None:
    answer = await mixture.generate(input_ids=PROMPT, sampling_params=GREEDY)
    assert len(answer["output_ids"]) == 8
    assert "text" not in answer
    stopping = {"input_ids": PROMPT, "sampling_params": {**GREEDY, "stop": ["x"]}}
    for path, body, sentence in (
        ("/generate", stopping, "stop needs a tokenizer"),
        ("/tokenize", {"prompt": "hello"}, "saved without a tokenizer"),
    ):
        refused = await mixture.post(path, body)
        assert refused.status == 400
        assert sentence in refused.message
