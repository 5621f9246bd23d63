"""Each policy loss against its paper's formula in plain Python, value and gradient, in float64."""

import math

import pytest
import torch
from loss_references import (
    MEANS_OVER_A_TRAJECTORY,
    SUMS_OVER_A_TRAJECTORY,
    TOKEN_FORMS,
    Tokens,
    gradient,
    joined,
    random_batch,
    trajectories_of,
    weighed,
)

from arl.algorithm.losses.surrogates import PolicyTokens, Surrogate, surrogate
from arl.api.objective import (
    ClippedLossConfig,
    DPPOLossConfig,
    LossConfig,
    MirrorDescentLossConfig,
    ReinforceLossConfig,
    SAPOLossConfig,
    TOPRLossConfig,
)

CONFIGS = {
    "ppo": ClippedLossConfig(clip_low=0.2, clip_high=0.28),
    "ppo without a lower clip": ClippedLossConfig(clip_low=None, clip_high=0.2),
    "ppo without an upper clip": ClippedLossConfig(clip_low=0.2, clip_high=None),
    "importance sampling": ClippedLossConfig(clip_low=None, clip_high=None),
    "ppo with dual clip": ClippedLossConfig(clip_low=0.2, clip_high=0.2, dual_clip=1.5),
    "dual clip alone": ClippedLossConfig(clip_low=None, clip_high=None, dual_clip=1.3),
    "reinforce": ReinforceLossConfig(),
    "gspo": ClippedLossConfig(kind="gspo", clip_low=0.1, clip_high=0.15),
    "gmpo": ClippedLossConfig(kind="gmpo", clip_low=0.3, clip_high=0.4),
    "cispo": ClippedLossConfig(kind="cispo", clip_low=0.2, clip_high=0.3),
    "cispo without a lower clip": ClippedLossConfig(kind="cispo", clip_high=0.3),
    "sapo": SAPOLossConfig(),
    "sapo with other temperatures": SAPOLossConfig(tau_positive=2.0, tau_negative=0.7),
    "topr": TOPRLossConfig(),
    "mirror descent": MirrorDescentLossConfig(tau=0.7),
    "dppo": DPPOLossConfig(delta=0.1),
}
every_loss = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def evaluated(batch: list[Tokens], config: LossConfig) -> tuple[Surrogate, torch.Tensor, list[float]]:
    """The surrogate, sum(weight * loss), and its gradient by each current logprob."""
    current = joined(batch, "current").requires_grad_()
    result = surrogate(
        PolicyTokens(
            current=current,
            proximal=joined(batch, "proximal"),
            advantages=joined(batch, "advantages"),
            trajectories=trajectories_of(batch),
        ),
        config,
    )
    weights = torch.tensor([t.weight for t in batch for _ in t.current], dtype=torch.float64)
    total = (weights * result.loss).sum()
    return result, total.detach(), torch.autograd.grad(total, current)[0].tolist()


def of_tokens(**lists: list[float]) -> Tokens:
    """One trajectory; what is not given is 0."""
    length = len(next(iter(lists.values())))
    floats = {name: [0.0] * length for name in ("current", "proximal", "behavior", "reference", "advantages")}
    return Tokens(**{**floats, **lists}, versions=[0] * length, selected=[False] * length, weight=1.0)


@every_loss
@pytest.mark.parametrize("seed", range(5))
def test_a_loss_and_its_gradient_are_those_of_its_formula(config: LossConfig, seed: int):
    batch, form = random_batch(seed), TOKEN_FORMS[config.kind]
    result, _, slopes = evaluated(batch, config)
    expected_losses, expected_slopes = [], []
    for t in batch:
        expected_losses += form(t.current, t.current, t.proximal, t.advantages, config)
        expected_slopes += gradient(
            lambda c, t=t: t.weight * sum(form(c, t.current, t.proximal, t.advantages, config)), t.current
        )
    assert result.loss.tolist() == pytest.approx(expected_losses, abs=1e-6, rel=0)
    assert slopes == pytest.approx(expected_slopes, abs=1e-6, rel=0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["gspo", "gmpo", "topr", "mirror descent"])
def test_a_trajectorys_tokens_add_up_to_the_papers_loss_of_the_whole(name: str, seed: int):
    """Under sequence_mean where it is a mean, under sequence_sum where it is a sum; with nothing of ours held fixed."""
    config = CONFIGS[name]
    is_mean = config.kind in MEANS_OVER_A_TRAJECTORY
    paper = (MEANS_OVER_A_TRAJECTORY | SUMS_OVER_A_TRAJECTORY)[config.kind]
    batch = weighed(random_batch(seed, one_advantage=True, moved=0.2), by_length=is_mean)
    _, total, slopes = evaluated(batch, config)
    expected = sum(paper(t.current, t.current, t.proximal, t.advantages[0], config) for t in batch)
    expected_slopes = [
        slope
        for t in batch
        for slope in gradient(lambda c, t=t: paper(c, t.current, t.proximal, t.advantages[0], config), t.current)
    ]
    assert total.item() == pytest.approx(expected, abs=1e-6)
    assert slopes == pytest.approx(expected_slopes, abs=1e-6, rel=0)


@pytest.mark.parametrize("name", [n for n in CONFIGS if n not in ("importance sampling", "reinforce")])
def test_the_batches_have_tokens_on_both_sides_of_every_trust_region(name: str):
    is_clipped = torch.cat([evaluated(random_batch(seed), CONFIGS[name])[0].is_clipped for seed in range(5)])
    assert is_clipped.any()
    assert not is_clipped.all()


@pytest.mark.parametrize("name", CONFIGS)
def test_on_policy_the_gradient_is_reinforces(name: str):
    """Where c is p, for every loss and without a factor: SAPO's gate passes 4 s (1 - s) = 1 of it there, and mirror
    descent's penalty is at its minimum."""
    batch = [
        of_tokens(current=list(t.proximal), proximal=list(t.proximal), advantages=list(t.advantages))
        for t in random_batch(0)
    ]
    _, _, slopes = evaluated(batch, CONFIGS[name])
    assert slopes == pytest.approx([-a for t in batch for a in t.advantages], abs=1e-12)


@every_loss
def test_a_tokens_loss_has_a_gradient_in_that_token_alone(config: LossConfig):
    batch = random_batch(1)
    current = joined(batch, "current")

    def losses(current: torch.Tensor) -> torch.Tensor:
        tokens = PolicyTokens(
            current=current,
            proximal=joined(batch, "proximal"),
            advantages=joined(batch, "advantages"),
            trajectories=trajectories_of(batch),
        )
        return surrogate(tokens, config).loss

    jacobian = torch.autograd.functional.jacobian(losses, current)
    assert isinstance(jacobian, torch.Tensor)
    assert jacobian.equal(torch.diag(jacobian.diagonal()))
    assert jacobian.diagonal().any()


@pytest.mark.parametrize(
    "name", [name for name, config in CONFIGS.items() if config.kind in ("ppo", "gspo", "gmpo", "dppo_tv", "reinforce")]
)
def test_clipped_tokens_are_those_without_gradient(name: str):
    result, _, slopes = evaluated(random_batch(2), CONFIGS[name])
    assert result.is_clipped.tolist() == [slope == 0 for slope in slopes]


@pytest.mark.parametrize(
    ("config", "trajectories", "is_clipped"),
    [
        # the weight is clipped
        (CONFIGS["cispo"], [([math.log(r)], a) for r, a in ((0.5, 1), (1.0, 1), (1.5, -1))], [True, False, True]),
        # 4 s (1 - s) < 1/2, which is so where tau |r - 1| > log((sqrt(2) + 1) / (sqrt(2) - 1)) = 1.7627
        (CONFIGS["sapo"], [([math.log(r)], 1) for r in (0.1, 1.0, 2.76, 2.77)], [False, False, False, True]),
        # bad, with a ratio above 1
        (
            CONFIGS["topr"],
            [([c, 2 * c], a) for c in (0.1, -0.1) for a in (1, -1)],
            [False] * 2 + [True] * 2 + [False] * 4,
        ),
        # drawn back: tau D >= A > 0, or tau D <= A < 0
        (
            MirrorDescentLossConfig(tau=1.0),
            [([0.9, 0.0], a) for a in (1.0, 0.9, -1.0)] + [([-0.9, 0.0], -0.8)],
            [False, False, True, True, False, False, True, True],
        ),
    ],
    ids=["cispo", "sapo", "topr", "mirror descent"],
)
def test_each_loss_says_which_tokens_it_holds_back(
    config: LossConfig, trajectories: list[tuple[list[float], float]], is_clipped: list[bool]
):
    batch = [of_tokens(current=c, advantages=[a] * len(c)) for c, a in trajectories]
    assert evaluated(batch, config)[0].is_clipped.tolist() == is_clipped
