"""The variants of training: heads, losses and adapters, with minibatches for each."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from train_sequences import COMPOSED, LOSS, constrained_sequences, family_sequences, random_sequences

from arl.algorithm.losses.preferences import PreferenceLoss, paired
from arl.algorithm.losses.reinforcement import ValueLoss
from arl.api.settings.engines import LoRAConfig, OptimizerConfig, TrainConfig
from arl.api.train_engine import Head, Output, TokenLoss, TrainSequence
from arl.engine.fsdp.train_engine import FSDPTrainEngine

OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, max_grad_norm=0.1)
"""A large eps keeps AdamW smooth: it would otherwise blow rounding in tiny gradients up to whole steps."""
LORA = LoRAConfig(rank=3, alpha=6)
"""Two ranks cannot share the three rows of A evenly."""
PAIRS = PreferenceLoss(beta=0.2, sft=0.5)
VALUE = ValueLoss(value_clip=0.2)
# torch's own: the import of its compiler warns, and so does a look at .grad that it silences in a way of its own.
COMPILING = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


def sequences_with_returns(count: int = 9, seed: int = 1) -> list[TrainSequence]:
    generator = torch.Generator().manual_seed(seed)
    return [
        replace(
            sequence,
            values=0.1 * torch.randn(len(sequence), generator=generator),
            returns=torch.randn(len(sequence), generator=generator),
        )
        for sequence in random_sequences(count, seed=seed)
    ]


def pairs() -> list[TrainSequence]:
    """Six pairs, mostly of one prompt; of the last, one sequence is not trained."""
    sequences = family_sequences(2) + family_sequences(3)
    sequences[11].loss_mask.zero_()
    return paired(list(zip(sequences[:12:2], sequences[1:12:2], strict=True)))


@dataclass(frozen=True, kw_only=True)
class Variant:
    minibatch: Callable[[], list[TrainSequence]]
    loss: TokenLoss = LOSS
    head: Head = "policy"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def minibatches(self) -> list[list[TrainSequence]]:
        """The second is one sequence, so that one of two ranks gets nothing."""
        sequences = self.minibatch()
        return [sequences, sequences[:1]]

    @property
    def outputs(self) -> list[Output]:
        return ["logprobs", "reference_logprobs"] if self.head == "policy" else ["values"]

    def engine(self, model_dir: Path, **options: Any) -> FSDPTrainEngine:
        config = TrainConfig(**{"optimizer": OPTIMIZER, **self.options, **options})
        return FSDPTrainEngine(model_dir, config, head=self.head)


VARIANTS = {
    "token mean": Variant(minibatch=partial(random_sequences, 9, seed=1)),
    "sequence mean": Variant(
        minibatch=partial(random_sequences, 9, seed=1, aggregation="sequence_mean"), loss=COMPOSED
    ),
    "shared prefixes": Variant(minibatch=partial(family_sequences, 4)),
    "constrained": Variant(minibatch=partial(constrained_sequences, 4)),
    "adapters": Variant(minibatch=partial(random_sequences, 9, seed=1), options={"lora": LORA}),
    "value": Variant(minibatch=sequences_with_returns, loss=VALUE, head="value"),
    "pairs": Variant(minibatch=pairs, loss=PAIRS),
}


def weights_of(engine: FSDPTrainEngine, *, trained: bool = True) -> dict[str, torch.Tensor]:
    """Copies of the whole parameters, trained or frozen ones; a collective."""
    named = {n: p.detach() for n, p in engine._policy.named_parameters() if p.requires_grad is trained}
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).clone() for n, p in named.items()}


def assert_same_tensors(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], rtol: float = 1e-4, atol: float = 1e-5
) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name].float(), tensor.float(), rtol=rtol, atol=atol, msg=name)
