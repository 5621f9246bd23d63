"""The embedded server records which experts computed each token, wherever its keys and values came from."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mixtures import FAMILIES, load_mixture, own_routes, write_mixture
from reference import Reference
from tiny_qwen import SIZES, make_batch_of, make_job, prompt_of, random_model, run_all, save, step_until_sampled
from transformers import OlmoeConfig

from arl.engine.local.scheduler import RunningBatch
from arl.engine.local.sequences import Job


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_mixture(tmp_path_factory.mktemp(name), name) for name in FAMILIES}


@pytest.fixture
def make_mixture(directories: dict[str, Path]) -> Callable[..., RunningBatch]:
    def make(**options: Any) -> RunningBatch:
        return make_batch_of(str(directories["qwen3_moe"]), **options)

    return make


def routed_job(prompt: Sequence[int], routes_from: int = 0, **sampling: Any) -> Job:
    job = make_job(list(prompt), **sampling)
    job.routes_from = routes_from
    return job


def returned(job: Job) -> np.ndarray:
    routes = job.returned_routes()
    assert routes is not None
    return routes.experts


def own(model: Any, job: Job) -> np.ndarray:
    """What the model's routers choose for the job's tokens but the last."""
    return own_routes(model, torch.tensor([*job.input_ids, *job.output_ids])).experts[:-1]


@pytest.mark.parametrize("family", FAMILIES)
def test_routes_and_logprobs_are_the_models_own_whoever_shares_the_batch(
    family: str, directories: dict[str, Path]
) -> None:
    model = load_mixture(directories[family])
    batch = make_batch_of(str(directories[family]), max_rows=3, prefill_tokens=16)
    shared = prompt_of(40, 1)
    prompts = [prompt_of(n, n) for n in (1, 2, 50)] + [shared, shared, [*shared, 5, 6], shared[:30], [*shared[:20], 9]]
    jobs: list[Job] = []
    for _ in range(2):  # the second time, prefixes are retained ones
        jobs = [routed_job(prompt, max_new_tokens=6 + i) for i, prompt in enumerate(prompts)]
        run_all(batch, jobs)
        for job in jobs:
            assert (returned(job) == own(model, job)).all()
            Reference(model).check_answer(
                {"output_ids": job.output_ids, "meta_info": {"output_token_logprobs": [
                    (logprob, token, None) for logprob, token in zip(job.output_logprobs, job.output_ids, strict=True)
                ]}},
                job.input_ids,
            )  # fmt: skip
    assert jobs[4].cached_tokens > 30


@pytest.mark.parametrize("seed", range(3))
def test_routes_are_right_whenever_jobs_come_go_and_are_retracted(
    make_mixture: Callable[..., RunningBatch], directories: dict[str, Path], seed: int
) -> None:
    chance, model = random.Random(seed), load_mixture(directories["qwen3_moe"])
    batch = make_mixture(max_rows=4, prefill_tokens=10)
    stems = [prompt_of(30, i) for i in range(3)]
    jobs: list[Job] = []
    for _ in range(150):
        action = chance.random()
        if action < 0.3:
            stem = chance.choice(stems)[: chance.randrange(1, 31)]
            jobs.append(routed_job([*stem, *prompt_of(chance.randrange(4), 9)], max_new_tokens=chance.randrange(1, 12)))
            batch.add(jobs[-1])
        elif action < 0.35:
            batch.retract()
        elif action < 0.4 and jobs:
            batch.abort(chance.choice(jobs).rid)
        elif not batch.is_idle:
            batch.step()
    run_all(batch)
    assert len(jobs) > 10
    for job in jobs:
        if job.output_ids:
            assert (returned(job) == own(model, job)).all()


def test_only_the_tokens_that_are_asked_for_are_returned(make_mixture: Callable[..., RunningBatch]) -> None:
    batch, prompt = make_mixture(), prompt_of(20, 0)
    whole, rest, none = routed_job(prompt, temperature=0), routed_job(prompt, 15, temperature=0), make_job(prompt)
    run_all(batch, [whole, rest, none])
    assert len(returned(whole)) == 20 + 8 - 1
    assert (returned(rest) == returned(whole)[15:]).all()
    assert none.returned_routes() is None


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
def test_a_token_keeps_the_routes_of_the_pass_after_which_the_next_one_was_sampled(
    mode: str, make_mixture: Callable[..., RunningBatch], directories: dict[str, Path], tmp_path: Path
) -> None:
    """New weights come while a response is on its way. What was sampled before was sampled under the old routes."""
    old = load_mixture(directories["qwen3_moe"])
    new = load_mixture(write_mixture(tmp_path / "new", "qwen3_moe", seed=1))
    batch = make_mixture()
    job = routed_job(prompt_of(20, 0), max_new_tokens=12)
    batch.add(job)
    step_until_sampled(batch, job, 5)
    if mode == "retract":
        batch.retract()
    elif mode == "abort":
        batch.abort(None)
    batch.load(new.state_dict(), "1")
    run_all(batch)
    tokens = 20 + 5 - 1
    assert (returned(job)[:tokens] == own(old, job)[:tokens]).all()
    if mode == "abort":
        assert len(returned(job)) == tokens
        job = routed_job([*job.input_ids, *job.output_ids], tokens, max_new_tokens=7)
        run_all(batch, [job])
        assert (returned(job) == own(new, job)[tokens:]).all()
    elif mode == "retract":
        assert (returned(job)[tokens:] == own(new, job)[tokens:]).all()
    assert job.versions[-1] == "1"
    later = routed_job(job.input_ids[:20])
    run_all(batch, [later])
    assert (returned(later) == own(new, later)).all()


def test_routes_of_a_prompt_that_is_computed_again_before_its_first_sample_are_those_of_the_new_weights(
    make_mixture: Callable[..., RunningBatch], directories: dict[str, Path], tmp_path: Path
) -> None:
    new = load_mixture(write_mixture(tmp_path / "new", "qwen3_moe", seed=1))
    batch, job = make_mixture(prefill_tokens=10), routed_job(prompt_of(50, 0))
    batch.add(job)
    batch.step()
    batch.retract()
    batch.load(new.state_dict(), "1")
    run_all(batch)
    assert (returned(job) == own(new, job)).all()


def test_a_job_that_is_aborted_within_its_prompt_returns_no_routes(make_mixture: Callable[..., RunningBatch]) -> None:
    batch, job = make_mixture(prefill_tokens=10), routed_job(prompt_of(50, 0))
    batch.add(job)
    batch.step()
    batch.abort(None)
    assert job.returned_routes() is None


def test_a_mixture_with_unknown_routers_generates_and_returns_no_routes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2)
    batch = make_batch_of(save(random_model(config), tmp_path))
    assert "is a mixture of experts of type olmoe, whose routers arl does not know" in caplog.text
    job = routed_job(prompt_of(5, 0))
    run_all(batch, [job])
    assert len(job.output_ids) == 8
    assert job.returned_routes() is None
