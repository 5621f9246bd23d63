import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from embedded_server import NURSERY
from mixtures import write_mixture
from observe.doctor.faulty_server import FaultyServer
from observe.doctor.planted import OPTIONS, SHAPE

from arl.engine.tiny import write_tiny_model


@contextmanager
def served(model: Path, *options: str) -> Iterator[FaultyServer]:
    with tempfile.TemporaryDirectory(prefix="arl-server-") as directory:
        process = FaultyServer(NURSERY.get(), Path(directory), "--model", str(model), *options)
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "model", shape=SHAPE)


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[FaultyServer]:
    with served(model) as process:
        yield process


@pytest.fixture(scope="session")
def bfloat16_server(model: Path) -> Iterator[FaultyServer]:
    (options,) = OPTIONS.values()
    with served(model, *options) as process:
        yield process


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture(tmp_path_factory.mktemp("mixture") / "model", "qwen3_moe")


@pytest.fixture(scope="session")
def mixture_server(mixture: Path) -> Iterator[FaultyServer]:
    with served(mixture) as process:
        yield process
