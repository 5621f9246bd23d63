"""POST /generate: what an answer holds, and which prefixes are read from the cache. POST /tokenize."""

import torch
from conformance.conftest import CONTEXT_LENGTH, Models
from protocol_client import Client, spans

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
