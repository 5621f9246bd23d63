"""An exchange with a server: both sides at the same time, and an update that begins."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from arl.api.engine import WeightServer
from arl.api.errors import NoSuchPathError, ServerError, ServerFailedError
from arl.engine.weights.disk import look_at

_EXPLANATION_S = 1.0
"""The time that a server has to explain why its group broke."""

ResultT = TypeVar("ResultT")


async def done(future: asyncio.Future[ResultT]) -> ResultT:
    return await future


async def begin(server: WeightServer) -> None:
    try:
        await server.begin_update()
    except NoSuchPathError as error:
        raise ServerError(
            f"{server.address} must be SGLang 0.5.23 or newer for weights.transport=distributed ({error}); or use disk"
        ) from error
    except ServerFailedError:
        raise
    except ServerError:
        # An update that broke off was left open. Ending it puts into use what this one overwrites, all of it.
        await server.end_update()
        await server.begin_update()


async def both(ours: asyncio.Future[Any], theirs: Coroutine[Any, Any, None]) -> None:
    """Wait for both sides of an exchange. Raises the first failure, or the server's explanation of it."""
    answering = asyncio.ensure_future(theirs)
    try:
        await asyncio.wait({ours, answering}, return_when=asyncio.FIRST_EXCEPTION)
        if ours.done() and isinstance(ours.exception(), ServerFailedError):
            await asyncio.wait({answering}, timeout=_EXPLANATION_S)
        for side in (answering, ours):
            if side.done():
                side.result()
    finally:
        for side in (answering, ours):
            side.cancel()  # a thread goes on until its group is left, or its time is over
            side.add_done_callback(look_at)
