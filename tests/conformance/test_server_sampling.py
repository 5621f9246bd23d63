"""How tokens are drawn, which logprobs the server tells, and what of a stop stands in ids and text."""

import asyncio
import itertools
from dataclasses import dataclass
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
            is_likelier = probs > own * (1 + 1e-4)  # rounding orders nearly equal tokens
            if "top_k" in filtered:
                assert is_likelier.sum(-1).max() < 3
            elif "top_p" in filtered:
                assert torch.where(is_likelier, probs, 0).sum(-1).max() <= 0.4 + 1e-4
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


GREEDY = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}


@dataclass(frozen=True)
class Continued:
    """A prompt, what the model greedily says to it, and where in it two tokens of plain ASCII stand."""

    prompt: list[int]
    output: list[int]
    at: int
    stop: str


@pytest.fixture(scope="module")
def continued(models: Models) -> Continued:
    """The second token and the text of both stand nowhere before; all tokens are in the tokenizer's vocabulary."""
    for seed in itertools.count():
        prompt = torch.randint(256, (4,), generator=torch.Generator().manual_seed(seed)).tolist()
        output = models.a.greedy(prompt, 40)
        if max(output) >= len(models.tokenizer):
            continue
        texts = [models.tokenizer.decode([token]) for token in output]
        for at in range(3, 38):
            stop = texts[at] + texts[at + 1]
            is_new = output.index(output[at + 1]) == at + 1 and stop not in "".join(texts[: at + 1])
            if is_new and len(stop) == 2 and stop.isascii() and stop.isprintable():
                return Continued(prompt, output, at, stop)
    raise AssertionError


@pytest.fixture(scope="module")
def ending_prompt(models: Models) -> list[int]:
    """A prompt that the model greedily answers with its end-of-sequence token."""
    prompts = torch.randint(256, (4096, 4), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        answers = models.a.model(prompts).logits[:, -1].argmax(-1)
    return prompts[answers == models.tokenizer.eos_token_id][0].tolist()


async def answered(client: Client, prompt: list[int], **sampling: Any) -> tuple[list[int], str, Any]:
    answer = await client.generate(input_ids=prompt, sampling_params={**GREEDY, "ignore_eos": False, **sampling})
    return answer["output_ids"], answer["text"], answer["meta_info"]["finish_reason"]


async def test_the_end_of_sequence_token_is_the_last_id_and_not_in_the_text_unless_it_is_ignored(
    client: Client, models: Models, ending_prompt: list[int]
) -> None:
    end = models.tokenizer.eos_token_id
    assert await answered(client, ending_prompt) == ([end], "", {"type": "stop", "matched": end})
    ids, _, reason = await answered(client, ending_prompt, ignore_eos=True, max_new_tokens=3)
    assert ids == models.a.greedy(ending_prompt, 3)
    assert reason == {"type": "length", "length": 3}
    _, shown, _ = await answered(client, ending_prompt, ignore_eos=True, max_new_tokens=1, skip_special_tokens=False)
    assert shown == models.tokenizer.eos_token


async def test_a_stop_token_is_the_last_id_and_not_in_the_text_unless_ends_are_ignored(
    client: Client, models: Models, continued: Continued
) -> None:
    ids, token = continued.output[: continued.at + 2], continued.output[continued.at + 1]
    trimmed = await answered(client, continued.prompt, stop_token_ids=[token])
    assert trimmed == (ids, models.tokenizer.decode(ids[:-1]), {"type": "stop", "matched": token})
    whole = await answered(client, continued.prompt, stop_token_ids=[token], no_stop_trim=True)
    assert whole == (ids, models.tokenizer.decode(ids), {"type": "stop", "matched": token})
    ignored = await answered(client, continued.prompt, stop_token_ids=[token], ignore_eos=True)
    assert ignored[0] == continued.output


async def test_a_stop_string_that_two_tokens_make_up_is_in_the_ids_and_not_in_the_text(
    client: Client, models: Models, continued: Continued
) -> None:
    ids, reason = continued.output[: continued.at + 2], {"type": "stop", "matched": continued.stop}
    trimmed = await answered(client, continued.prompt, stop=[continued.stop], ignore_eos=True)
    assert trimmed == (ids, models.tokenizer.decode(ids[:-2]), reason)
    whole = await answered(client, continued.prompt, stop="nowhere", ignore_eos=True, no_stop_trim=True)
    assert whole[0] == continued.output
    whole = await answered(client, continued.prompt, stop=continued.stop, ignore_eos=True, no_stop_trim=True)
    assert whole == (ids, models.tokenizer.decode(ids), reason)


async def test_a_stop_string_beyond_the_last_token_does_not_count(client: Client, continued: Continued) -> None:
    cut = continued.at + 1
    ids, _, reason = await answered(
        client, continued.prompt, stop=[continued.stop], max_new_tokens=cut, ignore_eos=True
    )
    assert ids == continued.output[:cut]
    assert reason == {"type": "length", "length": cut}
