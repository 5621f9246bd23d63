"""How arl's client and its embedded server write calls of /generate as bytes.

    WebSocket message = frame ..       client: CALL, CANCEL       server: RESULT

A message holds whatever is to be sent at the moment. Token ids are int32, logprobs float32, all little-endian; the
rest of a call, and of a result, is JSON. An image travels once, and as its digest from then on.
Only these two programs speak it, so a server says in /model_info which FORMAT it takes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

FORMAT = 8
"""To be raised when either side changes what it sends."""
PATH = "/generate_frames"
MAX_MESSAGE_BYTES = 128 << 20
MAX_NAME_BYTES = 1024
"""The longest rid."""
GONE = 410
"""The status of a call that names an image which the server keeps no more: all of them are to be sent again."""

_BATCH_BYTES = 1 << 20
"""A message ends when it is as long as this, however much more there is."""
_CALL = struct.Struct("<BQIHIH")
_IMAGE = struct.Struct("<32sIII")
_CANCEL = struct.Struct("<BQ")
_RESULT = struct.Struct("<QHIIIII")
_MOST = (1 << 32) - 1
_IS_CALL, _IS_CANCEL = 1, 2
_IDS, _LOGPROBS = np.dtype("<i4"), np.dtype("<f4")


@dataclass(frozen=True, slots=True, kw_only=True)
class FramedImage:
    """An image of a call's prompt: its placeholders are the tokens start..stop-1."""

    digest: bytes
    """The SHA-256 of its file."""
    start: int
    stop: int
    data: bytes
    """The file; empty if the server has had it."""

    def encode(self) -> bytes:
        return _IMAGE.pack(self.digest, self.start, self.stop, len(self.data)) + self.data


@dataclass(slots=True, kw_only=True)
class Call:
    """One request. number: unique on its connection, and above 0."""

    number: int
    rid: str
    settings: bytes
    """JSON: the fields of SettingsBody."""
    ids: np.ndarray
    """The prompt."""
    images: Sequence[FramedImage] = ()

    def encode(self) -> bytes:
        rid = self.rid.encode()
        lengths = (len(self.ids), len(rid), len(self.settings), len(self.images))
        head = _CALL.pack(_IS_CALL, self.number, *lengths)
        images = (image.encode() for image in self.images)
        return b"".join((head, rid, self.settings, self.ids.astype(_IDS, copy=False).tobytes(), *images))


@dataclass(slots=True)
class Cancel:
    """Nobody waits for this call any more. It is aborted, and has no result."""

    number: int

    def encode(self) -> bytes:
        return _CANCEL.pack(_IS_CANCEL, self.number)


@dataclass(slots=True, kw_only=True)
class Result:
    """A call's answer. status: as over HTTP; unless it is 200, `head` is the error's body."""

    number: int
    status: int = 200
    head: bytes
    """JSON: finish_reason, weight_version, weight_versions, cached_tokens and, if the call has stop strings, text."""
    ids: np.ndarray = field(default_factory=lambda: np.empty(0))
    logprobs: np.ndarray = field(default_factory=lambda: np.empty(0))
    kept_ids: bytes = b""
    """The ids from which each token was sampled, as KeptIds.encode writes them; empty if the call did not ask."""
    routes: bytes = b""
    """For a mixture of experts, if the call asked: the experts of each token, as Routes.encode writes them."""
    microseconds: int = 0
    """From the call's coming to its result."""

    def encode(self) -> bytes:
        lasted = min(self.microseconds, _MOST)
        lengths = (len(self.ids), len(self.head), len(self.kept_ids), len(self.routes))
        head = _RESULT.pack(self.number, self.status, lasted, *lengths)
        numbers = (self.ids.astype(_IDS).tobytes(), self.logprobs.astype(_LOGPROBS).tobytes())
        return b"".join((head, self.head, *numbers, self.kept_ids, self.routes))


class BrokenFrameError(Exception):
    """A message is not made of frames."""


class _Cursor:
    """Reads a message from its beginning to its end."""

    def __init__(self, message: bytes) -> None:
        self._message = message
        self._at = 0

    @property
    def is_at_end(self) -> bool:
        return self._at >= len(self._message)

    @property
    def kind(self) -> int:
        return self._message[self._at]

    def unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack(self.take(form.size))

    def take(self, num_bytes: int) -> bytes:
        start, self._at = self._at, self._at + num_bytes
        if self._at > len(self._message):
            raise BrokenFrameError("a frame ends early")
        return self._message[start : self._at]

    def numbers(self, kind: np.dtype, count: int) -> np.ndarray:
        return np.frombuffer(self.take(count * kind.itemsize), dtype=kind)


def calls_of(message: bytes) -> Iterator[Call | Cancel]:
    """Raises BrokenFrameError."""
    cursor = _Cursor(message)
    while not cursor.is_at_end:
        if cursor.kind == _IS_CANCEL:
            yield Cancel(cursor.unpack(_CANCEL)[1])
        elif cursor.kind == _IS_CALL:
            yield _call(cursor)
        else:
            raise BrokenFrameError(f"there is no frame of kind {cursor.kind}")


def _call(cursor: _Cursor) -> Call:
    _, number, num_ids, len_rid, len_settings, num_images = cursor.unpack(_CALL)
    try:
        rid = cursor.take(len_rid).decode()
    except UnicodeDecodeError as error:
        raise BrokenFrameError(f"a rid is not text: {error}") from error
    return Call(
        number=number,
        rid=rid,
        settings=cursor.take(len_settings),
        ids=cursor.numbers(_IDS, num_ids),
        images=tuple(_image(cursor) for _ in range(num_images)),
    )


def _image(cursor: _Cursor) -> FramedImage:
    digest, start, stop, length = cursor.unpack(_IMAGE)
    return FramedImage(digest=digest, start=start, stop=stop, data=cursor.take(length))


def results_of(message: bytes) -> Iterator[Result]:
    """Raises BrokenFrameError."""
    cursor = _Cursor(message)
    while not cursor.is_at_end:
        number, status, lasted, num_ids, len_head, len_kept, len_routes = cursor.unpack(_RESULT)
        yield Result(  # its arguments are evaluated in the order of the bytes
            number=number,
            status=status,
            microseconds=lasted,
            head=cursor.take(len_head),
            ids=cursor.numbers(_IDS, num_ids),
            logprobs=cursor.numbers(_LOGPROBS, num_ids),
            kept_ids=cursor.take(len_kept),
            routes=cursor.take(len_routes),
        )


def messages_of(frames: list[bytes]) -> list[bytes]:
    """Encoded frames as messages, in order."""
    messages: list[list[bytes]] = [[]]
    size = 0
    for frame in frames:
        if size and size + len(frame) > _BATCH_BYTES:
            messages.append([])
            size = 0
        messages[-1].append(frame)
        size += len(frame)
    return list(map(b"".join, messages))
