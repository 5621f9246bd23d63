"""Fixtures of the embedded server's tests: a model on disk, references, a batch and a scheduler to drive."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from tiny_qwen import Deliveries, Reference, build_model, make_batch_of, save

from arl.engine.local.model_thread import Scheduler
from arl.engine.local.scheduler import RunningBatch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(build_model(0), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference(build_model(0))


@pytest.fixture(scope="session")
def other_reference() -> Reference:
    """Of another version of the same model's weights."""
    return Reference(build_model(1))


@pytest.fixture(scope="session")
def other_weights(other_reference: Reference) -> dict[str, torch.Tensor]:
    return other_reference.model.state_dict()


@pytest.fixture
def make_batch(model_dir: str) -> Callable[..., RunningBatch]:
    return partial(make_batch_of, model_dir)


@pytest.fixture
def batch(make_batch: Callable[..., RunningBatch]) -> RunningBatch:
    return make_batch()


@pytest.fixture
def deliveries() -> Deliveries:
    return Deliveries()


@pytest.fixture
def scheduler(model_dir: str, deliveries: Deliveries) -> Iterator[Scheduler]:
    made = Scheduler(model_dir, weight_version="0", max_running_requests=8, context_length=256)
    made.start(deliveries)
    yield made
    made.close()
