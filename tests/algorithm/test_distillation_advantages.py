"""Distillation's advantages give the gradient of KL(student || teacher), however stale the tokens are."""

import math
from dataclasses import replace

import pytest
import torch
from advantage_cases import group, trajectory

from arl.algorithm.advantages import with_advantages
from arl.algorithm.batch import Batch
from arl.algorithm.losses.reinforcement import PolicyLoss
from arl.api.algorithm import preset
from arl.api.engine import PackedTokens, TokenOutputs

SAMPLER, TEACHER = (0.4, 0.3, 0.2, 0.1), (0.1, 0.2, 0.3, 0.4)
ALGORITHM = preset("distillation", correction={"kind": "none"}, minibatches=2)


def advantage(token: int, student: tuple[float, ...]) -> float:
    """Of a token that the sampler drew and the teacher was asked about, when the student has come to `student`."""
    gain = math.log(TEACHER[token]) - math.log(SAMPLER[token])
    drawn = trajectory(0.0, (0, 1), token_rewards=(0.0, gain))
    log_prob = [torch.tensor([0.0, math.log(policy[token])]) for policy in (SAMPLER, student)]
    batch = replace(Batch.of([group(drawn)]), behavior_logprobs=log_prob[0], proximal_logprobs=log_prob[1])
    return float(with_advantages(batch, ALGORITHM).advantages[1])


@pytest.mark.parametrize("student", [SAMPLER, TEACHER, (0.05, 0.15, 0.3, 0.5)], ids=["fresh", "there", "beyond"])
def test_the_expected_gradient_is_that_of_the_divergence(student: tuple[float, ...]):
    """Over all tokens the sampler could have drawn, by the student's logits."""
    logits = torch.tensor(student, dtype=torch.float64).log().requires_grad_()
    current = logits.log_softmax(-1)
    loss = PolicyLoss.of(ALGORITHM)
    behavior = torch.tensor(SAMPLER, dtype=torch.float64)
    tokens = PackedTokens(
        behavior_logprobs=behavior.log(),
        proximal_logprobs=current.detach(),
        advantages=torch.tensor([advantage(token, student) for token in range(4)], dtype=torch.float64),
        sequence_ids=torch.arange(4),
    )
    zeros = torch.zeros_like(current)
    losses = loss(TokenOutputs(logprobs=current, entropy=zeros, values=zeros), tokens)
    (ours,) = torch.autograd.grad((behavior * losses.loss).sum(), logits, retain_graph=True)
    divergence = (current.exp() * (current - torch.tensor(TEACHER, dtype=torch.float64).log())).sum()
    (theirs,) = torch.autograd.grad(divergence, logits)
    assert ours.tolist() == pytest.approx(theirs.tolist(), abs=1e-6)
