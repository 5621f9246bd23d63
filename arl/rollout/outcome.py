"""How an example of an epoch ended, and how columns lie in a checkpoint."""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from enum import StrEnum


class GroupOutcome(StrEnum):
    """How an example of an epoch ended. The letter is its mark in checkpoints; `.` marks one that has not ended."""

    TRAINED = "t"
    REJECTED = "r"
    DROPPED = "d"


def packed(data: bytes | bytearray) -> str:
    return b64encode(zlib.compress(data)).decode("ascii")


def unpacked(text: str) -> bytes:
    return zlib.decompress(b64decode(text))
