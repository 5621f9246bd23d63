"""A mirror passes a package on to those below it while it receives it, in bounded memory.

body --share--> own pipe --> the new version, checked
          |---> a pipe for each mirror below --PUT--> its report
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from aiohttp import StreamReader

from arl.api.errors import ServerFailedError, first_error
from arl.engine.weights.mirror_client import WATCH_S, MirrorClient, Outcome, pass_on, patience_s, told_of
from arl.engine.weights.mirror_tree import MAX_ROUTE_BYTES, ROUTE_MAGIC, Branch, route_of
from arl.engine.weights.package import PREAMBLE, DeltaError
from arl.web.server import request_error

log = logging.getLogger(__name__)

NOTHING_HELD = {"version": None, "checksum": None, "directory": None}
_SENDER_STALL_S = 60.0
"""The longest silence of a sender; then its update is given up, so that another can begin."""
_GIVING_WAY_S = 5.0
"""The same limit after another sender has come, because its parent has given up the first sender's route."""
_PIPE_BYTES = 4 << 20
_SLOW_SHARE = 0.75
"""A mirror below is given up if it alone held up the others for this share of the time."""

Read = Callable[[int], Awaitable[bytes]]
"""Exactly so many bytes of a package."""


@dataclass(eq=False)
class PackageBody:
    """What a sender sends: perhaps a route, then a package. Raises DeltaError if it stalls, or ends too early."""

    stream: StreamReader
    num_bytes: int
    """Bytes that have not been read yet."""
    _begin: bytes = b""
    _stall_s: float = field(default_factory=lambda: _SENDER_STALL_S)
    _silence: asyncio.Timeout | None = None
    """The time limit of a read that waits for the sender."""
    _silent_since: float = 0.0

    @contextlib.contextmanager
    def coming_beside(self, coming: set[PackageBody]) -> Iterator[None]:
        """Be one of those that come. The others may be silent for a moment only from now on."""
        for other in coming:
            other._give_way()
        coming.add(self)
        try:
            yield
        finally:
            coming.remove(self)

    def _give_way(self) -> None:
        self._stall_s = _GIVING_WAY_S
        if self._silence is not None and not self._silence.expired():
            self._silence.reschedule(self._silent_since + self._stall_s)

    async def route(self) -> tuple[Branch, ...]:
        """The branches below this mirror."""
        preamble = await self.read_exactly(PREAMBLE.size)
        magic, length = PREAMBLE.unpack(preamble)
        if magic != ROUTE_MAGIC:
            self._begin = preamble
            self.num_bytes += len(preamble)
            return ()
        if length > MAX_ROUTE_BYTES:
            raise DeltaError(f"a route of {length} bytes; it may have {MAX_ROUTE_BYTES}")
        return route_of(await self.read_exactly(length))

    async def read_exactly(self, num_bytes: int) -> bytes:
        begin, self._begin = self._begin[:num_bytes], self._begin[num_bytes:]
        async with self._patience():
            rest = await self.stream.readexactly(num_bytes - len(begin))
        self.num_bytes -= num_bytes
        return begin + rest

    async def pieces(self) -> AsyncIterator[bytes]:
        """Everything that has not been read yet."""
        while self.num_bytes > 0:
            piece, self._begin = self._begin, b""
            if not piece:
                async with self._patience():
                    piece = await self.stream.readany()
            if not piece:
                raise DeltaError(f"{self.num_bytes} bytes are missing")
            self.num_bytes -= len(piece)
            yield piece

    @contextlib.asynccontextmanager
    async def _patience(self) -> AsyncIterator[None]:
        self._silent_since = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._stall_s) as self._silence:
                yield
        except TimeoutError:
            raise DeltaError(f"nothing came for {self._stall_s:g} s") from None
        finally:
            self._silence = None


async def pass_on_and_receive(
    body: PackageBody, below: Sequence[Branch], receive: Callable[[Read], Awaitable[dict[str, Any]]], api_key: str
) -> dict[str, Any]:
    """Send a package to those below while `receive` takes it here; returns the answer. If one fails, the others go on.

    Raises DeltaError if the sender fails.
    """
    own, pipes = PiecePipe(), [(branch, PiecePipe()) for branch in below]
    num_bytes, reports = body.num_bytes, dict[str, Outcome]()

    async def send(branch: Branch, pipe: PiecePipe) -> None:
        try:
            reports.update(await pass_on(MirrorClient(branch.address, api_key), branch, num_bytes, pipe.each()))
        finally:
            pipe.close()

    async def receive_here() -> dict[str, Any]:
        try:
            return await receive(own.read_exactly)
        except Exception as error:  # those below get theirs, and the sender is told
            failure = request_error(error, {})
            if failure.status == HTTPStatus.INTERNAL_SERVER_ERROR:
                log.error("an update failed", exc_info=error)
            return {**NOTHING_HELD, "status": failure.status, "reason": failure.message}
        finally:
            own.close()

    try:
        async with asyncio.TaskGroup() as group:
            receiving = group.create_task(receive_here())
            for branch, pipe in pipes:
                group.create_task(send(branch, pipe))
            await share(body.pieces(), own, pipes)
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    return receiving.result() | {"below": {address: told_of(outcome) for address, outcome in reports.items()}}


class PiecePipe:
    """Pieces on their way to one reader, which take a bounded amount of memory as long as the writer awaits `room`."""

    def __init__(self) -> None:
        self.held_s = 0.0
        """How long this reader alone held up the others."""
        self._pieces: deque[bytes] = deque()
        self._num_bytes = 0
        self._failure: Exception | None = None
        self._has_ended = False
        self._is_closed = False
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()

    @property
    def is_open(self) -> bool:
        return not self._is_closed

    @property
    def is_full(self) -> bool:
        return not self._has_room.is_set()

    async def room(self) -> None:
        await self._has_room.wait()

    def feed(self, piece: bytes) -> None:
        if self.is_open:
            self._pieces.append(piece)
            self._num_bytes += len(piece)
            self._note()

    def end(self) -> None:
        """Nothing more comes."""
        self._has_ended = True
        self._note()

    def fail(self, error: Exception) -> None:
        """The reader gets this error."""
        self._failure = error
        self.close()

    def close(self) -> None:
        """Nobody reads any more."""
        self._is_closed = True
        self._pieces.clear()
        self._num_bytes = 0
        self._note()

    def _note(self) -> None:
        self._changed.set()
        if self._num_bytes < _PIPE_BYTES:
            self._has_room.set()
        else:
            self._has_room.clear()

    async def each(self) -> AsyncIterator[bytes]:
        while piece := await self._next():
            yield piece

    async def read_exactly(self, num_bytes: int) -> bytes:
        """Raises asyncio.IncompleteReadError."""
        parts: list[bytes] = []
        missing = num_bytes
        while missing:
            if not (piece := await self._next()):
                raise asyncio.IncompleteReadError(b"".join(parts), num_bytes)
            if len(piece) > missing:
                self._pieces.appendleft(piece[missing:])
                self._num_bytes += len(piece) - missing
                piece = piece[:missing]
            parts.append(piece)
            missing -= len(piece)
        return b"".join(parts)

    async def _next(self) -> bytes:
        """The next piece; empty at the end."""
        while not self._pieces:
            if self._failure is not None:
                raise self._failure
            if self._has_ended or self._is_closed:
                return b""
            self._changed.clear()
            await self._changed.wait()
        piece = self._pieces.popleft()
        self._num_bytes -= len(piece)
        self._note()
        return piece


async def share(pieces: AsyncIterator[bytes], own: PiecePipe, below: Sequence[tuple[Branch, PiecePipe]]) -> None:
    """Feed each piece to all pipes; one that alone slows the others to a fraction is failed. Ends when nobody reads."""
    clock = asyncio.get_running_loop().time
    began, pipes = clock(), [own, *(pipe for _, pipe in below)]
    async for piece in pieces:
        for pipe in pipes:
            pipe.feed(piece)
        while full := [pipe for pipe in pipes if pipe.is_full]:
            waited_from = clock()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await full[0].room()
            now = clock()
            if len(full) == 1:
                full[0].held_s += now - waited_from
            for branch, pipe in below:
                limit_s = max(patience_s(branch), _SLOW_SHARE * (now - began))
                if pipe.is_open and pipe.held_s > limit_s:
                    pipe.fail(ServerFailedError(f"{branch.address} is far slower than the other mirrors"))
        if not any(pipe.is_open for pipe in pipes):
            return
    for pipe in pipes:
        pipe.end()
