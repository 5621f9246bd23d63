"""Routes: which experts computed each token, in a model that is a mixture of experts.

    tokens    The   cat   sat   <end>
    routes    1,6   0,3   3,7   (unknown)      of each layer, the experts that its router chose for the token

A token has routes once it was computed, that is, once the model has sampled the next token. So the last token of a
response has none until another request continues it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_HEAD = struct.Struct("<IIHHB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The size of a token's routes in a model."""

    num_layers: int
    """All layers of the model. Layers without a router have zeros."""
    experts_per_token: int
    num_experts: int
    """Experts are numbered from 0 to num_experts - 1."""

    @property
    def dtype(self) -> npt.DTypeLike:
        """The smallest dtype that holds an expert's number."""
        return np.min_scalar_type(self.num_experts - 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routes:
    """The routes of T tokens, of which N are known. Two are equal if all tokens' routes are.

    Raises ValueError for arrays that do not fit together.
    """

    is_known: npt.NDArray[np.bool_]
    """bool[T]"""
    experts: npt.NDArray[np.unsignedinteger[Any]]
    """uint8 or uint16 [N, layers, experts per token]: the experts of the known tokens, in order."""

    def __post_init__(self) -> None:
        num_known = int(self.is_known.sum())
        if self.experts.ndim != 3 or len(self.experts) != num_known:
            raise ValueError(
                f"routes of {num_known} known tokens came as experts of shape {self.experts.shape}; they must be "
                "[known tokens, layers, experts per token]"
            )

    @classmethod
    def of(cls, experts: npt.NDArray[np.unsignedinteger[Any]]) -> Routes:
        """Routes of tokens that are all known."""
        return cls(is_known=np.ones(len(experts), np.bool_), experts=experts)

    def __len__(self) -> int:
        return len(self.is_known)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Routes):
            return NotImplemented
        return np.array_equal(self.is_known, other.is_known) and np.array_equal(self.experts, other.experts)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    @property
    def num_bytes(self) -> int:
        return self.is_known.nbytes + self.experts.nbytes

    def take(self, places: npt.NDArray[Any] | slice) -> Routes | None:
        """The routes of the tokens at these places; None if none of them is known."""
        is_known = self.is_known[places]
        if not is_known.any():
            return None
        if self.is_known.all():
            chosen = self.experts[places]
            return Routes(is_known=is_known, experts=chosen)
        numbers = (self.is_known.cumsum() - 1)[places]
        return Routes(is_known=is_known, experts=self.experts[numbers[is_known]])

    @classmethod
    def joined(cls, parts: Sequence[Routes | int]) -> Routes | None:
        """Routes end to end; a number stands for that many unknown tokens. None if no token is known.

        Raises ValueError if the parts belong to different models.
        """
        known = [part for part in parts if isinstance(part, Routes) and len(part.experts)]
        if not known:
            return None
        shapes = {part.experts.shape[1:] for part in known}
        if len(shapes) > 1:
            told = " and ".join(f"{layers} layers of {each} experts" for layers, each in sorted(shapes))
            raise ValueError(f"routes of different models cannot be joined: {told} for each token")
        marks = [np.zeros(part, np.bool_) if isinstance(part, int) else part.is_known for part in parts]
        return cls(is_known=np.concatenate(marks), experts=np.concatenate([part.experts for part in known]))

    def encode(self) -> bytes:
        """The bytes that `decode` reads; little-endian."""
        num_known, num_layers, per_token = self.experts.shape
        width = self.experts.dtype.itemsize
        head = _HEAD.pack(len(self), num_known, num_layers, per_token, width)
        return b"".join((head, np.packbits(self.is_known).tobytes(), self.experts.astype(f"<u{width}").tobytes()))

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Routes:
        """The experts are a view of `data`. Raises ValueError for bytes that `encode` did not write."""
        if len(data) < _HEAD.size:
            raise ValueError("routes end early")
        length, num_known, num_layers, per_token, width = _HEAD.unpack_from(data)
        num_marks, num_numbers = -(-length // 8), num_known * num_layers * per_token
        if width not in (1, 2) or len(data) != _HEAD.size + num_marks + num_numbers * width:
            raise ValueError(f"routes have {len(data)} bytes, which are not those of {length} tokens")
        marks = np.frombuffer(data, np.uint8, num_marks, _HEAD.size)
        numbers = np.frombuffer(data, f"<u{width}", num_numbers, _HEAD.size + num_marks)
        is_known = np.unpackbits(marks, count=length).view(np.bool_)
        return cls(is_known=is_known, experts=numbers.reshape(num_known, num_layers, per_token))

    def keys(self) -> list[bytes]:
        """For each token, bytes that are equal for equal routes; empty for unknown ones."""
        rows = np.ascontiguousarray(self.experts).reshape(len(self.experts), -1)
        known = iter(rows.view(f"V{rows.itemsize * rows.shape[1]}").ravel().tolist())
        return [next(known) if is_known else b"" for is_known in self.is_known.tolist()]
