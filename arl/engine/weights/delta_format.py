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

import hashlib
import json
import struct
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

BLOCK_BYTES = 2 << 20
MAGIC = b"arldelta"
PREAMBLE = struct.Struct("<8sQ")
BLOCK_HEADER = struct.Struct("<BIII")
MAX_HEADER_BYTES = 16 << 20
_NOTHING, _GAPS, _BITMAP, _WHOLE = range(4)
_LONG_GAP = 255

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class DeltaError(ValueError):
    """Bytes are not a package, or do not fit the file that they are applied to."""


class WrongBaseError(DeltaError):
    """A package starts from another version than the held one, or does not lead to the version that it names."""


class FilePart(BaseModel):
    """The form in which a package gives one file."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

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


class PackageHeader(BaseModel):
    """The version that a package makes, and the version that it starts from."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    version: Annotated[int, Field(ge=0, lt=1 << 63)]
    checksum: Digest
    """The checksum of the directory that it makes."""
    base: Digest | None
    """Checksum of the directory that it starts from; None if it starts from nothing."""
    files: tuple[FilePart, ...]

    @field_validator("files")
    @classmethod
    def _are_different(cls, files: tuple[FilePart, ...]) -> tuple[FilePart, ...]:
        if len({file.name for file in files}) != len(files):
            raise ValueError("a file is given twice")
        return files

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


def payload_bytes(block_header: bytes) -> int:
    """The number of bytes that follow the header of a block."""
    _, _, positions, differences = BLOCK_HEADER.unpack(block_header)
    return positions + differences


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
    checksum = base.checksum if base is not None else None
    yield PackageHeader(version=version, checksum=new.checksum, base=checksum, files=tuple(parts)).to_bytes()
    for part, (path, theirs) in zip(parts, sources, strict=True):
        if not part.is_kept:
            yield from each(partial(_sent_block, path, theirs, part.width), spans(part.num_bytes))


def _sent_block(path: Path, base: Path | None, width: int, block: tuple[int, int]) -> bytes:
    ours = _read(path, *block)
    if base is None:
        return BLOCK_HEADER.pack(_WHOLE, 0, 0, len(ours)) + ours
    return encode_block(np.frombuffer(_read(base, *block), f"<u{width}"), np.frombuffer(ours, f"<u{width}"))


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
