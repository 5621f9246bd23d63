"""Continuous batching: what is generated is what plain transformers generates, whoever shares the batch, and under the
weights that its versions name."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_qwen import (
    SIZES,
    Reference,
    make_batch_of,
    make_job,
    prompt_of,
    random_model,
    run_all,
    save,
    scored,
    step_until_sampled,
)
from transformers import GraniteConfig, LlamaConfig

from arl.engine.local.scheduler import RunningBatch
from arl.engine.local.sequences import Job
from arl.engine.local.weight_receiver import WeightsError

MakeBatch = Callable[..., RunningBatch]
Weights = dict[str, torch.Tensor]


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        GraniteConfig(**SIZES, embedding_multiplier=3.0, logits_scaling=0.5, residual_multiplier=0.7),
    ],
    ids=lambda config: type(config).__name__,
)
def test_other_architectures_generate_and_score_as_transformers_does(tmp_path: Path, config: Any) -> None:
    reference = Reference(random_model(config))
    batch = make_batch_of(save(reference.model, tmp_path), max_rows=4, prefill_tokens=20, context_length=100)
    jobs = [make_job(prompt_of(3 + 13 * i, i), temperature=0, max_new_tokens=15) for i in range(5)]
    run_all(batch, jobs)
    reference.check_greedy(*jobs)
    given = scored(prompt_of(50, 1))
    run_all(batch, [given])
    for job in (*jobs, given):
        reference.check(job)


def test_rows_of_very_different_lengths_share_a_cache_that_grows(make_batch: MakeBatch, reference: Reference) -> None:
    batch = make_batch(max_rows=40, context_length=512)
    lengths = [300 if i == 20 else 5 + i for i in range(40)]
    jobs = [make_job(prompt_of(n, n), temperature=0, max_new_tokens=10 + n % 3) for n in lengths]
    run_all(batch, jobs)
    assert batch._runner.cache.capacity == 512
    reference.check_greedy(*jobs[::4])


def test_the_times_of_iterations_come_with_what_these_did(make_batch: MakeBatch) -> None:
    batch = make_batch(prefill_tokens=10)
    first = make_job(prompt_of(25, 1), max_new_tokens=4)
    run_all(batch, [first])
    report = batch._times.report()
    assert report["is_cpu_time"]
    (reads, *reading), (alone, *decoding) = report["iterations"]
    assert (reads, alone) == (True, False)
    assert decoding[:-1] == [3, 3, 26 + 27 + 28, 0, 0]  # iterations, requests, context, prompt tokens, first tokens
    assert reading[:-1] == [3, 0, 0, 25, 1]  # of 10, 10 and 5 tokens
    assert 0 < decoding[-1] < 10
    assert 0 < reading[-1] < 10
    jobs = [make_job(prompt_of(9, 2 + i), max_new_tokens=5) for i in (0, 1, 2, 3, 0)]
    run_all(batch, jobs)
    sums = [sum(column) for column in zip(*(row[1:] for row in batch._times.report()["iterations"]), strict=True)]
    assert sums[1] + sums[4] == 4 + 5 * 5  # each token is decoded, or comes with a prompt
    assert sums[3] == 25 + 4 * 9 + 1  # of the fifth prompt, which is the first, the last token


def test_decoding_goes_on_while_prompts_are_computed_in_chunks(make_batch: MakeBatch, reference: Reference) -> None:
    batch = make_batch(prefill_tokens=10)
    jobs = [make_job(prompt_of(35 + i, i), temperature=0, max_new_tokens=20) for i in range(4)]
    late = make_job(prompt_of(100, 9), temperature=0, max_new_tokens=20)
    for job in jobs:
        batch.add(job)
    step_until_sampled(batch, jobs[-1], 1)
    batch.add(late)
    before = len(jobs[-1].output_ids)
    for num_steps in range(1, 10):
        batch.step()
        assert len(jobs[-1].output_ids) == before + num_steps
        assert not late.output_ids
    run_all(batch)
    reference.check_greedy(*jobs, late)


def test_a_prompt_uses_what_it_has_in_common_with_a_known_one(batch: RunningBatch, reference: Reference) -> None:
    first = make_job(prompt_of(60, 1), temperature=0, max_new_tokens=15)
    run_all(batch, [first])
    second = make_job([*first.input_ids, *first.output_ids, *prompt_of(9, 2)], temperature=0, max_new_tokens=15)
    run_all(batch, [second])
    assert second.cached_tokens == 60 + 15 - 1
    reference.check_greedy(second)
    parting = make_job([*first.input_ids[:40], *prompt_of(20, 2)])
    run_all(batch, [parting])
    assert parting.cached_tokens >= 32
    reference.check(parting)


@pytest.mark.parametrize("length", [5, 16, 40, 90])
def test_samples_of_one_prompt_compute_it_once(make_batch: MakeBatch, reference: Reference, length: int) -> None:
    batch = make_batch(prefill_tokens=25)
    jobs = [make_job(prompt_of(length, 3), max_new_tokens=12) for _ in range(8)]
    run_all(batch, jobs)
    assert sorted(job.cached_tokens for job in jobs) == [0] + 7 * [length - 1]
    assert len({tuple(job.output_ids) for job in jobs}) == 8
    for job in jobs:
        reference.check(job)


def test_equal_prompts_are_sampled_in_the_step_that_computes_one_of_them(
    make_batch: MakeBatch, reference: Reference
) -> None:
    batch = make_batch(max_rows=6)
    running = make_job(prompt_of(9, 1), max_new_tokens=4)
    batch.add(running)
    batch.step()
    group = [make_job(prompt_of(20, 2), max_new_tokens=2, seed=seed) for seed in range(4)]
    late = make_job(prompt_of(20, 2), max_new_tokens=2)
    other = replace(make_job(prompt_of(20, 2), max_new_tokens=2), extra_key="other")
    for job in (*group, other, late):
        batch.add(job)
    batch.step()
    assert [len(job.output_ids) for job in (running, *group, other, late)] == [2, 1, 1, 1, 1, 1, 0]
    run_all(batch)
    alone = make_job(prompt_of(20, 2), max_new_tokens=2, seed=3)
    run_all(make_batch(), [alone])
    assert alone.output_ids == group[3].output_ids
    for job in (running, *group, other, late):
        reference.check(job)


def test_random_groups_that_are_aborted_retracted_and_scored_are_computed_as_alone(
    make_batch: MakeBatch, reference: Reference
) -> None:
    rng = random.Random(5)
    batch = make_batch(max_rows=7, prefill_tokens=15)
    prompts = [prompt_of(rng.randrange(1, 40), seed) for seed in range(4)]
    jobs: list[Job] = []
    for _ in range(40):
        for _ in range(rng.choice([0, 1, 1, 4])):
            prompt = rng.choice(prompts)
            starts = [None, None, None, *range(len(prompt))]
            job = make_job(prompt, max_new_tokens=rng.randrange(1, 6), top_p=rng.choice([1.0, 0.5]))
            jobs.append(replace(job, logprob_start=rng.choice(starts), is_prefill_only=rng.random() < 0.1))
            batch.add(jobs[-1])
        event = rng.random()
        if event < 0.1:
            batch.retract()
        elif event < 0.2:
            batch.abort(rng.choice(jobs).rid if jobs else "none")
        if not batch.is_idle:
            batch.step()
    run_all(batch)
    for job in jobs:
        if job.finish_reason == {"type": "abort", "message": "Aborted by request"}:
            job.logprob_start = None if job.lacks_input_logprobs else job.logprob_start
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


def test_a_seeded_request_that_is_interrupted_goes_on_as_if_it_was_not(make_batch: MakeBatch) -> None:
    whole, retracted = (make_job(prompt_of(20, 1), seed=7, max_new_tokens=30) for _ in range(2))
    run_all(make_batch(), [whole])
    batch = make_batch()
    batch.add(retracted)
    step_until_sampled(batch, retracted, 10)
    batch.retract()
    run_all(batch)
    assert retracted.output_ids == whole.output_ids
    sent_again = make_job([*whole.input_ids, *whole.output_ids[:10]], seed=7, max_new_tokens=20)
    run_all(make_batch(), [sent_again])
    assert sent_again.output_ids == whole.output_ids[10:]


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


def test_a_retraction_begins_a_prompt_anew_and_keeps_what_was_told(make_batch: MakeBatch, reference: Reference) -> None:
    batch, midway, job = make_batch(prefill_tokens=16), scored(prompt_of(60, 3), 5), make_job(prompt_of(30, 4))
    job.logprob_start = 0
    batch.add(midway)
    batch.step()
    batch.step()
    assert len(midway.input_logprobs) > 0
    assert midway.lacks_input_logprobs
    batch.retract()
    batch.add(job)
    step_until_sampled(batch, job, 5)
    told = list(job.input_logprobs)
    batch.retract()
    run_all(batch)
    assert job.input_logprobs == told
    assert len(job.output_ids) == 8
    reference.check(midway)
    reference.check(job)


@pytest.mark.parametrize("prefill_tokens", [1, 16])
def test_jobs_of_one_prompt_that_run_at_once_are_each_told_all(
    make_batch: MakeBatch, reference: Reference, prefill_tokens: int
) -> None:
    prompt = prompt_of(60, 5)
    jobs = [scored(prompt, start) for start in (0, 40, 58, 59, 0)]
    run_all(make_batch(prefill_tokens=prefill_tokens), jobs)
    for job in jobs:
        reference.check(job)
        assert job.output_ids == []
    assert jobs[1].cached_tokens == 40


def differs(logprobs: list[float], other: torch.Tensor) -> bool:
    return (torch.tensor(logprobs) - other).abs().max().item() > 1e-2


def test_a_prompt_that_was_half_computed_when_the_weights_changed_goes_on_with_what_it_has(
    batch: RunningBatch, other_reference: Reference, other_weights: Weights
) -> None:
    job = make_job(prompt_of(150, 1), temperature=0)
    batch.add(job)
    batch.step()
    batch.load(other_weights, "1")
    run_all(batch)
    assert job.versions == ["1"] * 8
    assert differs(job.output_logprobs, other_reference.logprobs(job.input_ids, job.output_ids))


@pytest.mark.parametrize("is_running", [False, True])
def test_no_cache_of_old_weights_serves_a_later_request_and_that_of_new_ones_does(
    batch: RunningBatch, other_reference: Reference, other_weights: Weights, is_running: bool
) -> None:
    first = make_job(prompt_of(40, 1), max_new_tokens=20)
    batch.add(first)
    step_until_sampled(batch, first, 10 if is_running else 20)
    batch.load(other_weights, "1")
    same_prompt = make_job(first.input_ids, max_new_tokens=20)
    run_all(batch, [same_prompt])
    next_turn = make_job([*first.input_ids, *first.output_ids, 7], max_new_tokens=20)
    run_all(batch, [next_turn])
    last_turn = make_job([*next_turn.input_ids, *next_turn.output_ids, 7])
    run_all(batch, [last_turn])
    assert last_turn.cached_tokens == len(last_turn.input_ids) - 2
    for job in (same_prompt, next_turn, last_turn):
        other_reference.check(job)


@pytest.mark.parametrize(
    ("misfit", "message"),
    [({"model.layers.7.x": torch.zeros(1)}, "no model.layers.7.x"), ({"model.norm.weight": torch.zeros(31)}, "31")],
)
def test_weights_that_do_not_fit_change_nothing(
    batch: RunningBatch, reference: Reference, other_weights: Weights, misfit: Weights, message: str
) -> None:
    first = make_job(prompt_of(40, 1))
    run_all(batch, [first])
    with pytest.raises(WeightsError, match=message):
        batch.load({**other_weights, **misfit}, "1")
    turn = make_job([*first.input_ids, *first.output_ids, 7])
    run_all(batch, [turn])
    assert turn.versions == ["0"] * 8
    assert turn.cached_tokens == 47
    reference.check(turn)


def test_weights_that_are_not_numbers_fail_requests_and_good_ones_heal_the_server(
    batch: RunningBatch, other_reference: Reference, other_weights: Weights
) -> None:
    broken = {name: torch.full_like(tensor, float("nan")) for name, tensor in other_weights.items()}
    batch.load(broken, "1")
    failing = [make_job(prompt_of(40, i)) for i in range(3)]
    for job in failing:
        batch.add(job)
    with pytest.raises(FloatingPointError, match="not numbers") as caught:
        run_all(batch)
    batch.fail(caught.value)
    batch.load(other_weights, "2")
    jobs = [make_job(prompt_of(10 + 20 * i, i)) for i in range(3)]
    run_all(batch, jobs)
    for job in jobs:
        other_reference.check(job)


def test_weights_that_were_released_have_to_be_loaded_whole(
    batch: RunningBatch, other_reference: Reference, other_weights: Weights
) -> None:
    batch.release(["kv_cache", "weights"])
    batch._runner.resume(["kv_cache", "weights"])
    some = {name: tensor for name, tensor in other_weights.items() if name != "model.norm.weight"}
    with pytest.raises(WeightsError, match=r"all must be loaded again, and model\.norm\.weight is missing"):
        batch.load(some, "1")
    assert not batch._runner.can_compute
    batch.load(other_weights, "1")
    job = make_job(prompt_of(40, 1))
    run_all(batch, [job])
    other_reference.check(job)
