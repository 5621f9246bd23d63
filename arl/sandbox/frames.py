"""How arl and its keeper talk: frames over a socket. Imports nothing of arl, for the keeper.

A frame is one line of JSON, whose `blobs` are the lengths of the byte strings that follow it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

Header = dict[str, Any]
"""What a frame's line says; both sides are arl's own, and keeper.py lists what they say."""


def frame(header: Header, blobs: Sequence[bytes] = ()) -> bytes:
    """A frame, ready to be sent."""
    line = json.dumps({**header, "blobs": [len(blob) for blob in blobs]})
    return b"".join([line.encode(), b"\n", *blobs])


class Frames(asyncio.Protocol):
    """The receiving end: calls `received` with each frame, and `lost` when the other side is gone."""

    def __init__(self, received: Callable[[Header, list[bytes]], None], lost: Callable[[], None]) -> None:
        self._received = received
        self._lost = lost
        self._buffer = bytearray()
        self._header: Header | None = None

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while self._next_frame():
            pass

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()

    def _next_frame(self) -> bool:
        """Take one frame from the buffer; False while it is not all there."""
        header: Header | None = self._header
        if header is None:
            line, newline, _ = self._buffer.partition(b"\n")
            if not newline:
                return False
            parsed: Header = json.loads(line)
            header = self._header = parsed
            del self._buffer[: len(line) + 1]
        lengths: list[int] = header["blobs"]
        if len(self._buffer) < sum(lengths):
            return False
        blobs: list[bytes] = []
        for length in lengths:
            blobs.append(bytes(self._buffer[:length]))
            del self._buffer[:length]
        self._header = None
        self._received(header, blobs)
        return True
