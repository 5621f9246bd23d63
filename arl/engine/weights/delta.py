"""DeltaTransport sends the changes of weights to mirrors, which patch a copy of the model beside their servers.

snapshot --written--> directory --compared with the one before--> delta --waves.py--> mirror --path--> server loads
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from arl.api.engine import InferenceEngine, Snapshot, UpdateStats, WeightServer, WeightSource, WeightUpdate
from arl.api.engine_config import DeltaWeightsConfig
from arl.api.errors import TransportError
from arl.engine.weights.disk import DiskTransport, WrittenWeights, shared
from arl.engine.weights.mirror_client import MirrorClient
from arl.engine.weights.package import Replica, delta_package, survey
from arl.engine.weights.waves import MirrorTrees, Package, Waves

_MAX_SHARE = 0.5
"""A delta that is larger than this share of the model is not sent."""
_MAX_THREADS = 8


class DeltaTransport(DiskTransport):
    """Writes each snapshot to a directory of this machine, as DiskTransport does, and brings mirrors to it.

    A mirror that holds the version before gets the delta, unless that exceeds half of the model; any other mirror gets
    the whole model. This machine sends to a few mirrors, and these to others while they receive. A server is told to
    load a directory only after its mirror has checked every byte. A server without a mirror loads this machine's
    directory.
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
        self.trees = MirrorTrees(fanout=config.fanout, has_key=config.key is not None)
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
        try:
            pieces = delta_package(last, new, version, self._pool, max_bytes=int(_MAX_SHARE * new.num_bytes))
        except FileNotFoundError:
            pieces = None  # an update that nobody prepared for came between: the last directory is gone
        return Compared(new=new, base=last.checksum, delta=pieces)

    def waves(self, compared: Compared, version: int) -> Waves:
        """For one update."""
        self.trees.begin_update()
        delta = None
        if (pieces := compared.delta) is not None:
            delta = Package(num_bytes=sum(map(len, pieces)), pieces=lambda: pieces, is_delta=True)
        return Waves(self.trees, compared.new, version, delta, compared.base)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A version on this machine, and the delta to it."""

    new: Replica
    base: str | None = None
    """The checksum of the version that the delta starts from."""
    delta: list[bytes] | None = None
    """The pieces of a package; None if there is none, or the whole model is as well sent."""


class DeltaWeights(WrittenWeights):
    """A SharedUpdate that is written and compared when the first server prepares for it, once for all of them."""

    def __init__(self, transport: DeltaTransport, snapshot: Snapshot) -> None:
        super().__init__(transport, snapshot)
        self._deltas = transport
        self._comparing: Future[Compared] | None = None
        self._waves: Waves | None = None
        self._expected: list[str] = []
        self._mirrored: dict[MirrorClient, Path] = {}
        self._is_loaded_here = False

    @property
    def num_bytes(self) -> int:
        """The bytes that this machine sent to mirrors, plus the directory's if servers of this machine load it."""
        num_sent = self._waves.num_sent if self._waves else 0
        return num_sent + (super().num_bytes if self._is_loaded_here else 0)

    def expect(self, turns: Sequence[Sequence[WeightServer]]) -> None:
        """Their mirrors get the update together when the first of them is prepared."""
        self._expected = [server.address for turn in turns for server in turn]

    def end(self) -> None:
        """End what is sent to mirrors for which nobody waits."""
        if self._waves is not None:
            self._waves.end()

    async def prepare(self, server: WeightServer) -> None:
        """Bring the server's mirror to this version. Raises TransportError; ServerError if the mirror is at fault."""
        if (mirror := self._deltas.mirror_of(server.address)) is None:
            await super().prepare(server)
            self._is_loaded_here = True
            return
        await self.on_disk()
        if self._comparing is None:
            self._comparing = self._deltas.submit(self._deltas.compare, self.directory, self.version)
        compared = await shared(self._comparing)
        if self._waves is None:
            self._waves = self._deltas.waves(compared, self.version)
        expected, self._expected = self._expected, []
        others = [other for server in expected if (other := self._deltas.mirror_of(server)) is not None]
        self._mirrored[mirror] = await self._waves.bring(mirror, others)

    async def load(self, server: WeightServer, *, flush_cache: bool) -> None:
        if (mirror := self._deltas.mirror_of(server.address)) is None:
            await super().load(server, flush_cache=flush_cache)
        elif mirror in self._mirrored:
            await server.load_directory(self._mirrored[mirror], version=self.version, flush_cache=flush_cache)
        else:
            raise TransportError(f"version {self.version} is not in {mirror.url}; call prepare before load")
