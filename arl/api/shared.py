"""What several users have open at the same time: rewards, sandboxes, servers."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Self


class Shared(ABC):
    """What is opened by the first `async with` and closed by the last, however many use it at the same time.

    So a workflow can enter a reward that it was given: whoever opened it before keeps it open.
    """

    def __init__(self) -> None:
        self._num_users = 0
        self._entering = asyncio.Lock()

    async def __aenter__(self) -> Self:
        async with self._entering:
            if not self._num_users:
                await self._open()
            self._num_users += 1
        return self

    async def __aexit__(self, *exc: object) -> None:
        async with self._entering:
            self._num_users -= 1
            if not self._num_users:
                await self._close()

    @abstractmethod
    async def _open(self) -> None: ...

    @abstractmethod
    async def _close(self) -> None: ...
