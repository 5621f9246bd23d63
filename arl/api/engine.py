"""Contracts of the engine that samples, the engine that trains, and the weights that travel between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from arl.api.types import TOKEN_FIELDS, ModelRequest, ModelResponse, TrainSequence, fill_unset, unset

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of a model, as servers know it."""

    name: str
    """In checkpoints."""
    dtype: str
    """Such as "bfloat16"."""
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

    async def load_adapter(self, name: str, directory: Path) -> None:
        """Hold an adapter (peft's files, an absolute path) beside the model, for requests that carry its name.

        Generation goes on. A name stands for one adapter for ever; loading a known adapter does nothing.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter that no request will carry any more. Unloading an unknown adapter does nothing."""
        ...


class WeightUpdate(Protocol):
    """New weights on their way to the servers. An inference engine calls both methods for each server that it updates.

    It may do so for several servers at once, for one again after a failure, and later for one that was away. An update
    can be loaded until a newer one was delivered.
    """

    @property
    def version(self) -> int: ...

    @property
    def adapter(self) -> str | None:
        """The adapter that requests must carry for this version; None if the version is the server's own weights.

        Requests can use an adapter as soon as it was prepared: the server is not paused.
        """
        ...

    @property
    def num_bytes(self) -> int:
        """What was moved for this version so far, for all servers together."""
        ...

    async def prepare(self, server: WeightServer) -> None:
        """Bring the weights next to the server while it still generates. Raises ServerError, TransportError."""
        ...

    async def load(self, server: WeightServer, *, flush_cache: bool) -> None:
        """Make the (paused) server hold all of `version`. If this raises, the server must not serve."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskWeights:
    """A WeightUpdate that is there already: a Hugging Face model directory (an absolute path) of `num_bytes`."""

    version: int
    directory: Path
    num_bytes: int = 0

    @property
    def adapter(self) -> None: ...

    async def prepare(self, server: WeightServer) -> None: ...

    async def load(self, server: WeightServer, *, flush_cache: bool) -> None:
        await server.load_directory(self.directory, version=self.version, flush_cache=flush_cache)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterWeights:
    """A WeightUpdate that is there already: an adapter in a directory (an absolute path) of `num_bytes`."""

    version: int
    adapter: str
    directory: Path
    num_bytes: int = 0

    async def prepare(self, server: WeightServer) -> None:
        await server.load_adapter(self.adapter, self.directory)

    async def load(self, server: WeightServer, *, flush_cache: bool) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStats:
    """What a weight update cost."""

    pause_s: float
    """The longest time that a server did not generate."""
    load_s: float
    """The longest load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishStats:
    """One publish, as the trainer sees it."""

    version: int
    snapshot_s: float
    """How long the trainer waited for the snapshot."""
    transfer_s: float
    """From the snapshot until every server served the version."""
    pause_s: float
    num_bytes: int


class Sampler(Protocol):
    """What a workflow samples from: the current policy, and nothing else of the engine behind it."""

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Continue `request.input_ids`. A weight update meanwhile shows in the response's versions alone.

        Cancelling the call aborts the request on its server. Raises PromptTooLongError, RequestTimeoutError,
        ServerError when no server can answer, EngineClosedError.
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
        """Bring every server to `update.version` while requests are in flight. `version` is that when it returns.

        Raises ServerError if no server holds it, and ValueError for a version below the one served.
        """
        ...

    async def aclose(self) -> None:
        """Abort what runs and release connections. Idempotent."""
        ...


Output = Literal["logprobs", "reference_logprobs", "values"]
"""What a train engine's forward is asked for."""

Head = Literal["policy", "value", "policy_and_value"]
"""What a train engine's model ends in: the language-model head, a value head [H -> 1], or both on one backbone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What a model accepts."""

    vocab_size: int
    """Token ids are below it."""
    context_length: int | None = None
    """Most tokens of a sequence. None: any number."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenOutputs:
    """What the model says of a microbatch's trained tokens: float32[M], with gradient; 0 where it has no such head.

    logprobs: of the token, under the current weights. entropy: of the sampling distribution, in nats. values: of the
    context that the token was sampled in, so without the token itself.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedTokens:
    """The trained tokens of one microbatch, flat: every field has length M = number of tokens with loss_mask 1.

    Fields are TrainSequence's, and what is not given is 0. sequence_ids int64[M]: which sequence of the microbatch
    (0..S-1) each token belongs to, ascending. unit_ids int64[M]: which unit of sequences, numbered 0..U-1 in the
    microbatch; a sequence of unit -1 is a unit of its own.
    """

    behavior_logprobs: torch.Tensor
    proximal_logprobs: torch.Tensor = field(default_factory=unset)
    reference_logprobs: torch.Tensor = field(default_factory=unset)
    advantages: torch.Tensor = field(default_factory=unset)
    values: torch.Tensor = field(default_factory=unset)
    returns: torch.Tensor = field(default_factory=unset)
    selected: torch.Tensor = field(default_factory=unset)
    loss_weights: torch.Tensor = field(default_factory=unset)
    versions: torch.Tensor = field(default_factory=unset)
    sequence_ids: torch.Tensor = field(default_factory=unset)
    unit_ids: torch.Tensor = field(default_factory=unset)

    def __post_init__(self) -> None:
        names = (*TOKEN_FIELDS, "sequence_ids", "unit_ids")
        fill_unset(self, names, len(self.behavior_logprobs), self.behavior_logprobs.device)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLosses:
    """What a loss gives back: loss float32[M] per trained token, not yet weighted by loss_weights, with gradient.

    The rest are metrics, detached, each a name -> float[M] and reported over all tokens of the minibatch, so that they
    do not depend on how it was split: means: the mean. maxima: the largest. weighted: the sum, weighted as the loss is.
    quotients: name -> (a, b), sum(a) / sum(b), and not reported where sum(b) is 0. sample_sizes: for weights w, the
    effective sample size sum(w)^2 / (N sum(w^2)) of N tokens (Kish 1965), 1 where all weigh the same.
    """

    loss: torch.Tensor
    means: Mapping[str, torch.Tensor] = field(default_factory=dict[str, "torch.Tensor"])
    maxima: Mapping[str, torch.Tensor] = field(default_factory=dict[str, "torch.Tensor"])
    weighted: Mapping[str, torch.Tensor] = field(default_factory=dict[str, "torch.Tensor"])
    quotients: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict[str, "tuple[torch.Tensor, torch.Tensor]"]
    )
    sample_sizes: Mapping[str, torch.Tensor] = field(default_factory=dict[str, "torch.Tensor"])


class TokenLoss(Protocol):
    """A loss as a pure, picklable function of one microbatch's trained tokens."""

    def __call__(self, outputs: TokenOutputs, tokens: PackedTokens) -> TokenLosses: ...


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

    @property
    def limits(self) -> ModelLimits:
        """What sequences may hold."""
        ...

    def forward(self, sequences: Sequence[TrainSequence], output: Output = "logprobs") -> list[torch.Tensor]:
        """What the model says of each token, float32[T] for each sequence; 0.0 where loss_mask is 0. No gradient.

        logprobs and values are under the current weights, reference_logprobs under the reference's. Raises ConfigError
        if the engine has no such head or no reference.
        """
        ...

    def update_reference(self, share: float = 1.0) -> None:
        """Move the reference policy's weights towards the current ones: reference += share * (current - reference).

        The first call makes the reference, a copy of the current weights: their memory once more. `save` keeps it.
        """
        ...

    def train_batch(self, minibatches: Sequence[Sequence[TrainSequence]], loss: TokenLoss) -> dict[str, float]:
        """One optimizer step for each minibatch, then version += 1. Metrics are means over the minibatches."""
        ...

    def snapshot(self) -> Snapshot:
        """Copy the weights aside, as servers hold them. Later steps do not change the copy."""
        ...

    def save(self, directory: Path) -> Saving:
        """Copy aside everything that `load` needs to continue bit for bit: weights, optimizer, schedule, version, RNG.

        `directory` is written beside later steps, and is whole when the saving has ended.
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
