"""TimedEngine: an engine that remembers what it was asked, what it answered, and how long that took."""

from __future__ import annotations

import time
from dataclasses import dataclass

from arl.api.engine import InferenceEngine, UpdateStats, WeightUpdate
from arl.api.types import ModelRequest, ModelResponse


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCall:
    """One `agenerate`. output_ids: empty where it raised. ended_by: the stop reason, or the name of the error."""

    input_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    elapsed_s: float
    ended_by: str

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.input_ids + self.output_ids


class TimedEngine:
    """Passes everything on to `engine`. `calls`: in the order in which they ended."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self.calls: list[EngineCall] = []

    @property
    def version(self) -> int:
        return self._engine.version

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        began = time.monotonic()
        try:
            response = await self._engine.agenerate(request)
        except BaseException as error:
            self._note(request, (), began, type(error).__name__)
            raise
        self._note(request, response.output_ids, began, response.stop_reason)
        return response

    async def pause(self) -> None:
        await self._engine.pause()

    async def resume(self) -> None:
        await self._engine.resume()

    async def update_weights(self, update: WeightUpdate) -> UpdateStats:
        return await self._engine.update_weights(update)

    async def aclose(self) -> None:
        await self._engine.aclose()

    def _note(self, request: ModelRequest, output_ids: tuple[int, ...], began: float, ended_by: str) -> None:
        self.calls.append(
            EngineCall(
                input_ids=tuple(request.input_ids),
                output_ids=output_ids,
                elapsed_s=time.monotonic() - began,
                ended_by=ended_by,
            )
        )
