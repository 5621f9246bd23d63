"""Loss weights are shares of the whole minibatch."""

import pytest
import torch

from arl.algorithm.aggregation import weigh_tokens
from arl.api.types import TrainSequence


def sequence(*loss_mask: int) -> TrainSequence:
    zeros = torch.zeros(len(loss_mask))
    return TrainSequence(
        token_ids=torch.zeros(len(loss_mask), dtype=torch.int64),
        loss_mask=torch.tensor(loss_mask, dtype=torch.bool),
        behavior_logprobs=zeros,
        proximal_logprobs=zeros,
        advantages=zeros,
        loss_weights=zeros,
        versions=torch.zeros(len(loss_mask), dtype=torch.int64),
    )


MINIBATCH = [sequence(0, 1, 1, 1), sequence(0, 0, 0), sequence(0, 1)]


def test_token_mean_weighs_every_trained_token_alike():
    weights = [s.loss_weights.tolist() for s in weigh_tokens(MINIBATCH, "token_mean")]
    assert weights == [[0.0, 0.25, 0.25, 0.25], [0.0, 0.0, 0.0], [0.0, 0.25]]


def test_sequence_mean_weighs_every_trained_sequence_alike():
    weights = [s.loss_weights for s in weigh_tokens(MINIBATCH, "sequence_mean")]
    assert [w.sum().item() for w in weights] == pytest.approx([0.5, 0.0, 0.5])
    assert weights[0].tolist() == pytest.approx([0.0, 1 / 6, 1 / 6, 1 / 6])


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_a_minibatch_in_which_nothing_is_trained_weighs_nothing(aggregation):
    (only,) = weigh_tokens([sequence(0, 0)], aggregation)
    assert only.loss_weights.tolist() == [0.0, 0.0]
