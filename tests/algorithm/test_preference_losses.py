"""DPO, IPO and Bradley-Terry against plain references: one pair at a time, in Python's own floats."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from loss_references import gradient

from arl.algorithm.losses.preferences import PreferenceLoss, RewardModelLoss, paired
from arl.algorithm.trained_tokens import packed_tokens
from arl.api.train_engine import TokenLoss, TokenOutputs, TrainSequence

Numbers = list[float]
PlainPair = tuple[Numbers, Numbers, Numbers, Numbers]
"""Current and reference logprobs of the chosen answer, then of the rejected one."""


def random_pairs(count: int, seed: int = 0) -> list[PlainPair]:
    draw = random.Random(seed)

    def logprobs(length: int) -> Numbers:
        return [-3 * draw.random() for _ in range(length)]

    lengths = [(draw.randint(1, 5), draw.randint(1, 5)) for _ in range(count)]
    return [(logprobs(a), logprobs(a), logprobs(b), logprobs(b)) for a, b in lengths]


def reference_loss(pair: PlainPair, loss: PreferenceLoss) -> float:
    """Of one pair, as the papers write it."""
    chosen, chosen_reference, rejected, rejected_reference = pair
    first = sum(c - r for c, r in zip(chosen, chosen_reference, strict=True))
    second = sum(c - r for c, r in zip(rejected, rejected_reference, strict=True))
    if loss.mean_logprobs:
        first, second = first / max(len(chosen), 1), second / max(len(rejected), 1)
    h = first - second
    imitation = -loss.sft * sum(chosen) / max(len(chosen), 1)
    if loss.kind == "ipo":
        return (h - 1 / (2 * loss.beta)) ** 2 + imitation
    sigmoid = 1 / (1 + math.exp(-loss.beta * h))
    preference = -(1 - loss.label_smoothing) * math.log(sigmoid) - loss.label_smoothing * math.log(1 - sigmoid)
    return preference + imitation


def sequence(logprobs: Numbers, reference: Numbers) -> TrainSequence:
    """A prompt of one token, then the answer."""
    count = len(logprobs)
    return TrainSequence(
        token_ids=torch.zeros(count + 1, dtype=torch.int64),
        loss_mask=torch.tensor([False] + [True] * count),
        behavior_logprobs=torch.tensor([0.0, *logprobs], dtype=torch.float64),  # stands for the current ones
        reference_logprobs=torch.tensor([0.0, *reference], dtype=torch.float64),
    )


def minibatch(pairs: Sequence[PlainPair]) -> list[TrainSequence]:
    return paired([(sequence(a, b), sequence(c, d)) for a, b, c, d in pairs])


def total(sequences: Sequence[TrainSequence], loss: TokenLoss) -> tuple[float, list[Numbers], dict[str, float]]:
    """One microbatch's share of the loss, its gradient by each sequence's current logprobs, and the paired metrics."""
    tokens = packed_tokens(trained := [s for s in sequences if s.loss_mask.any()])
    current = tokens.behavior_logprobs.clone().requires_grad_()
    zeros = torch.zeros_like(current)
    losses = loss(TokenOutputs(logprobs=current, entropy=zeros, values=current), tokens)
    weights = tokens.loss_weights.double()
    value = (losses.loss * weights).sum()
    (slopes,) = torch.autograd.grad(value, current)
    metrics = {name: float((v * weights).sum()) for name, v in losses.weighted.items()}
    return float(value.detach()), [g.tolist() for g in slopes.split([int(s.loss_mask.sum()) for s in trained])], metrics


def bradley_terry(scores: Sequence[float]) -> float:
    """Of one pair (chosen, rejected)."""
    chosen, rejected = scores
    return -math.log(1 / (1 + math.exp(rejected - chosen))) + 0.01 * (chosen + rejected) ** 2


LOSSES = [
    PreferenceLoss(),
    PreferenceLoss(beta=0.7, label_smoothing=0.2),
    PreferenceLoss(beta=0.5, mean_logprobs=True),
    PreferenceLoss(kind="ipo", beta=0.3),
    PreferenceLoss(kind="ipo", beta=0.3, mean_logprobs=True),
    PreferenceLoss(sft=1.0),
    PreferenceLoss(kind="ipo", beta=0.3, sft=0.2),
]


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_preference_losses_equal_their_definitions_in_value_and_gradient(loss: PreferenceLoss):
    """An empty answer has a log-ratio of 0, and a pair of two counts nowhere."""
    pairs = [*random_pairs(7), ([-1.0], [-1.5], [], [])]
    value, gradients, _ = total(minibatch([*pairs, ([], [], [], [])]), loss)
    assert value == pytest.approx(sum(reference_loss(pair, loss) for pair in pairs) / len(pairs), abs=1e-6)
    expected = [
        slopes
        for a, a_reference, b, b_reference in pairs
        for slopes in (
            gradient(lambda c: reference_loss((c, a_reference, b, b_reference), loss), a),  # noqa: B023
            gradient(lambda c: reference_loss((a, a_reference, c, b_reference), loss), b),  # noqa: B023
        )
        if slopes
    ]
    for ours, theirs in zip(gradients, expected, strict=True):
        assert ours == pytest.approx([g / len(pairs) for g in theirs], abs=1e-6)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_whole_pairs_may_be_split_over_microbatches_in_any_order(loss: PreferenceLoss, parts: int):
    sequences = minibatch(random_pairs(7))
    whole, _, metrics = total(sequences, loss)
    pairs = [sequences[2 * i : 2 * i + 2] for i in (4, 0, 6, 2, 5, 1, 3)]
    splits = [total([s for pair in pairs[i::parts] for s in reversed(pair)], loss) for i in range(parts)]
    assert sum(value for value, _, _ in splits) == pytest.approx(whole, abs=1e-9)
    for name, value in metrics.items():
        assert sum(split[name] for _, _, split in splits) == pytest.approx(value, abs=1e-9)


def test_metrics_are_means_over_pairs_however_long_they_are():
    right = ([-1.0], [-2.0], [-3.0] * 4, [-2.0] * 4)
    wrong = ([-2.0] * 9, [-1.0] * 9, [-1.0], [-1.0])
    unmoved = ([-2.0], [-2.0], [-1.0], [-1.0])
    _, _, metrics = total(minibatch([right, right, wrong, unmoved]), PreferenceLoss(beta=0.1))
    assert metrics == pytest.approx(
        {
            "accuracy": 2.5 / 4,
            "margin": 0.1 * (5 + 5 - 9) / 4,
            "chosen_logratio": (1 + 1 - 9) / 4,
            "rejected_logratio": (-4 - 4) / 4,
            "chosen_nll": (1 + 1 + 2 + 2) / 4,
        }
    )


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_almost_impossible_answers_leave_everything_finite(loss: PreferenceLoss):
    value, gradients, metrics = total(minibatch([([-1e4], [-1e-3], [-1e-3], [-1e4])]), loss)
    assert all(map(math.isfinite, [value, *metrics.values(), *(g for row in gradients for g in row)]))


def test_bradley_terry_equals_its_definition_in_value_and_gradient():
    scores = [(0.3, -1.2), (-0.5, 0.9), (2.0, 1.9)]
    sequences = minibatch([([chosen], [0.0], [rejected], [0.0]) for chosen, rejected in scores])
    value, gradients, metrics = total(sequences, RewardModelLoss(center=0.01))
    assert value == pytest.approx(sum(bradley_terry(list(pair)) for pair in scores) / 3, abs=1e-6)
    expected = [g / 3 for pair in scores for g in gradient(bradley_terry, pair)]
    assert [g for (g,) in gradients] == pytest.approx(expected, abs=1e-6)
    assert metrics["accuracy"] == pytest.approx(2 / 3)
    assert metrics["margin"] == pytest.approx(sum(a - b for a, b in scores) / 3)
    assert metrics["score"] == pytest.approx(sum(a + b for a, b in scores) / 6)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kind": "simpo"}, "kind is 'simpo'; it must be dpo or ipo"),
        ({"beta": 0.0}, "beta is 0.0; it must be above 0"),
        ({"label_smoothing": 0.5}, "below 0.5"),
        ({"sft": -1.0}, "sft is -1.0; it must be at least 0"),
        ({"kind": "ipo", "label_smoothing": 0.1}, "label_smoothing is for kind=dpo"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict, reason: str):
    with pytest.raises(ValueError, match=reason):
        replace(PreferenceLoss(), **settings)
