"""A mirror (arl/engine/weights/mirror.py), seen from the trainer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from arl.api.errors import ServerError
from arl.engine.client.server_client import ServerFailedError

_CONNECT_TIMEOUT_S = 10.0
_WRONG_BASE = 409


class WrongBaseError(Exception):
    """The mirror does not hold what the package starts from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a mirror holds: a directory on its machine; None while it is empty."""

    checksum: str | None
    directory: Path | None


class MirrorClient:
    """The calls to one mirror. Raises ServerFailedError where it may answer later, ServerError where it will not.

    busy: to be held by whoever changes what the mirror holds. Timeouts are the caller's.
    """

    def __init__(self, address: str, api_key: str | None) -> None:
        self.address = address.rstrip("/")
        self.busy = asyncio.Lock()
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def held(self) -> Held:
        return await self._call("GET", None, {})

    async def put(self, num_bytes: int, pieces: Iterable[bytes]) -> Held:
        """Send a package of so many bytes; returns when what it leads to is there. Raises WrongBaseError."""
        return await self._call("PUT", _sent(iter(pieces)), {"Content-Length": str(num_bytes)})

    def checked(self, held: Held, checksum: str) -> Path:
        """The directory, which has to have this checksum."""
        if held.directory is None or held.checksum != checksum:
            raise ServerError(f"the mirror at {self.address} took an update and holds something else: is it shared?")
        return held.directory

    async def _call(self, method: str, data: AsyncIterator[bytes] | None, headers: dict[str, str]) -> Held:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=self._headers) as session,
                session.request(method, f"{self.address}/version", data=data, headers=headers) as response,
            ):
                return self._parse(response.status, await response.read())
        except (aiohttp.ClientError, OSError) as error:
            raise ServerFailedError(
                f"the mirror at {self.address} could not be reached: {str(error) or type(error).__name__}"
            ) from error

    def _parse(self, status: int, raw: bytes) -> Held:
        try:
            body: dict[str, Any] = json.loads(raw)
            if status == 200:
                directory = body["directory"]
                return Held(checksum=body["checksum"], directory=Path(directory) if directory else None)
            sentence = str(body["error"]["message"])
        except (ValueError, KeyError, TypeError):
            sentence = raw.decode(errors="replace").strip()[:500]
        message = f"the mirror at {self.address} answered with HTTP {status}: {sentence}"
        if status == _WRONG_BASE:
            raise WrongBaseError(message)
        if status in (401, 403):
            raise ServerError(f"{message}; set weights.api_key to the key that it was started with")
        if status >= 500:
            raise ServerFailedError(message)
        raise ServerError(f"{message}; is it a mirror of this version of arl?")


async def _sent(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Pieces are read from files as they are sent, on another thread."""
    while piece := await asyncio.to_thread(next, pieces, b""):
        yield piece
