"""A tiny model directory, and train engines that are closed again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from train_models import MakeEngine, MakeLearner, engines, learner_config, write_critic, write_model
from train_ranks import Ranks

from arl.run.learner import load_learner
from arl.training.learner import Learner


@pytest.fixture(scope="session", params=["tied", "untied"])
def any_model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head is tied to the embedding, and one whose head is its own."""
    return write_model(tmp_path_factory.mktemp("model") / "model", tied=request.param == "tied")


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="session")
def critic_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_critic(tmp_path_factory.mktemp("critic") / "model")


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Two ranks for all tests of a session."""
    return Ranks(2, tmp_path_factory.mktemp("pair"))


@pytest.fixture
def make_engine(model_dir: Path) -> Iterator[MakeEngine]:
    with engines(model_dir) as make:
        yield make


@pytest.fixture
def make_learner(model_dir: Path) -> Iterator[MakeLearner]:
    """make(train={...}, algorithm={...}, ...) -> a learner of `learner_config`, as `launch` makes it."""
    learners: list[Learner] = []

    def make(**sections: Any) -> Learner:
        learners.append(load_learner(learner_config(model_dir, **sections)))
        return learners[-1]

    yield make
    for learner in learners:
        learner.close()
