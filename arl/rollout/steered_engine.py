"""SteeredEngine: the engine as one episode sees it, where how it samples is not left to the workflow alone."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b

from arl.api.engine import InferenceEngine, UpdateStats, WeightUpdate
from arl.api.types import ModelRequest, ModelResponse, SamplingParams


class SteeredEngine:
    """Passes everything on to `engine`, with other sampling parameters.

    is_greedy: every request is answered at temperature 0, so with the most likely tokens; their logprobs are then at
    temperature 1, as the response says. seed: requests that have none get one, made of this text and of how many were
    made before. Retries of an episode share the engine, so one does not fail for ever by the same tokens.
    """

    def __init__(self, engine: InferenceEngine, *, is_greedy: bool = False, seed: str | None = None) -> None:
        self._engine = engine
        self._is_greedy = is_greedy
        self._seed = seed
        self._num_requests = 0

    @property
    def version(self) -> int:
        return self._engine.version

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        return await self._engine.agenerate(replace(request, sampling=self._steered(request.sampling)))

    async def pause(self) -> None:
        await self._engine.pause()

    async def resume(self) -> None:
        await self._engine.resume()

    async def update_weights(self, update: WeightUpdate) -> UpdateStats:
        return await self._engine.update_weights(update)

    async def aclose(self) -> None:
        await self._engine.aclose()

    def _steered(self, sampling: SamplingParams) -> SamplingParams:
        number, self._num_requests = self._num_requests, self._num_requests + 1
        if self._is_greedy:
            return replace(sampling, temperature=0.0)
        if self._seed is None or sampling.seed is not None:
            return sampling
        return replace(sampling, seed=_seed_of(f"{self._seed}-{number}"))


def _seed_of(text: str) -> int:
    """31 bits, which every server takes for a seed; the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest()) >> 1
