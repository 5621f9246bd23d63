"""Training sequences: the records that train engines take, of torch tensors, which are built only beside torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from arl.api.own_arrays import no_arrays

if TYPE_CHECKING:
    import torch

    from arl.api.images import PlacedImage
    from arl.api.kept_ids import KeptIds
    from arl.api.own_arrays import Arrays
    from arl.api.routes import Routes


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
    "behavior_logprobs",
    "proximal_logprobs",
    "reference_logprobs",
    "advantages",
    "values",
    "returns",
    "selected",
    "turn_starts",
    "loss_weights",
    "versions",
)
"""The per-token fields of TrainSequence beside id and mask. PackedTokens has them for each trained token."""
