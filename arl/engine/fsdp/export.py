"""Writes the weights of a train engine's checkpoint as a model directory, without building the engine.

It holds the model once in float32, and once as files have it: no optimizer, no server, no GPU.
"""

from __future__ import annotations

from pathlib import Path

import torch

from arl.api.errors import ConfigError
from arl.api.settings.engines import LoRAConfig
from arl.engine.fsdp.lora import Adapters, LoRAOrigin
from arl.engine.fsdp.model import LoadedModel, ModelWriter, load_model
from arl.engine.fsdp.parallel import ProcessGroupLease
from arl.engine.fsdp.policy import Policy
from arl.engine.fsdp.saving import load_weights, read_progress
from arl.engine.fsdp.snapshot import SnapshotTaker


def export_weights(checkpoint: Path, model: str, directory: Path, *, adapter: bool) -> int:
    """Write a Hugging Face directory, whole or not at all; returns its bytes.

    checkpoint: of a policy, written by any number of ranks. model: what the run began from. adapter: write the adapters
    alone, in peft's format; else they are merged into the model. Raises ConfigError if there are none, CheckpointError,
    ModelError, TransportError if the directory cannot be written.
    """
    progress = read_progress(checkpoint)
    if adapter and progress.lora is None:
        raise ConfigError(f"{checkpoint} has no adapters: the run trained the whole model; export it without --adapter")
    device = torch.device("cpu")
    lease = ProcessGroupLease(device.type)
    try:
        loaded = load_model(model)
        writer = ModelWriter(loaded)
        adapters = _adapters(loaded, model, progress.lora)
        policy = Policy(loaded.model)
        for name, parameter in policy.named_parameters():
            if name in progress.frozen:
                parameter.requires_grad_(False)
        load_weights(checkpoint, policy, adapters)
        taker = SnapshotTaker(writer, device, adapters)
        try:
            snapshot = taker.take_adapter(progress.version) if adapter else taker.take(progress.version)
            return snapshot.write(directory)
        finally:
            taker.close()
    finally:
        lease.release()


def _adapters(loaded: LoadedModel, model: str, origin: LoRAOrigin | None) -> Adapters | None:
    """Adapters in the places of those that were trained; their values are read afterwards, so any seed will do."""
    if origin is None:
        return None
    config = LoRAConfig(rank=origin.rank, alpha=origin.alpha, target_modules=tuple(origin.target_modules))
    return Adapters(loaded, model, config, "float32", seed=0)
