"""Engines on a GPU. Run by `make test-gpu`; where there is none, every test here is skipped."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine.fsdp.train_models import MakeEngine, write_model

from arl.api.engine_config import OptimizerConfig, TrainConfig
from arl.engine.fsdp.train_engine import FSDPTrainEngine

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    absent = pytest.mark.skip(reason="needs a GPU that torch can use (torch.cuda.is_available())")
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
    """make_engine(device=..., dtype=..., ...) -> a train engine, on the GPU unless told otherwise."""
    engines: list[FSDPTrainEngine] = []

    def make(
        device: str = "cuda", optimizer: OptimizerConfig | None = None, model: Path = model_dir, **options
    ) -> FSDPTrainEngine:
        # A large eps keeps AdamW smooth: it would otherwise blow rounding in tiny gradients up to whole steps.
        optimizer = optimizer or OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1)
        config = TrainConfig(optimizer=optimizer, device=device, max_tokens_per_microbatch=60, **options)
        engines.append(FSDPTrainEngine(model, config))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
