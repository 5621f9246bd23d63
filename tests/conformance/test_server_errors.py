"""Requests that cannot be answered: their status, and the shape in which the sentence comes.

Requests that end stock SGLang's process (docs/sglang_protocol.md) are in the embedded server's own tests.
"""

from typing import Any

import pytest
from protocol_client import Answer, Client

PROMPT = [10, 11, 12, 13]
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
    ],
)
async def test_controls_of_the_wrong_form_are_malformed(client: Client, path: str, body: dict[str, Any]) -> None:
    assert told(await client.post(path, body)) == "malformed"


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", "/generate", 405)])
async def test_a_wrong_path_or_method_is_answered_in_json(client: Client, method: str, path: str, status: int) -> None:
    async with client.session.request(method, path) as response:
        assert response.status == status
        assert "detail" in await response.json()
