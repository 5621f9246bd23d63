"""AdapterTransport: the base model stays in the servers, and what is published is an adapter, a new one each time.

    snapshot --written--> directory in peft's format --/load_lora_adapter NAME-vT--> server, beside what it runs
                                                      --NAME-vT in new requests----> version T

A server generates on while it loads an adapter; requests in flight end under the one that they named. So nothing is
paused, and a publish costs what reading a few megabytes costs. Each version is a name of its own, of this run alone:
no server, cache or former run can take one adapter for another. Version 0 is an adapter too (B is 0), so that no
request goes to the bare model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from arl.api.config import AdapterWeightsConfig, Config, DiskWeightsConfig, SGLangProcessesConfig
from arl.api.engine import InferenceEngine, TrainEngine, UpdateStats, WeightServer, WeightUpdate
from arl.api.errors import TransportError
from arl.api.types import new_id
from arl.engine.weights.disk import DiskTransport, WrittenWeights


class AdapterSnapshot(Protocol):
    """The adapters of one version, copied aside, for servers that hold the model which these belong to."""

    @property
    def version(self) -> int: ...

    def write_adapter(self, directory: Path) -> int:
        """Write a directory in peft's format, whole or not at all; returns its bytes. Raises TransportError after
        `release`."""
        ...

    def release(self) -> None:
        """Let go of the memory. Idempotent."""
        ...


@runtime_checkable
class AdapterEngine(Protocol):
    """A train engine that can copy adapters aside without the model, which is large and stays as it is."""

    def snapshot_adapter(self) -> AdapterSnapshot:
        """Later steps do not change the copy. Raises ConfigError where there are none, without train.lora."""
        ...


class AdapterTransport:
    """Writes each snapshot's adapter to a directory of its own, where DiskTransport would write a model."""

    def __init__(self, config: AdapterWeightsConfig, run_dir: Path) -> None:
        self._disk = DiskTransport(DiskWeightsConfig(directory=config.directory), run_dir)
        self._name = f"arl-{new_id()[:12]}"

    def snapshot(self, engine: TrainEngine) -> WrittenAdapter:
        """Copy the weights aside; nothing is written yet. Raises TransportError for an engine without adapters."""
        if not isinstance(engine, AdapterEngine):
            raise TransportError(
                f"{type(engine).__name__} has no adapters to publish; train with train.lora, or use "
                "weights.transport=disk"
            )
        snapshot = engine.snapshot_adapter()
        return WrittenAdapter(self._disk.take(_AdapterAlone(snapshot)), f"{self._name}-v{snapshot.version}")

    async def deliver(self, update: WeightUpdate, engine: InferenceEngine) -> UpdateStats:
        """Bring the servers to `update`, then remove the files of those before it: servers have read them."""
        return await self._disk.deliver(update, engine)

    def discard(self, update: WeightUpdate) -> None:
        """Let go of a snapshot that will not be delivered. Idempotent."""
        if isinstance(update, WrittenAdapter):
            self._disk.discard(update.written)

    def close(self) -> None:
        """Remove all files. Idempotent."""
        self._disk.close()


def sglang_options(config: Config) -> list[str]:
    """What SGLang servers have to be started with for this run's adapters; nothing for a run without.

    A server computes as many adapters at once as there are versions in flight, max_staleness + 1, and the model alone,
    which it checks its health with; one more does not have to wait for a place.
    """
    if not isinstance(config.weights, AdapterWeightsConfig) or (lora := config.train.lora) is None:
        return []
    is_every = lora.target_modules == "all-linear"
    targets = ["all"] if is_every else sorted({name.rpartition(".")[2] for name in lora.target_modules})
    options = ["--enable-lora", "--max-lora-rank", str(lora.rank), "--lora-target-modules", *targets]
    options += ["--max-loras-per-batch", str(config.rollout.max_staleness + 3)]
    is_on_cpu = isinstance(config.engine, SGLangProcessesConfig) and config.engine.gpus_per_server == 0
    return [*options, "--lora-backend", "torch_native"] if is_on_cpu else options


class WrittenAdapter:
    """A WeightUpdate that is written when the first server prepares for it, once for all of them."""

    def __init__(self, written: WrittenWeights, name: str) -> None:
        self.version = written.version
        self.adapter = name
        self.written = written

    @property
    def num_bytes(self) -> int:
        return self.written.num_bytes

    async def prepare(self, server: WeightServer) -> None:
        """Have the server hold the adapter, beside those that its requests name. Raises ServerError, TransportError."""
        await self.written.prepare(server)
        if (directory := self.written.directory) is None:
            raise TransportError(f"version {self.version} was not written")
        await server.load_adapter(self.adapter, directory)

    async def load(self, server: WeightServer, *, flush_cache: bool) -> None:
        """Nothing is left to do: SGLang's prefix cache, and the embedded server's, keep adapters apart."""


@dataclass(frozen=True, slots=True)
class _AdapterAlone:
    """A snapshot of adapters, as one that DiskTransport writes."""

    snapshot: AdapterSnapshot

    @property
    def version(self) -> int:
        return self.snapshot.version

    def write(self, directory: Path) -> int:
        return self.snapshot.write_adapter(directory)

    def release(self) -> None:
        self.snapshot.release()
