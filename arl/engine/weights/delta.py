"""DeltaTransport sends the changes of weights to mirrors, which patch a copy of the model beside their servers.

snapshot --written--> directory --compared with the one before--> delta --PUT--> mirror --path--> server loads
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from arl.api.engine import InferenceEngine, UpdateStats, WeightServer, WeightUpdate
from arl.api.errors import ServerError, ServerFailedError, TransportError, first_error
from arl.api.settings.engines import DeltaWeightsConfig
from arl.api.train_engine import Snapshot, WeightSource
from arl.engine.weights.delta_format import Replica, WrongBaseError, package, survey
from arl.engine.weights.disk import DiskTransport, WrittenWeights, look_at, shared
from arl.runtime.http.client import Body, JsonClient
from arl.runtime.threads import offload

_MAX_SHARE = 0.5
"""A delta that is larger than this share of the model is not sent."""
_MAX_THREADS = 8
_CONNECT_TIMEOUT_S = 10.0
_HEALTH_S = 5.0
"""How often a mirror is asked whether it lives while it takes an update, and how long it may take to answer."""


class DeltaTransport(DiskTransport):
    """Writes each snapshot to a directory of this machine, as DiskTransport does, and brings mirrors to it.

    A mirror that holds the version before gets the delta, unless that exceeds half of the model; any other mirror gets
    the whole model. A server is told to load a directory only after its mirror has checked every byte. A server without
    a mirror loads this machine's directory.
    """

    def __init__(
        self,
        config: DeltaWeightsConfig,
        run_dir: Path,
        engine: WeightSource | None = None,
        servers: Iterable[str] = (),
        mirrors: Mapping[str, str] | None = None,
    ) -> None:
        """mirrors: server -> its mirror, looked up at each update; None: config.mirrors. Else as DiskTransport."""
        of_config = {server.rstrip("/"): address for server, address in config.mirrors.items()}
        self._mirrors = of_config if mirrors is None else mirrors
        super().__init__(config, run_dir, engine, [url for url in servers if url.rstrip("/") not in self._mirrors])
        self._clients: dict[str, MirrorClient] = {}
        self._key = config.key
        threads = max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // 2))
        self._pool = ThreadPoolExecutor(threads, "arl-deltas")
        self._last: Replica | None = None

    def mirror_of(self, server: str) -> MirrorClient | None:
        """Servers with the same mirror share its client."""
        if (address := self._mirrors.get(server)) is None:
            return None
        address = address.rstrip("/")
        return self._clients.setdefault(address, MirrorClient(address, self._key))

    def snapshot(self, engine: WeightSource) -> DeltaWeights:
        return self._kept(DeltaWeights(self, engine.snapshot()))

    async def deliver(self, update: WeightUpdate, engine: InferenceEngine) -> UpdateStats:
        try:
            return await super().deliver(update, engine)
        finally:
            if isinstance(update, DeltaWeights):
                update.end()

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
        pieces, room = list[bytes](), int(_MAX_SHARE * new.num_bytes)
        try:
            for piece in package(new, version, last, self._pool.map):
                pieces.append(piece)
                if (room := room - len(piece)) < 0:
                    return Compared(new=new)
        except FileNotFoundError:  # an update that nobody prepared for came between: the last directory is gone
            return Compared(new=new)
        return Compared(new=new, base=last.checksum, delta=pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A version on this machine, and the delta to it."""

    new: Replica
    base: str | None = None
    """The checksum of the version that the delta starts from."""
    delta: Sequence[bytes] = ()
    """The pieces of a package; none if the whole model is as well sent."""


class DeltaWeights(WrittenWeights):
    """A SharedUpdate that is written and compared when the first server prepares for it, once for all of them."""

    def __init__(self, transport: DeltaTransport, snapshot: Snapshot) -> None:
        super().__init__(transport, snapshot)
        self._deltas = transport
        self._comparing: Future[Compared] | None = None
        self._directories: dict[MirrorClient, Path] = {}
        self._ahead: list[asyncio.Task[None]] = []
        self._num_sent = 0
        self._is_loaded_here = False

    @property
    def num_bytes(self) -> int:
        """The bytes that this machine sent to mirrors, plus the directory's if servers of this machine load it."""
        return self._num_sent + (super().num_bytes if self._is_loaded_here else 0)

    def expect(self, servers: Sequence[WeightServer]) -> None:
        """Bring their mirrors to this version at once, while the servers wait for their turns."""
        for mirror in dict.fromkeys(self._deltas.mirror_of(server.address) for server in servers):
            if mirror is not None:
                self._ahead.append(task := asyncio.create_task(self._bring(mirror)))
                task.add_done_callback(look_at)  # if it fails, `prepare` tries again

    def end(self) -> None:
        """End what `expect` began and no server has come for."""
        for task in self._ahead:
            task.cancel()

    async def prepare(self, server: WeightServer) -> None:
        """Bring the server's mirror to this version. Raises TransportError; ServerError if the mirror is at fault."""
        if (mirror := self._deltas.mirror_of(server.address)) is not None:
            await self._bring(mirror)
        else:
            await super().prepare(server)
            self._is_loaded_here = True

    async def load(self, server: WeightServer, *, flush_cache: bool) -> None:
        if (mirror := self._deltas.mirror_of(server.address)) is None:
            await super().load(server, flush_cache=flush_cache)
        elif mirror in self._directories:
            await server.load_directory(self._directories[mirror], version=self.version, flush_cache=flush_cache)
        else:
            raise TransportError(f"version {self.version} is not in {mirror.url}; call prepare before load")

    async def _bring(self, mirror: MirrorClient) -> None:
        """Servers that share a mirror come one after another, and all but the first find it done."""
        await self.on_disk()
        if self._comparing is None:
            self._comparing = self._deltas.submit(self._deltas.compare, self.directory, self.version)
        compared = await shared(self._comparing)
        wanted = compared.new.checksum
        async with mirror.in_use:
            held = await mirror.held()
            if held.checksum == compared.base and compared.delta:
                with suppress(WrongBaseError):  # it has lost its base since it was asked
                    held = await mirror.put(self._sent(iter(compared.delta)))
            if held.checksum != wanted:
                try:
                    held = await mirror.put(self._sent(package(compared.new, self.version)))
                except WrongBaseError as error:  # a package without a base came out wrong: something was damaged
                    raise ServerFailedError(str(error)) from error
        if held.checksum != wanted or held.directory is None:
            raise ServerError(f"the mirror at {mirror.url} took an update but holds another; is it shared?")
        self._directories[mirror] = held.directory

    async def _sent(self, pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
        while piece := await offload(next, pieces, b""):  # it may come from a file
            yield piece
            self._num_sent += len(piece)


# Mirrors


class Held(NamedTuple):
    """The version on a mirror, and its directory there; both are None while it is empty."""

    checksum: str | None
    directory: Path | None


class MirrorClient(JsonClient):
    """Calls to a mirror (mirror.py). They raise ServerFailedError if it may answer later, else ServerError."""

    key_hint = "set ARL_MIRROR_API_KEY to the key that it was started with"
    path_hint = "is it a mirror of this version of arl?"

    def __init__(self, address: str, api_key: str | None) -> None:
        super().__init__(address, api_key=api_key, timeout_s=None, connect_timeout_s=_CONNECT_TIMEOUT_S)
        self.in_use = asyncio.Lock()
        """To be held while changing what the mirror holds."""

    async def held(self) -> Held:
        try:
            return await self._call("GET", b"")
        finally:
            await self.aclose()  # the next call comes a version later

    async def put(self, pieces: AsyncIterator[bytes]) -> Held:
        """Send a package; returns when the mirror has checked it. Raises WrongBaseError.

        It may be slow as long as it lives: the caller limits the time.
        """
        try:
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self._watch())
                held = await self._call("PUT", pieces)
                watching.cancel()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        finally:
            await self.aclose()
        return held

    async def _watch(self) -> None:
        """Ends with ServerFailedError once the mirror no longer answers."""
        while True:
            await asyncio.sleep(_HEALTH_S)
            try:
                async with asyncio.timeout(_HEALTH_S):
                    await self.send("GET", "/health")
            except TimeoutError:
                raise ServerFailedError(f"{self.url} takes an update, but does not answer any more") from None

    async def _call(self, method: str, data: Body) -> Held:
        reply = await self.send(method, "/version", data)
        if reply.status == 409:
            raise WrongBaseError(reply.reason)
        if reply.status != 200:
            raise self.error_of(reply)
        match reply.json():
            case {"checksum": str() | None as checksum, "directory": str() | None as directory}:
                return Held(checksum=checksum, directory=Path(directory) if directory else None)
            case _:
                raise ServerError(f"{reply.url} is not a mirror: it answered {reply.body[:200]!r}")
