"""Images on their way through a pipe: the file of each crosses once, for as long as the sender holds the image.

A long episode asks for one turn after the other with all images so far, and returns them in its trajectories.

    sender     knows which images the receiver holds: those that it sent, and that are still alive here
    receiver   holds them until the sender says that they are gone, with the next message

The pipe keeps messages in order, so both always know the same.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from arl.api.images import Image


class SentImages:
    """Pickles messages for one receiver."""

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
        return self._own[global_name] if module_name == __name__ else super().find_class(module_name, global_name)


def _held(digest: str) -> NoReturn:
    """Names an image that the receiver holds."""
    raise NotImplementedError("only HeldImages reads this")


def _taken(data: bytes, width: int, height: int) -> NoReturn:
    """Names an image whose file is in the message."""
    raise NotImplementedError("only HeldImages reads this")
