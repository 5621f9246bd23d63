"""The trainer's logprobs of a few fixed tokens, with which servers that take its weights must agree."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from arl.api.engine import InferenceEngine, TrainEngine, WeightProbe, WeightSource
from arl.api.train_sequence import TrainSequence

_NUM_TOKENS = 64


@runtime_checkable
class ProbedWeights(Protocol):
    """A WeightSource that gives probes."""

    def probe(self) -> WeightProbe | None:
        """Of the current weights; None if they cannot be probed. Blocks."""
        ...


@runtime_checkable
class CheckedEngine(Protocol):
    """An inference engine that compares its servers with probes."""

    def wants_probe(self, version: int) -> bool:
        """Whether a server is to be compared once it holds this version."""
        ...

    async def check_weights(self, probe: WeightProbe) -> None:
        """Raises ServerError for a server that computes with other weights than the probe's."""
        ...


def probe_due(engine: WeightSource, servers: InferenceEngine) -> WeightProbe | None:
    """A probe of the current weights if servers are to be compared with it once they hold them. Blocks."""
    if not (isinstance(servers, CheckedEngine) and isinstance(engine, ProbedWeights)):
        return None
    return engine.probe() if servers.wants_probe(engine.version) else None


def probe_of(engine: TrainEngine, *, is_exact: bool) -> WeightProbe:
    """is_exact: whether the trainer computes in float32. Tokens are random ones, the same in every run of a model."""
    import torch  # importing arl's controller must not load it

    limits = engine.limits
    length = min(_NUM_TOKENS, (limits.context_length or 2 * _NUM_TOKENS) // 2)  # servers need room for an answer
    token_ids = np.random.default_rng(0).integers(limits.vocab_size, size=length)
    if limits.image_ids:  # of an image that is not there, which trainer and servers refuse
        of_images = np.isin(token_ids, [*limits.image_ids])
        token_ids[of_images] = next(number for number in range(limits.vocab_size) if number not in limits.image_ids)
    mask = torch.arange(length) > 0
    (row,) = engine.forward([TrainSequence(token_ids=torch.from_numpy(token_ids), loss_mask=mask)])
    logprobs = row[1:].double().numpy()
    return WeightProbe(
        version=engine.version, token_ids=tuple(token_ids.tolist()), logprobs=logprobs, is_exact=is_exact
    )
