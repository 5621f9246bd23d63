"""DeltaTransport sends the changes of weights to mirrors, which patch a copy of the model beside their servers.

snapshot --written--> directory --compared with the one before--> delta --PUT--> mirror --path--> server loads
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from arl.api.engine import Snapshot, WeightServer, WeightSource
from arl.api.engine_config import DeltaWeightsConfig
from arl.api.errors import ServerError, ServerFailedError, TransportError
from arl.engine.weights.disk import DiskTransport, WrittenWeights, shared
from arl.engine.weights.package import Replica, WrongBaseError, delta_package, survey, whole_package
from arl.offload import offload
from arl.web.client import JsonClient
from arl.web.connections import Body

_CONNECT_TIMEOUT_S = 10.0
_WRONG_BASE = 409
_MAX_SHARE = 0.5
"""A delta that is larger than this share of the model is not sent."""
_MAX_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The version on a mirror; both fields are None while it is empty."""

    checksum: str | None
    directory: Path | None
    """On the mirror's machine."""


class MirrorClient(JsonClient):
    """Calls to a mirror, without timeouts. They raise ServerFailedError if it may answer later, else ServerError."""

    key_hint = "set weights.api_key to the key that it was started with"
    path_hint = "is it a mirror of this version of arl?"

    def __init__(self, address: str, api_key: str | None) -> None:
        super().__init__(address, api_key=api_key, timeout_s=None, connect_timeout_s=_CONNECT_TIMEOUT_S)
        self.busy = asyncio.Lock()
        """To be held while changing what the mirror holds."""

    async def held(self) -> Held:
        return await self._call("GET", b"", {})

    async def put(self, num_bytes: int, pieces: Iterable[bytes]) -> Held:
        """Send a package of so many bytes; returns when the new version is complete. Raises WrongBaseError."""
        return await self._call("PUT", _sent(iter(pieces)), {"Content-Length": str(num_bytes)})

    async def _call(self, method: str, data: Body, headers: dict[str, str]) -> Held:
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
            raise ServerError(f"{reply.url} is not a mirror: it answered {reply.body[:200]!r}") from error


async def _sent(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Read pieces from files while they are sent, on another thread."""
    while piece := await offload(next, pieces, b""):
        yield piece


class DeltaTransport(DiskTransport):
    """Writes each snapshot to a directory of this machine, as DiskTransport does, and brings mirrors to it.

    A mirror that holds the version before gets the delta, unless that exceeds half of the model; any other mirror gets
    the whole model. A server is told to load a directory only after its mirror has checked every byte. A server without
    a mirror loads this machine's directory.
    """

    def __init__(self, config: DeltaWeightsConfig, run_dir: Path, engine: WeightSource | None = None) -> None:
        super().__init__(config, run_dir, engine)
        clients = {address: MirrorClient(address, config.key) for address in set(config.mirrors.values())}
        self.mirrors = {server.rstrip("/"): clients[address] for server, address in config.mirrors.items()}
        threads = max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // 2))
        self._pool = ThreadPoolExecutor(threads, "arl-deltas")
        self._last: Replica | None = None

    def snapshot(self, engine: WeightSource) -> DeltaWeights:
        return self._kept(DeltaWeights(self, engine.snapshot()))

    def close(self) -> None:
        """Remove what is on this machine; mirrors keep what they hold. Idempotent."""
        super().close()
        self._pool.shutdown(cancel_futures=True)

    def compare(self, directory: Path, version: int) -> Compared:
        """Compare a new version with the last. For one thread. Raises TransportError if its directory is gone."""
        try:
            new, last = survey(directory, self._pool), self._last
        except OSError as error:
            raise TransportError(f"the weights of version {version} can no longer be read: {error}") from error
        self._last = new
        if last is None or last.checksum == new.checksum:
            return Compared(new=new)
        try:
            pieces = delta_package(last, new, version, self._pool, max_bytes=int(_MAX_SHARE * new.num_bytes))
        except FileNotFoundError:
            pieces = None  # an update that nobody prepared for came between: the last directory is gone
        return Compared(new=new, base=last.checksum, delta=pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A version on this machine, and the delta to it."""

    new: Replica
    base: str | None = None
    """The checksum of the version that the delta starts from."""
    delta: list[bytes] | None = None
    """The pieces of a package; None if there is none, or the whole model is as well sent."""


class DeltaWeights(WrittenWeights):
    """A WeightUpdate that is written and compared when the first server prepares for it, once for all of them."""

    def __init__(self, transport: DeltaTransport, snapshot: Snapshot) -> None:
        super().__init__(transport, snapshot)
        self._deltas = transport
        self._comparing: Future[Compared] | None = None
        self._mirrored: dict[MirrorClient, Path] = {}
        self._num_sent = 0
        self._is_loaded_here = False

    @property
    def num_bytes(self) -> int:
        """The bytes sent to mirrors, plus the directory's if servers of this machine load it."""
        return self._num_sent + (super().num_bytes if self._is_loaded_here else 0)

    async def prepare(self, server: WeightServer) -> None:
        """Bring the server's mirror to this version. Raises TransportError; ServerError if the mirror is at fault."""
        await super().prepare(server)
        if (mirror := self._deltas.mirrors.get(server.address)) is None:
            self._is_loaded_here = True
            return
        if self._comparing is None:
            self._comparing = self._deltas.submit(self._deltas.compare, self.directory, self.version)
        compared = await shared(self._comparing)
        async with mirror.busy:  # servers that share a mirror share what is sent
            self._mirrored[mirror] = await self._bring(mirror, compared)

    async def load(self, server: WeightServer, *, flush_cache: bool) -> None:
        if (mirror := self._deltas.mirrors.get(server.address)) is None:
            await super().load(server, flush_cache=flush_cache)
        elif mirror in self._mirrored:
            await server.load_directory(self._mirrored[mirror], version=self.version, flush_cache=flush_cache)
        else:
            raise TransportError(f"version {self.version} is not in {mirror.url}; call prepare before load")

    async def _bring(self, mirror: MirrorClient, compared: Compared) -> Path:
        """Send what the mirror lacks; returns the directory on its machine."""
        new, held = compared.new, await mirror.held()
        if compared.delta is not None and held.checksum == compared.base:
            with suppress(WrongBaseError):  # it lost what it held meanwhile
                held = await self._put(mirror, sum(map(len, compared.delta)), compared.delta)
        if held.directory is None or held.checksum != new.checksum:
            try:
                held = await self._put(mirror, *whole_package(new, self.version))
            except WrongBaseError as error:  # a package without a base came out wrong: files or bytes were damaged
                raise ServerFailedError(str(error)) from error
        if held.directory is None or held.checksum != new.checksum:
            raise ServerError(f"the mirror at {mirror.url} took an update but holds another; is it shared?")
        return held.directory

    async def _put(self, mirror: MirrorClient, num_bytes: int, pieces: Iterable[bytes]) -> Held:
        held = await mirror.put(num_bytes, pieces)
        self._num_sent += num_bytes
        return held
