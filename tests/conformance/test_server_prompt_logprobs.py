"""Logprobs of tokens that were given, not sampled, as a teacher or a judge of fluency tells them."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conformance.conftest import Models
from protocol_client import Client
from reference import close
from servers import Server

from arl.api.errors import ModelError
from arl.workflow.teachers import TeacherClient

NOTHING_NEW = {"max_new_tokens": 0}
# Not the vocabulary's last token, whose id stock SGLang tells as 0 among those given.
_LARGEST = 280


def tokens(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(_LARGEST) for _ in range(count)]


async def ask(client: Client, input_ids: Sequence[int], start: int | None = 0, **fields: Any) -> Any:
    body = {"sampling_params": NOTHING_NEW, "return_logprob": True, "logprob_start_len": start, **fields}
    return await client.generate(input_ids=input_ids, **body)


def check(answer: Any, models: Models, given: Sequence[int], start: int = 0) -> None:
    """Every token from `start` on is told, and all but the first with the logprob that transformers computes."""
    entries = answer["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in entries] == given[start:]
    assert entries[0][0] is None
    close([entry[0] for entry in entries[1:]], models.a.logprobs(given[: start + 1], given[start + 1 :]))


async def test_every_token_but_the_first_has_the_models_own_logprob_also_in_many_chunks(
    client: Client, models: Models
) -> None:
    for given in (tokens(40, 0), tokens(5000, 9)):
        answer = await ask(client, given)
        check(answer, models, given)
        assert answer["output_ids"] == []
        assert answer["meta_info"]["output_token_logprobs"] == []
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
        assert answer["meta_info"]["completion_tokens"] == 0


@pytest.mark.parametrize("temperature", [0, 0.5, 2.0])
async def test_no_temperature_scales_the_logprobs_of_given_tokens(
    client: Client, models: Models, temperature: float
) -> None:
    given = tokens(30, 1)
    sampling = {"max_new_tokens": 2, "temperature": temperature, "top_k": 3, "ignore_eos": True}
    answer = await ask(client, given, sampling_params=sampling)
    check(answer, models, given)
    assert len(answer["output_ids"]) == 2


async def test_a_prefix_that_is_cached_hides_no_logprob(client: Client, models: Models) -> None:
    given = tokens(60, 2)
    await ask(client, given)
    answer = await ask(client, given)
    check(answer, models, given)
    assert answer["meta_info"]["cached_tokens"] == 0
    longer = [*given, *tokens(20, 3)]
    check(await ask(client, longer), models, longer)


@pytest.mark.parametrize("start", [1, 30, 38, 39])
async def test_a_later_start_uses_the_cache_up_to_it(client: Client, models: Models, start: int) -> None:
    given = tokens(40, 4)
    await ask(client, given)
    answer = await ask(client, given, start)
    check(answer, models, given, start)
    assert 0 < answer["meta_info"]["cached_tokens"] <= start


async def test_a_start_at_the_end_or_unset_tells_nothing_and_one_past_it_is_refused(client: Client) -> None:
    given = tokens(10, 5)
    for start in (10, -1, None):
        assert (await ask(client, given, start))["meta_info"]["input_token_logprobs"] == []
    assert (await ask(client, given[:1]))["meta_info"]["input_token_logprobs"] == [[None, given[0], None]]
    past = {"input_ids": given, "sampling_params": NOTHING_NEW, "return_logprob": True, "logprob_start_len": 11}
    assert "higher than the number of input tokens" in (await client.post("/generate", past)).message
    without = await client.generate(input_ids=given, sampling_params=NOTHING_NEW, logprob_start_len=0)
    assert "input_token_logprobs" not in without["meta_info"]


async def test_what_is_generated_beside_it_stays_the_same(client: Client, models: Models) -> None:
    prompt, given = tokens(12, 10), tokens(900, 11)
    sampling = {"max_new_tokens": 30, "temperature": 0, "ignore_eos": True}
    sampled, scored = await asyncio.gather(
        client.generate(input_ids=prompt, sampling_params=sampling), ask(client, given)
    )
    assert sampled["output_ids"] == models.a.greedy(prompt, 30)
    check(scored, models, given)


async def test_a_teacher_client_is_told_the_models_logprobs(client: Client, server: Server, models: Models) -> None:
    given = [*(token % 260 for token in tokens(50, 12)), 0]
    async with TeacherClient(server.url, tokenizer=models.tokenizer) as teacher:
        with pytest.raises(ModelError, match="knows only"):
            await teacher.logprobs([*given, 288])
        given[-1] = len(models.tokenizer) - 1
        told = torch.tensor(await teacher.logprobs(given, start=20))
    torch.testing.assert_close(told[20:], models.a.logprobs(given[:20], given[20:]), atol=1e-4, rtol=0)
    assert (told[:20] == 0).all()
