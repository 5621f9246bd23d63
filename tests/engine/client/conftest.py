from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from protocol_server import Engines, Server

from arl.api.config import ClientConfig
from arl.engine.client.sglang import RemoteSGLangEngine


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with Server() as server:
        yield server


@pytest.fixture
async def other() -> AsyncIterator[Server]:
    async with Server() as server:
        yield server


@pytest.fixture
def over() -> Engines:
    @asynccontextmanager
    async def open_engine(
        servers: Sequence[Server],
        *,
        api_key: str | None = None,
        version: int = 0,
        eos_token_ids: Sequence[int] = (),
        **settings: Any,
    ) -> AsyncIterator[RemoteSGLangEngine]:
        addresses = [server.address for server in servers]
        config = ClientConfig(**{"request_timeout_s": 20.0, **settings})
        async with RemoteSGLangEngine(
            addresses, config, api_key=api_key, version=version, eos_token_ids=eos_token_ids
        ) as engine:
            for server in servers:
                server.calls.clear()
            yield engine

    return open_engine
