"""Asks the train engine for logprobs, and moves its weights from one version to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from arl.api.errors import TrainingError
from arl.api.sampling_mask import KeptIds
from arl.api.settings.engines import OptimizerConfig
from arl.api.train_engine import PackedTokens, TokenLosses, TokenOutputs, TrainEngine, TrainSequence
from arl.observe.doctor.server_probe import Floats, Sampled
from arl.runtime.threads import TrainThread

PROBE_OPTIMIZER = OptimizerConfig(lr=0.02, warmup_steps=500)
"""The first step changes each weight by 4e-5, and each further step by 4e-5 more. So a model of any size soon moves as
far as it should, and hardly farther."""
_MOST_STEPS = 80


def likelier(outputs: TokenOutputs, tokens: PackedTokens) -> TokenLosses:
    """A loss that makes the tokens likelier."""
    return TokenLosses(loss=-outputs.logprobs)


class TrainerProbe:
    """Asks a train engine, on its thread. The engine's optimizer must be PROBE_OPTIMIZER."""

    def __init__(self, engine: TrainEngine, thread: TrainThread) -> None:
        self.engine = engine
        self._thread = thread

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[Floats]:
        """[T - 1] each: the logprob of each token except the first, at temperature 1."""
        made = [_sequence(ids, 1) for ids in sequences]
        return [row[1:] for row in await self._forward(made)]

    async def of_sampled(self, responses: Sequence[Sampled], *, with_routes: bool = True) -> list[Floats]:
        """For each response, the trainer's logprobs of its tokens, as training would compute them.

        with_routes: compute with the experts that the server reports, if it reports any.
        """
        made = [
            replace(
                _sequence(one.token_ids, len(one.prompt_ids), one.temperature),
                kept_ids=_behind(len(one.prompt_ids), one.kept_ids),
                routes=one.routes if with_routes else None,
            )
            for one in responses
        ]
        rows = await self._forward(made)
        return [row[len(one.prompt_ids) :] for row, one in zip(rows, responses, strict=True)]

    async def move(self, sequences: Sequence[Sequence[int]], least: float) -> float:
        """Train until the logprobs of these sequences have moved by `least` nats on average; returns how far.

        Raises TrainingError if that takes too many steps.
        """
        before = await self.score(sequences)
        batch = [_sequence(ids, 1) for ids in sequences]
        moved = 0.0
        for _ in range(_MOST_STEPS):
            await self._thread(self.engine.train_batch, [batch], likelier)
            after = await self.score(sequences)
            moved = float(np.abs(np.concatenate(after) - np.concatenate(before)).mean())
            if moved >= least:
                return moved
        raise TrainingError(f"{_MOST_STEPS} steps moved logprobs by {moved:.2g} nats; the doctor needs {least:.2g}")

    async def write(self, directory: Path) -> None:
        """Write the weights as servers get them, as a Hugging Face directory."""

        def work() -> None:
            snapshot = self.engine.snapshot()
            try:
                snapshot.write(directory)
            finally:
                snapshot.release()

        await self._thread(work)

    async def _forward(self, sequences: Sequence[TrainSequence]) -> list[Floats]:
        rows = await self._thread(self.engine.forward, sequences)
        return [row.double().numpy() for row in rows]


def _sequence(ids: Sequence[int], first: int, temperature: float = 1.0) -> TrainSequence:
    """first: the first trained token."""
    mask = torch.arange(len(ids)) >= first
    return TrainSequence(
        token_ids=torch.tensor(list(ids)),
        loss_mask=mask,
        loss_weights=mask / mask.sum().clamp(min=1),
        temperature=temperature,
    )


def _behind(num_prompt: int, kept_ids: KeptIds | None) -> KeptIds | None:
    """The same kept ids, behind the prompt's tokens."""
    return None if kept_ids is None else KeptIds.joined([num_prompt, kept_ids])
