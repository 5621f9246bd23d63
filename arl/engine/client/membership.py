"""Servers join and leave: those of the start, those added to a run, and those removed from it.

A server serves once it has been greeted, fits the others and holds the current weights. It leaves without requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress

from arl.api.errors import ServerError, ServerFailedError, TransportError
from arl.api.settings.engines import ClientConfig
from arl.engine.client.health import Upkeep
from arl.engine.client.server_client import Greeting, ServerClient, greet
from arl.engine.client.server_pool import Server, ServerPool, ServerState
from arl.engine.client.weight_update import leave_running

_GREETING_PAUSES_S = (0.0, 0.2, 1.0)
"""How long to wait before each greeting of a server at the start."""
_STRAGGLERS_S = 2.0
"""How long the start waits for more servers once enough of them have answered, if it does not need all."""
_HANDOVER_TIMEOUT_S = 3.0
"""How long a leaving server may take to return aborted requests, and to unload its adapters."""
_MAX_TOLD = 8
"""How many servers one message names."""

logger = logging.getLogger(__name__)


class Membership:
    """Adds servers to `pool` and removes them; `upkeep` brings them to the current weights."""

    def __init__(self, pool: ServerPool, config: ClientConfig, upkeep: Upkeep) -> None:
        self._pool = pool
        self._config = config
        self._upkeep = upkeep

    async def start(self, clients: Sequence[ServerClient], least: int | None = None) -> None:
        """Add the first servers. Raises ServerError naming those that do not answer, or do not fit together.

        least: so many are enough. Those that cannot join yet are left out, with a warning. None: all have to join.
        """
        if least is not None and len(clients) < least:
            raise ServerError(
                f"the run needs {least} servers (engine.min_servers), and its servers file has {len(clients)}"
            )
        answers = await _greeted(clients, len(clients) if least is None else least)
        missing = {client: error for client, error in answers.items() if isinstance(error, ServerError)}
        if missing and least is None:
            raise ServerError(f"no inference server answers at {_told(missing)}. Start it, or correct engine.addresses")
        for client, answer in answers.items():
            if isinstance(answer, Greeting):
                try:
                    self._welcome(client, answer)
                except ServerError as error:
                    if least is None:
                        raise
                    missing[client] = error
        for client in missing:
            await client.aclose()
        if least is not None and missing:
            what = f"{len(missing)} of {len(clients)} servers cannot join: {_told(missing)}"
            if len(self._pool.servers) < least:
                raise ServerError(f"{what}. The run needs {least} of them (engine.min_servers)")
            logger.warning("%s", what)

    def _welcome(self, client: ServerClient, greeting: Greeting) -> None:
        server = self._pool.join(client)
        try:
            self._upkeep.welcome(server, greeting)
        except ServerError:
            self._pool.drop(server)
            raise
        self._pool.admit(server)

    async def add(self, client: ServerClient) -> None:
        """Bring a new server to the current weights, then let it serve. Raises ServerError, and leaves it out.

        While the others sleep it does, too, and its time limit stands still.
        """
        server, clock = self._pool.join(client), self._pool.clock
        limit = clock.limit(clock.now() + self._config.update_timeout_s)
        try:
            async with limit:
                self._upkeep.welcome(server, await greet(client, sets_going=not self._pool.is_asleep))
                while not await self._upkeep.restore(server):
                    await self._upkeep.awake()  # or newer weights came meanwhile
        except TimeoutError:
            if not limit.expired():
                raise ServerError(f"{server.address} does not answer") from None
            raise ServerError(
                f"{server.address} was not ready within {self._config.update_timeout_s:g} s (engine.update_timeout_s)"
            ) from None
        except TransportError as error:
            raise ServerError(f"{server.address} did not get the current weights: {error}") from error
        finally:
            clock.ended(limit)
            if server.state is ServerState.JOINING:
                self._pool.drop(server)
                if server.pauses or self._pool.is_asleep:
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
            while server.state is ServerState.ASLEEP:  # left running, it would take memory that the trainer has
                await self._pool.changed()
        except BaseException:  # mostly a cancellation: the server goes on as before
            self._pool.stay(server)
            raise
        self._upkeep.forget(server)
        is_idle = server.state is ServerState.DRAINING
        self._pool.drop(server)
        try:
            if not is_idle:
                await leave_running(server)
        finally:
            await server.client.aclose()

    async def _drained(self, server: Server, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                while server.attempts:
                    await self._pool.changed()
        except TimeoutError:
            return False
        return True


async def _greeted(clients: Sequence[ServerClient], least: int) -> dict[ServerClient, Greeting | ServerError]:
    """The answers that arrive soon after `least` servers have greeted. The others, if few, do not hold up the start."""
    async with asyncio.TaskGroup() as group:
        calls = {client: group.create_task(_greet(client)) for client in clients}
        waiting, num_greeted = set(calls.values()), 0
        while waiting and num_greeted < least:
            answered, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            num_greeted += sum(isinstance(call.result(), Greeting) for call in answered)
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=_STRAGGLERS_S)
            for call in late:
                call.cancel()
    return {
        client: ServerFailedError(f"{client.address} has not answered yet") if call.cancelled() else call.result()
        for client, call in calls.items()
    }


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


def _told(missing: Mapping[ServerClient, ServerError]) -> str:
    told = [f"{client.address} ({error})" for client, error in missing.items()]
    more = len(told) - _MAX_TOLD
    return "; ".join(told[:_MAX_TOLD]) + (f"; and {more} more" if more > 0 else "")
