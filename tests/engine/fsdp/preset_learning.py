"""What a preset makes of two batches of random groups: metrics and weights, on one rank or on this rank of several."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from random_groups import MAX_STALENESS, VERSION
from safetensors.torch import load_file

from arl.algorithm.batch import Batch
from arl.api.algorithm import AlgorithmConfig, preset
from arl.api.config import OptimizerConfig, TrainConfig
from arl.api.engine import Output, TokenLoss
from arl.api.types import NOT_SAMPLED, Group, TrainSequence
from arl.engine.fsdp.minibatch import divide
from arl.engine.fsdp.train_engine import FSDPTrainEngine
from arl.training.learner import Learner

TRAIN = TrainConfig(optimizer=OptimizerConfig(lr=3e-3, eps=1e-3, weight_decay=0.1))
"""A large eps keeps AdamW smooth: it would otherwise blow rounding in tiny gradients up to whole steps."""

OF_PACKING = {"microbatches", "packing_efficiency", "forwarded_tokens", "forwarded_share"}
"""Metrics that say how the work was split."""


def config_of(name: str) -> AlgorithmConfig:
    """The preset with two minibatches, so that ratios leave 1, and enough selected tokens for a batch this small."""
    selections = {"clip_cov": {"share": 0.1, "low": 0.01}, "kl_cov": {"share": 0.1}}
    changes = {"selection": selections[name]} if name in selections else {}
    critic = {"critic": {"lr": 3e-3}} if preset(name).critic else {}
    return preset(name, minibatches=2, **changes, **critic)


def near_to_the_model(groups: Sequence[Group], model: Path) -> list[Group]:
    """The groups as if they had been sampled by the model, or by one that is a little different."""
    engine = FSDPTrainEngine(model, TRAIN)
    logprobs = iter(engine.forward(Batch.of(groups).sequences()))
    engine.close()
    generator = torch.Generator().manual_seed(3)

    def sampled(group: Group) -> Group:
        trajectories = []
        for trajectory in group.trajectories:
            near = next(logprobs) + 0.2 * torch.randn(len(trajectory.token_ids), generator=generator)
            near = torch.where(torch.tensor(trajectory.versions) == NOT_SAMPLED, 0.0, near.clamp(max=0.0))
            trajectories.append(replace(trajectory, behavior_logprobs=tuple(near.tolist())))
        return replace(group, trajectories=tuple(trajectories))

    return [sampled(group) for group in groups]


class SharedEngine(FSDPTrainEngine):
    """This rank's engine of several: it takes its share of the sequences, and gives back everyone's."""

    def forward(self, sequences: Sequence[TrainSequence], output: Output = "logprobs") -> list[torch.Tensor]:
        shares = self._divided(sequences)
        own = super().forward([sequences[i] for i in shares[dist.get_rank()]], output)
        everyones: list[list[torch.Tensor]] = [[] for _ in shares]
        dist.all_gather_object(everyones, own)
        outputs = [torch.zeros(len(sequence)) for sequence in sequences]
        for share, rows in zip(shares, everyones, strict=True):
            for index, row in zip(share, rows, strict=True):
                outputs[index] = row
        return outputs

    def train_batch(self, minibatches: Sequence[Sequence[TrainSequence]], loss: TokenLoss) -> dict[str, float]:
        shares = [[part[i] for i in self._divided(part)[dist.get_rank()]] for part in minibatches]
        return super().train_batch(shares, loss)

    def _divided(self, sequences: Sequence[TrainSequence]) -> list[list[int]]:
        return divide(sequences, dist.get_world_size(), share_prefixes=self._config.share_prefixes)


def learned(
    name: str, batches: Sequence[Sequence[Group]], model: Path, directory: Path, train: TrainConfig = TRAIN
) -> dict[str, Any]:
    """Metrics of each batch, as JSON has them. The weights after the last lie in `directory`."""
    config = config_of(name)
    engine = _engine(model, train, critic=False)
    critic = _engine(model, train, critic=True) if config.critic else None
    learner = Learner(engine, config, critic=critic, max_staleness=MAX_STALENESS + len(batches))
    try:
        metrics = [learner.train(learner.prepare(groups)) for groups in batches]
        snapshot = engine.snapshot()
        snapshot.write(directory)
        snapshot.release()
    finally:
        learner.close()
    return {"metrics": metrics}


def _engine(model: Path, train: TrainConfig, *, critic: bool) -> FSDPTrainEngine:
    engine_class = SharedEngine if dist.is_initialized() and dist.get_world_size() > 1 else FSDPTrainEngine
    engine = engine_class(model, train, head="value" if critic else "policy")
    # As if it had trained before: tokens are of the versions up to this.
    engine._version = VERSION
    return engine


def weights(directory: Path) -> Mapping[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def learned_on_a_rank(
    rank: int, directory: Path, names: Sequence[str], batches: Sequence[Sequence[Group]], model: Path
) -> dict[str, Any]:
    return {name: learned(name, batches, model, directory / name) for name in names}


def comparable(report: Mapping[str, Any]) -> list[dict[str, float]]:
    """The metrics of each batch without those that say how the work was split."""
    metrics = json.loads(json.dumps(report["metrics"]))
    return [{k: v for k, v in row.items() if k.removeprefix("critic/") not in OF_PACKING} for row in metrics]
