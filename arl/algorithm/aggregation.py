"""How token losses become one number: each token's share of a minibatch's loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from arl.api.algorithm import Aggregation
from arl.api.types import TrainSequence


def weigh_tokens(
    minibatch: Sequence[Sequence[TrainSequence]], aggregation: Aggregation, *, sequence_tokens: int = 1
) -> list[TrainSequence]:
    """The sequences of all groups with loss_weights, so that the minibatch's loss is sum(loss_weights * token loss).

    With N trained tokens in the minibatch, n_i of them in sequence i, N_g in group g, and counting only sequences (S)
    and groups (G) that have any:

        token_mean (DAPO, 2503.14476, eq. 8):                    1 / N
        sequence_mean (GRPO, 2402.03300, eq. 3):                 1 / (S n_i)
        sequence_sum (Dr.GRPO, 2503.20783, section 3.2):         1 / (S sequence_tokens)
        group_mean (each group a token mean of its own):         1 / (G N_g)

    The denominators are the whole minibatch's, so the loss is the same however it is split into microbatches or over
    ranks: call this before any split. Untrained tokens weigh 0; a sequence without trained tokens counts nowhere,
    and a minibatch of such sequences has loss 0.
    """
    counts = [[int(sequence.loss_mask.sum()) for sequence in group] for group in minibatch]
    num_tokens = sum(map(sum, counts))
    num_sequences = sum(count > 0 for group in counts for count in group)
    num_groups = sum(sum(group) > 0 for group in counts)
    weighed: list[TrainSequence] = []
    for group, group_counts in zip(minibatch, counts, strict=True):
        for sequence, count in zip(group, group_counts, strict=True):
            share = {
                "token_mean": num_tokens,
                "sequence_mean": num_sequences * count,
                "sequence_sum": num_sequences * sequence_tokens,
                "group_mean": num_groups * sum(group_counts),
            }[aggregation]
            weights = sequence.loss_mask.to(torch.float32) / max(share, 1)
            weighed.append(replace(sequence, loss_weights=weights))
    return weighed
