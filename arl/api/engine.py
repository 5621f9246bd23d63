"""Contracts of the engine that samples, the engine that trains, and the weights that travel between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from arl.api.train_sequence import TOKEN_FIELDS, TrainSequence, fill_unset, unset
from arl.api.types import ModelRequest, ModelResponse

if TYPE_CHECKING:
    import numpy as np
    import torch

    from arl.api.routes import Routing
    from arl.api.weight_prints import TensorPrint


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


Output = Literal["logprobs", "reference_logprobs", "values"]
"""The number that a forward pass of a train engine returns for each token."""

Head = Literal["policy", "value"]
"""The head of a train engine's model: the language-model head, or a value head [H -> 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """The limits of a model's input."""

    vocab_size: int
    """Token ids are below this."""
    context_length: int | None = None
    """The most tokens that a sequence may have. None: unlimited."""
    image_ids: frozenset[int] = frozenset()
    """Ids that mean something only around an image or a video: their placeholders and tags."""
    arrays: frozenset[str] = frozenset()
    """The names in Trajectory.arrays that the model needs. A trajectory without one of them fails, as does one with
    others."""


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenOutputs:
    """The model's outputs for a microbatch's trained tokens: float32[M], with gradient; 0 without the head for it."""

    logprobs: torch.Tensor
    """The token's logprob under the current weights."""
    entropy: torch.Tensor
    """The entropy of the sampling distribution, in nats."""
    values: torch.Tensor
    """The value of the context in which the token was sampled, without the token itself."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedTokens:
    """The trained tokens of one microbatch, flat: every field has length M = number of tokens with loss_mask 1.

    The other fields are TrainSequence's. An unset tensor becomes zeros.
    """

    behavior_logprobs: torch.Tensor
    proximal_logprobs: torch.Tensor = field(default_factory=unset)
    reference_logprobs: torch.Tensor = field(default_factory=unset)
    advantages: torch.Tensor = field(default_factory=unset)
    values: torch.Tensor = field(default_factory=unset)
    returns: torch.Tensor = field(default_factory=unset)
    selected: torch.Tensor = field(default_factory=unset)
    turn_starts: torch.Tensor = field(default_factory=unset)
    loss_weights: torch.Tensor = field(default_factory=unset)
    versions: torch.Tensor = field(default_factory=unset)
    sequence_ids: torch.Tensor = field(default_factory=unset)
    """int64[M], ascending: the number of each token's sequence in the microbatch, 0..S-1."""
    unit_ids: torch.Tensor = field(default_factory=unset)
    """int64[M]: the number of each token's unit, 0..U-1 among those with trained tokens in the microbatch. Unit -1
    becomes a unit of one sequence."""

    def __post_init__(self) -> None:
        names = (*TOKEN_FIELDS, "sequence_ids", "unit_ids")
        fill_unset(self, names, len(self.behavior_logprobs), self.behavior_logprobs.device)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLosses:
    """The result of a loss: a loss for each trained token of a microbatch, and metrics.

    Metrics are detached, each a name -> float[M]. They are reported over all tokens of the minibatch, so they do not
    depend on how it was split.
    """

    loss: torch.Tensor
    """float32[M], with gradient, not yet weighted by loss_weights."""
    means: Mapping[str, torch.Tensor] = field(default_factory=dict[str, "torch.Tensor"])
    """Reported: the mean."""
    maxima: Mapping[str, torch.Tensor] = field(default_factory=dict[str, "torch.Tensor"])
    """Reported: the largest."""
    weighted: Mapping[str, torch.Tensor] = field(default_factory=dict[str, "torch.Tensor"])
    """Reported: the sum, weighted as the loss is."""
    quotients: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict[str, "tuple[torch.Tensor, torch.Tensor]"]
    )
    """name -> (a, b). Reported: sum(a) / sum(b), unless sum(b) is 0."""
    kept: Mapping[str, torch.Tensor] = field(default_factory=dict[str, "torch.Tensor"])
    """Not reported, but kept for TrainEngine.kept."""
    sample_sizes: Mapping[str, torch.Tensor] = field(default_factory=dict[str, "torch.Tensor"])
    """name -> weights w. Reported: the effective sample size sum(w)^2 / (N sum(w^2)) of N tokens (Kish 1965), 1 for
    equal weights."""


class TokenLoss(Protocol):
    """A loss as a pure, picklable function of one microbatch's trained tokens."""

    def __call__(self, outputs: TokenOutputs, tokens: PackedTokens) -> TokenLosses: ...


class Snapshot(Protocol):
    """A copy of one version's weights. Methods block, and any thread may call them during training."""

    @property
    def version(self) -> int: ...

    def write(self, directory: Path) -> int:
        """Write a Hugging Face model directory (weights, config, tokenizer), whole or not at all; return its bytes."""
        ...

    def release(self) -> None:
        """Free the memory. Idempotent."""
        ...


class Saving(Protocol):
    """A checkpoint that is written while training goes on."""

    def wait(self) -> None:
        """Block until the checkpoint is on the disk. Raises CheckpointError and then leaves earlier ones untouched."""
        ...


class WeightSource(Protocol):
    """Weights being trained, as a transport takes them. Calls block. Make them all from one thread."""

    @property
    def version(self) -> int:
        """The number of batches trained."""
        ...

    def snapshot(self) -> Snapshot:
        """Copy the weights, in the form that servers hold. Later steps do not change the copy."""
        ...


class TrainEngine(WeightSource, Protocol):
    """Trains a model. Calls block. Make them all from one thread."""

    @property
    def limits(self) -> ModelLimits:
        """The limits of the model's input."""
        ...

    def forward(self, sequences: Sequence[TrainSequence], output: Output = "logprobs") -> list[torch.Tensor]:
        """The model's `output` for each token, float32[T] for each sequence; 0.0 where loss_mask is 0. No gradient.

        Logprobs and values come from the current weights, reference_logprobs from the reference's. Raises ConfigError
        if the engine lacks the head or the reference.
        """
        ...

    def update_reference(self, share: float = 1.0) -> None:
        """Move the reference policy's weights towards the current ones: reference += share * (current - reference).

        The first call creates the reference, a copy of the current weights, in as much memory. `save` keeps it.
        """
        ...

    def train_batch(self, minibatches: Sequence[Sequence[TrainSequence]], loss: TokenLoss) -> dict[str, float]:
        """One optimizer step for each minibatch, then version += 1. Metrics are means over the minibatches."""
        ...

    @property
    def kept(self) -> Sequence[Mapping[str, torch.Tensor]]:
        """The values that the loss of the last train_batch kept: for each minibatch, name -> float32[T] over all its
        tokens, NaN where loss_mask is 0."""
        ...

    def offload(self) -> None:
        """Leave the device: weights, optimizer state and reference move to the CPU's memory. Idempotent.

        Until `onload`, snapshots are taken, and checkpoints saved and loaded; the other calls raise TrainingError.
        """
        ...

    def onload(self) -> None:
        """Move everything back onto the device. Idempotent."""
        ...

    def fingerprint(self) -> Mapping[str, TensorPrint]:
        """A few numbers of each trained tensor, by its name. Equal weights have equal prints, however they are shared
        among ranks."""
        ...

    def save(self, directory: Path) -> Saving:
        """Copy everything that `load` needs to continue bit for bit: weights, optimizer, schedule, version, RNG.

        `directory` is written during later steps. It is complete when the saving has ended.
        """
        ...

    def load(self, directory: Path) -> None:
        """Continue from a directory that `save` wrote. Raises CheckpointError, which names the mismatch."""
        ...

    def close(self) -> None: ...


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
