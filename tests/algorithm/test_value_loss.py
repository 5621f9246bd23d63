"""The critic's loss, against its definition in plain Python."""

import random

import pytest
import torch
from loss_references import clip, gradient

from arl.algorithm.losses.reinforcement import ValueLoss
from arl.api.train_engine import PackedTokens, TokenOutputs


def outputs_of(values: list[float]) -> TokenOutputs:
    numbers = torch.tensor(values, dtype=torch.float64)
    return TokenOutputs(logprobs=-torch.ones_like(numbers), entropy=torch.ones_like(numbers), values=numbers)


def tokens_of(before: list[float], returns: list[float]) -> PackedTokens:
    values, targets = torch.tensor([before, returns], dtype=torch.float64)
    return PackedTokens(behavior_logprobs=-torch.ones_like(values), values=values, returns=targets)


def reference(value: float, before: float, target: float, value_clip: float | None) -> float:
    unclipped = (value - target) ** 2
    if value_clip is None:
        return unclipped / 2
    return max(unclipped, (clip(value, before - value_clip, before + value_clip) - target) ** 2) / 2


@pytest.mark.parametrize("value_clip", [None, 0.2, 1.0])
def test_the_loss_and_its_gradient_are_those_of_the_definition(value_clip: float | None):
    rng = random.Random(0)
    now, before, returns = ([rng.gauss(0, 1) for _ in range(60)] for _ in range(3))
    outputs = outputs_of(now)
    outputs.values.requires_grad_()
    losses = ValueLoss(value_clip=value_clip)(outputs, tokens_of(before, returns))
    (slopes,) = torch.autograd.grad(losses.loss.sum(), outputs.values)
    expected = [reference(*triple, value_clip) for triple in zip(now, before, returns, strict=True)]

    def slope(value: float, v0: float, target: float) -> float:
        return gradient(lambda at: reference(at[0], v0, target, value_clip), [value])[0]

    assert losses.loss.tolist() == pytest.approx(expected, abs=1e-12)
    assert slopes.tolist() == pytest.approx([slope(*t) for t in zip(now, before, returns, strict=True)], abs=1e-6)


@pytest.mark.parametrize(("value_clip", "is_clipped"), [(None, [0.0, 0.0]), (0.2, [1.0, 0.0])])
def test_metrics_say_what_was_predicted_how_far_off_it_was_and_what_was_clipped(
    value_clip: float | None, is_clipped: list[float]
):
    losses = ValueLoss(value_clip=value_clip)(outputs_of([0.5, -0.5]), tokens_of([0.0, 0.0], [1.0, 1.0]))
    assert losses.means["value"].tolist() == [0.5, -0.5]
    assert losses.means["value_error"].tolist() == [0.5, 1.5]
    assert losses.means["value_clip_fraction"].tolist() == is_clipped


def test_rounding_does_not_count_as_clipping():
    rng = random.Random(0)
    now, before = ([rng.uniform(-0.1, 0.1) for _ in range(500)] for _ in range(2))
    losses = ValueLoss(value_clip=0.2)(outputs_of(now), tokens_of(before, [0.0] * 500))
    assert not losses.means["value_clip_fraction"].any()
