"""Fixtures of the embedded server's tests: a model on disk, references, a batch and a scheduler to drive."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from tiny_qwen import Deliveries, Reference, build_model, build_tokenizer
from transformers import AutoModelForCausalLM

from arl.engine.local.runner import ModelRunner
from arl.engine.local.running_batch import Batch
from arl.engine.local.scheduler import Scheduler, SchedulerSettings


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    build_model(0).save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="session")
def other_weights() -> dict[str, torch.Tensor]:
    """Another version of the same model's weights."""
    return build_model(1).state_dict()


@pytest.fixture(scope="session")
def reference(model_dir: str) -> Reference:
    return Reference(AutoModelForCausalLM.from_pretrained(model_dir))


@pytest.fixture(scope="session")
def other_reference(other_weights: dict[str, torch.Tensor]) -> Reference:
    return Reference(build_model(1))


@pytest.fixture
def make_batch(model_dir: str) -> Callable[..., Batch]:
    def make(
        *, max_rows: int = 8, prefill_tokens: int = 64, prefix_cache_bytes: int = 1 << 24, context_length: int = 256
    ) -> Batch:
        runner = ModelRunner(model_dir, device="cpu", dtype="float32", max_rows=max_rows, context_length=context_length)
        return Batch(
            runner,
            max_rows=max_rows,
            prefill_tokens=prefill_tokens,
            prefix_cache_bytes=prefix_cache_bytes,
            weight_version="0",
        )

    return make


@pytest.fixture
def batch(make_batch: Callable[..., Batch]) -> Batch:
    return make_batch()


@pytest.fixture
def deliveries() -> Deliveries:
    return Deliveries()


@pytest.fixture
def scheduler(model_dir: str, deliveries: Deliveries) -> Iterator[Scheduler]:
    made = Scheduler(
        model_dir, deliveries, SchedulerSettings(weight_version="0", max_running_requests=8, context_length=256)
    )
    made.start()
    yield made
    made.close()
