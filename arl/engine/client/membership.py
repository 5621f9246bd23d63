"""Servers join and leave: those of the start, those added to a run, and those removed from it.

A server serves once it has been greeted, fits the others and holds the current weights. It leaves without requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from arl.api.engine_config import ClientConfig
from arl.api.errors import ServerError, ServerFailedError, TransportError
from arl.engine.client.greeting import Greeting, greet
from arl.engine.client.server_client import ServerClient
from arl.engine.client.server_pool import Server, ServerPool, ServerState
from arl.engine.client.server_update import leave_running
from arl.engine.client.upkeep import Upkeep

_GREETING_PAUSES_S = (0.0, 0.2, 1.0)
"""How long to wait before each greeting of a server at the start."""
_HANDOVER_TIMEOUT_S = 3.0
"""How long a leaving server may take to return aborted requests, and to unload its adapters."""


class Membership:
    """Adds servers to `pool` and removes them; `upkeep` brings them to the current weights."""

    def __init__(self, pool: ServerPool, config: ClientConfig, upkeep: Upkeep) -> None:
        self._pool = pool
        self._config = config
        self._upkeep = upkeep

    async def start(self, clients: Sequence[ServerClient]) -> None:
        """Add the first servers. Raises ServerError naming those that do not answer, or do not fit together."""
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(_greet(client)) for client in clients]
        answers = {client: call.result() for client, call in zip(clients, calls, strict=True)}
        if missing := [f"{client.address} ({e})" for client, e in answers.items() if isinstance(e, ServerError)]:
            where = "; ".join(missing)
            raise ServerError(f"no inference server answers at {where}. Start it, or correct engine.addresses")
        for client, answer in answers.items():
            if isinstance(answer, Greeting):
                server = self._pool.join(client)
                self._upkeep.welcome(server, answer)
                self._pool.admit(server)

    async def add(self, client: ServerClient) -> None:
        """Bring a new server to the current weights, then let it serve. Raises ServerError, and leaves it out."""
        server = self._pool.join(client)
        try:
            async with asyncio.timeout(self._config.update_timeout_s):
                self._upkeep.welcome(server, await greet(client))
                while not await self._upkeep.restore(server):
                    pass  # newer weights came meanwhile
        except TimeoutError:
            raise ServerError(
                f"{server.address} was not ready within {self._config.update_timeout_s:g} s (engine.update_timeout_s)"
            ) from None
        except TransportError as error:
            raise ServerError(f"{server.address} did not get the current weights: {error}") from error
        finally:
            if server.state is ServerState.JOINING:
                self._pool.drop(server)
                if server.pauses:
                    await leave_running(server)
                await client.aclose()

    async def remove(self, server: Server, drain_timeout_s: float) -> None:
        """Let its requests end, give those that do not end in time to other servers, and drop it."""
        others = [other for other in self._pool.servers if other is not server and not other.is_leaving]
        if not others or (server.is_in_service and not any(other.is_in_service for other in others)):
            raise ServerError(f"{server.address} is the last server that serves; add another before removing it")
        if len(others) < self._config.min_servers:
            least = f"engine.min_servers is {self._config.min_servers}"
            raise ServerError(f"{least}, and without {server.address} there are {len(others)}; add another before")
        self._pool.leave(server)
        try:
            if not await self._drained(server, drain_timeout_s):
                async with asyncio.TaskGroup() as group:
                    for attempt in server.attempts:
                        group.create_task(self._upkeep.abort_now(server, attempt.rid))
                if not await self._drained(server, _HANDOVER_TIMEOUT_S):
                    self._pool.lose_attempts(server, f"{server.address} was removed")
            with suppress(TimeoutError):
                async with asyncio.timeout(_HANDOVER_TIMEOUT_S):
                    await self._upkeep.updates.unload(server, [*server.adapters])
        except BaseException:  # mostly a cancellation: the server goes on as before
            self._pool.stay(server)
            raise
        self._upkeep.forget(server)
        is_idle = server.state is ServerState.DRAINING
        self._pool.drop(server)
        if not is_idle:
            await leave_running(server)
        await server.client.aclose()

    async def _drained(self, server: Server, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                while server.attempts:
                    await self._pool.changed()
        except TimeoutError:
            return False
        return True


async def _greet(client: ServerClient) -> Greeting | ServerError:
    """Greets again if a request failed, so that one bad answer among many servers does not stop a run's start."""
    failure = ServerError("")
    for pause_s in _GREETING_PAUSES_S:
        await asyncio.sleep(pause_s)
        try:
            return await greet(client)
        except ServerFailedError as error:
            failure = error
        except ServerError as error:
            return error
    return failure
