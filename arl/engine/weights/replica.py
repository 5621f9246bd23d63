"""Model directories as packages carry them (package.py): surveyed, packed on one machine, built on another."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path

import numpy as np

from arl.engine.weights.package import apply_block, directory_checksum, encode_block, file_digest
from arl.engine.weights.package import FilePart, PackageHeader, block_digest, block_sizes

_SAFETENSORS = ".safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A model directory that nobody writes to any more. files: name -> (bytes, digest)."""

    directory: Path
    files: dict[str, tuple[int, str]]

    @property
    def checksum(self) -> str:
        return directory_checksum(self.files)

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for num_bytes, _ in self.files.values())

    def part(self, name: str, base: Replica | None) -> FilePart:
        """How a package would give this file to whoever holds `base`."""
        num_bytes, _ = summary = self.files[name]
        theirs = None if base is None else base.files.get(name)
        if theirs == summary:
            return FilePart(name=name, num_bytes=num_bytes, how="kept")
        if theirs is not None and theirs[0] == num_bytes and name.endswith(_SAFETENSORS):
            width = element_width(self.directory / name)
            return FilePart(name=name, num_bytes=num_bytes, how="patched", width=width)
        return FilePart(name=name, num_bytes=num_bytes, how="whole")


def survey(directory: Path, pool: Executor) -> Replica:
    """Read and hash every file of `directory`, block by block on the pool's threads."""
    files = {}
    for path in sorted(path for path in directory.iterdir() if path.is_file()):
        sizes = block_sizes(path.stat().st_size)
        digests = pool.map(lambda block, path=path: block_digest(_read(path, *block)), spans(sizes))
        files[path.name] = (sum(sizes), file_digest(digests))
    return Replica(directory=directory, files=files)


def whole_package(new: Replica, version: int) -> tuple[int, Iterator[bytes]]:
    """The package that needs no base: its bytes in all, and then piece by piece."""
    parts = tuple(new.part(name, None) for name in sorted(new.files))
    header = PackageHeader(version=version, checksum=new.checksum, base=None, files=parts).to_bytes()

    def pieces() -> Iterator[bytes]:
        yield header
        for part in parts:
            for block in spans(part.block_sizes):
                yield _read(new.directory / part.name, *block)

    return len(header) + new.num_bytes, pieces()


def delta_package(base: Replica, new: Replica, version: int, pool: Executor, max_bytes: int) -> list[bytes] | None:
    """The package that makes `base` into `new`, in pieces; None as soon as it would be more than max_bytes."""
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
    def encode(block: tuple[int, int]) -> bytes:
        return encode_block(
            np.frombuffer(_read(base / part.name, *block), f"<u{part.width}"),
            np.frombuffer(_read(new / part.name, *block), f"<u{part.width}"),
        )

    def read(block: tuple[int, int]) -> bytes:
        return _read(new / part.name, *block)

    if part.how == "kept":
        return
    work: Callable[[tuple[int, int]], bytes] = encode if part.how == "patched" else read
    yield from pool.map(work, spans(part.block_sizes))


def patched_block(base: Path, start: int, size: int, part: FilePart, encoded: bytes) -> tuple[bytearray, bytes]:
    """A block of the new file, from the base's and what changed; and its digest. Raises DeltaError."""
    block = bytearray(_read(base / part.name, start, size))
    apply_block(np.frombuffer(block, f"<u{part.width}"), encoded)
    return block, block_digest(block)


def element_width(path: Path) -> int:
    """Bytes of most of a safetensors file's elements: what the file is best compared in."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    totals: Counter[int] = Counter()
    for tensor in (header[name] for name in header.keys() - {"__metadata__"}):
        start, end = tensor["data_offsets"]
        totals[(end - start) // max(1, prod(tensor["shape"]))] += end - start
    ((width, _),) = totals.most_common(1) or [(1, 0)]
    return next(w for w in (8, 4, 2, 1) if w <= max(1, width) and path.stat().st_size % w == 0)


def spans(sizes: list[int]) -> list[tuple[int, int]]:
    """(start, size) of each block."""
    return list(zip(accumulate(sizes, initial=0), sizes, strict=False))


def _read(path: Path, start: int, size: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        block = file.read(size)
    if len(block) != size:
        raise OSError(f"{path} became shorter while it was read")
    return block
