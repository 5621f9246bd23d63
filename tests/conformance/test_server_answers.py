"""What a server answers: tokens, cached prefixes, what it is, and which errors in which shape.

Requests that end stock SGLang's process (docs/sglang_protocol.md) are in the embedded server's own tests.
"""

from typing import Any

import pytest
import torch
from conformance.conftest import CONTEXT_LENGTH, Models
from protocol_client import Answer, Client, spans

PROMPT = [10, 11, 12, 13]
GREEDY = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}


async def test_an_answer_has_ids_text_and_everything_known_about_them(client: Client, models: Models) -> None:
    answer = await client.generate(input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True, rid="mine")
    info = answer["meta_info"]
    assert answer["output_ids"] == models.a.greedy(PROMPT, 8)
    assert answer["text"] == models.tokenizer.decode(answer["output_ids"])
    assert info["id"] == "mine"
    assert info["finish_reason"] == {"type": "length", "length": 8}
    assert (info["prompt_tokens"], info["completion_tokens"]) == (4, 8)
    assert info["cached_tokens"] in range(4)
    assert [token for _, token, _ in info["output_token_logprobs"]] == answer["output_ids"]
    assert info["weight_version"] == "a"
    assert spans(answer) == [("a", 0, 8)]
    unasked = await client.generate(input_ids=PROMPT, sampling_params=GREEDY)
    assert "output_token_logprobs" not in unasked["meta_info"]


async def test_prefixes_are_read_from_the_cache_within_an_extra_key_alone(client: Client) -> None:
    prompt = torch.randint(256, (64,), generator=torch.Generator().manual_seed(2)).tolist()
    cached = [
        (await client.generate(input_ids=prompt, sampling_params=GREEDY, extra_key=key))["meta_info"]["cached_tokens"]
        for key in ("1", "2", None, "1", "2", None)
    ]
    assert cached == [0, 0, 0, 63, 63, 63]


async def test_it_tokenizes_as_the_models_tokenizer(client: Client, models: Models) -> None:
    text = "Agent 12345 said:\n\t'déjà vu' <|im_start|>user\n# 你好"
    tokens = models.tokenizer.encode(text)
    answer = await client.post("/tokenize", {"prompt": text})
    assert answer.body == {"tokens": tokens, "count": len(tokens), "max_model_len": CONTEXT_LENGTH}


async def test_it_renders_messages_as_the_models_template(client: Client, models: Models) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1 = ?"}]
    text = models.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    asked = {"messages": messages, "add_generation_prompt": True, "add_special_tokens": False}
    answer = await client.post("/tokenize", asked)
    assert answer.body["tokens"] == models.tokenizer.encode(text, add_special_tokens=False)


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


FEW = {"max_new_tokens": 2}
LONG = 9000


def told(answer: Answer) -> str:
    """The shape of a refusal's body."""
    body = answer.body
    assert answer.status == 400, body
    if body.keys() == {"error"}:
        return "message in error" if isinstance(body["error"], dict) else "error"
    if body.get("object") == "error":
        assert (body["param"], body["code"]) == (None, 400)
        return "malformed" if body["type"] == "Bad Request" else "openai"
    assert body["success"] is False
    return "success"


BAD_VALUES: list[dict[str, Any]] = [
    {"input_ids": [], "sampling_params": FEW},
    {"input_ids": [1] * LONG, "sampling_params": FEW},
    {"input_ids": [1] * 8000, "sampling_params": {"max_new_tokens": 500}},
    {"input_ids": PROMPT, "lora_path": "unknown", "sampling_params": FEW},
]
MALFORMED: list[dict[str, Any]] = [
    {"input_ids": "abc"},
    {"input_ids": ["a"]},
    {"input_ids": [1.5]},
    {"input_ids": PROMPT, "sampling_params": "hot"},
    {"input_ids": PROMPT, "rid": 7, "sampling_params": FEW},
    {"input_ids": PROMPT, "return_logprob": "perhaps", "sampling_params": FEW},
]
BAD_SAMPLING: list[dict[str, Any]] = [
    {"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}, {"top_k": 0}, {"top_k": -2}, {"min_p": 2},
    {"max_new_tokens": -1},
]  # fmt: skip
MALFORMED_SAMPLING: list[dict[str, Any]] = [
    {"temperature": "hot"}, {"max_new_tokens": 1.5}, {"stop": 3}, {"stop_token_ids": ["a"]}, {"never_heard_of": 1},
]  # fmt: skip


def sampling(wrongs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"input_ids": PROMPT, "sampling_params": {**FEW, **wrong}} for wrong in wrongs]


@pytest.mark.parametrize(
    ("bodies", "shape"),
    [
        (BAD_VALUES + sampling(BAD_SAMPLING), "message in error"),
        (MALFORMED, "malformed"),
        (sampling(MALFORMED_SAMPLING), "error"),
    ],
    ids=["values", "forms", "forms of sampling parameters"],
)
async def test_what_cannot_be_generated_is_refused(client: Client, bodies: list[dict[str, Any]], shape: str) -> None:
    for body in bodies:
        assert told(await client.post("/generate", body)) == shape, str(body)[:100]


@pytest.mark.parametrize("path", ["/generate", "/pause_generation", "/update_weights_from_disk"])
async def test_a_body_that_is_no_json_is_malformed_everywhere(client: Client, path: str) -> None:
    async with client.session.post(path, data=b"{bad", headers={"Content-Type": "application/json"}) as response:
        assert told(Answer(response.status, await response.json())) == "malformed"


async def test_a_prompt_that_is_too_long_says_how_long_it_may_be(client: Client) -> None:
    answer = await client.post("/generate", {"input_ids": [1] * LONG, "sampling_params": FEW})
    expected = "The input (9000 tokens) is longer than the model's context length (8192 tokens)."
    assert answer.message == expected
    body = {"input_ids": [1] * 8000, "sampling_params": {"max_new_tokens": 500}}
    assert "maximum context length of 8192 tokens" in (await client.post("/generate", body)).message


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/pause_generation", {"mode": "sometimes"}),
        ("/update_weights_from_disk", {}),
        ("/update_weights_from_disk", {"model_path": 3}),
        ("/init_weights_update_group", {}),
        ("/update_weights_from_distributed", {"names": 3}),
        ("/load_lora_adapter", {"lora_name": "x"}),
        ("/tokenize", {"prompt": 3}),
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
    ],
)
async def test_controls_of_the_wrong_form_are_malformed(client: Client, path: str, body: dict[str, Any]) -> None:
    assert told(await client.post(path, body)) == "malformed"


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", "/generate", 405)])
async def test_a_wrong_path_or_method_is_answered_in_json(client: Client, method: str, path: str, status: int) -> None:
    async with client.session.request(method, path) as response:
        assert response.status == status
        assert "detail" in await response.json()
