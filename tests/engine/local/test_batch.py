"""Continuous batching: what is generated is what plain transformers generates, whoever shares the batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from transformers import GraniteConfig, LlamaConfig, MistralConfig, Qwen2Config

from arl.engine.local.running_batch import RunningBatch
from arl.engine.local.sequences import Job

MakeBatch = Callable[..., RunningBatch]


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(**SIZES),
        LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        LlamaConfig(**SIZES, head_dim=16, attention_bias=True),
        MistralConfig(**SIZES, sliding_window=None),
        GraniteConfig(**SIZES, embedding_multiplier=3.0, logits_scaling=0.5, residual_multiplier=0.7),
    ],
    ids=lambda config: type(config).__name__,
)
def test_other_architectures_generate_as_transformers_does(tmp_path: Path, config: Any) -> None:
    reference = Reference(random_model(config))
    batch = make_batch_of(save(reference.model, tmp_path), max_rows=4, prefill_tokens=20, context_length=100)
    jobs = [make_job(prompt_of(3 + 13 * i, i), temperature=0, max_new_tokens=15) for i in range(5)]
    run_all(batch, jobs)
    reference.check_greedy(*jobs)
    for job in jobs:
        reference.check(job)


def test_rows_of_very_different_lengths_share_a_batch(make_batch: MakeBatch, reference: Reference) -> None:
    batch = make_batch(max_rows=40)
    jobs = [
        make_job(prompt_of(180 if i == 20 else 5 + i, i), temperature=0, max_new_tokens=10 + i % 3) for i in range(40)
    ]
    run_all(batch, jobs)
    reference.check_greedy(*jobs[::4])


def test_greedy_output_is_the_same_when_prompts_are_computed_in_chunks(
    make_batch: MakeBatch, reference: Reference
) -> None:
    batch = make_batch(prefill_tokens=10)
    jobs = [make_job(prompt_of(35 + i, i), temperature=0, max_new_tokens=20) for i in range(4)]
    late = make_job(prompt_of(47, 9), temperature=0, max_new_tokens=20)
    for job in jobs:
        batch.add(job)
    step_until_sampled(batch, jobs[0], 5)
    run_all(batch, [late])
    reference.check_greedy(*jobs, late)


def test_decoding_goes_on_while_a_long_prompt_is_computed(make_batch: MakeBatch) -> None:
    batch = make_batch(prefill_tokens=10)
    running, late = make_job(prompt_of(5, 1), max_new_tokens=60), make_job(prompt_of(100, 2))
    batch.add(running)
    step_until_sampled(batch, running, 1)
    batch.add(late)
    for num_steps in range(1, 10):
        batch.step()
        assert len(running.output_ids) == 1 + num_steps
        assert not late.output_ids


def test_a_second_turn_continues_from_the_first_ones_cache(batch: RunningBatch, reference: Reference) -> None:
    first = make_job(prompt_of(30, 1), temperature=0, max_new_tokens=15)
    run_all(batch, [first])
    second = make_job([*first.input_ids, *first.output_ids, *prompt_of(9, 2)], temperature=0, max_new_tokens=15)
    run_all(batch, [second])
    assert second.cached_tokens == 30 + 15 - 1
    reference.check_greedy(second)


def test_a_prompt_that_leaves_a_known_one_midway_uses_the_common_part(
    batch: RunningBatch, reference: Reference
) -> None:
    first = make_job(prompt_of(60, 1))
    run_all(batch, [first])
    second = make_job([*first.input_ids[:40], *prompt_of(20, 2)])
    run_all(batch, [second])
    assert second.cached_tokens >= 32
    reference.check(second)


@pytest.mark.parametrize("length", [5, 16, 40, 90])
def test_samples_of_one_prompt_compute_it_once(make_batch: MakeBatch, reference: Reference, length: int) -> None:
    batch = make_batch(prefill_tokens=25)
    jobs = [make_job(prompt_of(length, 3), max_new_tokens=12) for _ in range(8)]
    run_all(batch, jobs)
    assert sorted(job.cached_tokens for job in jobs) == [0] + 7 * [length - 1]
    assert len({tuple(job.output_ids) for job in jobs}) == 8
    for job in jobs:
        reference.check(job)


def test_a_seeded_request_does_not_depend_on_its_company(make_batch: MakeBatch) -> None:
    def seeded() -> Job:
        return make_job(prompt_of(20, 1), seed=7, max_new_tokens=30, temperature=1.5)

    alone, again, other_seed = seeded(), seeded(), make_job(prompt_of(20, 1), seed=8, max_new_tokens=30)
    run_all(make_batch(), [alone])
    company = [make_job(prompt_of(3 * i + 1, i), max_new_tokens=5 + 7 * i, top_p=0.5) for i in range(6)]
    run_all(make_batch(), [*company, again, other_seed])
    assert again.output_ids == alone.output_ids
    assert other_seed.output_ids != alone.output_ids


def test_a_seeded_request_that_was_retracted_goes_on_as_if_it_was_not(make_batch: MakeBatch) -> None:
    whole, retracted = (make_job(prompt_of(20, 1), seed=7, max_new_tokens=30) for _ in range(2))
    run_all(make_batch(), [whole])
    batch = make_batch()
    batch.add(retracted)
    step_until_sampled(batch, retracted, 10)
    batch.retract()
    run_all(batch)
    assert retracted.output_ids == whole.output_ids


def test_requests_beyond_the_batch_wait_and_all_finish(make_batch: MakeBatch) -> None:
    batch = make_batch(max_rows=3)
    jobs = [make_job(prompt_of(5 + i, i), max_new_tokens=1 + i % 7) for i in range(25)]
    for job in jobs:
        batch.add(job)
    most = 0
    while not batch.is_idle:
        batch.step()
        most = max(most, batch.num_running)
    assert most <= 3
    assert [len(job.output_ids) for job in jobs] == [1 + i % 7 for i in range(25)]
    assert all(job.finish_reason == {"type": "length", "length": len(job.output_ids)} for job in jobs)


def test_a_cache_that_grows_keeps_what_it_holds(make_batch: MakeBatch, reference: Reference) -> None:
    batch = make_batch(context_length=512)
    jobs = [make_job(prompt_of(20 + 100 * i, i), temperature=0, max_new_tokens=60) for i in range(3)]
    run_all(batch, jobs)
    assert batch._runner.cache.capacity == 512
    reference.check_greedy(*jobs)


def test_retained_prefixes_beyond_their_memory_are_evicted(make_batch: MakeBatch, reference: Reference) -> None:
    bytes_per_token = 2 * 2 * 2 * 16 * 4
    batch = make_batch(prefix_cache_bytes=70 * bytes_per_token)
    old, new = make_job(prompt_of(40, 1), max_new_tokens=8), make_job(prompt_of(40, 2), max_new_tokens=8)
    run_all(batch, [old])
    run_all(batch, [new])
    for job, num_cached in ((new, 47), (old, 0)):
        turn = make_job([*job.input_ids, *job.output_ids, 5])
        run_all(batch, [turn])
        assert turn.cached_tokens == num_cached
        reference.check(turn)
