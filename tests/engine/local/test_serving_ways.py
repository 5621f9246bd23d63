"""The ways of the embedded server: recurrent states beside slots, a cache for each request, and how one is chosen."""

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import write_adapter
from decoder_families import tiny_family
from reference import chosen, close
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
from transformers import Phi3Config

from arl.api.errors import ModelError
from arl.engine.local import runner, slot_attention
from arl.engine.local.scheduler import RunningBatch
from arl.engine.local.sequences import Job

MakeBatch = Callable[..., RunningBatch]

WAYS = {
    "gpt_oss": "slots",
    "gemma2": "slots",
    "qwen3_next": "states many",
    "falcon_h1": "states many",
    "mamba": "states one",
    "llama4_text": "own many",
    "recurrent_gemma": "own never eager",
}
"""Families, and how they are served. recurrent_gemma keeps its states to itself."""


@cache
def reference_of(family: str, seed: int) -> Reference:
    model = tiny_family(family, seed)
    model.set_attn_implementation("eager")
    return Reference(model)


@pytest.fixture(params=WAYS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make_batch(family: str, tmp_path: Path) -> MakeBatch:
    return partial(make_batch_of, save(reference_of(family, 0).model, tmp_path))


some_families = pytest.mark.parametrize("family", ["qwen3_next", "mamba", "llama4_text", "recurrent_gemma"])


@torch.no_grad()
def check(job: Job, parts: list[tuple[Reference, int]]) -> None:
    """Its logprobs are those of transformers' own decoding. parts: which weights computed its tokens, up to where."""
    tokens, taken, start, logits = [*job.input_ids, *job.output_ids], dict[str, Any](), 0, list[torch.Tensor]()
    for reference, stop in parts:
        stop = min(stop, len(tokens))
        while start < stop:
            end = start + 1 if start else stop
            output = reference.model(torch.tensor([tokens[start:end]]), use_cache=True, **taken)
            taken = {name: output[name] for name in ("past_key_values", "cache_params") if output.get(name) is not None}
            logits.append(output.logits[0])
            start = end
    told = [*job.input_logprobs, *job.output_logprobs]
    if told:
        close(told, chosen(torch.cat(logits)[-1 - len(told) : -1], tokens[-len(told) :]), atol=5e-4)


def test_requests_that_join_and_leave_while_weights_change_are_computed_as_by_transformers(
    family: str, make_batch: MakeBatch
) -> None:
    rng, batch = random.Random(family), make_batch(max_rows=5, prefill_tokens=12)
    assert batch._runner.way == WAYS[family]
    versions = [reference_of(family, seed) for seed in range(2)]
    prompts = [prompt_of(rng.randrange(1, 30), seed) for seed in range(3)]
    parts: defaultdict[Job, list[tuple[Reference, int]]] = defaultdict(list)
    turns, current, number = list[list[int]](), 0, 0
    while number < 30 or not batch.is_idle:
        number += 1
        for _ in range(rng.choice([0, 1, 3]) if number < 20 else 0):
            prompt = rng.choice(turns[-3:] or prompts) if rng.random() < 0.5 else rng.choice(prompts)
            batch.add(make_job(prompt, max_new_tokens=rng.randrange(1, 7), temperature=rng.choice([0.0, 1.0])))
        if rng.random() < 0.15 and "never" not in WAYS[family]:
            for row in batch._rows:
                parts[row.job].append((versions[current], row.num_computed))
            current = 1 - current
            batch.load(versions[current].model.state_dict(), str(current))
        ended = batch.abort(rng.choice(batch._rows).job.rid) if batch._rows and rng.random() < 0.1 else []
        for job in [*ended, *([] if batch.is_idle else batch.step())]:
            check(job, [*parts[job], (versions[current], 1000)])
            turns.append([*job.input_ids, *job.output_ids, 7])


@some_families
def test_a_turn_goes_on_from_the_end_of_the_turn_before_and_no_other_prompt_does(
    family: str, make_batch: MakeBatch
) -> None:
    batch, reference = make_batch(), reference_of(family, 0)
    firsts = [make_job(prompt_of(40, 1), max_new_tokens=5, seed=seed) for seed in range(2)]
    run_all(batch, firsts)
    turns = [make_job([*first.input_ids, *first.output_ids, 5, 6]) for first in firsts]
    parting = make_job([*firsts[0].input_ids[:30], *prompt_of(9, 2)])
    run_all(batch, [*turns, parting])
    assert [turn.cached_tokens for turn in turns] == [44, 44]
    assert parting.cached_tokens == 0
    for job in (*firsts, *turns, parting):
        check(job, [(reference, 1000)])


@some_families
@pytest.mark.parametrize("length", [1, 2, 33])
def test_samples_of_one_prompt_compute_it_once(family: str, make_batch: MakeBatch, length: int) -> None:
    batch, reference = make_batch(prefill_tokens=10), reference_of(family, 0)
    jobs = [make_job(prompt_of(length, 3), max_new_tokens=4, seed=seed) for seed in range(4)]
    other = make_job(prompt_of(50, 4), max_new_tokens=2)
    run_all(batch, [other, *jobs])
    assert sorted(job.cached_tokens for job in jobs) == [0] + 3 * [length - 1]
    for job in (*jobs, other):
        check(job, [(reference, 1000)])


@some_families
def test_a_prompt_begins_anew_after_a_retraction_or_without_the_caches_memory(
    family: str, make_batch: MakeBatch
) -> None:
    batch, reference = make_batch(prefill_tokens=16), reference_of(family, 0)
    whole = make_job(prompt_of(20, 1), seed=7)
    run_all(batch, [whole])
    batch.release(["kv_cache"])
    assert batch._runner.held_bytes["kv_cache"] == 0
    batch._runner.resume(["kv_cache"])
    job, short = make_job(prompt_of(20, 1), seed=7), make_job([5])
    for one in (short, job):
        batch.add(one)
    step_until_sampled(batch, job, 3)
    batch.retract()
    run_all(batch)
    assert job.output_ids == whole.output_ids
    for one in (short, job):
        check(one, [(reference, 1000)])


@some_families
def test_given_tokens_of_prompts_that_run_at_once_are_scored(family: str, make_batch: MakeBatch) -> None:
    prompt = prompt_of(40, 5)
    jobs = [scored(prompt, start) for start in (0, 30, 38, 0)] + [replace(make_job(prompt), logprob_start=10)]
    run_all(make_batch(prefill_tokens=16), jobs)
    for job in jobs:
        check(job, [(reference_of(family, 0), 1000)])


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("qwen3_next", ["q_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"]),
        ("llama4_text", ["q_proj", "o_proj"]),
        ("recurrent_gemma", ["q_proj", "linear_x", "gate_proj"]),
    ],
)
def test_requests_of_other_adapters_share_a_batch(
    family: str, make_batch: MakeBatch, tmp_path: Path, layers: list[str]
) -> None:
    batch, references = make_batch(prefill_tokens=16), {"": reference_of(family, 0)}
    for seed, name in enumerate(("one", "two")):
        merged = tmp_path / f"merged-{name}"
        directory = write_adapter(tmp_path / name, tmp_path, seed, merged=merged, target_modules=layers)
        references[name] = Reference(merged)
        batch._runner.adapters.add(batch._runner.adapters.read(name, str(directory)))
    jobs = [make_job(prompt_of(12 + 5 * number, number % 2), max_new_tokens=6) for number in range(6)]
    for number, job in enumerate(jobs):
        job.adapter = ("", "one", "two")[number % 3]
    run_all(batch, jobs)
    for job in jobs:
        check(job, [(references[job.adapter], 1000)])


@pytest.mark.parametrize(("family", "part"), [("gpt_oss", "window"), ("gpt_oss", "sinks"), ("gemma2", "cap")])
def test_slots_that_forget_a_part_of_attention_are_found_wrong(
    make_batch: MakeBatch, part: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = slot_attention.Scoring
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(slot_attention, "Scoring", lambda **parts: whole(**{**parts, part: None}))
    assert make_batch()._runner.way.startswith("own many")


@pytest.mark.parametrize("family", ["llama4_text"])
def test_a_model_that_no_way_serves_is_refused_with_the_difference(
    make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(runner, "WAYS", ("slots",))
    with pytest.raises(ModelError, match=r"Llama4.* \(model_type llama4_text, layers: chunked.* differ by \d"):
        make_batch()


def test_longrope_is_served_where_it_turns_all_sequences_alike(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    }  # fmt: skip
    config = Phi3Config(**SIZES, rope_parameters=rope, original_max_position_embeddings=64)
    reference = Reference(random_model(config))
    directory = save(reference.model, tmp_path)
    with pytest.raises(ModelError, match=r"context_length is 65; longrope .* 64 tokens at most"):
        make_batch_of(directory, context_length=65)
    batch, job = make_batch_of(directory, context_length=64), make_job(prompt_of(50, 1), max_new_tokens=14)
    run_all(batch, [job])
    check(job, [(reference, 1000)])
