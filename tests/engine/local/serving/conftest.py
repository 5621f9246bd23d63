"""One server for all tests that leave it as they found it."""

from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest
from embedded_server import server_here
from protocol_client import Client

from arl.engine.tiny import TinyShape, write_tiny_model

SHAPE = TinyShape(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=2, context_length=8192)


@pytest.fixture(scope="session")
def model_a(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("weights") / "a", shape=SHAPE, seed=0))


@pytest.fixture(scope="session")
def model_b(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Other weights of the same shape."""
    return str(write_tiny_model(tmp_path_factory.mktemp("weights") / "b", shape=SHAPE, seed=1))


@pytest.fixture(scope="session")
def shared_url(model_a: str) -> Iterator[str]:
    options = ("--weight-version", "v0", "--max-running-requests", "8")
    with server_here(model_a, *options, "--context-length", str(SHAPE.context_length)) as url:
        yield url


@pytest.fixture
async def client(shared_url: str, model_a: str) -> AsyncIterator[Client]:
    """A client of the shared server, which afterwards runs again, idle, with its first weights."""
    async with aiohttp.ClientSession(shared_url) as session:
        client = Client(session)
        yield client
        await client.post("/pause_generation", {"mode": "abort"})
        await client.post("/continue_generation")
        if (await client.get("/model_info")).body["weight_version"] != "v0":
            await client.post("/update_weights_from_disk", {"model_path": model_a, "weight_version": "v0"})
