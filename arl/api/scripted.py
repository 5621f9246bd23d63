"""ScriptedEngine: the official fake InferenceEngine, made from a function, for testing workflows without a model."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence

from arl.api.engine import UpdateStats, WeightUpdate
from arl.api.errors import EngineClosedError
from arl.api.types import ModelRequest, ModelResponse

Script = Callable[[ModelRequest], "ModelResponse | Sequence[int] | Awaitable[ModelResponse | Sequence[int]]"]


class ScriptedEngine:
    """Answers every request by calling `script`, sync or async; bare token ids become a response of logprob -1.0.

    `requests` keeps what was asked. Versions, pause and resume behave as a real engine's do: tokens carry the
    version current when the request began, and a paused engine starts no request.
    """

    def __init__(self, script: Script, version: int = 0) -> None:
        self._script = script
        self._version = version
        self._running = asyncio.Event()
        self._running.set()
        self._closed = False
        self.requests: list[ModelRequest] = []

    @property
    def version(self) -> int:
        return self._version

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        await self._running.wait()
        if self._closed:
            raise EngineClosedError("agenerate was called on a closed ScriptedEngine")
        self.requests.append(request)
        version = self._version
        answer = self._script(request)
        if inspect.isawaitable(answer):
            answer = await answer
        if isinstance(answer, ModelResponse):
            return answer
        output_ids = tuple(answer)[: request.sampling.max_new_tokens]
        return ModelResponse(
            output_ids=output_ids,
            output_logprobs=(-1.0,) * len(output_ids),
            output_versions=(version,) * len(output_ids),
            stop_reason="length" if len(output_ids) == request.sampling.max_new_tokens else "stop",
            temperature=request.sampling.logprob_temperature,
        )

    async def pause(self) -> None:
        self._running.clear()

    async def resume(self) -> None:
        self._running.set()

    async def update_weights(self, update: WeightUpdate) -> UpdateStats:
        self._version = update.version
        return UpdateStats(pause_s=0.0, load_s=0.0)

    async def aclose(self) -> None:
        self._closed = True
        self._running.set()
