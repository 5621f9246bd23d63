"""Under truncated sampling an importance-weighted loss is unbiased: summed over all tokens that could be drawn, it is
the objective of the truncated policy, and so is its gradient."""

import pytest
import torch

from arl.algorithm.losses.reinforcement import PolicyLoss
from arl.api.sampling_mask import KeptIds
from arl.api.settings.algorithm import preset
from arl.api.train_engine import PackedTokens, TokenOutputs
from arl.api.types import SamplingParams
from arl.engine.fsdp.policy import token_logprobs
from arl.engine.local.sampler import Filter

VOCABULARY, HIDDEN, CONTEXTS = 40, 6, 5
SAMPLINGS = [SamplingParams(top_p=0.8), SamplingParams(top_k=7), SamplingParams(min_p=0.1, temperature=1.6)]


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def expected_gradient(sampling: SamplingParams, *, replays: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the weights by arl's loss, in expectation over the sampler's draws, and of minus the expected
    reward of the truncated policy by a dense softmax.

    replays: logprobs are among the kept ids; else of the whole vocabulary.
    """
    states, behavior_weight = random(CONTEXTS, HIDDEN, seed=0), random(VOCABULARY, HIDDEN, seed=1)
    current_weight = behavior_weight + 0.3 * random(VOCABULARY, HIDDEN, seed=2)
    rewards, temperature = random(CONTEXTS, VOCABULARY, seed=3), sampling.temperature
    whole = (states @ behavior_weight.T / temperature).softmax(-1)
    narrowing = Filter.of([sampling], VOCABULARY, torch.device("cpu"))
    assert narrowing is not None
    kept = narrowing.apply(whole)
    assert 0 < (kept > 0).sum() < kept.numel() / 2
    drawn = kept / kept.sum(-1, keepdim=True)

    context, token = drawn.nonzero(as_tuple=True)
    weight = current_weight.clone().requires_grad_()
    logprobs, entropy = token_logprobs(
        states[context],
        weight,
        token,
        torch.full((len(token),), temperature),
        chunk_size=16,
        kept_ids=KeptIds.of([kept[c].nonzero()[:, 0].numpy() for c in context]) if replays else None,
    )
    behavior = (drawn if replays else whole)[context, token].log()
    tokens = PackedTokens(
        behavior_logprobs=behavior,
        proximal_logprobs=behavior,
        reference_logprobs=behavior,
        advantages=rewards[context, token],
        values=torch.zeros_like(behavior),
        returns=torch.zeros_like(behavior),
        loss_weights=drawn[context, token],
        versions=torch.zeros_like(token),
        sequence_ids=torch.arange(len(token)),
    )
    loss = PolicyLoss.of(preset("importance_sampling"))
    outputs = TokenOutputs(logprobs=logprobs, entropy=entropy, values=torch.zeros_like(logprobs))
    (loss(outputs, tokens).loss * tokens.loss_weights).sum().backward()

    dense = current_weight.clone().requires_grad_()
    logits = (states @ dense.T / temperature).masked_fill(kept == 0, -torch.inf)
    (-(logits.softmax(-1) * rewards).sum()).backward()
    assert weight.grad is not None
    assert dense.grad is not None
    return weight.grad, dense.grad


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_the_expected_gradient_is_that_of_the_truncated_policy(sampling: SamplingParams) -> None:
    ours, wanted = expected_gradient(sampling, replays=True)
    torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-5)


def test_logprobs_of_the_whole_distribution_would_give_another() -> None:
    ours, wanted = expected_gradient(SAMPLINGS[0], replays=False)
    assert (ours - wanted).norm() > 0.1 * wanted.norm()
