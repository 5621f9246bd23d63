"""DeltaTransport sends the changes of weights to mirrors, which patch a copy of the model beside their servers.

snapshot --written--> directory --compared with the one before--> delta --PUT--> mirror --path--> server loads

A package turns one model directory into another, exact to the bit. At the learning rates of RL few weights of a
bfloat16 model change in a step, and most of these move to a neighbouring value. So a file is compared as an array of
unsigned integers of the dtype's width, block by block: gaps between changed positions are small numbers, and the
differences of the integers are mostly 1 and -1. A package leads from the directory with the checksum `base` to the one
with `checksum`; without a base it holds the whole directory. Numbers are little-endian.

    8 bytes    b"arldelta"
    uint64     length of what follows
    JSON       {"version": 8, "checksum": "<hex>", "base": "<hex>" or null, "files": [
                 {"name": .., "num_bytes": .., "is_kept": true | false, "width": 1 | 2 | 4 | 8}]}
    then, for each file that is not the base's (`is_kept`), its blocks of 2 MiB (the last may be shorter):
        uint8      0 nothing changed, 1 changes at gaps, 2 changes by a bitmap, 3 the block itself
        uint32     how many integers of `width` bytes changed
        uint32     bytes of the positions that follow
        uint32     bytes of the differences that follow, or of the block
        bytes      positions, as a zlib stream. gaps: for each changed integer the number of unchanged ones
                   before it, in uint8; 255 stands for 255 unchanged ones and goes on. bitmap: a bit for each
                   integer, the lowest bit first
        bytes      differences, new minus old modulo 2^(8 width), as signed integers: first a bit for each, lowest
                   bit first, set if it is negative; then, as a zlib stream, magnitudes less 1, the lowest bytes
                   of all before the next

The checksum of a directory is the SHA-256 of a line `name num_bytes digest` for each file, sorted by name; a file's
digest is the SHA-256 of its blocks' SHA-256, so that blocks can be hashed side by side.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import struct
import zlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from arl.api.engine import InferenceEngine, UpdateStats, WeightServer, WeightUpdate
from arl.api.errors import ServerError, ServerFailedError, TransportError, first_error
from arl.api.settings.engines import DeltaWeightsConfig
from arl.api.train_engine import Snapshot, WeightSource
from arl.engine.weights.disk import DiskTransport, WrittenWeights, look_at, shared
from arl.runtime.http.client import Body, JsonClient
from arl.runtime.threads import offload

_MAX_SHARE = 0.5
"""A delta that is larger than this share of the model is not sent."""
_MAX_THREADS = 8
_CONNECT_TIMEOUT_S = 10.0
_HEALTH_S = 5.0
"""How often a mirror is asked whether it lives while it takes an update, and how long it may take to answer."""

BLOCK_BYTES = 2 << 20
MAGIC = b"arldelta"
PREAMBLE = struct.Struct("<8sQ")
BLOCK_HEADER = struct.Struct("<BIII")
MAX_HEADER_BYTES = 16 << 20
_NOTHING, _GAPS, _BITMAP, _WHOLE = range(4)
_LONG_GAP = 255

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


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


# The format


class DeltaError(ValueError):
    """Bytes are not a package, or do not fit the file that they are applied to."""


class WrongBaseError(DeltaError):
    """A package starts from another version than the held one, or does not lead to the version that it names."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class FilePart(_Record):
    """The form in which a package gives one file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}$")]
    num_bytes: Annotated[int, Field(ge=0, lt=1 << 63)]
    is_kept: bool
    """The file is the base's, and nothing of it is sent."""
    width: Literal[1, 2, 4, 8] = 1
    """Bytes of the integers that the file is compared in."""

    @model_validator(mode="after")
    def _holds_whole_integers(self) -> Self:
        if self.num_bytes % self.width:
            raise ValueError(f"{self.name} has {self.num_bytes} bytes, in integers of {self.width}")
        return self


class PackageHeader(_Record):
    """The version that a package makes, and the version that it starts from."""

    version: Annotated[int, Field(ge=0, lt=1 << 63)]
    checksum: Digest
    """The checksum of the directory that it makes."""
    base: Digest | None
    """Checksum of the directory that it starts from; None if it starts from nothing."""
    files: tuple[FilePart, ...]

    @model_validator(mode="after")
    def _has_different_files(self) -> Self:
        if len({file.name for file in self.files}) != len(self.files):
            raise ValueError("a file is given twice")
        return self

    def to_bytes(self) -> bytes:
        body = self.model_dump_json().encode()
        return PREAMBLE.pack(MAGIC, len(body)) + body

    @classmethod
    def parse(cls, body: bytes) -> PackageHeader:
        """From the JSON alone. Raises DeltaError."""
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            raise DeltaError(f"not the header of a package: {error.errors()[0]['msg']}") from error


def header_bytes(preamble: bytes) -> int:
    """The length of the header that follows these first 16 bytes. Raises DeltaError."""
    magic, length = PREAMBLE.unpack(preamble)
    if magic != MAGIC or length > MAX_HEADER_BYTES:
        raise DeltaError("not a package: it begins with something else")
    return length


# Blocks


def spans(num_bytes: int) -> list[tuple[int, int]]:
    """(start, size) of each block of a file."""
    return [(start, min(BLOCK_BYTES, num_bytes - start)) for start in range(0, num_bytes, BLOCK_BYTES)]


def encode_block(base: NDArray[np.unsignedinteger], new: NDArray[np.unsignedinteger]) -> bytes:
    """The bytes that turn `base` into `new`: arrays [N] of the same unsigned dtype."""
    changed = base != new
    index = np.flatnonzero(changed)  # taking by index is several times as fast as by mask
    if not (count := len(index)):
        return BLOCK_HEADER.pack(_NOTHING, 0, 0, 0)
    if 8 * count > len(base):
        kind, positions = _BITMAP, np.packbits(changed, bitorder="little")
    else:
        skipped = np.diff(index, prepend=-1) - 1
        ends = np.cumsum(skipped // _LONG_GAP + 1)
        kind, positions = _GAPS, np.full(ends[-1], _LONG_GAP, np.uint8)
        positions[ends - 1] = skipped % _LONG_GAP
    # Signs, then magnitudes less 1, byte by byte: 1 and -1 leave only zeros.
    signed = (new[index] - base[index]).view(f"<i{base.itemsize}")
    magnitudes = (np.abs(signed).view(base.dtype) - 1).view(np.uint8)
    planes = np.concatenate([magnitudes[plane :: base.itemsize] for plane in range(base.itemsize)])
    where, what = _compress(positions), np.packbits(signed < 0, bitorder="little").tobytes() + _compress(planes)
    return BLOCK_HEADER.pack(kind, count, len(where), len(what)) + where + what


def apply_block(block: NDArray[Any], encoded: bytes) -> None:
    """Turn the base's `block` into the new one, in place. encoded: by encode_block. Raises DeltaError."""
    kind, count, num_positions, num_differences = BLOCK_HEADER.unpack_from(encoded)
    positions, differences = np.split(np.frombuffer(encoded, np.uint8)[BLOCK_HEADER.size :], [num_positions])
    num_signs = -(-count // 8)
    if len(differences) != num_differences or count > len(block) or num_signs > num_differences:
        raise DeltaError(f"a block of {len(block)} integers with {count} changed ones and {len(encoded)} bytes")
    if kind == _NOTHING:
        return
    if kind == _BITMAP:
        bits = _decompress(positions, -(-len(block) // 8))
        index = np.flatnonzero(np.unpackbits(bits, bitorder="little").view(np.bool_))
    elif kind == _GAPS:
        steps = _decompress(positions, count + len(block) // _LONG_GAP, at_most=True)
        ends = np.flatnonzero(steps != _LONG_GAP)
        index = np.cumsum(steps, dtype=np.intp)[ends] + np.arange(len(ends))
    else:
        raise DeltaError(f"a block gives its positions in an unknown way: {kind}")
    if len(index) != count or (count and index[-1] >= len(block)):
        raise DeltaError(f"a block of {len(block)} integers gives positions that do not fit its {count} changed ones")
    planes = _decompress(differences[num_signs:], count * block.itemsize).reshape(block.itemsize, count)
    magnitudes = np.ones(count, block.dtype)
    for number, plane in enumerate(planes):
        magnitudes += plane.astype(block.dtype) << block.dtype.type(8 * number)
    # Inverting all bits and adding 1 negates, where the sign is set.
    signs = np.unpackbits(differences[:num_signs], count=count, bitorder="little").astype(block.dtype)
    block[index] += (magnitudes ^ (0 - signs)) + signs


def _compress(values: NDArray[np.uint8]) -> bytes:
    """With entropy coding and runs alone: there are no longer repetitions here, and searching for them takes time."""
    stream = zlib.compressobj(1, strategy=zlib.Z_RLE)
    return stream.compress(values.data) + stream.flush()


def _decompress(data: NDArray[np.uint8], size: int, at_most: bool = False) -> NDArray[np.uint8]:
    """Exactly `size` bytes, or at most so many; it never unpacks more. Raises DeltaError."""
    stream = zlib.decompressobj()
    try:
        out = stream.decompress(data.data, size + 1)
    except zlib.error as error:
        raise DeltaError(f"a block's bytes are not a zlib stream: {error}") from error
    if len(out) > size or (len(out) < size and not at_most) or not stream.eof:
        raise DeltaError(f"a block unpacks to {len(out)} bytes or more; it must be {size}")
    return np.frombuffer(out, np.uint8)


def built_block(
    base: Path | None, block: tuple[int, int], width: int, encoded: bytes
) -> tuple[bytes | bytearray, bytes]:
    """A block of a new file, from what was sent and the base's file; and its digest. Raises DeltaError, OSError."""
    if encoded[0] == _WHOLE:
        built = encoded[BLOCK_HEADER.size :]
    elif base is None:
        raise DeltaError("a block changes a file that the base does not have")
    else:
        built = bytearray(_read(base, *block))
        apply_block(np.frombuffer(built, f"<u{width}"), encoded)
    if len(built) != block[1]:
        raise DeltaError(f"a block has {len(built)} bytes; it must have {block[1]}")
    return built, block_digest(built)


def block_digest(block: bytes | bytearray) -> bytes:
    return hashlib.sha256(block).digest()


def file_digest(block_digests: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(block_digests)).hexdigest()


# Directories


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A model directory that is no longer written to."""

    directory: Path
    files: dict[str, tuple[int, str]]
    """name -> (bytes, digest)"""

    @property
    def checksum(self) -> str:
        lines = "".join(f"{name} {num_bytes} {digest}\n" for name, (num_bytes, digest) in sorted(self.files.items()))
        return hashlib.sha256(lines.encode()).hexdigest()

    def file(self, name: str, num_bytes: int) -> Path | None:
        """Its file of this name and length."""
        return self.directory / name if self.files.get(name, (-1, ""))[0] == num_bytes else None

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for num_bytes, _ in self.files.values())


def survey(directory: Path, pool: Executor) -> Replica:
    """Read and hash every file of `directory`, block by block on the pool's threads."""
    files = {}
    for path in sorted(path for path in directory.iterdir() if path.is_file()):
        num_bytes = path.stat().st_size
        digests = pool.map(lambda block, path=path: block_digest(_read(path, *block)), spans(num_bytes))
        files[path.name] = (num_bytes, file_digest(digests))
    return Replica(directory=directory, files=files)


def package(new: Replica, version: int, base: Replica | None = None, each: Any = map) -> Iterator[bytes]:
    """The pieces of a package from `base`, or from nothing, to `new`; the first is the header.

    each: maps a function over blocks, as map or an executor's map does. Raises OSError.
    """
    parts, sources = list[FilePart](), list[tuple[Path, Path | None]]()
    for name, (num_bytes, digest) in sorted(new.files.items()):
        path, theirs = new.directory / name, base.file(name, num_bytes) if base is not None else None
        is_kept = base is not None and base.files.get(name) == (num_bytes, digest)
        width = element_width(path) if theirs is not None and path.suffix == ".safetensors" else 1
        parts.append(FilePart(name=name, num_bytes=num_bytes, is_kept=is_kept, width=width))
        sources.append((path, theirs))

    def sent(path: Path, theirs: Path | None, width: int, block: tuple[int, int]) -> bytes:
        ours = _read(path, *block)
        if theirs is None:
            return BLOCK_HEADER.pack(_WHOLE, 0, 0, len(ours)) + ours
        return encode_block(np.frombuffer(_read(theirs, *block), f"<u{width}"), np.frombuffer(ours, f"<u{width}"))

    checksum = base.checksum if base is not None else None
    yield PackageHeader(version=version, checksum=new.checksum, base=checksum, files=tuple(parts)).to_bytes()
    for part, (path, theirs) in zip(parts, sources, strict=True):
        if not part.is_kept:
            yield from each(partial(sent, path, theirs, part.width), spans(part.num_bytes))


def element_width(path: Path) -> Literal[1, 2, 4, 8]:
    """The width in bytes of the elements of a safetensors file's largest tensor, in which the file is best compared."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    tensors = [header[name] for name in header.keys() - {"__metadata__"}]
    num_bytes, shape = max(
        ((t["data_offsets"][1] - t["data_offsets"][0], t["shape"]) for t in tensors), default=(0, [])
    )
    width = num_bytes // max(1, prod(shape))
    return next(w for w in (8, 4, 2, 1) if w <= max(1, width) and path.stat().st_size % w == 0)


def _read(path: Path, start: int, size: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        block = file.read(size)
    if len(block) != size:
        raise OSError(f"{path} became shorter while it was read")
    return block
