"""Messages between the controller's process and a worker: the records, and the socket that carries them."""

from __future__ import annotations

import asyncio
import copyreg
import io
import os
import pickle
import struct
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np

from arl.api.events import Event
from arl.api.images import Image
from arl.api.types import ModelRequest, ModelResponse, Trajectory
from arl.runtime.processes.rpc import Message, portable

_SIZE = struct.Struct("<Q")


class Play(NamedTuple):
    """Run an episode."""

    episode: int
    example: bytes
    """Pickled."""
    task: str = ""
    """Whose workflow plays it, if they are TaskWorkflows."""


class Stop(NamedTuple):
    episode: int


class Answered(NamedTuple):
    """The end of a request: a response, or an error and its traceback."""

    request: int
    response: ModelResponse | None
    error: Exception | None = None
    traceback: str = ""


class Close(NamedTuple):
    """Leave the workflow, and end."""


class Ready(NamedTuple):
    """The workflow is entered."""


class Request(NamedTuple):
    """An episode calls `agenerate`."""

    episode: int
    request: int
    asked: ModelRequest
    """input_ids: int32[T] where the workflow gave token ids that fit; else what it gave."""


class Drop(NamedTuple):
    """Nobody waits for this request any more."""

    episode: int
    request: int


class Failure(NamedTuple):
    """An error of the workflow, pickled apart: only the worker may know its class."""

    pickled: bytes
    traceback: str
    """Its last line stands for the error where that cannot be unpickled."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        return cls(pickle.dumps(portable(error)), "".join(traceback.format_exception(error)))

    def error(self) -> Exception:
        with suppress(Exception):  # unpickling runs what users wrote
            if isinstance(error := pickle.loads(self.pickled), Exception):
                return error
        return RuntimeError(self.traceback.rstrip().rpartition("\n")[2])


class Ended(NamedTuple):
    """The end of an episode: with trajectories, a failure, or neither, which means rejected."""

    episode: int
    trajectories: tuple[Trajectory, ...] = ()
    """Their columns travel as arrays, and are not checked again."""
    failure: Failure | None = None
    is_interrupt: bool = False
    """The workflow raised KeyboardInterrupt, which ends the run."""


class Noted(NamedTuple):
    """A record of the event log, of what a tool or a reward did in an episode."""

    episode: int
    event: Event


class Clocked(NamedTuple):
    """An episode's clock stands still, or runs again."""

    episode: int
    is_still: bool


class Gone(NamedTuple):
    """The sender's pipe to the receiver's: these images may be forgotten."""

    digests: list[str]


class Said(NamedTuple):
    """arl logged this in the worker."""

    message: Message


class Closed(NamedTuple):
    """The last message of a worker: the workflow was left, or could not be entered or left."""

    failure: Failure | None = None


def as_array(input_ids: Any) -> Any:
    """int32[T] if these are token ids that fit, which travel fast; else what was given, for the engine to refuse."""
    if isinstance(input_ids, tuple | list) and {*map(type, cast("Iterable[object]", input_ids))} == {int}:
        try:
            return np.array(input_ids, dtype=np.int32)
        except OverflowError:
            pass
    return cast("object", input_ids)


def frame(message: object) -> bytes:
    """A message without images, as it crosses."""
    body = pickle.dumps(message, protocol=5)
    return _SIZE.pack(len(body)) + body


class Pipe(asyncio.Protocol):
    """One end of the socket. Messages sent in one turn of the event loop leave in one write.

    An image's file crosses once, while this end holds the image.
    """

    def __init__(self, take: Callable[[Any], None]) -> None:
        """take: called with each message, in order."""
        self.ended = asyncio.get_running_loop().create_future()
        """Set when the other end was closed, or this one."""
        self.fault = ""
        """Says what was wrong with a message that could not be read."""
        self._take = take
        self._received = bytearray()
        self._outgoing: list[bytes] = []
        self._sent_images, self._held_images = SentImages(), HeldImages()

    def send(self, message: object) -> None:
        """Raises what pickling raises. Does nothing once the pipe has ended."""
        gone = self._sent_images.gone()
        if gone:
            self._put(frame(Gone(gone)))
        body = self._sent_images.pickled(message)
        self._put(_SIZE.pack(len(body)) + body)

    def write(self, parts: bytes) -> None:
        """At once, as it is."""
        self._transport.write(parts)

    def close(self) -> None:
        """Once everything is sent."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        try:
            if isinstance(exc, ConnectionError):  # a write that failed made asyncio give up reading, too
                descriptor = self._transport.get_extra_info("socket").fileno()
                with suppress(OSError):  # also where it would wait
                    while data := os.read(descriptor, 1 << 16):
                        self.data_received(data)
        finally:
            if not self.ended.done():
                self.ended.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._received += data
        begin, size = 0, len(self._received)
        with memoryview(self._received) as view:
            while size - begin >= _SIZE.size:
                (length,) = _SIZE.unpack_from(view, begin)
                end = begin + _SIZE.size + length
                if end > size:
                    break
                if not self._read(view[begin + _SIZE.size : end]):
                    return
                begin = end
        del self._received[:begin]

    def _read(self, body: memoryview) -> bool:
        try:
            with body:
                message = self._held_images.unpickled(body)
        except Exception as error:  # noqa: BLE001 (unpickling runs what users wrote)
            self.fault = f"sent a message that cannot be read ({type(error).__name__}: {error})"
            self._transport.abort()
            return False
        if isinstance(message, Gone):
            self._held_images.forget(message.digests)
        else:
            self._take(message)
        return True

    def _put(self, framed: bytes) -> None:
        if self.ended.done():
            return
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(framed)

    def _flush(self) -> None:
        if self._outgoing:
            self._transport.write(b"".join(self._outgoing))
            self._outgoing = []


class SentImages:
    """Pickles messages for one receiver. The file of an image crosses once, for as long as the sender holds the image:
    a long episode asks for one turn after the other with all images so far, and returns them in its trajectories.

    The receiver holds images until the sender says that they are gone, with the next message. The pipe keeps messages
    in order, so both always know the same.
    """

    def __init__(self) -> None:
        self._sent: dict[str, weakref.ref[Image]] = {}
        """By digest: what the receiver holds."""
        self._new: dict[str, weakref.ref[Image]] = {}
        """What the message that is being pickled adds to that."""
        self._gone: deque[str] = deque()
        """Images that are not alive any more. Any thread may add to it."""

    def gone(self) -> list[str]:
        """The digests of images that the receiver can forget: tell it before the next message."""
        gone = [self._gone.popleft() for _ in range(len(self._gone))]
        for digest in gone:
            del self._sent[digest]
        return gone

    def pickled(self, message: object) -> bytes:
        """The message, which the receiver gets next. Raises what pickling raises, and then has sent nothing."""
        stream = io.BytesIO()
        pickler = pickle.Pickler(stream, protocol=5)
        pickler.dispatch_table = copyreg.dispatch_table.copy() | {Image: self._reduced}
        try:
            pickler.dump(message)
            self._sent |= self._new
        finally:
            self._new = {}  # the receiver must not be told to forget what it did not get
        return stream.getvalue()

    def _reduced(self, image: Image) -> tuple[Any, ...]:
        if image.digest in self._sent:
            return _held, (image.digest,)
        self._new[image.digest] = weakref.ref(image, lambda _, digest=image.digest: self._gone.append(digest))
        return _taken, (image.data, image.width, image.height)


class HeldImages:
    """Reads what SentImages pickled."""

    def __init__(self) -> None:
        self._held: dict[str, Image] = {}

    def forget(self, digests: list[str]) -> None:
        for digest in digests:
            del self._held[digest]

    def unpickled(self, body: bytes | memoryview) -> Any:
        """Raises what unpickling raises, which runs what users wrote."""
        return _Unpickler(body, {_held.__name__: self._held.__getitem__, _taken.__name__: self._take}).load()

    def _take(self, data: bytes, width: int, height: int) -> Image:
        image = Image.kept(data, width, height)
        return self._held.setdefault(image.digest, image)


class _Unpickler(pickle.Unpickler):
    def __init__(self, body: bytes | memoryview, own: dict[str, Callable[..., Image]]) -> None:
        """own: what stands for the functions of this module."""
        super().__init__(io.BytesIO(body))
        self._own = own

    def find_class(self, module_name: str, global_name: str) -> Any:
        is_own = module_name == __name__ and global_name in self._own
        return self._own[global_name] if is_own else super().find_class(module_name, global_name)


def _held(digest: str) -> NoReturn:
    """Names an image that the receiver holds."""
    raise NotImplementedError("only HeldImages reads this")


def _taken(data: bytes, width: int, height: int) -> NoReturn:
    """Names an image whose file is in the message."""
    raise NotImplementedError("only HeldImages reads this")
