"""A tiny model directory, and train engines that are closed again."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from train_models import MakeEngine, write_critic, write_model
from train_ranks import Ranks

from arl.api.engine import Head
from arl.api.engine_config import OptimizerConfig, TrainConfig
from arl.engine.fsdp.train_engine import FSDPTrainEngine


@pytest.fixture(scope="session", params=["tied", "untied"])
def any_model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head is tied to the embedding, and one whose head is its own."""
    return write_model(tmp_path_factory.mktemp("model") / "model", tied=request.param == "tied")


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model", tied=False)


@pytest.fixture(scope="session")
def critic_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_critic(tmp_path_factory.mktemp("critic") / "model")


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Two ranks for all tests of a session."""
    return Ranks(2, tmp_path_factory.mktemp("pair"))


@pytest.fixture
def make_engine(model_dir: Path) -> Iterator[MakeEngine]:
    """make_engine(model_dir=..., optimizer=..., head=..., max_tokens_per_microbatch=..., ...) -> a train engine."""
    engines: list[FSDPTrainEngine] = []

    def make(
        directory: Path = model_dir, optimizer: OptimizerConfig | None = None, head: Head = "policy", **options
    ) -> FSDPTrainEngine:
        # A large eps keeps AdamW smooth: it would otherwise blow rounding in tiny gradients up to whole steps.
        optimizer = optimizer or OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1)
        engines.append(FSDPTrainEngine(directory, TrainConfig(optimizer=optimizer, **options), head=head))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
