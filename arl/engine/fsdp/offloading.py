"""Where the tensors of a train engine are: on its device, or in the CPU's memory while servers have the device."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

from arl.engine.fsdp.policy import Reference

logger = logging.getLogger(__name__)


class Residence:
    """Moves a sharded module, its optimizer's state and its reference away from `device` and back.

    In the CPU's memory they look as with train.cpu_offload: they can be copied, and checkpoints read into them.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        reference: Reference,
        device: torch.device,
        *,
        is_offloaded: bool,
    ) -> None:
        """is_offloaded: FSDP keeps everything in the CPU's memory, and brings each layer itself."""
        self._module = module
        self._optimizer = optimizer
        self._reference = reference
        self._device = device
        self._has_none = is_offloaded or device.type == "cpu"
        self.is_away = False
        self._moved: list[tuple[torch.Tensor, str]] = []
        """The parts of the optimizer's state that were on the device; others, such as counts, never are."""

    def leave(self) -> None:
        """Idempotent. Gathered layers have to be released before."""
        if self.is_away:
            return
        self.is_away = True
        if self._has_none:
            logger.info("nothing moves between turns: what is trained is in the CPU's memory")
            return
        self.move(lambda tensor: tensor.to("cpu"))
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def come_back(self) -> None:
        """Idempotent."""
        if self.is_away and not self._has_none:
            self.move(lambda tensor: tensor.to(self._device))
        self.is_away = False

    def move(self, to: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """to: a copy of a tensor elsewhere. Parameters stay the objects that they are."""
        if not self._moved:
            states = self._optimizer.state.items()
            self._moved = [
                (p, name)
                for p, state in states
                for name, value in state.items()
                if isinstance(value, torch.Tensor) and value.device.type == self._device.type and value.ndim
            ]
        self._module._apply(to)  # as Module.to does; FSDP follows
        for parameter, name in self._moved:
            state = self._optimizer.state[parameter]
            state[name] = to(state[name])
        self._reference.move(to)
