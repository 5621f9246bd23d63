"""The memory that the weights and the caches of a server occupy: let go of while a trainer needs it, and taken again.

Tensors stay the objects that they are, in the model and in the fused decoder beside it: only their memory goes and
comes. What it then holds is undefined, so nothing is computed until all weights have been loaded again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable
from typing import Literal, get_args

import torch
from torch import nn

from arl.engine.local.slot_attention import SlotCache
from arl.engine.local.weight_receiver import WeightsError, named

MemoryPart = Literal["kv_cache", "weights"]
"""What can be let go of by itself, as SGLang names it."""
PARTS: tuple[MemoryPart, ...] = get_args(MemoryPart)


class Occupation:
    """The memory of one model and of its slot cache. Belongs to one thread at a time."""

    def __init__(self, model: nn.Module, cache: SlotCache) -> None:
        """Call `with_own_memory` on the model before anything else refers to its parameters."""
        self._model = model
        self._cache = cache
        self._sizes: dict[torch.UntypedStorage, int] = {}
        """The storages that were let go of, and how many bytes each had."""
        self.released: frozenset[MemoryPart] = frozenset()
        """What is let go of now."""
        self.lacks_weights = False
        """The weights are let go of, or not loaded again since."""

    @property
    def held_bytes(self) -> dict[MemoryPart, int]:
        weights = sum(storage.nbytes() for storage in _storages(self._model.parameters()))
        return {"kv_cache": self._cache.num_bytes, "weights": weights}

    def release(self, parts: Collection[MemoryPart]) -> None:
        """Parts that are released already stay so."""
        if "kv_cache" in parts and "kv_cache" not in self.released:
            self._cache.release()
        if "weights" in parts and "weights" not in self.released:
            self._sizes = {storage: storage.nbytes() for storage in _storages(self._model.parameters())}
            for storage in self._sizes:
                storage.resize_(0)
            self.lacks_weights = True
        self.released |= frozenset(parts)
        _give_back(self._cache.device)

    def resume(self, parts: Collection[MemoryPart]) -> None:
        """Parts that are held already stay so."""
        if "weights" in parts and "weights" in self.released:
            for storage, size in self._sizes.items():
                storage.resize_(size)
            self._sizes = {}
        if "kv_cache" in parts and "kv_cache" in self.released:
            self._cache.resume()
        self.released -= frozenset(parts)

    def check(self, names: Iterable[str]) -> None:
        """Raise WeightsError unless tensors of these names can be loaded now: all of them, if none is there."""
        if "weights" in self.released:
            raise WeightsError("the weights' memory is released; call /resume_memory_occupation before loading")
        known = {name for name, _ in self._model.named_parameters()}
        if self.lacks_weights and (missing := sorted(known - set(names))):
            raise WeightsError(
                f"the weights were released, so all must be loaded again, and {named(missing)} is missing"
            )

    def note_load(self) -> None:
        """All weights are there."""
        self.lacks_weights = False


def with_own_memory(model: nn.Module) -> nn.Module:
    """The model, with its parameters in memory that can be let go of: those that were mapped from a file cannot."""
    for parameter in model.parameters():
        if not parameter.untyped_storage().resizable():
            parameter.data = parameter.data.clone()
    return model


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Each storage once, though several tensors may be parts of it."""
    return list({tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}.values())


def _give_back(device: torch.device) -> None:
    """Let the system have what torch, or the C library, would keep for later."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc alone has it
        trim(0)
