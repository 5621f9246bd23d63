"""Contracts of the engine that samples, the engine that trains, and the weights that travel between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from arl.api.train_engine import WeightSource
from arl.api.types import ModelRequest, ModelResponse

if TYPE_CHECKING:
    import numpy as np

    from arl.api.routed_experts import Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of a model, as servers know it."""

    name: str
    """The tensor's name in checkpoints."""
    dtype: str
    """Such as "bfloat16"."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGroup:
    """A process group through which a server receives weights: its sender is rank 0 and listens at address:port."""

    name: str
    address: str
    port: int
    world_size: int
    """The sender, and the server's ranks, which follow it from 1."""
    backend: str
    """gloo (CPU tensors), nccl, or nccl_by_id."""
    unique_id: str | None = None
    """NCCL's id of the group, in base64, for servers that meet by it instead of at address:port."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightProbe:
    """A trainer's logprobs of fixed tokens under one version: a server that holds the version has the same."""

    version: int
    token_ids: tuple[int, ...]
    logprobs: np.ndarray
    """float64[T - 1]: of each token except the first, at temperature 1."""
    is_exact: bool
    """The trainer computes in float32."""


class WeightServer(Protocol):
    """One inference server, as a weight update sees it. Calls raise ServerError; timeouts are the caller's."""

    @property
    def address(self) -> str: ...

    @property
    def num_ranks(self) -> int:
        """How many processes of the server take part in a WeightGroup: its tensor-parallel size."""
        ...

    @property
    def meets_by_id(self) -> bool:
        """It takes part in groups that have a unique_id, and in no others."""
        ...

    async def load_directory(self, directory: Path, *, version: int, flush_cache: bool) -> None:
        """Load a model directory that the server sees under this absolute path, and label it with the version."""
        ...

    async def join_group(self, group: WeightGroup) -> None:
        """Join the group. Returns when sender and server have met, so the sender must join at the same time."""
        ...

    async def leave_group(self, name: str) -> None: ...

    async def begin_update(self) -> None: ...

    async def receive(
        self, specs: Sequence[TensorSpec], group: WeightGroup, *, version: int | None, flush_cache: bool
    ) -> None:
        """Receive these tensors while the sender sends them: one dtype, end to end in one broadcast of bytes.

        version: the version that they complete; None while more tensors are to come and the server holds a mixture.
        """
        ...

    async def end_update(self) -> None:
        """Serve the weights received since begin_update."""
        ...

    async def load_adapter(self, name: str, directory: Path) -> None:
        """Load an adapter (peft's files, an absolute path) beside the model, for requests that carry its name.

        Generation goes on. A name always stands for the same adapter, and loading a known adapter does nothing.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter that no request will name again. Unloading an unknown adapter does nothing."""
        ...


class WeightUpdate(Protocol):
    """New weights on their way to the servers. An inference engine calls `prepare` and `load` for each server.

    It may update several servers at once, retry a server after a failure, and update an absent server later. An update
    can be loaded until a newer one has been delivered.
    """

    @property
    def version(self) -> int: ...

    @property
    def adapter(self) -> str | None:
        """The adapter that requests name for this version once it is prepared; None: the server's own weights."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes moved for this version so far; a send that servers share counts once."""
        ...

    async def prepare(self, server: WeightServer) -> None:
        """Bring the weights next to the server while it still generates. Raises ServerError, TransportError."""
        ...

    async def load(self, server: WeightServer, *, flush_cache: bool) -> None:
        """Load all of `version` into the paused server. If this raises, the server must not serve."""
        ...


@runtime_checkable
class SharedUpdate(WeightUpdate, Protocol):
    """A WeightUpdate that can be brought next to servers before their turns. It works without `expect`, too."""

    def expect(self, servers: Sequence[WeightServer]) -> None:
        """These servers are about to be prepared and loaded, one after another."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskWeights:
    """A WeightUpdate from an existing Hugging Face model directory, or from an adapter's (absolute paths)."""

    version: int
    directory: Path
    num_bytes: int = 0
    adapter: str | None = None
    """The name of the adapter that the directory holds; None if it holds a model."""

    async def prepare(self, server: WeightServer) -> None:
        if self.adapter is not None:
            await server.load_adapter(self.adapter, self.directory)

    async def load(self, server: WeightServer, *, flush_cache: bool) -> None:
        """An adapter needs no loading, and no flushing: prefix caches keep adapters apart."""
        if self.adapter is None:
            await server.load_directory(self.directory, version=self.version, flush_cache=flush_cache)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStats:
    """The cost of a weight update."""

    pause_s: float
    """The longest time for which one server did not generate."""
    load_s: float
    """The longest load."""
    resume_s: float = 0.0
    """Of servers that had let go of their memory: how long the slowest took to get it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishStats:
    """One publish, as the trainer sees it."""

    version: int
    snapshot_s: float
    """How long the trainer waited for the snapshot."""
    transfer_s: float
    """From the snapshot until every server served the version."""
    pause_s: float
    """The longest time for which one server did not generate."""
    num_bytes: int
    resume_s: float = 0.0
    """UpdateStats's."""


class Sampler(Protocol):
    """The current policy, as a workflow samples from it. It shows nothing else of the engine."""

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Continue `request.input_ids`. A weight update during the call shows in the response's versions alone.

        Cancelling the call aborts the request on its server. Raises PromptTooLongError, RequestTimeoutError,
        EngineClosedError, and ServerError when no server can answer.
        """
        ...


class InferenceEngine(Sampler, Protocol):
    """Samples from the current policy, and takes new weights. All methods belong to one event loop."""

    @property
    def version(self) -> int:
        """The published version: the newest that every serving server holds."""
        ...

    async def pause(self) -> None:
        """Stop generating; requests keep waiting until resume."""
        ...

    async def resume(self) -> None: ...

    async def update_weights(self, update: WeightUpdate) -> UpdateStats:
        """Bring every server to `update.version` while requests are in flight. On return `version` is the new one.

        Raises ServerError if no server holds the new version, and ValueError if it is below the one served.
        """
        ...

    def counters(self) -> Mapping[str, float]:
        """The state of its servers, for logs: metric name -> number. Empty for an engine without servers."""
        ...

    async def aclose(self) -> None:
        """Abort running requests and release connections. Idempotent."""
        ...


@runtime_checkable
class ColocatedServers(Protocol):
    """An InferenceEngine whose servers share devices with the trainer, which take turns."""

    @property
    def is_asleep(self) -> bool:
        """The servers have let go of their memory."""
        ...

    async def release_memory(self) -> None:
        """Pause the servers and let them let go of weights and caches. The next update_weights ends that.

        On return the devices are the trainer's. Requests wait, and their time stands still.
        """
        ...


MODEL_SIZES = ("hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size", "num_attention_heads")
"""Keys of config.json that distinguish models of one type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model that inference servers should serve, as far as it is known."""

    name: str
    vocab_size: int | None = None
    """Token ids are below this."""
    end_token_ids: frozenset[int] = frozenset()
    """The model's own end-of-sequence tokens."""
    model_type: str | None = None
    shape: Mapping[str, int | None] = field(default_factory=dict[str, int | None])
    """The values of MODEL_SIZES in its config.json."""
    routing: Routing | None = None
    """Set for a mixture of experts whose routes are wanted."""


class WeightTransport(Protocol):
    """Moves weights from training to an InferenceEngine: take a snapshot, then deliver it during training."""

    def snapshot(self, engine: WeightSource) -> WeightUpdate:
        """Copy the weights. Training waits for this part of a publish alone."""
        ...

    async def deliver(self, update: WeightUpdate, engine: InferenceEngine) -> UpdateStats:
        """Bring the servers to the snapshot's version, then free what they no longer need."""
        ...

    def discard(self, update: WeightUpdate) -> None:
        """Free a snapshot that a newer one replaced before its delivery."""
        ...

    def close(self) -> None: ...
