"""The delta format: any bits become any other bits, exactly; what is not a delta is refused."""

import hashlib
import json
import zlib
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from arl.engine.weights import delta
from arl.engine.weights.delta import (
    BLOCK_HEADER,
    DeltaError,
    FilePart,
    PackageHeader,
    apply_block,
    built_block,
    element_width,
    encode_block,
    package,
    survey,
)

DTYPES = ("<u1", "<u2", "<u4", "<u8")


@st.composite
def blocks(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays of a length, from equal to all different."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    size = draw(st.integers(1, 3000))
    share = draw(st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.2, 0.9, 1.0]))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    largest = np.iinfo(dtype).max
    base = rng.integers(0, largest, size, dtype, endpoint=True)
    kind = draw(st.sampled_from(["next", "any"]))
    others = base + rng.choice(np.array([1, largest], dtype), size)
    others = others if kind == "next" else rng.integers(0, largest, size, dtype, endpoint=True)
    return base, np.where(rng.random(size) < share, others, base)


def slowly_applied(base: np.ndarray, encoded: bytes) -> list[int]:
    """The format as its description reads, number by number."""
    kind, count, num_positions, _ = BLOCK_HEADER.unpack_from(encoded)
    new, bits = [int(value) for value in base], 8 * base.itemsize
    if kind == 0:
        return new
    payload = encoded[BLOCK_HEADER.size :]
    where, what = zlib.decompress(payload[:num_positions]), payload[num_positions:]
    positions: list[int] = []
    if kind == 1:
        at = -1
        for step in where:
            at += step if step == 255 else step + 1
            positions += [] if step == 255 else [at]
    else:
        positions = [i for i in range(len(base)) if where[i // 8] >> i % 8 & 1]
    assert len(positions) == count
    signs, planes = what[: -(-count // 8)], zlib.decompress(what[-(-count // 8) :])
    for i, at in enumerate(positions):
        magnitude = 1 + sum(planes[plane * count + i] << 8 * plane for plane in range(base.itemsize))
        new[at] = (new[at] + (-magnitude if signs[i // 8] >> i % 8 & 1 else magnitude)) % (1 << bits)
    return new


@given(blocks())
@settings(deadline=None)
def test_a_block_becomes_the_other_to_the_bit_by_bytes_as_the_format_describes_them(
    pair: tuple[np.ndarray, np.ndarray],
):
    base, new = pair
    encoded = encode_block(base, new)
    patched = base.copy()
    apply_block(patched, encoded)
    assert patched.tobytes() == new.tobytes()
    assert slowly_applied(base, encoded) == new.tolist()


def test_a_step_to_a_neighbouring_value_takes_little_more_than_its_position_and_none_a_header():
    rng = np.random.default_rng(0)
    base = rng.integers(0, 1 << 16, 1 << 20, "<u2")
    changed = rng.random(len(base)) < 0.01
    new = np.where(changed, base + rng.choice(np.array([1, (1 << 16) - 1], "<u2"), len(base)), base)
    bits = 8 * len(encode_block(base, new)) / changed.sum()
    entropy = -np.log2(0.01) - 0.99 / 0.01 * np.log2(0.99) + 1
    assert bits < 1.1 * entropy
    assert len(encode_block(base, base)) == BLOCK_HEADER.size


@given(blocks(), st.data())
@settings(deadline=None)
def test_broken_bytes_do_no_more_than_change_numbers_and_bytes_that_end_early_are_refused(
    pair: tuple[np.ndarray, np.ndarray], data: st.DataObject
):
    base, new = pair
    encoded = bytearray(encode_block(base, new))
    end = data.draw(st.integers(BLOCK_HEADER.size, len(encoded)))
    if end < len(encoded):
        with pytest.raises(DeltaError):
            apply_block(base.copy(), bytes(encoded[:end]))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    patched = base.copy()
    try:
        apply_block(patched, bytes(encoded))
    except DeltaError:
        assert patched.tobytes() == base.tobytes()


@pytest.mark.parametrize(("kind", "message"), [(1, "or more; it must be"), (9, "an unknown way: 9")])
def test_a_stream_that_is_too_large_or_of_an_unknown_kind_is_not_unpacked(kind: int, message: str):
    bomb = zlib.compress(bytes(1 << 26))
    with pytest.raises(DeltaError, match=message):
        apply_block(np.zeros(10, "<u2"), BLOCK_HEADER.pack(kind, 1, len(bomb), 1) + bomb + b"\0")


def test_a_block_that_needs_a_base_or_has_another_length_is_refused():
    whole, changed = BLOCK_HEADER.pack(3, 0, 0, 4) + b"abcd", BLOCK_HEADER.pack(0, 0, 0, 0)
    assert built_block(None, (0, 4), 1, whole)[0] == b"abcd"
    for block, encoded in (((0, 5), whole), ((0, 4), changed)):
        with pytest.raises(DeltaError):
            built_block(None, block, 1, encoded)


IMPOSSIBLE = [{"name": name} for name in ("../config.json", "a/b", ".hidden", "")]
IMPOSSIBLE += [{"is_kept": 1}, {"width": 3}, {"num_bytes": -1}, {"num_bytes": 3, "width": 2}]


@pytest.mark.parametrize("fields", IMPOSSIBLE)
def test_a_file_that_cannot_be_is_refused(fields: dict):
    file = {"name": "config.json", "num_bytes": 4, "is_kept": False, **fields}
    header = {"version": 1, "checksum": "a" * 64, "base": None, "files": [file]}
    with pytest.raises(DeltaError, match="not the header of a package"):
        PackageHeader.parse(json.dumps(header).encode())


def test_a_header_reads_as_it_was_written_and_what_is_none_is_refused():
    part = FilePart(name="model.safetensors", num_bytes=4, is_kept=False, width=2)
    header = PackageHeader(version=3, checksum="a" * 64, base="b" * 64, files=(part,))
    raw = header.to_bytes()
    start = delta.PREAMBLE.size
    assert delta.header_bytes(raw[:start]) == len(raw) - start
    assert PackageHeader.parse(raw[start:]) == header
    for body in (b"", b"{}", b"[]", b'{"files": [1]}', b'{"files": [], "version": "1"}', b"\xff"):
        with pytest.raises(DeltaError):
            PackageHeader.parse(body)


# Directories


@pytest.fixture
def pool() -> Iterator[Executor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "BLOCK_BYTES", 1000)


def write_model(directory: Path, **tensors: torch.Tensor) -> Path:
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text("{}")
    return directory


def test_the_checksum_is_of_every_file_by_name_length_and_content(tmp_path: Path, pool: Executor):
    for name, content in (("b", bytes(2500)), ("a", b"x")):
        (tmp_path / name).write_bytes(content)

    def digest(*blocks: bytes) -> str:
        return hashlib.sha256(b"".join(hashlib.sha256(block).digest() for block in blocks)).hexdigest()

    expected = f"a 1 {digest(b'x')}\nb 2500 {digest(bytes(1000), bytes(1000), bytes(500))}\n"
    assert survey(tmp_path, pool).checksum == hashlib.sha256(expected.encode()).hexdigest()


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 2), (torch.float32, 4), (torch.float8_e4m3fn, 1)])
def test_a_file_is_compared_in_the_width_that_most_of_it_has(tmp_path: Path, dtype: torch.dtype, width: int):
    weight = torch.randn(100, 100).to(dtype)
    directory = write_model(tmp_path / "m", weight=weight, norm=torch.ones(10), none=torch.ones(0))
    assert element_width(directory / "model.safetensors") == width


def test_a_delta_gives_each_file_in_the_shortest_way(tmp_path: Path, pool: Executor):
    weight = torch.randn(100, 100).bfloat16()
    base = survey(write_model(tmp_path / "base", weight=weight), pool)
    weight.view(-1)[4321] += 1
    directory = write_model(tmp_path / "new", weight=weight)
    (directory / "added.json").write_text("{}")
    new = survey(directory, pool)
    pieces = list(package(new, 2, base, pool.map))
    header = PackageHeader.parse(pieces[0][delta.PREAMBLE.size :])
    assert [(part.name, part.is_kept, part.width) for part in header.files] == [
        ("added.json", False, 1),
        ("config.json", True, 1),
        ("model.safetensors", False, 2),
    ]
    assert header.base == base.checksum
    assert header.checksum == new.checksum
    assert sum(map(len, pieces)) < 1000


def test_a_file_that_shrank_since_it_was_surveyed_is_an_error(tmp_path: Path, pool: Executor):
    new = survey(write_model(tmp_path / "new", weight=torch.randn(100, 100)), pool)
    (new.directory / "config.json").write_text("")
    with pytest.raises(OSError, match="shorter"):
        list(package(new, 2))
