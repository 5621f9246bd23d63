"""The model thread: commands in order, pause modes, failures that stay where they belong."""

import time
from typing import Any

import pytest
from tiny_qwen import Deliveries, Reference, make_job, prompt_of

from arl.api.errors import EngineClosedError
from arl.engine.local.model_thread import Scheduler
from arl.engine.local.runner import ModelRunner


def test_a_step_that_raises_fails_its_requests_and_not_the_thread(
    scheduler: Scheduler, deliveries: Deliveries, monkeypatch: pytest.MonkeyPatch, reference: Reference
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("the device is on fire")

    failing, fine = make_job(prompt_of(5, 1)), make_job(prompt_of(5, 1), temperature=0)
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "forward", fail)
        scheduler.submit(failing)
        deliveries.wait_done(failing)
    assert failing.finish_reason is not None
    assert failing.finish_reason["status_code"] == 500
    assert "the device is on fire" in failing.finish_reason["message"]
    scheduler.submit(fine)
    deliveries.wait_done(fine)
    assert scheduler.is_alive
    reference.check_greedy(fine)


def test_closing_returns_unfinished_requests_and_refuses_later_ones(
    scheduler: Scheduler, deliveries: Deliveries
) -> None:
    jobs = [make_job(prompt_of(8 + i, i), max_new_tokens=240) for i in range(3)]
    for job in jobs:
        scheduler.submit(job)
    while any(len(job.output_ids) < 3 for job in jobs):
        time.sleep(0.001)
    scheduler.pause("in_place").result(10)
    for _ in range(2):
        scheduler.close()
    late = make_job([1])
    scheduler.submit(late)
    deliveries.wait_done(*jobs, late)
    assert not scheduler.is_alive
    assert all(job.finish_reason and job.finish_reason["type"] == "abort" for job in (*jobs, late))
    with pytest.raises(EngineClosedError):
        scheduler.resume().result(10)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_model_thread_that_dies_returns_its_requests_and_is_seen_to_be_dead(
    scheduler: Scheduler, deliveries: Deliveries, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any) -> None:
        raise SystemExit

    monkeypatch.setattr(ModelRunner, "forward", die)
    jobs = [make_job(prompt_of(5, i)) for i in range(12)]
    scheduler.pause("in_place").result(10)
    for job in jobs:
        scheduler.submit(job)
    scheduler.resume()
    deliveries.wait_done(*jobs)
    scheduler.close()
    assert not scheduler.is_alive
    assert all(job.finish_reason and job.finish_reason["type"] == "abort" for job in jobs)
