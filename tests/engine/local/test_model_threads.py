"""Threads that compute rows of their own: the same numbers, fair shares, and errors that wait for the others."""

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from tiny_qwen import Reference, make_job, prompt_of, run_all

from arl.engine.local.runner import ModelThreads
from arl.engine.local.scheduler import RunningBatch


@pytest.fixture
def threads() -> Iterator[ModelThreads]:
    made = ModelThreads(3)
    yield made
    made.close()


def test_rows_shared_out_among_threads_are_computed_as_on_one(
    make_batch: Callable[..., RunningBatch], reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(max_rows=64, num_threads=2, prefill_tokens=512)
    jobs = [make_job(prompt_of(2 + i % 30, i), max_new_tokens=3 + i % 9) for i in range(90)]
    used: list[int] = []
    run = ModelThreads.run
    monkeypatch.setattr(ModelThreads, "run", lambda self, parts: used.append(len(parts)) or run(self, parts))
    run_all(batch, jobs)
    batch._runner.close()
    assert set(used) == {1, 2}
    for job in jobs[::7]:
        reference.check(job)


@pytest.mark.parametrize("lengths", [[1] * 72, [1] * 100, [1] * 40 + [40, 30], [1, 1, 90, 88, 80], [30, 30, 30]])
def test_each_thread_gets_about_as_many_tokens(threads: ModelThreads, lengths: list[int]) -> None:
    cuts = threads.cuts(lengths)
    bounds = [0, *cuts, len(lengths)]
    shares = [sum(lengths[first:last]) for first, last in pairwise(bounds)]
    assert len(cuts) == 2
    assert min(shares) > 0
    assert max(shares) <= 1.5 * sum(lengths) / 3


@pytest.mark.parametrize("lengths", [[], [1] * 47, [500], [1] * 10 + [500], [500] + [1] * 10])
def test_few_tokens_and_rows_that_cannot_be_shared_are_not_cut(threads: ModelThreads, lengths: list[int]) -> None:
    assert threads.cuts(lengths) == []


def test_an_error_is_raised_when_no_thread_computes_any_longer(threads: ModelThreads) -> None:
    failed, ended = threading.Event(), []

    def fails() -> torch.Tensor:
        failed.set()
        raise RuntimeError("the first part failed")

    def ends() -> torch.Tensor:
        assert failed.wait(10)
        ended.append(torch.is_inference_mode_enabled())
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match="the first part failed"):
        threads.run([fails, ends, ends])
    assert ended == [True, True]
