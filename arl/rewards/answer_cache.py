"""What servers answered to requests, on disk, for many episodes and several processes at once."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import uuid
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from arl.api.errors import RewardError


class AnswerCache:
    """One file for each request, named by a hash of it, which holds the request and its answer.

    Files come into being whole, so a process that is killed leaves none half written; one that cannot be read, for
    whatever reason, is as good as none, and is written anew. Of equal requests made at the same time in one process one
    is asked, and all get its answer, or its error.
    """

    def __init__(self, directory: Path | str) -> None:
        self._directory = Path(directory)
        self._asked: dict[str, asyncio.Future[str]] = {}

    async def answer(self, request: Mapping[str, Any], ask: Callable[[], Awaitable[str]]) -> str:
        """The answer to a request that is JSON; `ask` gets it where it is not known. Raises what `ask` raises, and
        RewardError where the directory cannot be written."""
        text = json.dumps(request, sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()
        while (asked := self._asked.get(key)) is not None:
            await asyncio.wait((asked,))
            if not asked.cancelled():
                return asked.result()
        asked = self._asked[key] = asyncio.get_running_loop().create_future()
        try:
            answer = await self._look_up(key, text, ask)
        except Exception as error:
            asked.set_exception(error)
            asked.exception()  # whether anybody else waited or not
            raise
        except BaseException:  # cancelled: who waits asks instead
            asked.cancel()
            raise
        finally:
            del self._asked[key]
        asked.set_result(answer)
        return answer

    async def _look_up(self, key: str, text: str, ask: Callable[[], Awaitable[str]]) -> str:
        path = self._directory / key[:2] / f"{key}.json"
        known = await asyncio.to_thread(_read, path, text)
        if known is not None:
            return known
        answer = await ask()
        try:
            await asyncio.to_thread(_write, path, text, answer)
        except OSError as error:
            raise RewardError(f"the cache {self._directory} cannot be written: {error}") from error
        return answer


def _read(path: Path, request: str) -> str | None:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        answer = kept["answer"] if kept["request"] == json.loads(request) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return answer if isinstance(answer, str) else None


def _write(path: Path, request: str, answer: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(f".{uuid.uuid4().hex}.new")
    new.write_text(json.dumps({"request": json.loads(request), "answer": answer}), encoding="utf-8")
    os.replace(new, path)
