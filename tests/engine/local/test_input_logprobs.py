"""Logprobs of a prompt's own tokens, computed a step's chunk at a time, whoever shares the batch."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_qwen import (
    SIZES,
    Reference,
    make_batch_of,
    make_job,
    prompt_of,
    random_model,
    run_all,
    save,
    step_until_sampled,
)
from transformers import GraniteConfig

from arl.engine.local.running_batch import RunningBatch
from arl.engine.local.sequences import Job

MakeBatch = Callable[..., RunningBatch]


def scored(prompt: list[int], start: int = 0, *, prefill_only: bool = True) -> Job:
    return replace(make_job(prompt), logprob_start=start, is_prefill_only=prefill_only)


@pytest.mark.parametrize("prefill_tokens", [1, 7, 512])
def test_chunks_of_any_size_give_the_same_logprobs(
    make_batch: MakeBatch, reference: Reference, prefill_tokens: int
) -> None:
    jobs = [scored(prompt_of(length, length)) for length in (2, 40, 90)]
    run_all(make_batch(prefill_tokens=prefill_tokens), jobs)
    for job in jobs:
        reference.check(job)
        assert job.output_ids == []


def test_a_retraction_in_the_middle_of_a_prompt_begins_it_anew(make_batch: MakeBatch, reference: Reference) -> None:
    batch, job = make_batch(prefill_tokens=16), scored(prompt_of(60, 3), 5)
    batch.add(job)
    batch.step()
    batch.step()
    assert 0 < len(job.input_logprobs) < job.num_input_logprobs
    batch.retract()
    run_all(batch)
    reference.check(job)


def test_a_retraction_after_the_prompt_keeps_what_was_told(make_batch: MakeBatch, reference: Reference) -> None:
    batch = make_batch()
    job = replace(make_job(prompt_of(30, 4), max_new_tokens=20), logprob_start=0)
    batch.add(job)
    step_until_sampled(batch, job, 5)
    told = list(job.input_logprobs)
    batch.retract()
    run_all(batch)
    assert job.input_logprobs == told
    assert len(job.output_ids) == 20
    reference.check(job)


def test_jobs_of_one_prompt_that_run_at_once_are_each_told_all(make_batch: MakeBatch, reference: Reference) -> None:
    prompt = prompt_of(60, 5)
    jobs = [scored(prompt, start) for start in (0, 40, 58, 59, 0)]
    run_all(make_batch(prefill_tokens=16), jobs)
    for job in jobs:
        reference.check(job)
    assert jobs[1].cached_tokens == 40


def test_a_model_that_scales_its_logits_is_asked_for_them_itself(tmp_path: Path) -> None:
    config = GraniteConfig(**SIZES, logits_scaling=0.5, embedding_multiplier=3.0)
    reference = Reference(random_model(config))
    job = scored(prompt_of(50, 1))
    run_all(make_batch_of(save(reference.model, tmp_path), prefill_tokens=16), [job])
    reference.check(job)
