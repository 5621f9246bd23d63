"""Asks the train engine for logprobs of what a server sampled, and moves its weights from one version to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from arl.api.errors import TrainingError
from arl.api.routed_experts import Routes
from arl.api.sampling_mask import KeptIds
from arl.api.settings.engines import OptimizerConfig
from arl.api.train_engine import PackedTokens, TokenLosses, TokenOutputs, TrainEngine, TrainSequence
from arl.runtime.threads import TrainThread

Floats = npt.NDArray[np.float64]

PROBE_OPTIMIZER = OptimizerConfig(lr=0.02, warmup_steps=500)
"""The first step changes each weight by 4e-5, and each further step by 4e-5 more. So a model of any size soon moves as
far as it should, and hardly farther."""
_MOST_STEPS = 80


def likelier(outputs: TokenOutputs, tokens: PackedTokens) -> TokenLosses:
    """A loss that makes the tokens likelier."""
    return TokenLosses(loss=-outputs.logprobs)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """One sampled response."""

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    logprobs: Floats
    """The behavior logprobs."""
    labels: Sequence[str]
    """The version label of each token."""
    temperature: float
    kept_ids: KeptIds | None = None
    routes: Routes | None = None
    """Of prompt and response, if they were asked for."""


class TrainerProbe:
    """Asks a train engine, on its thread. The engine's optimizer must be PROBE_OPTIMIZER."""

    def __init__(self, engine: TrainEngine, thread: TrainThread) -> None:
        self.engine = engine
        self._thread = thread

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[Floats]:
        """[T - 1] each: the logprob of each token except the first, at temperature 1."""
        rows = await self._thread(self.engine.forward, [_sequence(ids, 1) for ids in sequences])
        return [row.double().numpy()[1:] for row in rows]

    async def of_sampled(
        self,
        responses: Sequence[Sampled],
        *,
        temperature: float | None = None,
        with_routes: bool = True,
        of: Literal["logprobs", "reference_logprobs"] = "logprobs",
    ) -> list[Floats]:
        """For each response, the trainer's logprobs of its tokens, as training would compute them.

        temperature: instead of the response's. with_routes: compute with the experts that the server reports, if it
        reports any. of reference_logprobs: under the version before the last `move`.
        """
        made = [
            replace(
                _sequence([*one.prompt_ids, *one.output_ids], len(one.prompt_ids), temperature or one.temperature),
                kept_ids=None if one.kept_ids is None else KeptIds.joined([len(one.prompt_ids), one.kept_ids]),
                routes=one.routes if with_routes else None,
            )
            for one in responses
        ]
        rows = await self._thread(self.engine.forward, made, of)
        return [row.double().numpy()[len(one.prompt_ids) :] for row, one in zip(rows, responses, strict=True)]

    async def move(self, sequences: Sequence[Sequence[int]], least: float) -> None:
        """Train until the logprobs of these sequences have moved by `least` nats on average.

        The weights before become the engine's reference. Raises TrainingError if that takes too many steps.
        """
        await self._thread(self.engine.update_reference)
        before = await self.score(sequences)
        batch = [_sequence(ids, 1) for ids in sequences]
        moved = 0.0
        for _ in range(_MOST_STEPS):
            await self._thread(self.engine.train_batch, [batch], likelier)
            after = await self.score(sequences)
            moved = float(np.abs(np.concatenate(after) - np.concatenate(before)).mean())
            if moved >= least:
                return
        raise TrainingError(f"{_MOST_STEPS} steps moved logprobs by {moved:.2g} nats; the doctor needs {least:.2g}")


def _sequence(ids: Sequence[int], first: int, temperature: float = 1.0) -> TrainSequence:
    """first: the first trained token."""
    mask = torch.arange(len(ids)) >= first
    return TrainSequence(
        token_ids=torch.tensor(list(ids)),
        loss_mask=mask,
        loss_weights=mask / mask.sum().clamp(min=1),
        temperature=temperature,
    )
