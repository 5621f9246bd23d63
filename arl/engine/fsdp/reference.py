"""A reference policy on the train engine: a second set of values of what is trained, sharded alike.

    forward("reference_logprobs"):   weights <--exchanged--> reference,  forward pass,  exchanged back

Only what is trained is held twice. So with adapters it costs next to nothing: the frozen model is both policies'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from arl.engine.fsdp.optimizer import local_shard


class Reference:
    """The reference's values of a sharded module's trained parameters; none at first. Each rank holds its shards."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._values: dict[str, torch.Tensor] = {}

    @property
    def is_held(self) -> bool:
        return bool(self._values)

    @property
    def values(self) -> Mapping[str, torch.Tensor]:
        """By the parameters' names, and sharded as they are; checkpoints are read into them."""
        return self._values

    @torch.no_grad()
    def update(self, share: float) -> None:
        """reference += share * (current - reference), in place; the first call makes a copy, whatever the share."""
        if not 0 < share <= 1:
            raise ValueError(f"the reference moves by a share of {share}; it must be above 0 and at most 1")
        trained = self._trained()
        if not self._values:
            self._values = {name: p.detach().clone() for name, p in trained.items()}
            return
        for name, value in self._values.items():
            local_shard(value).lerp_(local_shard(trained[name].detach()), share)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The module has the reference's values meanwhile, and afterwards its own again, to the bit.

        No gathered weights may be left, neither before nor at the end: those would be the other's.
        """
        trained = self._trained()
        exchanged: list[str] = []
        # Made once and before all else: putting the module's own values back must not fail for lack of memory.
        scratch = self._scratch()
        try:
            for name in self._values:
                self._exchange(name, trained[name], scratch)
                exchanged.append(name)
            yield
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # offloaded weights may still be on their way from the memory that is written
            for name in exchanged:
                self._exchange(name, trained[name], scratch)

    @torch.no_grad()
    def _exchange(self, name: str, parameter: nn.Parameter, scratch: torch.Tensor) -> None:
        """In place, as sharding reads the parameters' own memory."""
        current, other = local_shard(parameter.detach()), local_shard(self._values[name])
        kept = scratch[: current.numel()].view_as(current)
        kept.copy_(current)
        current.copy_(other)
        other.copy_(kept)

    def _scratch(self) -> torch.Tensor:
        """Room for the largest of this rank's shards."""
        shards = [local_shard(value) for value in self._values.values()]
        largest = max(shards, key=torch.Tensor.numel, default=torch.empty(0))
        return torch.empty_like(largest).flatten()

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self._module.named_parameters() if p.requires_grad}
