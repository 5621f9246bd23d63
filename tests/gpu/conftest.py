"""Engines on a GPU. Run by `make test-gpu`; where there is none, every test here is skipped."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine.fsdp.train_models import MakeEngine, engines, write_model

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    absent = pytest.mark.skip(reason="needs a GPU: torch.cuda.is_available() is false")
    # torch compiles flex attention at first use, which takes its time, and warns of what torch itself does.
    compiling = [
        pytest.mark.timeout(600),
        pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
    ]
    for item in items:
        if HERE in item.path.parents:
            for mark in (pytest.mark.gpu, *compiling):
                item.add_marker(mark)
            if not torch.cuda.is_available():
                item.add_marker(absent)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of heads that flex attention can do: 16, where the models of other tests have 8."""
    return write_model(tmp_path_factory.mktemp("model") / "model", tied=True, head_dim=16)


@pytest.fixture
def make_engine(model_dir: Path) -> Iterator[MakeEngine]:
    with engines(model_dir, device="cuda", max_tokens_per_microbatch=60) as make:
        yield make
