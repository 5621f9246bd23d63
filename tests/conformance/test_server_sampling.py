"""How tokens are drawn, and which logprobs the server tells."""

import asyncio
from typing import Any

import pytest
import torch
from conformance.conftest import Models
from protocol_client import Client
from servers import Server

PROMPT = [10, 11, 12, 13]
NUM_TOKENS = 24
FREE = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}


async def sampled(client: Client, num_samples: int = 1, **sampling: Any) -> list[Any]:
    """Answers to a few prompts of different lengths, each asked `num_samples` times."""
    prompts = [prompt for prompt in (PROMPT[:1], PROMPT, PROMPT * 9) for _ in range(num_samples)]
    answers = await asyncio.gather(*(ask(client, prompt, **sampling) for prompt in prompts))
    return [{**answer, "prompt": prompt} for answer, prompt in zip(answers, prompts, strict=True)]


async def ask(client: Client, prompt: list[int] = PROMPT, **sampling: Any) -> Any:
    return await client.generate(input_ids=prompt, sampling_params={**FREE, **sampling}, return_logprob=True)


SAMPLINGS: list[dict[str, float]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.5},
    {"top_p": 0.5},
    {"top_k": 5},
    {"min_p": 0.3},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05},
    {"sampling_seed": 5},
]


async def test_logprobs_are_of_the_tempered_model_before_any_filter(client: Client, models: Models) -> None:
    answers = await asyncio.gather(*(ask(client, **sampling) for sampling in SAMPLINGS))
    for answer, sampling in zip(answers, SAMPLINGS, strict=True):
        models.a.check_answer(answer, PROMPT, sampling.get("temperature", 1.0))


async def test_temperature_zero_is_greedy_with_logprobs_at_temperature_one(client: Client, models: Models) -> None:
    for answer in await sampled(client, temperature=0):
        assert answer["output_ids"] == models.a.greedy(answer["prompt"], NUM_TOKENS)
        models.a.check_answer(answer, answer["prompt"])


async def test_filters_leave_the_likeliest(client: Client, models: Models) -> None:
    for filtered in ({"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.5}):
        for answer in await sampled(client, 4, **filtered):
            probs = models.a.logits(answer["prompt"], answer["output_ids"]).softmax(-1)
            own = probs.gather(1, torch.tensor(answer["output_ids"])[:, None])
            if "top_k" in filtered:
                assert (probs > own).sum(-1).max() < 3
            elif "top_p" in filtered:
                assert torch.where(probs > own, probs, 0).sum(-1).max() <= 0.4 + 1e-4
            else:
                assert (own[:, 0] >= 0.5 * probs.amax(-1) - 1e-4).all()


async def test_tokens_are_drawn_as_often_as_their_probability_says(client: Client, models: Models) -> None:
    num_samples = 300
    samplings: list[dict[str, float]] = [{}, {"temperature": 2.0}, {"top_k": 2}]
    for sampling in samplings:
        one = {**sampling, "max_new_tokens": 1}
        answers = await asyncio.gather(*(ask(client, **one) for _ in range(num_samples)))
        tokens = [answer["output_ids"][0] for answer in answers]
        counts = torch.bincount(torch.tensor(tokens), minlength=288)
        probs = (models.a.logits(PROMPT, [0])[0] / sampling.get("temperature", 1.0)).softmax(-1)
        if "top_k" in sampling:
            probs = torch.where(probs >= probs.topk(2).values[-1], probs, 0)
            probs /= probs.sum()
        shares = counts / num_samples
        divergence = torch.special.xlogy(shares, shares / probs) + torch.special.xlogy(
            1 - shares, (1 - shares) / (1 - probs)
        )
        # Chernoff: a share this far from its probability comes by chance with at most exp(-num_samples * divergence).
        assert num_samples * divergence.nan_to_num(0.0).max() < 16, sampling


async def test_a_seed_gives_the_same_sample_again(client: Client, server: Server) -> None:
    if server.kind == "sglang":
        pytest.skip("stock SGLang heeds seeds in its deterministic mode alone, which no CPU backend has")
    first, again, other = [(await ask(client, sampling_seed=seed))["output_ids"] for seed in (5, 5, 6)]
    assert first == again != other
