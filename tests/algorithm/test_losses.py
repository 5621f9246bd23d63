"""Losses against plain float64 references, written out case by case."""

import math
from dataclasses import dataclass

import pytest
import torch

from arl.algorithm.losses import PPOLoss, SFTLoss
from arl.api.config import PPOConfig
from arl.api.engine import PackedTokens, TokenLosses

LOW, HIGH, CAP = 0.2, 0.28, 5.0
LOSS = PPOLoss(clip_low=LOW, clip_high=HIGH, behavior_weight_cap=CAP)


@dataclass(frozen=True)
class Token:
    current: float
    proximal: float
    behavior: float
    advantage: float


# Each region of the clip for both signs of the advantage, each side of the weight's cap, and the on-policy point.
TOKENS = [
    Token(current, proximal, behavior, advantage)
    for current in (-1.0, -1.1, -0.4, -2.0)
    for proximal, behavior in ((-1.0, -1.0), (-1.0, -1.3), (-1.0, -4.0), (-1.2, -0.1))
    for advantage in (1.5, -0.7, 0.0)
]


def packed(tokens: list[Token]) -> PackedTokens:
    return PackedTokens(
        behavior_logprobs=torch.tensor([t.behavior for t in tokens]),
        proximal_logprobs=torch.tensor([t.proximal for t in tokens]),
        advantages=torch.tensor([t.advantage for t in tokens]),
        loss_weights=torch.ones(len(tokens)),
        versions=torch.zeros(len(tokens), dtype=torch.int64),
        sequence_ids=torch.zeros(len(tokens), dtype=torch.int64),
    )


def evaluate(loss: PPOLoss | SFTLoss, tokens: list[Token]) -> tuple[TokenLosses, list[float]]:
    """The loss, and the gradient of its sum by each current logprob."""
    current = torch.tensor([t.current for t in tokens], requires_grad=True)
    losses = loss(current, torch.full((len(tokens),), 2.0), packed(tokens))
    (gradient,) = torch.autograd.grad(losses.loss.sum(), current)
    return losses, gradient.tolist()


def reference(token: Token) -> tuple[float, float]:
    """(loss, its derivative by the current logprob) of decoupled PPO, by cases."""
    ratio = math.exp(token.current - token.proximal)
    weight = min(math.exp(token.proximal - token.behavior), CAP)
    advantage = token.advantage
    if advantage > 0 and ratio > 1 + HIGH:
        return -weight * advantage * (1 + HIGH), 0.0
    if advantage < 0 and ratio < 1 - LOW:
        return -weight * advantage * (1 - LOW), 0.0
    return -weight * advantage * ratio, -weight * advantage * ratio


def test_decoupled_ppo_equals_its_definition_in_value_and_gradient():
    losses, gradient = evaluate(LOSS, TOKENS)
    assert losses.loss.tolist() == pytest.approx([reference(t)[0] for t in TOKENS], abs=1e-5)
    assert gradient == pytest.approx([reference(t)[1] for t in TOKENS], abs=1e-5)


def test_on_policy_the_gradient_is_reinforces():
    tokens = [Token(c, c, c, a) for c in (-0.1, -1.0, -3.0) for a in (1.5, -0.7, 0.0)]
    _, gradient = evaluate(LOSS, tokens)
    assert gradient == pytest.approx([-t.advantage for t in tokens])


def test_bypassed_the_ratio_is_to_the_sampler_and_there_is_no_weight():
    bypassed = PPOLoss(clip_low=LOW, clip_high=HIGH, proximal="bypassed", behavior_weight_cap=CAP)
    losses, gradient = evaluate(bypassed, TOKENS)
    expected = [reference(Token(t.current, t.behavior, t.behavior, t.advantage)) for t in TOKENS]
    assert losses.loss.tolist() == pytest.approx([loss for loss, _ in expected], abs=1e-5)
    assert gradient == pytest.approx([derivative for _, derivative in expected], abs=1e-5)


def test_current_as_proximal_equals_recomputed_before_the_first_update():
    tokens = [Token(t.current, t.current, t.behavior, t.advantage) for t in TOKENS]
    current = PPOLoss(clip_low=LOW, clip_high=HIGH, proximal="current", behavior_weight_cap=CAP)
    (losses, gradient), (expected, expected_gradient) = evaluate(current, TOKENS), evaluate(LOSS, tokens)
    assert losses.loss.tolist() == expected.loss.tolist()
    assert gradient == expected_gradient
    assert {k: v.tolist() for k, v in losses.means.items()} == {k: v.tolist() for k, v in expected.means.items()}


def test_without_a_cap_the_weight_is_left_as_it_is():
    tokens = [Token(-1.0, -1.0, -4.0, 1.0)]
    losses, _ = evaluate(PPOLoss(clip_low=LOW, clip_high=HIGH, behavior_weight_cap=None), tokens)
    assert losses.loss.tolist() == pytest.approx([-math.exp(3.0)], rel=1e-5)


def test_metrics_say_what_the_ratio_the_clip_and_the_weight_did():
    tokens = [Token(-0.4, -1.0, -1.0, 1.0), Token(-2.0, -1.0, -1.0, 1.0), Token(-1.0, -1.0, -4.0, 1.0)]
    losses, _ = evaluate(LOSS, tokens)
    ratios = [math.exp(0.6), math.exp(-1.0), 1.0]
    assert losses.means["ratio"].tolist() == pytest.approx(ratios)
    assert losses.maxima["ratio_max"].tolist() == pytest.approx(ratios)
    assert losses.means["clip_fraction"].tolist() == [1.0, 0.0, 0.0]
    assert losses.means["behavior_weight"].tolist() == pytest.approx([1.0, 1.0, CAP])
    assert losses.maxima["behavior_weight_max"].tolist() == pytest.approx([1.0, 1.0, CAP])
    assert losses.means["behavior_kl_proximal"].tolist() == pytest.approx([0.0, 0.0, math.exp(3) - 1 - 3], rel=1e-5)
    assert losses.means["behavior_kl_current"].tolist() == pytest.approx(
        [math.exp(d) - 1 - d for d in (0.6, -1.0, 3.0)], rel=1e-5
    )
    assert losses.means["entropy"].tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("cap", [CAP, None])
def test_extreme_log_ratios_stay_finite(cap: float | None):
    far = [-1e4, -200.0, -1e-3]
    tokens = [Token(c, p, b, a) for c in far for p in far for b in far for a in (2.0, -2.0)]
    losses, gradient = evaluate(PPOLoss(clip_low=LOW, clip_high=HIGH, behavior_weight_cap=cap), tokens)
    assert all(map(math.isfinite, [*losses.loss.tolist(), *gradient]))
    assert all(values.isfinite().all() for values in (losses.means | losses.maxima).values())


def test_the_loss_is_built_from_its_section_of_the_configuration():
    config = PPOConfig(clip_low=0.1, clip_high=0.3, minibatches=2, behavior_weight_cap=2.0)
    assert PPOLoss.of(config) == PPOLoss(clip_low=0.1, clip_high=0.3, proximal="recomputed", behavior_weight_cap=2.0)


@pytest.mark.parametrize(("minibatches", "proximal"), [(1, "current"), (2, "recomputed")])
def test_a_batch_of_one_minibatch_has_its_current_logprobs_as_proximal_ones(minibatches: int, proximal: str):
    assert PPOLoss.of(PPOConfig(minibatches=minibatches)).proximal == proximal


def test_supervised_loss_is_the_negative_log_likelihood():
    losses, gradient = evaluate(SFTLoss(), TOKENS)
    assert losses.loss.tolist() == pytest.approx([-t.current for t in TOKENS])
    assert gradient == [-1.0] * len(TOKENS)
