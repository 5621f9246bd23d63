"""A stream of examples without a length, as a run reads it: in chunks, each of which can be read again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from arl.api.types import Example


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChunk:
    """Rows of a stream, one after another."""

    rows: Sequence[Example]
    cursor: Any
    """Where it begins, as a JSON value."""
    after: Any
    """Where the next one begins; None: nowhere, as the stream has ended."""
    digest: str
    """Of its first row; "" without one."""


class Stream(Protocol):
    @property
    def beginning(self) -> Any:
        """The cursor of the first row."""
        ...

    def read(self, cursor: Any) -> StreamChunk:
        """The chunk at a cursor; the same one each time. Blocks. Raises DatasetError."""
        ...
