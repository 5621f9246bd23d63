"""A train engine that shows what a step does: its gradients and its updates.

It runs in one process, and needs the memory of two more copies of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from arl.api.train_engine import TokenLoss, TrainSequence
from arl.engine.fsdp.minibatch import MinibatchTally
from arl.engine.fsdp.policy import local_shard
from arl.engine.fsdp.train_engine import FSDPTrainEngine


class WatchedEngine(FSDPTrainEngine):
    """An FSDPTrainEngine of one rank."""

    gradients: Mapping[str, torch.Tensor]
    """Parameter name -> the sum of the gradients of the last train_batch's minibatches, before clipping."""
    updates: Mapping[str, torch.Tensor]
    """How the last train_batch changed the parameters."""

    def train_batch(self, minibatches: Sequence[Sequence[TrainSequence]], loss: TokenLoss) -> dict[str, float]:
        before = {name: shard.clone() for name, shard in self._shards().items()}
        self.gradients = {name: torch.zeros_like(shard) for name, shard in before.items()}
        metrics = super().train_batch(minibatches, loss)
        self.updates = {name: shard - before[name] for name, shard in self._shards().items()}
        return metrics

    @torch.no_grad()
    def take_state(self, other: WatchedEngine) -> None:
        """Go on from the other's weights, optimizer, reference and version. Both train the same parameters."""
        for name, parameter in self._trained.items():
            theirs = other._trained[name]
            local_shard(parameter.detach()).copy_(local_shard(theirs.detach()))
            for key, value in self._optimizer.state[parameter].items():
                local_shard(value).copy_(local_shard(other._optimizer.state[theirs][key]))
        for name, value in self._reference.values.items():
            if name in other._reference.values:
                local_shard(value).copy_(local_shard(other._reference.values[name]))
        self._version, self._num_updates = other._version, other._num_updates

    def _update(self, tally: MinibatchTally) -> None:
        for name, parameter in self._trained.items():
            if parameter.grad is not None:
                self.gradients[name].add_(local_shard(parameter.grad))
        super()._update(tally)

    def _shards(self) -> dict[str, torch.Tensor]:
        return {name: local_shard(p.detach()) for name, p in self._trained.items()}
