"""Shared use of what a process has once: Ray, a process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar


class Lease:
    """Holds a resource for an engine. One that existed stays as it was; one started here ends with its last holder."""

    _holders: ClassVar[int] = 0

    def __init__(self, is_there: bool, start: Callable[[], None]) -> None:
        cls = type(self)
        self._is_held = cls._holders > 0 or not is_there
        if self._is_held:
            if cls._holders == 0:
                start()
            cls._holders += 1

    def release(self) -> None:
        """Idempotent."""
        if self._is_held:
            self._is_held = False
            cls = type(self)
            cls._holders -= 1
            if cls._holders == 0:
                self._end()

    def _end(self) -> None:
        raise NotImplementedError
