"""The model thread: commands in order, pause modes, failures that stay where they belong."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tiny_qwen import Deliveries, Reference, make_job, prompt_of

from arl.api.errors import ArlError, ConfigError, EngineClosedError, ModelError
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


def configure(directory: Path, **changes: Any) -> None:
    config = directory / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))


def lose_a_parameter(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def make_up_a_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')


WINDOW = {"sliding_window": 16, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}
SPOILT: list[tuple[Callable[[Path], object], str]] = [
    (lambda at: (at / "config.json").unlink(), "is not a model directory"),
    (lambda at: (at / "model.safetensors").unlink(), "cannot be loaded"),
    (lambda at: (at / "model.safetensors").write_bytes(bytes(9)), "cannot be loaded"),
    (lambda at: (at / "tokenizer.json").unlink(), "tokenizer in .* cannot be read"),
    (make_up_a_tokenizer, "has no token for any letter"),
    (lose_a_parameter, r"lack 1 parameters, such as model\.layers\.1\.mlp\.up_proj\.weight"),
    (lambda at: configure(at, **WINDOW), "sliding window of 16"),
]


@pytest.mark.parametrize(("spoil", "sentence"), SPOILT, ids=[sentence for _, sentence in SPOILT])
def test_a_directory_that_cannot_be_served_is_refused(
    model_dir: str, tmp_path: Path, spoil: Callable[[Path], object], sentence: str
) -> None:
    directory = tmp_path / "spoilt"
    shutil.copytree(model_dir, directory)
    spoil(directory)
    with pytest.raises(ModelError, match=sentence):
        Scheduler(str(directory))


UNKNOWN: list[tuple[dict[str, Any], type[ArlError], str]] = [
    ({"device": "gpu"}, ConfigError, "device"),
    ({"context_length": 513}, ModelError, "positions for 512 tokens"),
]


@pytest.mark.parametrize(("setting", "error", "sentence"), UNKNOWN)
def test_settings_that_cannot_be_are_refused(
    model_dir: str, setting: dict[str, Any], error: type[ArlError], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        Scheduler(model_dir, **setting)
