from collections.abc import Iterator
from pathlib import Path

import pytest
from embedded_server import ServerProcess, server_process
from published import Trainee, trainee, write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def trainer(model: Path, tmp_path: Path) -> Iterator[Trainee]:
    with trainee(model, tmp_path) as made:
        yield made


@pytest.fixture(scope="session")
def first(model: Path) -> Iterator[ServerProcess]:
    with server_process(str(model)) as server:
        yield server


@pytest.fixture(scope="session")
def second(model: Path) -> Iterator[ServerProcess]:
    """The one that tests kill and start again; it runs when they end."""
    with server_process(str(model)) as server:
        yield server
