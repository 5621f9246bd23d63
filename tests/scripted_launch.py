"""`launch` over the official fakes: what a document's code runs on in tests, instead of servers and a model."""

from collections.abc import Callable
from typing import Self

import pytest

import arl.assembly
from arl.api.scripted import ScriptedEngine, ScriptedTrainEngine


class ScriptedServers:
    """Stands where RemoteSGLangEngine does: opens and closes the engine, or a new one for each launch."""

    def __init__(self, made: ScriptedEngine | Callable[[], ScriptedEngine]) -> None:
        self.made = made

    def __call__(self, *args: object, **kwargs: object) -> Self:
        return self

    async def __aenter__(self) -> ScriptedEngine:
        self.engine = self.made if isinstance(self.made, ScriptedEngine) else self.made()
        return self.engine

    async def __aexit__(self, *exc: object) -> None:
        await self.engine.aclose()


async def _no_addresses(*args: object) -> tuple[list[str], None]:
    return [], None


def use_fakes(monkeypatch: pytest.MonkeyPatch, engine: ScriptedEngine | Callable[[], ScriptedEngine]) -> None:
    """Let `launch` compose everything as it does, but for the two engines."""
    monkeypatch.setattr(arl.assembly, "RemoteSGLangEngine", ScriptedServers(engine))
    monkeypatch.setattr(arl.assembly, "FSDPTrainEngine", lambda *args: ScriptedTrainEngine())
    monkeypatch.setattr(arl.assembly, "_addresses", _no_addresses)
    monkeypatch.setattr(arl.assembly, "end_token_ids", lambda name: frozenset())
