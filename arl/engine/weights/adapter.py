"""AdapterTransport: the base model stays in the servers, and each publish gives them a new adapter.

    snapshot --written--> directory in peft's format --/load_lora_adapter NAME-vT--> server, beside what it runs
                                                      --NAME-vT in new requests----> version T

A server goes on generating while it loads an adapter; requests in flight end under the adapter that they named. So
nothing is paused, and a publish costs as much as reading a few megabytes. Each version of each run has its own name: no
server, cache or former run can take one adapter for another. Version 0 is an adapter too (B is 0), so no request goes
to the bare model.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from arl.api.config import AdapterWeightsConfig, Config, SGLangProcessesConfig
from arl.api.engine import DiskWeights, Snapshot, TrainEngine, WeightServer
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


class AdapterTransport(DiskTransport):
    """Writes each snapshot's adapter to a directory of its own, where DiskTransport would write a model."""

    def __init__(self, config: AdapterWeightsConfig, run_dir: Path) -> None:
        super().__init__(config, run_dir)
        self._name = f"arl-{new_id()[:12]}"

    def snapshot(self, engine: TrainEngine) -> WrittenAdapter:
        """Copy the adapters aside; nothing is written yet. Raises TransportError for an engine without adapters."""
        if not isinstance(engine, AdapterEngine):
            raise TransportError(
                f"{type(engine).__name__} has no adapters to publish; train with train.lora, or use "
                "weights.transport=disk"
            )
        snapshot = engine.snapshot_adapter()
        name = f"{self._name}-v{snapshot.version}"
        return self._kept(WrittenAdapter(name, _AdapterAlone(snapshot), self._writer, self._write))


def sglang_options(config: Config) -> list[str]:
    """The options that SGLang servers need for this run's adapters; none for a run without adapters.

    A server computes several adapters at once: max_staleness + 1 versions in flight, the bare model for its health
    checks, and one more so that a new version does not wait for a place.
    """
    if not isinstance(config.weights, AdapterWeightsConfig) or (lora := config.train.lora) is None:
        return []
    is_every = lora.target_modules == "all-linear"
    targets = ["all"] if is_every else sorted({name.rpartition(".")[2] for name in lora.target_modules})
    options = ["--enable-lora", "--max-lora-rank", str(lora.rank), "--lora-target-modules", *targets]
    options += ["--max-loras-per-batch", str(config.rollout.max_staleness + 3)]
    is_on_cpu = isinstance(config.engine, SGLangProcessesConfig) and config.engine.gpus_per_server == 0
    return [*options, "--lora-backend", "torch_native"] if is_on_cpu else options


class WrittenAdapter(WrittenWeights):
    """A WeightUpdate that is written when the first server prepares for it, once for all of them."""

    def __init__(
        self, name: str, snapshot: Snapshot, writer: ThreadPoolExecutor, write: Callable[[Snapshot], DiskWeights]
    ) -> None:
        super().__init__(snapshot, writer, write)
        self._name = name

    @property
    def adapter(self) -> str:
        return self._name

    async def prepare(self, server: WeightServer) -> None:
        """Have the server hold the adapter, beside those that its requests name. Raises ServerError, TransportError."""
        await super().prepare(server)
        await server.load_adapter(self.adapter, self.directory)

    async def load(self, server: WeightServer, *, flush_cache: bool) -> None:
        """Nothing is left to do: SGLang's prefix cache, and the embedded server's, keep adapters apart."""


@dataclass(frozen=True, slots=True)
class _AdapterAlone:
    """A snapshot of adapters in the form that DiskTransport writes."""

    snapshot: AdapterSnapshot

    @property
    def version(self) -> int:
        return self.snapshot.version

    def write(self, directory: Path) -> int:
        return self.snapshot.write_adapter(directory)

    def release(self) -> None:
        self.snapshot.release()
