"""Inference servers, and how weights reach them, as settings."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from arl.api.settings import Section

PauseMode = Literal["in_place", "retract", "abort"]


class ClientConfig(Section):
    """What every inference engine's client side shares."""

    request_timeout_s: PositiveFloat = 600.0
    """Longest time one agenerate may take, pauses and retries included."""
    max_retries: NonNegativeInt = 3
    """How often a request is sent again after its server failed, each time keeping the tokens it already has."""
    pause_mode: PauseMode = "in_place"
    """What a weight update does to running requests: in_place keeps their KV cache, retract recomputes it under the
    new weights, abort returns partial outputs that the client continues."""
    update_timeout_s: PositiveFloat = 120.0
    """Longest time one server may take to load new weights before it is fenced off."""
    update_order: Literal["all", "rolling"] = "all"
    """all: a weight update reaches every server at once. rolling: one after another, while the others generate."""

    @property
    def absence_timeout_s(self) -> float:
        """Longest time that a weight update waits for a server to come back where none is left."""
        return self.update_timeout_s


class StartedServersConfig(ClientConfig):
    """What servers that arl starts and stops have in common."""

    num_servers: PositiveInt = 1
    """How many servers to start, each a process of its own on a free port."""
    max_restarts: NonNegativeInt = 3
    """How often a server that died is started again. Its requests go to the others meanwhile."""
    startup_timeout_s: PositiveFloat = 120.0
    """Longest time a server may take until it answers /health."""

    @property
    def absence_timeout_s(self) -> float:
        return self.startup_timeout_s + self.update_timeout_s

    @model_validator(mode="after")
    def _an_order_needs_several(self) -> Self:
        if self.update_order == "rolling" and self.num_servers == 1:
            raise ValueError("update_order is rolling, but num_servers is 1, and none generates meanwhile; start more")
        return self


class LocalEngineConfig(StartedServersConfig):
    """The embedded server: arl starts it, as processes of its own, and stops it."""

    kind: Literal["local"] = "local"
    num_threads: PositiveInt = 1
    """CPU threads for each server's model."""
    device: str = "cpu"
    """The torch device that the servers compute on: cpu, cuda, cuda:0, ..."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the servers hold weights in and compute in."""
    max_running_requests: PositiveInt = 128
    """How many requests one server decodes at once; more wait in its queue."""
    context_length: PositiveInt | None = None
    """Longest prompt plus response in tokens; the model's own limit (at most 4096) when unset."""


class SGLangEngineConfig(ClientConfig):
    """SGLang servers, already running."""

    kind: Literal["sglang"] = "sglang"
    addresses: tuple[str, ...] = ()
    """Base URLs, such as http://127.0.0.1:30000; all must serve the same model."""
    api_key: str | None = None
    """Sent as a bearer token, if the servers ask for one."""

    @model_validator(mode="after")
    def _has_addresses(self) -> Self:
        if not self.addresses:
            raise ValueError("addresses is empty; name at least one server, such as http://127.0.0.1:30000")
        return self


class SGLangProcessesConfig(StartedServersConfig):
    """SGLang servers that arl starts on this machine, as processes of its own, and stops."""

    kind: Literal["sglang_processes"] = "sglang_processes"
    python: Path = Path(sys.executable)
    """The Python interpreter that has sglang; its environment may be another than arl's."""
    gpus_per_server: NonNegativeInt = 1
    """GPUs of this machine for each server, in order: its tensor-parallel size. 0: servers on the CPU."""
    first_gpu: NonNegativeInt = 0
    """The GPUs before this one are left alone, for the trainer."""
    arguments: tuple[str, ...] = ()
    """More arguments for each `python -m sglang.launch_server`, such as --mem-fraction-static 0.8."""
    startup_timeout_s: PositiveFloat = 600.0
    """Longest time a server may take until it answers /health."""


EngineConfig = Annotated[LocalEngineConfig | SGLangEngineConfig | SGLangProcessesConfig, Field(discriminator="kind")]


class DiskWeightsConfig(Section):
    """Servers load a model directory."""

    transport: Literal["disk"] = "disk"
    directory: Path | None = None
    """Where model directories are written; must be visible to every server. Unset: a RAM-backed directory of this
    machine, or the run directory where there is none."""


class DistributedWeightsConfig(Section):
    """Servers receive tensors through a process group that they share with the trainer: no file is written."""

    transport: Literal["distributed"] = "distributed"
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """auto: nccl where the trainer is on CUDA, gloo where it is on a CPU. All servers have to support it."""
    address: str | None = None
    """Where servers on other machines reach the trainer. Unset: the trainer's own address as its network says it."""
    bucket_bytes: PositiveInt = 256 << 20
    """Tensors are sent in buckets of at most this size; a larger tensor is one of its own."""


class DeltaWeightsConfig(Section):
    """Servers on other machines get what changed since the version they hold, exact to the bit, and small at the
    learning rates of RL. A mirror beside each server patches its copy of the model, which the server then loads."""

    transport: Literal["delta"] = "delta"
    mirrors: dict[str, str] = Field(default_factory=dict)
    """Server address -> address of the mirror on its machine, started by `python -m arl.engine.weights.mirror`.
    A server without one has to see this machine's directory, as with disk."""
    api_key: str | None = None
    """Sent to the mirrors as a bearer token, if they ask for one."""
    directory: Path | None = None
    """Where model directories are written on this machine, as with disk."""

    @model_validator(mode="after")
    def _has_mirrors(self) -> Self:
        if not self.mirrors:
            raise ValueError(
                "mirrors is empty; without a mirror there is nobody to send a delta to. Servers of this machine load "
                "whole directories from memory: use transport=disk"
            )
        return self


class AdapterWeightsConfig(Section):
    """Servers keep the model, and load each version's adapter beside it while they generate: nothing is paused, and a
    request keeps the adapter that it began with. For train.lora; without it the trainer has no adapters."""

    transport: Literal["adapter"] = "adapter"
    directory: Path | None = None
    """Where adapters are written, as with disk."""


WeightsConfig = Annotated[
    DiskWeightsConfig | DistributedWeightsConfig | DeltaWeightsConfig | AdapterWeightsConfig,
    Field(discriminator="transport"),
]
"""How weights reach the servers."""


def check_fused(targets: set[str]) -> None:
    """Raise ValueError if SGLang would load no adapter of these layers, of which it holds some as one."""
    for layers, needed in (({"q_proj", "k_proj", "v_proj"}, {"q_proj", "v_proj"}), ({"up_proj"}, {"gate_proj"})):
        if targets & layers and (missing := needed - targets):
            raise ValueError(
                f"train.lora.target_modules lacks {' and '.join(sorted(missing))}: SGLang holds it together with "
                f"{' and '.join(sorted(targets & layers))}, and takes adapters of both or none. Name it too, or use "
                "weights.transport=disk"
            )
