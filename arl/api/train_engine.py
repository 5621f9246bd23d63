"""Train engines: their contract, and the records that they take, of torch tensors, built only beside torch."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from arl.api.types import no_arrays

if TYPE_CHECKING:
    import torch

    from arl.api.images import PlacedImage
    from arl.api.routed_experts import Routes
    from arl.api.sampling_mask import KeptIds
    from arl.api.types import Arrays


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPrint:
    """The fingerprint of a tensor x. b_i are the bits of element i, k_i fixed pseudo-random odd numbers, s_i signs.

    All three are sums over elements, so they do not depend on how ranks share the tensor; the norm and the projection
    but for float rounding.
    """

    bits: int
    """sum(k_i b_i) modulo 2^64: equal for equal tensors, and hardly ever for others."""
    norm: float
    """The L2 norm."""
    projection: float
    """sum(s_i x_i). The difference of two tensors' projections is about as large as the norm of their difference."""


def digest_of(prints: Mapping[str, TensorPrint]) -> str:
    """16 hexadecimal digits: equal for equal weights. prints: by the tensors' names."""
    digest = hashlib.sha256()
    for name, one in sorted(prints.items()):
        digest.update(name.encode() + struct.pack("<xQ", one.bits))
    return digest.hexdigest()[:16]


def unset() -> torch.Tensor:
    """Default of a tensor field: replaced by zeros of the record's length when the record is built."""
    import torch

    return torch.empty(0)


def fill_unset(record: object, names: Sequence[str], length: int, device: torch.device) -> None:
    """Fill unset fields with zeros. For the `__post_init__` of a frozen record."""
    import torch

    for name in names:
        given = getattr(record, name).shape[0]
        if given not in (0, length):
            raise ValueError(f"{name} has {given} entries for {length} tokens; they must be equal")
        if given == 0:
            kinds = {"versions": torch.int64, "unit_ids": torch.int64, "sequence_ids": torch.int64}
            kind = torch.bool if name in ("selected", "turn_starts") else kinds.get(name, torch.float32)
            object.__setattr__(record, name, torch.zeros(length, dtype=kind, device=device))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainSequence:
    """A trajectory as the train engine takes it: 1-D tensors of length T, aligned with token_ids.

    Tensors are float32 unless their field says otherwise. An unset tensor becomes zeros.
    """

    token_ids: torch.Tensor
    """int64."""
    loss_mask: torch.Tensor
    """bool: whether the token is trained."""
    behavior_logprobs: torch.Tensor = field(default_factory=unset)
    """Logprobs under the sampler."""
    proximal_logprobs: torch.Tensor = field(default_factory=unset)
    """Logprobs under the weights with which the batch was taken."""
    reference_logprobs: torch.Tensor = field(default_factory=unset)
    """Logprobs under the reference policy."""
    advantages: torch.Tensor = field(default_factory=unset)
    values: torch.Tensor = field(default_factory=unset)
    """Before any update on the batch: the critic's values; without a critic, KTO's reference point."""
    returns: torch.Tensor = field(default_factory=unset)
    """The critic's targets."""
    selected: torch.Tensor = field(default_factory=unset)
    """bool: tokens that the loss treats apart (M2PO, Clip-Cov, KL-Cov)."""
    turn_starts: torch.Tensor = field(default_factory=unset)
    """bool: the first trained token of each turn, for algorithms that look at turns."""
    loss_weights: torch.Tensor = field(default_factory=unset)
    """Each token's share of the minibatch's loss: loss = sum over all tokens of loss_weights * token loss, however the
    batch is split. Aggregation and global denominators are in it already."""
    versions: torch.Tensor = field(default_factory=unset)
    """int64."""
    temperature: float = 1.0
    unit: int = -1
    """Sequences with the same unit number lie in one microbatch, for a loss that compares them. -1: no unit."""
    kept_ids: KeptIds | None = None
    """The ids from which each token was sampled: logprobs and entropies are over these. None: the whole vocabulary."""
    routes: Routes | None = None
    """The experts that compute each token, instead of those that the model's routers choose. None: the routers' own."""
    images: tuple[PlacedImage, ...] = ()
    """What the model sees at the placeholders among token_ids, in order."""
    arrays: Arrays = field(default_factory=no_arrays)
    """Trajectory's, of numpy: untouched."""

    def __post_init__(self) -> None:
        fill_unset(self, TOKEN_FIELDS, len(self), self.token_ids.device)
        for name, given in (("kept_ids", self.kept_ids), ("routes", self.routes)):
            if given is not None and len(given) != len(self):
                raise ValueError(f"{name} has {len(given)} entries for {len(self)} tokens; they must be equal")

    def __len__(self) -> int:
        return int(self.token_ids.shape[0])


TOKEN_FIELDS = (
    "behavior_logprobs", "proximal_logprobs", "reference_logprobs", "advantages", "values", "returns", "selected",
    "turn_starts", "loss_weights", "versions",
)  # fmt: skip
"""The per-token fields of TrainSequence beside id and mask. PackedTokens has them for each trained token."""


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
