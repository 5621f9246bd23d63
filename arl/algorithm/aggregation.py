"""How token losses become one number: each token's share of a minibatch's loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from arl.api.types import TrainSequence

Aggregation = Literal["token_mean", "sequence_mean"]


def weigh_tokens(minibatch: Sequence[TrainSequence], aggregation: Aggregation) -> list[TrainSequence]:
    """The same sequences with loss_weights, so that the minibatch's loss is sum(loss_weights * token loss).

    With N trained tokens in the minibatch, n_i of them in sequence i, and S sequences with n_i > 0:

        token_mean (DAPO, 2503.14476, eq. 8):  1 / N          sequence_mean (GRPO, 2402.03300, eq. 3):  1 / (S n_i)

    The denominators are the whole minibatch's, so the loss is the same however it is split into microbatches or over
    ranks: call this before any split. Untrained tokens weigh 0; a sequence without trained tokens counts nowhere,
    and a minibatch of such sequences has loss 0.
    """
    counts = [int(sequence.loss_mask.sum()) for sequence in minibatch]
    num_tokens, num_sequences = sum(counts), sum(count > 0 for count in counts)
    weighed: list[TrainSequence] = []
    for sequence, count in zip(minibatch, counts, strict=True):
        share = num_tokens if aggregation == "token_mean" else num_sequences * count
        weights = sequence.loss_mask.to(torch.float32) / max(share, 1)
        weighed.append(replace(sequence, loss_weights=weights))
    return weighed
