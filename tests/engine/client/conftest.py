from collections.abc import AsyncIterator

import pytest
from protocol_server import Server


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with Server() as server:
        yield server


@pytest.fixture
async def other() -> AsyncIterator[Server]:
    async with Server() as server:
        yield server
