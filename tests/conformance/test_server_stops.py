"""The end of an answer: its reason, and how much of the stop stands in the ids and in the text."""

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conformance.conftest import Models
from protocol_client import Client

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
