"""Two learners in one process: one trains as the run did, the other under other settings.

Only functions import torch, because the command's process imports this module without calling them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from arl.api.config import Config, EventsConfig
from arl.api.engine import Head
from arl.api.engine_config import TrainConfig
from arl.trainer_process import load_learner
from arl.training.flat_groups import FlatBatch

if TYPE_CHECKING:
    from arl.engine.fsdp.watched_engine import WatchedEngine
    from arl.training.learner import Learner

_SHOWN = 200
"""How many tokens are sent back: those that changed most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChange:
    """How one layer's gradient and update change under other settings."""

    layer: str
    gradient: float
    """The norm of the run's own gradient, before clipping."""
    other_gradient: float
    gradient_cosine: float
    """Between both gradients; NaN if one is 0."""
    update: float
    """The norm of the change of the weights."""
    other_update: float
    update_cosine: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChange:
    """One token and its say: the derivative of minus the loss with respect to its logprob, divided by the sum of the
    absolute values over all tokens."""

    trajectory: int
    """Its number among the trajectories of the batch's new groups."""
    place: int
    token_id: int
    version: int
    """The version that sampled it."""
    say: float
    other_say: float
    advantage: float
    other_advantage: float
    weight: float
    """The behavior weight, as corrected."""
    other_weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One step under both settings, from the same weights and batch."""

    metrics: Mapping[str, float]
    other_metrics: Mapping[str, float]
    layers: Sequence[LayerChange]
    tokens: Sequence[TokenChange]
    """The tokens whose say changed most, in descending order."""
    num_tokens: int
    """Tokens of the batch's new groups that have a say under either setting."""
    silenced: int
    """Tokens that have a say under the run's settings and none under the others."""
    heard: int
    """Tokens for which it is the other way round."""
    turned: int
    """Tokens that are pushed in the opposite direction."""
    moved: float
    """Half the sum of the absolute changes: 0 if no token's say changes, 1 if all of the say goes to other tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Trained:
    """One learner's step."""

    metrics: Mapping[str, float]
    columns: Mapping[str, np.ndarray]
    """Values for the trained tokens of the batch's new groups, end to end."""
    engine: WatchedEngine


class ComparedLearners:
    """The object in that process. Both learners begin where the run did."""

    def __init__(self, own: Config, other: Config) -> None:
        self._own, self._other = (_watched_learner(config) for config in (own, other))
        self._has_begun = False

    def load(self, directory: Path) -> None:
        """Go on from a checkpoint of the run, or from what `save` wrote."""
        self._own.load(directory)
        if (other := _beside(directory)).is_dir():
            self._other.load(other)
            self._has_begun = True

    def save(self, directory: Path) -> None:
        """Returns once both learners' files are written."""
        self._own.save(directory).wait()
        if self._has_begun:
            self._other.save(_beside(directory)).wait()

    def compare(self, batch: FlatBatch, other_batch: FlatBatch, follow: bool) -> Comparison:
        """Train one step with each. follow: the other one continues from its own weights, not from the run's."""
        if not (follow and self._has_begun):
            for own, other in zip(_engines(self._own), _engines(self._other), strict=True):
                other.take_state(own)
        self._has_begun = True
        return _compared(_train(self._own, batch), _train(self._other, other_batch), batch)

    def pass_over(self, batch: FlatBatch) -> None:
        """Train a step as the run did, only to reach the next one."""
        _train(self._own, batch)

    def close(self) -> None:
        try:
            self._own.close()
        finally:
            self._other.close()


def _beside(directory: Path) -> Path:
    """Where the other learner's files are."""
    return directory.with_name(f"{directory.name}-other")


def _watched_learner(config: Config) -> Learner:
    return load_learner(config, _watched_engine)


def _watched_engine(model: str | Path, settings: TrainConfig, *, seed: int, head: Head) -> WatchedEngine:
    from arl.engine.fsdp.watched_engine import WatchedEngine

    return WatchedEngine(str(model), settings, seed, head)


def compared_learners(own: Config, other: Config) -> partial[ComparedLearners]:
    """Builds both learners in another process, on one rank each, with the values of every token kept."""
    alone = {"num_ranks": 1, "min_ranks": None, "tensor_parallel": 1, "ray_address": None}
    log = own.log.model_copy(update={"events": EventsConfig(tokens="all")})
    configs = [c.model_copy(update={"train": c.train.model_copy(update=alone), "log": log}) for c in (own, other)]
    return partial(ComparedLearners, *configs)


def _engines(learner: Learner) -> list[Any]:
    return [*learner.engines.by_role.values()]


def _train(learner: Learner, batch: FlatBatch) -> _Trained:
    groups, replayed = batch.groups()
    trained = learner.train(learner.prepare(groups, replayed))
    engine: Any = learner.engine
    return _Trained(metrics=trained.metrics, columns=trained.kept.columns if trained.kept else {}, engine=engine)


def _compared(own: _Trained, other: _Trained, batch: FlatBatch) -> Comparison:
    groups, _ = batch.groups()
    trajectories = [t for group in groups for t in group.trajectories]
    counts = [t.num_trained_tokens for t in trajectories]
    number = np.repeat(np.arange(len(trajectories)), counts)
    place = np.concatenate([t.loss_mask.nonzero()[0] for t in trajectories])
    say, other_say = (_shares(trained, len(number)) for trained in (own, other))
    change = np.abs(other_say - say)

    def of(trained: _Trained, name: str, i: int) -> float:
        return float(np.nan_to_num(trained.columns[name][i])) if name in trained.columns else 0.0

    tokens = [
        TokenChange(
            trajectory=int(number[i]),
            place=int(place[i]),
            token_id=int(trajectories[number[i]].token_ids[place[i]]),
            version=int(trajectories[number[i]].versions[place[i]]),
            say=float(say[i]),
            other_say=float(other_say[i]),
            advantage=of(own, "advantages", i),
            other_advantage=of(other, "advantages", i),
            weight=of(own, "weights", i),
            other_weight=of(other, "weights", i),
        )
        for i in np.argsort(-change, kind="stable")[:_SHOWN].tolist()
    ]
    return Comparison(
        metrics=own.metrics,
        other_metrics=other.metrics,
        layers=_layers(own.engine, other.engine),
        tokens=tokens,
        num_tokens=int(((say != 0) | (other_say != 0)).sum()),
        silenced=int(((say != 0) & (other_say == 0)).sum()),
        heard=int(((say == 0) & (other_say != 0)).sum()),
        turned=int((say * other_say < 0).sum()),
        moved=float(change.sum() / 2),
    )


def _shares(trained: _Trained, size: int) -> np.ndarray:
    """float64: each token's say, divided by the sum of the absolute values; 0 if a token has none."""
    say = np.nan_to_num(trained.columns.get("say", np.zeros(size, np.float32))).astype(np.float64)
    return say / max(np.abs(say).sum(), 1e-300)


def _layers(own: WatchedEngine, other: WatchedEngine) -> list[LayerChange]:
    """The changes of all layers, in the order of the parameters."""
    sums: dict[str, np.ndarray] = {}
    for name in own.gradients:
        pairs = ((own.gradients[name], other.gradients[name]), (own.updates[name], other.updates[name]))
        products = [_products(a.double(), b.double()) for a, b in pairs]
        sums[_layer(name)] = sums.get(_layer(name), np.zeros((2, 3))) + np.array(products)
    return [
        LayerChange(
            layer=layer,
            gradient=math.sqrt(gradient[0]),
            other_gradient=math.sqrt(gradient[1]),
            gradient_cosine=_cosine(gradient),
            update=math.sqrt(update[0]),
            other_update=math.sqrt(update[1]),
            update_cosine=_cosine(update),
        )
        for layer, (gradient, update) in sums.items()
    ]


def _products(a: Any, b: Any) -> tuple[float, float, float]:
    return float((a * a).sum()), float((b * b).sum()), float((a * b).sum())


def _cosine(products: np.ndarray) -> float:
    a, b, both = products.tolist()
    return both / math.sqrt(a * b) if a and b else math.nan


def _layer(name: str) -> str:
    """The layer of a parameter: `layers.3`, or the parameter's own name outside the layers."""
    found = re.search(r"layers\.\d+", name)
    return found[0] if found else name.removesuffix(".weight").rpartition(".")[2]
