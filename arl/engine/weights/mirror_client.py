"""Calls to a mirror: what it holds, and a package for it and all below it.

trainer --PUT: route, package--> mirror --PUT: its part of the route, package--> mirrors below it
        <---- a report: what came of it and of all below it ----
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arl.api.errors import ArlError, ServerError, ServerFailedError, first_error
from arl.engine.weights.mirror_tree import Branch, route_to_bytes
from arl.engine.weights.package import WrongBaseError
from arl.web.client import JsonClient, Reply
from arl.web.connections import Body

STALL_S = 5.0
"""A mirror that takes nothing for so long is asked whether it lives. One that lives may wait for those below it: it has
as long again for each level of the tree below it, and once more."""
WATCH_S = 0.5
_HEALTH_TIMEOUT_S = 4.0
_CONNECT_TIMEOUT_S = 10.0
_WRONG_BASE, _UNREACHED = 409, 502


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The version on a mirror; both fields are None while it is empty."""

    checksum: str | None
    directory: Path | None
    """On the mirror's machine."""


class SlowMirrorError(ServerFailedError):
    """A mirror lives, but holds up others."""


Outcome = Held | ArlError | WrongBaseError | None
"""The content of a mirror after an update, or why the mirror did not take the update; None if nobody sent it one."""
Report = Mapping[str, Outcome]
"""Address -> outcome, for each mirror of a branch."""


class MirrorClient(JsonClient):
    """Calls to a mirror, without timeouts. They raise ServerFailedError if it may answer later, else ServerError."""

    key_hint = "set weights.api_key to the key that it was started with"
    path_hint = "is it a mirror of this version of arl?"

    def __init__(self, address: str, api_key: str | None) -> None:
        super().__init__(address, api_key=api_key, timeout_s=None, connect_timeout_s=_CONNECT_TIMEOUT_S)
        self.address = address
        self.busy = asyncio.Lock()
        """To be held while changing what the mirror holds."""

    async def held(self) -> Held:
        return _held((await self._call("GET", b"", {}))[0])

    async def put(self, num_bytes: int, pieces: AsyncIterator[bytes], below: Sequence[Branch] = ()) -> Report:
        """Send a package of so many bytes, with a route to those below. Returns when all that took it are complete.

        Raises WrongBaseError.
        """
        route = route_to_bytes(below)

        async def body() -> AsyncIterator[bytes]:
            yield route
            async for piece in pieces:
                yield piece

        answer, reply = await self._call("PUT", body(), {"Content-Length": str(len(route) + num_bytes)})
        if not below:
            return {self.address: _held(answer)}
        try:
            report: dict[str, Outcome] = {self.address: self._outcome(answer, reply)}
            return report | {address: self._outcome(told, reply) for address, told in answer["below"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise ServerError(f"{reply.url} makes no sense: {reply.body[:200]!r}") from error

    def _outcome(self, told: Mapping[str, Any] | None, reply: Reply) -> Outcome:
        if told is None:
            return None
        if (status := told.get("status")) is None:
            return _held(told)
        if status == _WRONG_BASE:
            return WrongBaseError(told["reason"])
        body = json.dumps({"message": told["reason"]}).encode()
        return self.error_of(Reply(url=reply.url, path=reply.path, status=status, headers=(), body=body))

    async def _call(self, method: str, data: Body, headers: dict[str, str]) -> tuple[dict[str, Any], Reply]:
        try:
            reply = await self.send(method, "/version", data, headers)
        finally:
            await self.aclose()  # the next call comes a version later
        if reply.status == _WRONG_BASE:
            raise WrongBaseError(reply.reason)
        if reply.status != 200:
            raise self.error_of(reply)
        answer = reply.json()
        if not isinstance(answer, dict) or not {"checksum", "directory"} <= answer.keys():
            raise ServerError(f"{reply.url} is not a mirror: it answered {reply.body[:200]!r}")
        return answer, reply


def _held(told: Mapping[str, Any]) -> Held:
    return Held(checksum=told["checksum"], directory=Path(told["directory"]) if told["directory"] else None)


def told_of(outcome: Outcome) -> dict[str, Any] | None:
    """The outcome as a JSON value."""
    match outcome:
        case None:
            return None
        case Held():
            return {"checksum": outcome.checksum, "directory": outcome.directory and str(outcome.directory)}
        case _:
            status = _WRONG_BASE if isinstance(outcome, WrongBaseError) else _UNREACHED
            return {"status": status, "reason": str(outcome)}


async def pass_on(
    client: MirrorClient, branch: Branch, num_bytes: int, pieces: AsyncIterator[bytes], *, holds_up_others: bool = True
) -> Report:
    """Send a package to a branch's mirror, which passes it on. Never raises ServerError: it is the mirror's outcome.

    holds_up_others: others wait while this mirror takes nothing. Else it may be slow as long as it lives.
    """
    taken = _Taken(pieces)
    unserved: dict[str, Outcome] = dict.fromkeys(branch.addresses)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(taken.watch(client, patience_s(branch) if holds_up_others else math.inf))
            report = await client.put(num_bytes, taken.each(), branch.below)
            taken.is_over.set()
    except BaseExceptionGroup as errors:
        error = first_error(errors)
        if not isinstance(error, ServerError | WrongBaseError):
            raise error from None
        return unserved | {branch.address: error}
    return unserved | {address: report[address] for address in unserved.keys() & report.keys()}


class _Taken:
    """Pieces that a mirror takes, and since when it has taken none although one was there."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._waits_since: float | None = self._began
        self.is_over = asyncio.Event()

    async def each(self) -> AsyncIterator[bytes]:
        while True:
            self._waits_since = None
            piece = await anext(self._pieces, None)
            self._waits_since = self._loop.time()
            if piece is None:
                return
            yield piece

    async def watch(self, client: MirrorClient, patience_s: float) -> None:
        """Raises ServerFailedError once the mirror is dead, SlowMirrorError once it is stuck."""
        lived_at = 0.0
        while not await self._ends_within(WATCH_S):
            if (since := self._waits_since) is None:
                continue
            now = self._loop.time()
            # What it has taken may still lie in the kernel, and leaves it as slowly as the rest did.
            message = f"{client.url} has taken nothing for {now - since:.0f} s"
            if now - since > max(patience_s, since - self._began):
                raise SlowMirrorError(message)
            if now - max(since, lived_at) > STALL_S:
                if not await _is_alive(client):
                    raise ServerFailedError(message)
                lived_at = self._loop.time()

    async def _ends_within(self, limit_s: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self.is_over.wait(), limit_s)
        return self.is_over.is_set()


async def _is_alive(client: MirrorClient) -> bool:
    asking = JsonClient(client.address, timeout_s=_HEALTH_TIMEOUT_S, retries=0)
    try:
        return (await asking.send("GET", "/health")).status == 200
    except ArlError:
        return False
    finally:
        await asking.aclose()


def patience_s(branch: Branch) -> float:
    """How long a mirror that lives may take nothing."""
    return (2 + branch.height) * STALL_S
