"""DeltaTransport, and its calls to mirrors: what changed goes to mirrors, which patch a copy beside their servers.

    snapshot --written--> directory --compared with the one before--> delta --PUT--> mirror --path--> server loads
                                                                        |
                 a mirror that holds something else: deltas in a row, or all of it

Before each update the transport asks a mirror for the checksum of what it holds. If a row of kept deltas leads from
there to the new version, and is less than half of the model, it sends these, else the whole model. Whatever goes wrong
in between, a server is told to load a directory only after the mirror has checked every byte of it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from arl.api.config import DeltaWeightsConfig
from arl.api.engine import DiskWeights, Snapshot, TrainEngine, WeightServer
from arl.api.errors import ServerError, ServerFailedError, TransportError
from arl.engine.weights.disk import DiskTransport, WrittenWeights
from arl.engine.weights.package import Replica, WrongBaseError, delta_package, survey, whole_package
from arl.web.client import JsonClient

_CONNECT_TIMEOUT_S = 10.0
_WRONG_BASE = 409
_MAX_DELTAS = 8
"""The most versions that a mirror may be behind and still get deltas."""
_MAX_SHARE = 0.5
"""A row of deltas that is larger than this share of the model is not sent."""
_MAX_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a mirror holds; both are None while it is empty."""

    checksum: str | None
    directory: Path | None
    """On the mirror's machine."""


class MirrorClient(JsonClient):
    """The calls to one mirror. They raise ServerFailedError if it may answer later, ServerError if it will not.

    Timeouts are the caller's.
    """

    key_hint = "set weights.api_key to the key that it was started with"
    path_hint = "is it a mirror of this version of arl?"

    def __init__(self, address: str, api_key: str | None) -> None:
        super().__init__(address, api_key=api_key, timeout_s=None, connect_timeout_s=_CONNECT_TIMEOUT_S)
        self.busy = asyncio.Lock()
        """To be held while changing what the mirror holds."""

    async def held(self) -> Held:
        return await self._call("GET", None, {})

    async def put(self, num_bytes: int, pieces: Iterable[bytes]) -> Held:
        """Send a package of so many bytes; returns when what it leads to is there. Raises WrongBaseError."""
        return await self._call("PUT", _sent(iter(pieces)), {"Content-Length": str(num_bytes)})

    def checked(self, held: Held, checksum: str) -> Path:
        """The directory, which has to have this checksum."""
        if held.directory is None or held.checksum != checksum:
            raise ServerError(f"the mirror at {self.url} took an update and holds something else: is it shared?")
        return held.directory

    async def _call(self, method: str, data: AsyncIterator[bytes] | None, headers: dict[str, str]) -> Held:
        try:
            reply = await self.send(method, "/version", data, headers)
        finally:
            await self.aclose()  # the next call comes a version later
        if reply.status == _WRONG_BASE:
            raise WrongBaseError(reply.reason)
        if reply.status != 200:
            raise self.error_of(reply)
        try:
            body = reply.json()
            directory = body["directory"]
            return Held(checksum=body["checksum"], directory=Path(directory) if directory else None)
        except (KeyError, TypeError) as error:
            raise ServerError(f"{reply.url} is no mirror: it answered {reply.body[:200]!r}") from error


async def _sent(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Read pieces from files while they are sent, on another thread."""
    while piece := await asyncio.to_thread(next, pieces, b""):
        yield piece


class DeltaTransport(DiskTransport):
    """Writes each snapshot to a directory of this machine, as DiskTransport does, and brings mirrors to it.

    A server without a mirror loads that directory. The last few deltas are kept in memory: never more than half of a
    model.
    """

    def __init__(self, config: DeltaWeightsConfig, run_dir: Path) -> None:
        super().__init__(config, run_dir)
        clients = {address: MirrorClient(address, config.api_key) for address in set(config.mirrors.values())}
        self._mirrors = {server.rstrip("/"): clients[address] for server, address in config.mirrors.items()}
        self._deltas = DeltaChain()

    def snapshot(self, engine: TrainEngine) -> DeltaWeights:
        """Copy the weights aside; nothing is written yet."""
        written = (engine.snapshot(), self._writer, self._write)
        return self._kept(DeltaWeights(*written, mirrors=self._mirrors, deltas=self._deltas))

    def close(self) -> None:
        """Remove what is on this machine; mirrors keep what they hold. Idempotent."""
        super().close()
        self._deltas.close()


class DeltaWeights(WrittenWeights):
    """A WeightUpdate that is written and compared when the first server prepares for it, once for all of them."""

    def __init__(
        self,
        snapshot: Snapshot,
        writer: ThreadPoolExecutor,
        write: Callable[[Snapshot], DiskWeights],
        *,
        mirrors: Mapping[str, MirrorClient],
        deltas: DeltaChain,
    ) -> None:
        """mirrors: by the address of the server."""
        super().__init__(snapshot, writer, write)
        self._mirrors = mirrors
        self._deltas = deltas
        self._replica: Future[Replica] | None = None
        self._mirrored: dict[MirrorClient, Path] = {}
        self._num_sent = 0
        self._is_loaded_here = False

    @property
    def num_bytes(self) -> int:
        """What was sent to mirrors, and the whole directory if servers of this machine load it."""
        return self._num_sent + (super().num_bytes if self._is_loaded_here else 0)

    async def prepare(self, server: WeightServer) -> None:
        """Bring the server's mirror to this version. Raises TransportError; ServerError if the mirror is at fault."""
        await super().prepare(server)
        if (mirror := self._mirrors.get(server.address)) is None:
            self._is_loaded_here = True
            return
        if self._replica is None:
            self._replica = self._submit(self._deltas.add, self.directory, self.version)
        replica = await asyncio.shield(asyncio.wrap_future(self._replica))
        async with mirror.busy:  # servers that share a mirror share what is sent
            self._mirrored[mirror] = await self._bring(mirror, replica)

    async def load(self, server: WeightServer, *, flush_cache: bool) -> None:
        if (mirror := self._mirrors.get(server.address)) is None:
            await super().load(server, flush_cache=flush_cache)
        elif mirror in self._mirrored:
            await server.load_directory(self._mirrored[mirror], version=self.version, flush_cache=flush_cache)
        else:
            raise TransportError(f"version {self.version} is not in {mirror.url}; prepare comes before load")

    async def _bring(self, mirror: MirrorClient, replica: Replica) -> Path:
        """Send what the mirror lacks; returns the directory on its machine."""
        held = await mirror.held()
        try:
            for step in self._deltas.row(held.checksum, replica):
                held = await mirror.put(step.num_bytes, step.pieces)
                self._num_sent += step.num_bytes
        except WrongBaseError:
            pass  # it lost what it held meanwhile
        if held.directory is None or held.checksum != replica.checksum:
            num_bytes, pieces = whole_package(replica, self.version)
            try:
                held = await mirror.put(num_bytes, pieces)
            except WrongBaseError as error:  # a package without a base came out wrong: files or bytes were damaged
                raise ServerFailedError(str(error)) from error
            self._num_sent += num_bytes
        return mirror.checked(held, replica.checksum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A package that leads from one checksum to another."""

    base: str
    checksum: str
    pieces: list[bytes]
    num_bytes: int


class DeltaChain:
    """The last versions' deltas, each from the version before. `add` belongs to one thread; `row` to any."""

    def __init__(self) -> None:
        threads = max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // 2))
        self._pool = ThreadPoolExecutor(threads, "arl-deltas")
        self._last: Replica | None = None
        self._deltas: tuple[Delta, ...] = ()

    def add(self, directory: Path, version: int) -> Replica:
        """Take in a new version. Raises TransportError if its directory is gone."""
        try:
            new, last = survey(directory, self._pool), self._last
        except OSError as error:
            raise TransportError(f"the weights of version {version} can't be read any more: {error}") from error
        max_bytes = int(_MAX_SHARE * new.num_bytes)
        if last is not None and last.checksum != new.checksum:
            pieces = self._compared(last, new, version, max_bytes)
            kept = (*self._deltas, _delta(last, new, pieces))[-_MAX_DELTAS:] if pieces else ()
            while sum(delta.num_bytes for delta in kept) > max_bytes:
                kept = kept[1:]
            self._deltas = kept
        self._last = new
        return new

    def _compared(self, last: Replica, new: Replica, version: int, max_bytes: int) -> list[bytes] | None:
        try:
            return delta_package(last, new, version, self._pool, max_bytes)
        except FileNotFoundError:
            return None  # an update that nobody prepared for came between: the last directory is gone

    def row(self, held: str | None, new: Replica) -> tuple[Delta, ...]:
        """The deltas that lead from `held` to `new`, in this order; none if they don't, or if `new` is held."""
        deltas = self._deltas
        if held == new.checksum or not deltas or deltas[-1].checksum != new.checksum:
            return ()
        start = max((i for i, delta in enumerate(deltas) if delta.base == held), default=len(deltas))
        return deltas[start:]

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._deltas = ()


def _delta(base: Replica, new: Replica, pieces: list[bytes]) -> Delta:
    return Delta(base=base.checksum, checksum=new.checksum, pieces=pieces, num_bytes=sum(map(len, pieces)))
