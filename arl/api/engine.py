"""The two engines behind which everything concrete hides: one samples, one trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from arl.api.types import ModelRequest, ModelResponse, TrainSequence

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of a model as servers know it: its name in checkpoints, its dtype ("bfloat16") and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGroup:
    """A process group through which one server receives weights: its sender is rank 0 and listens at address:port.

    The server's ranks are 1..world_size-1. backend: gloo (CPU tensors) or nccl.
    """

    name: str
    address: str
    port: int
    world_size: int
    backend: str


class WeightServer(Protocol):
    """One inference server, as a weight update sees it. Calls raise ServerError; timeouts are the caller's."""

    @property
    def address(self) -> str: ...

    @property
    def num_ranks(self) -> int:
        """How many processes of the server take part in a WeightGroup: its tensor-parallel size."""
        ...

    async def load_directory(self, directory: Path, *, version: int, flush_cache: bool) -> None:
        """Load a model directory that the server sees under this absolute path, and label it with the version."""
        ...

    async def join_group(self, group: WeightGroup) -> None:
        """Returns when sender and server have met, so the sender has to join at the same time."""
        ...

    async def leave_group(self, name: str) -> None: ...

    async def begin_update(self) -> None: ...

    async def receive(
        self, specs: Sequence[TensorSpec], group: WeightGroup, *, version: int | None, flush_cache: bool
    ) -> None:
        """Receive these tensors, of one dtype, end to end in one broadcast of bytes, while the sender sends it.

        version: what the server holds with them; None if others are still to come, and it holds a mixture.
        """
        ...

    async def end_update(self) -> None:
        """Serve what was received since begin_update."""
        ...


class WeightUpdate(Protocol):
    """New weights on their way to the servers. An inference engine calls both methods for each server it updates.

    It may do so for several servers at once, for one again after a failure, and later for one that was away: until a
    newer update was delivered, an update can be loaded.
    """

    @property
    def version(self) -> int: ...

    @property
    def num_bytes(self) -> int:
        """What was moved for this version so far, all servers together."""
        ...

    async def prepare(self, server: WeightServer) -> None:
        """Bring what the server needs next to it while it still generates. Raises ServerError, TransportError."""
        ...

    async def load(self, server: WeightServer, *, flush_cache: bool) -> None:
        """Make the (paused) server hold `version`, wholly: when this raises, it must not be served from."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskWeights:
    """A WeightUpdate that is there already: a Hugging Face model directory (an absolute path) of `num_bytes`."""

    version: int
    directory: Path
    num_bytes: int = 0

    async def prepare(self, server: WeightServer) -> None: ...

    async def load(self, server: WeightServer, *, flush_cache: bool) -> None:
        await server.load_directory(self.directory, version=self.version, flush_cache=flush_cache)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStats:
    """What a weight update cost: pause_s is the longest time a server did not generate, load_s the longest load."""

    pause_s: float
    load_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishStats:
    """One publish, as the trainer sees it. snapshot_s: the trainer waited. transfer_s: from snapshot to all served."""

    version: int
    snapshot_s: float
    transfer_s: float
    pause_s: float
    num_bytes: int


class InferenceEngine(Protocol):
    """Samples from the current policy. All methods belong to one event loop."""

    @property
    def version(self) -> int:
        """The published version: the newest that every serving server holds."""
        ...

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Continue `request.input_ids`. Weight updates in between are invisible but for the versions.

        Cancelling the call aborts the request on its server. Raises PromptTooLongError, RequestTimeoutError,
        ServerError when no server can answer, EngineClosedError.
        """
        ...

    async def pause(self) -> None:
        """Stop generating; requests keep waiting until resume."""
        ...

    async def resume(self) -> None: ...

    async def update_weights(self, update: WeightUpdate) -> UpdateStats:
        """Bring every server to `update.version` while requests are in flight. `version` is that when it returns.

        Raises ServerError if no server holds it, and ValueError for a version below the one served.
        """
        ...

    async def aclose(self) -> None:
        """Abort what runs and release connections. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedTokens:
    """The trained tokens of one microbatch, flat: every field has length M = number of tokens with loss_mask 1.

    behavior_logprobs, proximal_logprobs, advantages, loss_weights float32[M]; versions int64[M];
    sequence_ids int64[M]: which sequence of the microbatch (0..S-1) each token belongs to, ascending.
    """

    behavior_logprobs: torch.Tensor
    proximal_logprobs: torch.Tensor
    advantages: torch.Tensor
    loss_weights: torch.Tensor
    versions: torch.Tensor
    sequence_ids: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLosses:
    """What a loss gives back: loss float32[M] per trained token, not yet weighted by loss_weights, with gradient.

    means: name -> float[M], detached, averaged over all trained tokens of the minibatch.
    maxima: name -> float[M], detached, of which the largest value is reported.
    """

    loss: torch.Tensor
    means: Mapping[str, torch.Tensor]
    maxima: Mapping[str, torch.Tensor]


class TokenLoss(Protocol):
    """A loss as a pure, picklable function of one microbatch's trained tokens."""

    def __call__(self, current_logprobs: torch.Tensor, entropy: torch.Tensor, tokens: PackedTokens) -> TokenLosses:
        """current_logprobs float32[M] with gradient, entropy float32[M] of the sampling distribution, in nats."""
        ...


class Snapshot(Protocol):
    """The weights of one version, copied aside. Methods block, and may be called beside training from any thread."""

    @property
    def version(self) -> int: ...

    def write(self, directory: Path) -> int:
        """Write a Hugging Face model directory (weights, config, tokenizer), whole or not at all; returns its bytes."""
        ...

    def release(self) -> None:
        """Let go of the memory. Idempotent."""
        ...


class Saving(Protocol):
    """A checkpoint being written beside training."""

    def wait(self) -> None:
        """Block until it is on the disk. Raises CheckpointError; earlier checkpoints are then untouched."""
        ...


class TrainEngine(Protocol):
    """Holds the weights being trained. Calls block, and come from one thread."""

    @property
    def version(self) -> int:
        """The number of batches trained."""
        ...

    def forward(self, sequences: Sequence[TrainSequence]) -> list[torch.Tensor]:
        """Logprobs under the current weights, float32[T] for each sequence; 0.0 where loss_mask is 0. No gradient."""
        ...

    def train_batch(self, minibatches: Sequence[Sequence[TrainSequence]], loss: TokenLoss) -> dict[str, float]:
        """One optimizer step for each minibatch, then version += 1. Metrics are means over the minibatches."""
        ...

    def snapshot(self) -> Snapshot:
        """Copy the weights aside, as servers hold them. Later steps do not change the copy."""
        ...

    def save(self, directory: Path) -> Saving:
        """Copy aside everything that `load` needs to continue bit for bit: weights, optimizer, schedule, version, RNG.

        `directory` is written beside later steps, and is complete when the saving has ended.
        """
        ...

    def load(self, directory: Path) -> None:
        """Continue from `save`'s directory. Raises CheckpointError naming what does not fit."""
        ...

    def close(self) -> None: ...


class WeightTransport(Protocol):
    """Moves weights from a TrainEngine to an InferenceEngine: take a snapshot, then deliver it beside training."""

    def snapshot(self, engine: TrainEngine) -> WeightUpdate:
        """Copy the weights aside: the one part of a publish that training waits for."""
        ...

    async def deliver(self, update: WeightUpdate, engine: InferenceEngine) -> UpdateStats:
        """Bring the servers to the snapshot's version, then let go of what is no longer needed."""
        ...

    def discard(self, update: WeightUpdate) -> None:
        """Let go of a snapshot that will not be delivered, as a newer one took its place."""
        ...

    def close(self) -> None: ...
