"""Weight updates while requests are in flight: each token is of the weights that its version names."""

import pytest
import torch
from tiny_qwen import Reference, make_job, prompt_of, run_all, step_until_sampled

from arl.engine.local.scheduler import RunningBatch
from arl.engine.local.weight_receiver import WeightsError

Weights = dict[str, torch.Tensor]


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
