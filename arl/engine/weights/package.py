"""The delta format, and model directories as it carries them: surveyed, packed on one machine, built on another.

A package turns one model directory into another, exact to the bit. At the learning rates of RL few weights of a
bfloat16 model change in a step, and most of these move to a neighbouring value. So a file is compared as an array of
unsigned integers of the dtype's width, block by block: gaps between changed positions are small numbers, and the
differences of the integers are mostly 1 and -1.

A package leads from the directory with the checksum `base` to the one with `checksum`. Without a base it holds the
whole directory. Numbers are little-endian.

    8 bytes    b"arldelta"
    uint64     length of what follows
    JSON       {"version": 8, "checksum": "<hex>", "base": "<hex>" or null, "files": [
                 {"name": .., "num_bytes": .., "how": "whole" | "kept" | "patched", "width": 1 | 2 | 4 | 8}]}
    then, for each file in that order:
        whole      its bytes
        kept       nothing: it is the base's
        patched    for each block of 2 MiB (the last may be shorter), compared as integers of `width` bytes:
            uint8      how positions are given: 0 nothing changed, 1 gaps, 2 bitmap
            uint32     how many integers changed
            uint32     bytes of the positions that follow
            uint32     bytes of the differences that follow
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

import hashlib
import json
import re
import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 2 << 20
MAGIC = b"arldelta"
PREAMBLE = struct.Struct("<8sQ")
BLOCK_HEADER = struct.Struct("<BIII")
MAX_HEADER_BYTES = 16 << 20

_NOTHING, _GAPS, _BITMAP = 0, 1, 2
_LONG_GAP = 255
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_MAX_VERSION = 1 << 63
_HEX_DIGEST = re.compile(r"[0-9a-f]{64}")


class DeltaError(ValueError):
    """Bytes are not a package, or do not fit the file that they are applied to."""


class WrongBaseError(DeltaError):
    """A package starts from another version than the held one, or does not lead to the version that it names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """The form in which a package gives one file."""

    name: str
    num_bytes: int
    how: Literal["whole", "kept", "patched"]
    width: int = 1
    """Bytes of the integers that a patched file is compared in."""

    def __post_init__(self) -> None:
        if not _PLAIN_NAME.fullmatch(self.name):
            raise DeltaError(f"{self.name!r} is not a plain file name")
        is_width = type(self.width) is int and self.width in (1, 2, 4, 8)
        if self.how not in ("whole", "kept", "patched") or not is_width:
            raise DeltaError(f"{self.name} is given as {self.how!r} with width {self.width!r}")
        if type(self.num_bytes) is not int or self.num_bytes < 0 or self.num_bytes % self.width:
            raise DeltaError(f"{self.name} has {self.num_bytes!r} bytes, in integers of {self.width}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageHeader:
    """The version that a package makes, and the version that it starts from."""

    version: int
    checksum: str
    """The checksum of the directory that it makes."""
    base: str | None
    """Checksum of the directory that it starts from; None if it starts from nothing."""
    files: tuple[FilePart, ...]

    def __post_init__(self) -> None:
        for digest in (self.checksum, *([] if self.base is None else [self.base])):
            if not isinstance(digest, str) or not _HEX_DIGEST.fullmatch(digest):
                raise DeltaError(f"{digest!r} is not a checksum")
        if type(self.version) is not int or not 0 <= self.version < _MAX_VERSION:
            raise DeltaError(f"version is {self.version!r}; it must be an integer from 0 to {_MAX_VERSION - 1}")
        if len({file.name for file in self.files}) != len(self.files):
            raise DeltaError("a file is given twice")
        if self.base is None and any(file.how != "whole" for file in self.files):
            raise DeltaError("a package without a base must give every file whole")

    def to_bytes(self) -> bytes:
        body = json.dumps(asdict(self)).encode()
        return PREAMBLE.pack(MAGIC, len(body)) + body

    @classmethod
    def parse(cls, body: bytes) -> PackageHeader:
        """From the JSON alone. Raises DeltaError."""
        try:
            fields = json.loads(body)
            fields["files"] = tuple(FilePart(**file) for file in fields["files"])
            return cls(**fields)
        except (TypeError, KeyError, ValueError, RecursionError) as error:
            raise DeltaError(f"not the header of a package: {error}") from error


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
    if not (count := int(np.count_nonzero(changed))):
        return BLOCK_HEADER.pack(_NOTHING, 0, 0, 0)
    # Taking by index is several times as fast as by mask.
    index = np.flatnonzero(changed)
    if 8 * count > len(base):
        kind, positions = _BITMAP, np.packbits(changed, bitorder="little")
    else:
        kind, positions = _GAPS, _gaps(index)
    where, what = _compress(positions), _pack(new[index] - base[index])
    return BLOCK_HEADER.pack(kind, count, len(where), len(what)) + where + what


def payload_bytes(block_header: bytes) -> int:
    """The number of bytes that follow the header of a block."""
    _, _, positions, differences = BLOCK_HEADER.unpack(block_header)
    return positions + differences


def apply_block(block: NDArray[np.unsignedinteger], encoded: bytes) -> None:
    """Turn the base's `block` into the new one, in place. encoded: by encode_block. Raises DeltaError."""
    kind, count, num_positions, num_differences = BLOCK_HEADER.unpack_from(encoded)
    start, end = BLOCK_HEADER.size, BLOCK_HEADER.size + num_positions
    if len(encoded) != end + num_differences or count > len(block):
        raise DeltaError(f"a block of {len(block)} integers with {count} changed ones and {len(encoded)} bytes")
    if kind == _NOTHING:
        return
    positions = memoryview(encoded)[start:end]
    if kind == _BITMAP:
        bits = np.frombuffer(_decompress(positions, -(-len(block) // 8)), np.uint8)
        index = np.flatnonzero(np.unpackbits(bits, bitorder="little").view(np.bool_))
    elif kind == _GAPS:
        index = _positions(_decompress(positions, count + len(block) // _LONG_GAP, at_most=True))
    else:
        raise DeltaError(f"a block gives its positions in an unknown way: {kind}")
    if len(index) != count or (count and index[-1] >= len(block)):
        raise DeltaError(f"a block of {len(block)} integers gives positions that do not fit its {count} changed ones")
    block[index] += _unpack(memoryview(encoded)[end:], count, block.dtype)


def _gaps(index: NDArray[np.intp]) -> NDArray[np.uint8]:
    """Ascending positions as the number of positions left out before each; 255 stands for 255 and goes on."""
    gaps = np.diff(index, prepend=-1) - 1
    ends = np.cumsum(gaps // _LONG_GAP + 1)
    out = np.full(ends[-1], _LONG_GAP, np.uint8)
    out[ends - 1] = gaps % _LONG_GAP
    return out


def _positions(gaps: bytes) -> NDArray[np.intp]:
    """The inverse of _gaps."""
    steps = np.frombuffer(gaps, np.uint8)
    ends = np.flatnonzero(steps != _LONG_GAP)
    return np.cumsum(steps, dtype=np.intp)[ends] + np.arange(len(ends))


def _pack(differences: NDArray[np.unsignedinteger]) -> bytes:
    """Signs, then magnitudes less 1, byte by byte: 1 and -1 leave only zeros."""
    width = differences.itemsize
    signed = differences.view(f"<i{width}")
    magnitudes = (np.abs(signed).view(differences.dtype) - 1).view(np.uint8)
    planes = np.concatenate([magnitudes[plane::width] for plane in range(width)])
    return np.packbits(signed < 0, bitorder="little").tobytes() + _compress(planes)


def _unpack(packed: memoryview, count: int, dtype: np.dtype) -> NDArray[Any]:
    """The inverse of _pack. Raises DeltaError."""
    num_signs = -(-count // 8)
    if len(packed) < num_signs:
        raise DeltaError(f"a block has {len(packed)} bytes of differences for {count} changed integers")
    planes = np.frombuffer(_decompress(packed[num_signs:], count * dtype.itemsize), np.uint8)
    differences = np.ones(count, dtype)
    for plane in range(dtype.itemsize):
        differences += planes[plane * count : (plane + 1) * count].astype(dtype) << dtype.type(8 * plane)
    # Inverting all bits and adding 1 negates, where the sign is set.
    signs = np.unpackbits(np.frombuffer(packed[:num_signs], np.uint8), count=count, bitorder="little").astype(dtype)
    return (differences ^ (0 - signs)) + signs


def _compress(values: NDArray[np.uint8]) -> bytes:
    """With entropy coding and runs alone: there are no longer repetitions here, and searching for them takes time."""
    stream = zlib.compressobj(1, strategy=zlib.Z_RLE)
    return stream.compress(np.ascontiguousarray(values).data) + stream.flush()


def _decompress(data: bytes | memoryview, size: int, at_most: bool = False) -> bytes:
    """Exactly `size` bytes, or at most so many; it never unpacks more. Raises DeltaError."""
    stream = zlib.decompressobj()
    try:
        out = stream.decompress(data, size + 1)
    except zlib.error as error:
        raise DeltaError(f"a block's bytes are not a zlib stream: {error}") from error
    if len(out) > size or (len(out) < size and not at_most) or not stream.eof:
        raise DeltaError(f"a block unpacks to {len(out)} bytes or more; it must be {size}")
    return out


# Checksums


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

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for num_bytes, _ in self.files.values())

    def part(self, name: str, base: Replica | None) -> FilePart:
        """How a package gives this file to a mirror that holds `base`."""
        num_bytes, _ = summary = self.files[name]
        theirs = None if base is None else base.files.get(name)
        if theirs == summary:
            return FilePart(name=name, num_bytes=num_bytes, how="kept")
        if theirs is not None and theirs[0] == num_bytes and name.endswith(".safetensors"):
            width = element_width(self.directory / name)
            return FilePart(name=name, num_bytes=num_bytes, how="patched", width=width)
        return FilePart(name=name, num_bytes=num_bytes, how="whole")


def survey(directory: Path, pool: Executor) -> Replica:
    """Read and hash every file of `directory`, block by block on the pool's threads."""
    files = {}
    for path in sorted(path for path in directory.iterdir() if path.is_file()):
        num_bytes = path.stat().st_size
        digests = pool.map(lambda block, path=path: block_digest(_read(path, *block)), spans(num_bytes))
        files[path.name] = (num_bytes, file_digest(digests))
    return Replica(directory=directory, files=files)


def whole_package(new: Replica, version: int) -> tuple[int, Iterator[bytes]]:
    """A package that needs no base: its length in bytes, and its pieces."""
    parts = tuple(new.part(name, None) for name in sorted(new.files))
    header = PackageHeader(version=version, checksum=new.checksum, base=None, files=parts).to_bytes()

    def pieces() -> Iterator[bytes]:
        yield header
        for part in parts:
            for block in spans(part.num_bytes):
                yield _read(new.directory / part.name, *block)

    return len(header) + new.num_bytes, pieces()


def delta_package(base: Replica, new: Replica, version: int, pool: Executor, max_bytes: int) -> list[bytes] | None:
    """The pieces of a package from `base` to `new`; None if it would be longer than max_bytes."""
    parts = tuple(new.part(name, base) for name in sorted(new.files))
    pieces = [PackageHeader(version=version, checksum=new.checksum, base=base.checksum, files=parts).to_bytes()]
    num_bytes = len(pieces[0])
    for part in parts:
        for piece in _pieces(part, base.directory, new.directory, pool):
            pieces.append(piece)
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                return None
    return pieces


def _pieces(part: FilePart, base: Path, new: Path, pool: Executor) -> Iterator[bytes]:
    def piece(block: tuple[int, int]) -> bytes:
        ours = _read(new / part.name, *block)
        if part.how == "whole":
            return ours
        theirs = _read(base / part.name, *block)
        return encode_block(np.frombuffer(theirs, f"<u{part.width}"), np.frombuffer(ours, f"<u{part.width}"))

    if part.how != "kept":
        yield from pool.map(piece, spans(part.num_bytes))


def patched_block(base: Path, start: int, size: int, part: FilePart, encoded: bytes) -> tuple[bytearray, bytes]:
    """A block of the new file, made from the base's, and its digest. Raises DeltaError."""
    block = bytearray(_read(base / part.name, start, size))
    apply_block(np.frombuffer(block, f"<u{part.width}"), encoded)
    return block, block_digest(block)


def element_width(path: Path) -> int:
    """The width in bytes of most of a safetensors file's elements, in which the file is best compared."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    totals: Counter[int] = Counter()
    for tensor in (header[name] for name in header.keys() - {"__metadata__"}):
        start, end = tensor["data_offsets"]
        totals[(end - start) // max(1, prod(tensor["shape"]))] += end - start
    ((width, _),) = totals.most_common(1) or [(1, 0)]
    return next(w for w in (8, 4, 2, 1) if w <= max(1, width) and path.stat().st_size % w == 0)


def _read(path: Path, start: int, size: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        block = file.read(size)
    if len(block) != size:
        raise OSError(f"{path} became shorter while it was read")
    return block
