"""The policy's loss put together, and the critic's, against plain Python."""

import math
import pickle
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from loss_references import Tokens, clip, gradient, joined, packed, policy_loss, random_batch

from arl.algorithm.losses.preferences import SFTLoss
from arl.algorithm.losses.reinforcement import PolicyLoss, ValueLoss, kl_estimate
from arl.api.settings.algorithm import preset
from arl.api.settings.objective import KLCovSelection
from arl.api.train_engine import PackedTokens, TokenLosses, TokenOutputs

VERSION, MAX_STALENESS = 7, 4
SURROGATES: dict[str, dict[str, Any]] = {
    "ppo": {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.28},
    "ppo without a lower clip": {"clip_low": None, "clip_high": 0.2},
    "ppo without an upper clip": {"clip_low": 0.2, "clip_high": None},
    "importance sampling": {"clip_low": None, "clip_high": None},
    "ppo with dual clip": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1.5},
    "dual clip alone": {"clip_low": None, "clip_high": None, "dual_clip": 1.3},
    "reinforce": {"kind": "reinforce"},
    "gspo": {"kind": "gspo", "clip_low": 0.1, "clip_high": 0.15},
    "gspo by turns": {"kind": "gspo", "clip_low": 0.1, "clip_high": 0.15, "level": "turn"},
    "gmpo": {"kind": "gmpo", "clip_low": 0.3, "clip_high": 0.4},
    "gmpo by turns": {"kind": "gmpo", "clip_low": 0.3, "clip_high": 0.4, "level": "turn"},
    "cispo": {"kind": "cispo", "clip_low": 0.2, "clip_high": 0.3},
    "cispo without a lower clip": {"kind": "cispo", "clip_high": 0.3},
    "sapo": {"kind": "sapo"},
    "topr": {"kind": "topr"},
    "mirror descent": {"kind": "mirror_descent", "tau": 0.7},
    "dppo": {"kind": "dppo_tv", "delta": 0.1},
}
LEVELS = ("token", "sequence", "geometric")
VETO = {"level": "token", "lower": 0.6, "upper": 1.8, "veto": True}
WEIGHTS: dict[str, dict[str, Any]] = {
    **{f"{level} truncated above": {"weights": [{"level": level, "upper": 1.3}]} for level in LEVELS},
    **{f"{level} truncated below": {"weights": [{"level": level, "lower": 0.9}]} for level in LEVELS},
    **{f"{level} bounded": {"weights": [{"level": level, "lower": 0.8, "upper": 1.2}]} for level in LEVELS},
    "without bounds": {"weights": [{"level": "token"}]},
    "no weight": {"weights": [{"level": "none"}]},
    "two weights": {"weights": [{"level": "token", "upper": 1.4}, {"level": "geometric", "lower": 0.9, "upper": 1.2}]},
    "three weights": {"weights": [{"level": level, "upper": 1.3} for level in LEVELS]},
}
REJECTIONS: dict[str, list[dict[str, Any]]] = {
    **{f"{level} mask": [{"level": level, "lower": 0.7, "upper": 1.3}] for level in LEVELS},
    "token mask, low side": [{"level": "token", "lower": 0.9}],
    "sequence mask, high side": [{"level": "sequence", "upper": 1.2}],
    "outward": [{"level": "token", "lower": 0.8, "upper": 1.2, "outward": True}],
    "outward, high side, beside another": [{"level": "token", "upper": 1.1, "outward": True}, {**VETO, "veto": False}],
    "veto": [VETO],
    "veto, low side": [{"level": "token", "lower": 0.6, "veto": True}],
    "veto, high side": [{"level": "token", "upper": 1.5, "veto": True}],
    "every mask": [*({"level": level, "lower": 0.4, "upper": 1.6} for level in LEVELS), VETO],
}
PARTS: dict[str, dict[str, Any]] = {
    **{name: {"loss": loss} for name, loss in SURROGATES.items()},
    **WEIGHTS,
    **{name: {"rejections": parts} for name, parts in REJECTIONS.items()},
    "mask without a weight": {"weights": [{"level": "none"}], "rejections": REJECTIONS["geometric mask"]},
    "two weights, every mask": {**WEIGHTS["two weights"], "rejections": REJECTIONS["every mask"]},
    "k2 in the loss": {"kl": {"coefficient": 0.3, "estimator": "k2"}},
    "k3 in the loss": {"kl": {"coefficient": 0.3, "estimator": "k3"}},
    "divergence in the reward": {"kl": {"coefficient": 0.3, "place": "reward"}},
    "entropy bonus": {"entropy": 0.1},
    "second moment": {"selection": {"kind": "second_moment"}, "kl": {"coefficient": 0.1}},
    "clip_cov": {"selection": {"kind": "clip_cov"}, "entropy": 0.1},
    "kl_cov": {"selection": {"kind": "kl_cov", "coefficient": 0.7}, "rejections": [{"level": "token", "upper": 1.2}]},
    "gspo, selected": {"loss": SURROGATES["gspo"], "selection": {"kind": "clip_cov"}},
}
BATCH = [tokens for seed in range(11, 14) for tokens in random_batch(seed)]
every_part = pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS.keys())


def loss_of(parts: dict[str, Any], proximal: str = "recomputed") -> PolicyLoss:
    if proximal == "bypassed":
        parts = {**parts, "proximal": "bypassed", "weights": [], "rejections": []}
    config = preset("decoupled_ppo", minibatches=2, **{"rejections": [], **parts})
    return PolicyLoss(config=config, proximal=proximal, version=VERSION, max_staleness=MAX_STALENESS)  # pyright: ignore[reportArgumentType]


def outputs_of(batch: Sequence[Tokens], dtype: torch.dtype = torch.float64) -> TokenOutputs:
    current = joined(batch, "current", dtype).requires_grad_()
    return TokenOutputs(logprobs=current, entropy=torch.full_like(current, 2.0), values=torch.zeros_like(current))


def evaluated(loss: PolicyLoss | SFTLoss, batch: Sequence[Tokens]) -> tuple[TokenLosses, float, list[float]]:
    """The losses, sum(loss_weights * loss), and its gradient by the current logprobs."""
    outputs, tokens = outputs_of(batch), packed(batch)
    losses = loss(outputs, tokens)
    total = (tokens.loss_weights * losses.loss).sum()
    return losses, total.item(), torch.autograd.grad(total, outputs.logprobs)[0].tolist()


def of_tokens(n: int = 2, **columns: Sequence[float]) -> Tokens:
    """One trajectory of fresh tokens with logprobs and advantages of -1, but for the given columns."""
    names = ("current", "proximal", "behavior", "reference", "advantages")
    numbers: dict[str, Any] = {**{name: [-1.0] * n for name in names}, **columns}
    return Tokens(**{"versions": [VERSION] * n, "selected": [False] * n, "weight": 1.0, **numbers})


@every_part
@pytest.mark.parametrize("proximal", ["recomputed", "current", "approximated", "bypassed"])
def test_a_loss_and_its_gradient_are_those_of_its_formula(parts: dict[str, Any], proximal: str):
    loss = loss_of(parts, proximal)
    _, total, slopes = evaluated(loss, BATCH)

    def expected(tokens: Tokens, current: Sequence[float]) -> float:
        return policy_loss(tokens, current, tokens.current, loss.config, proximal, VERSION)

    assert total == pytest.approx(sum(expected(t, t.current) for t in BATCH), abs=1e-6)
    by_hand = [slope for t in BATCH for slope in gradient(lambda c, t=t: expected(t, c), t.current)]
    if proximal == "current" and isinstance(loss.config.selection, KLCovSelection):
        # |c - p| has no derivative at c = p, and is given 0.
        by_hand = evaluated(loss_of({**parts, "selection": None}, "current"), BATCH)[2]
    assert slopes == pytest.approx(by_hand, abs=1e-6, rel=0)


@pytest.mark.parametrize("name", SURROGATES)
def test_a_trust_region_holds_back_some_tokens_and_a_hard_clip_takes_their_gradient(name: str):
    loss = loss_of({"loss": SURROGATES[name], "weights": [{"level": "token"}]})
    losses, _, slopes = evaluated(loss, BATCH)
    is_clipped = losses.means["clip_fraction"].bool().tolist()
    assert any(is_clipped) == (name not in ("importance sampling", "reinforce"))
    assert not all(is_clipped)
    if loss.config.loss.kind in ("ppo", "gspo", "gmpo", "dppo_tv", "reinforce"):
        assert is_clipped == [slope == 0 for slope in slopes]


@pytest.mark.parametrize(
    ("loss", "trajectories", "is_clipped"),
    [
        # the weight is clipped
        (SURROGATES["cispo"], [([math.log(r)], a) for r, a in ((0.5, 1), (1.0, 1), (1.5, -1))], [1, 0, 1]),
        # 4 s (1 - s) < 1/2, which is so where tau |r - 1| > log((sqrt(2) + 1) / (sqrt(2) - 1)) = 1.7627
        (SURROGATES["sapo"], [([math.log(r)], 1) for r in (0.1, 1.0, 2.76, 2.77)], [0, 0, 0, 1]),
        # bad, with a ratio above 1
        (SURROGATES["topr"], [([c, 2 * c], a) for c in (0.1, -0.1) for a in (1, -1)], [0, 0, 1, 1, 0, 0, 0, 0]),
        # drawn back: tau D >= A > 0, or tau D <= A < 0
        (
            {"kind": "mirror_descent", "tau": 1.0},
            [([0.9, 0.0], a) for a in (1.0, 0.9, -1.0)] + [([-0.9, 0.0], -0.8)],
            [0, 0, 1, 1, 0, 0, 1, 1],
        ),
    ],
    ids=["cispo", "sapo", "topr", "mirror descent"],
)
def test_each_loss_says_which_tokens_it_holds_back(
    loss: dict[str, Any], trajectories: list[tuple[list[float], float]], is_clipped: list[int]
):
    batch = [of_tokens(len(c), current=c, proximal=[0.0] * len(c), advantages=[a] * len(c)) for c, a in trajectories]
    assert evaluated(loss_of({"loss": loss}), batch)[0].means["clip_fraction"].tolist() == is_clipped


@pytest.mark.parametrize(
    ("changes", "proximal"),
    [
        ({}, "current"),
        ({"minibatches": 2}, "recomputed"),
        ({"epochs": 2}, "recomputed"),
        ({"selection": {"kind": "second_moment"}}, "recomputed"),
        ({"proximal": "approximated", "minibatches": 2}, "approximated"),
        ({"proximal": "bypassed", "weights": [], "rejections": []}, "bypassed"),
    ],
)
def test_current_logprobs_serve_as_proximal_ones_if_nothing_else_needs_them(changes: dict[str, Any], proximal: str):
    assert PolicyLoss.of(preset("decoupled_ppo", **changes)).proximal == proximal


def test_a_loss_travels_between_processes():
    loss = PolicyLoss.of(preset("decoupled_ppo", loss={"kind": "gspo"}), version=3, max_staleness=2)
    assert pickle.loads(pickle.dumps(loss)) == loss


@every_part
def test_a_microbatch_without_trained_tokens_reports_the_same_names(parts: dict[str, Any]):
    """Its tensors are empty and its names are the same: every rank adds up the same ones."""
    nothing, something = loss_of(parts)(outputs_of([]), packed([])), evaluated(loss_of(parts), random_batch(1))[0]
    assert nothing.loss.shape == (0,)
    for kind in ("means", "maxima", "quotients", "sample_sizes"):
        assert list(getattr(nothing, kind)) == list(getattr(something, kind))


# Parts, one by one ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("moved", "pull"), [(5e-5, 0.0), (-5e-5, 0.0), (2e-4, 0.7), (-2e-4, -0.7)])
def test_kl_cov_draws_back_tokens_that_moved_and_not_the_rounding_of_those_that_did_not(moved: float, pull: float):
    tokens = of_tokens(current=[-1.0 + moved, -1.0], advantages=[0.0, 0.0], selected=[True, False])
    _, _, slopes = evaluated(loss_of({"selection": {"kind": "kl_cov", "coefficient": 0.7}}), [tokens])
    assert slopes == pytest.approx([pull, 0.0])


def test_the_entropy_bonus_rewards_entropy():
    batch = random_batch(3)
    entropy = torch.ones(sum(len(t.current) for t in batch), dtype=torch.float64, requires_grad=True)
    current = joined(batch, "current")
    losses = loss_of({"entropy": 0.25})(TokenOutputs(logprobs=current, entropy=entropy, values=current), packed(batch))
    assert torch.autograd.grad(losses.loss.sum(), entropy)[0].tolist() == [-0.25] * len(entropy)


FAR = [0.0, -19.9, -25.0, -1e4]


@every_part
def test_everything_is_finite_wherever_the_policies_are(parts: dict[str, Any]):
    """In float32, with advantages of a million: for one-token sequences, and for all tokens as one."""
    rows = [(c, p, b, r, a) for c in FAR for p in FAR for b in FAR for r in FAR for a in (1e6, -1e6)]
    current, proximal, behavior, reference, advantages = torch.tensor(rows).unbind(1)
    current.requires_grad_()
    for ids in (torch.arange(len(rows)), torch.zeros(len(rows), dtype=torch.int64)):
        tokens = PackedTokens(
            behavior_logprobs=behavior,
            proximal_logprobs=proximal,
            reference_logprobs=reference,
            advantages=advantages,
            selected=torch.arange(len(rows)) % 2 == 0,
            sequence_ids=ids,
        )
        outputs = TokenOutputs(logprobs=current, entropy=torch.ones(len(rows)), values=torch.zeros(len(rows)))
        losses = loss_of(parts)(outputs, tokens)
        values = [losses.loss, torch.autograd.grad(losses.loss.sum(), current)[0]]
        values += [*losses.means.values(), *losses.maxima.values(), *losses.sample_sizes.values()]
        assert all(value.isfinite().all() for value in values)


@every_part
@pytest.mark.parametrize("proximal", ["recomputed", "current", "approximated"])
def test_a_loss_stays_on_its_device_and_never_waits_for_it(parts: dict[str, Any], proximal: str):
    """On the meta device, where there are shapes and no numbers, nothing can be read back or mixed with the CPU's."""
    numbers = torch.zeros(6, device="meta")
    whole = torch.zeros(6, device="meta", dtype=torch.int64)
    tokens = PackedTokens(behavior_logprobs=numbers, versions=whole, sequence_ids=whole)
    current = numbers.clone().requires_grad_()
    losses = loss_of(parts, proximal)(TokenOutputs(logprobs=current, entropy=numbers, values=numbers), tokens)
    losses.loss.sum().backward()
    pairs = [value for pair in losses.quotients.values() for value in pair]
    values = [losses.loss, *losses.means.values(), *losses.maxima.values(), *losses.sample_sizes.values(), *pairs]
    assert {(value.device.type, value.shape) for value in values} == {("meta", (6,))}


# Metrics --------------------------------------------------------------------------------------------------------------


def test_metrics_say_what_the_ratio_the_clip_and_the_weight_did():
    tokens = of_tokens(3, current=[-0.4, -2.0, -1.0], behavior=[-1.0, -1.0, -4.0], advantages=[1.0] * 3)
    losses, _, _ = evaluated(loss_of({"weights": [{"level": "token", "upper": 5.0}]}), [tokens])
    ratios = [math.exp(0.6), math.exp(-1.0), 1.0]
    assert losses.means["ratio"].tolist() == pytest.approx(ratios)
    assert losses.maxima["ratio_max"].tolist() == pytest.approx(ratios)
    assert losses.means["clip_fraction"].tolist() == [1.0, 0.0, 0.0]
    assert losses.means["behavior_weight"].tolist() == pytest.approx([1.0, 1.0, 5.0])
    assert losses.maxima["behavior_weight_max"].tolist() == pytest.approx([1.0, 1.0, 5.0])
    assert losses.means["behavior_weight_zero"].tolist() == [0.0, 0.0, 0.0]
    assert losses.means["behavior_kl_proximal"].tolist() == pytest.approx([0.0, 0.0, math.exp(3) - 1 - 3])
    assert losses.means["behavior_kl_current"].tolist() == pytest.approx(
        [math.exp(d) - 1 - d for d in (0.6, -1.0, 3.0)]
    )
    assert losses.means["entropy"].tolist() == [2.0, 2.0, 2.0]
    assert losses.sample_sizes["effective_sample_size"].tolist() == pytest.approx([1.0, 1.0, 5.0])
    masked, _, _ = evaluated(loss_of({"rejections": [{"level": "token", "upper": 5.0}]}), [tokens])
    assert masked.means["behavior_weight_zero"].tolist() == [0.0, 0.0, 1.0]
    bypassed, _, _ = evaluated(loss_of({}, "bypassed"), [tokens])
    ratios = [math.exp(d) for d in (0.6, -1.0, 3.0)]
    assert bypassed.sample_sizes["effective_sample_size"].tolist() == pytest.approx(ratios)


@pytest.mark.parametrize(
    ("loss", "of_first", "of_second"),
    [
        (SURROGATES["gspo"], math.exp(0.2), math.exp(-0.5)),  # the geometric mean
        (SURROGATES["gmpo"], math.exp((0.4 - 0.4) / 2), math.exp(-0.3)),  # after the clip of each token
        (SURROGATES["topr"], math.exp(0.4), math.exp(-0.5)),  # the product
    ],
    ids=["gspo", "gmpo", "topr"],
)
def test_a_loss_over_trajectories_reports_their_ratio_beside_that_of_tokens(
    loss: dict[str, Any], of_first: float, of_second: float
):
    batch = [of_tokens(2, current=[-0.2, -1.4], advantages=[1.0, 1.0]), of_tokens(1, current=[-1.5])]
    losses, _, _ = evaluated(loss_of({"loss": loss}), batch)
    assert losses.means["trajectory_ratio"].tolist() == pytest.approx([of_first, of_first, of_second])
    assert losses.maxima["trajectory_ratio_max"].tolist() == losses.means["trajectory_ratio"].tolist()
    assert losses.means["ratio"].tolist() == pytest.approx([math.exp(0.8), math.exp(-0.4), math.exp(-0.5)])
    assert "trajectory_ratio" not in evaluated(loss_of({}), batch)[0].means


def test_the_distance_to_a_reference_and_the_selection_are_reported_where_there_is_one():
    tokens = of_tokens(current=[-0.4, -2.0], selected=[True, False])
    for kl in ({"estimator": "k3"}, {"estimator": "k2"}, {"place": "reward"}):
        losses, _, _ = evaluated(loss_of({"kl": {"coefficient": 0.1, **kl}}), [tokens])
        assert losses.means["kl_reference"].tolist() == pytest.approx([math.exp(-d) - 1 + d for d in (0.6, -1.0)])
    losses, _, _ = evaluated(loss_of({"selection": {"kind": "second_moment"}}), [tokens])
    assert losses.means["selected"].tolist() == [1.0, 0.0]
    assert not {"kl_reference", "selected"} & evaluated(loss_of({}), [tokens])[0].means.keys()


def test_metrics_by_staleness_are_those_of_the_tokens_of_that_staleness():
    batch = random_batch(9)
    losses, _, _ = evaluated(loss_of({}), batch)
    staleness = [VERSION - v for t in batch for v in t.versions]
    assert {0, 1, 2, 3, 4} == set(staleness)
    for name, members in {"0": {0}, "1": {1}, "2": {2}, "3-4": {3, 4}}.items():
        inside = [1.0 if s in members else 0.0 for s in staleness]
        for metric in ("ratio", "clip_fraction", "behavior_kl_proximal", "behavior_kl_current", "entropy"):
            above, below = losses.quotients[f"staleness_{name}/{metric}"]
            values = losses.means[metric].tolist()
            assert above.tolist() == [v * i for v, i in zip(values, inside, strict=True)]
            assert below.tolist() == inside
        above, below = losses.quotients[f"staleness_{name}/tokens"]
        assert above.tolist() == inside
        assert below.tolist() == [1.0] * len(staleness)


@pytest.mark.parametrize(
    ("max_staleness", "buckets"),
    [(0, []), (1, ["0", "1"]), (4, ["0", "1", "2", "3-4"]), (16, ["0", "1", "2", "3-4", "5-8", "9-16"]),
     (40, ["0", "1", "2", "3-4", "5-8", "9-16", "17+"])],
)  # fmt: skip
def test_there_are_as_many_buckets_of_staleness_as_a_run_allows(max_staleness: int, buckets: list[str]):
    """The last one holds whatever is older."""
    loss = PolicyLoss.of(preset("decoupled_ppo"), version=50, max_staleness=max_staleness)
    batch = [of_tokens(versions=[50 - 17, 50 - 40])]
    quotients = loss(outputs_of(batch), packed(batch)).quotients
    names = dict.fromkeys(name.partition("/")[0].removeprefix("staleness_") for name in quotients)
    assert list(names) == buckets
    if max_staleness == 40:
        assert quotients["staleness_17+/tokens"][0].tolist() == [1.0, 1.0]


@every_part
def test_metrics_are_detached_and_nothing_is_rounded(parts: dict[str, Any]):
    losses, _, _ = evaluated(loss_of(parts), random_batch(2))
    pairs = [value for pair in losses.quotients.values() for value in pair]
    values = [*losses.means.values(), *losses.maxima.values(), *losses.sample_sizes.values(), *pairs]
    assert not any(value.requires_grad for value in values)
    assert {value.dtype for value in (losses.loss, *values)} == {torch.float64}


# Imitation ------------------------------------------------------------------------------------------------------------


def test_supervised_loss_is_the_negative_log_likelihood():
    batch = random_batch(0)
    losses, _, slopes = evaluated(SFTLoss(), batch)
    assert losses.loss.tolist() == [-c for t in batch for c in t.current]
    assert slopes == [-t.weight for t in batch for _ in t.current]


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_penalty_draws_the_policy_back_from_either_side(estimator):
    """Its gradient never has the wrong sign, however far; beyond e^-20, k3's is gone."""
    far = [-1e4, -30.0, -19.0, -0.5, 0.5, 19.0, 30.0, 1e4]
    d = torch.tensor(far, dtype=torch.float64, requires_grad=True)
    (slopes,) = torch.autograd.grad(kl_estimate(d, estimator).sum(), d)
    assert (slopes * d >= 0).all()
    assert slopes[2:].all()


# The critic's --------------------------------------------------------------------------------


def valued(values: list[float]) -> TokenOutputs:
    numbers = torch.tensor(values, dtype=torch.float64)
    return TokenOutputs(logprobs=-torch.ones_like(numbers), entropy=torch.ones_like(numbers), values=numbers)


def returned(before: list[float], returns: list[float]) -> PackedTokens:
    values, targets = torch.tensor([before, returns], dtype=torch.float64)
    return PackedTokens(behavior_logprobs=-torch.ones_like(values), values=values, returns=targets)


def slow_value_loss(value: float, before: float, target: float, value_clip: float | None) -> float:
    unclipped = (value - target) ** 2
    if value_clip is None:
        return unclipped / 2
    return max(unclipped, (clip(value, before - value_clip, before + value_clip) - target) ** 2) / 2


@pytest.mark.parametrize("value_clip", [None, 0.2, 1.0])
def test_the_loss_and_its_gradient_are_those_of_the_definition(value_clip: float | None):
    rng = random.Random(0)
    now, before, returns = ([rng.gauss(0, 1) for _ in range(60)] for _ in range(3))
    outputs = valued(now)
    outputs.values.requires_grad_()
    losses = ValueLoss(value_clip=value_clip)(outputs, returned(before, returns))
    (slopes,) = torch.autograd.grad(losses.loss.sum(), outputs.values)
    expected = [slow_value_loss(*triple, value_clip) for triple in zip(now, before, returns, strict=True)]

    def slope(value: float, v0: float, target: float) -> float:
        return gradient(lambda at: slow_value_loss(at[0], v0, target, value_clip), [value])[0]

    assert losses.loss.tolist() == pytest.approx(expected, abs=1e-12)
    assert slopes.tolist() == pytest.approx([slope(*t) for t in zip(now, before, returns, strict=True)], abs=1e-6)


@pytest.mark.parametrize(("value_clip", "is_clipped"), [(None, [0.0, 0.0]), (0.2, [1.0, 0.0])])
def test_metrics_say_what_was_predicted_how_far_off_it_was_and_what_was_clipped(
    value_clip: float | None, is_clipped: list[float]
):
    losses = ValueLoss(value_clip=value_clip)(valued([0.5, -0.5]), returned([0.0, 0.0], [1.0, 1.0]))
    assert losses.means["value"].tolist() == [0.5, -0.5]
    assert losses.means["value_error"].tolist() == [0.5, 1.5]
    assert losses.means["value_clip_fraction"].tolist() == is_clipped


def test_rounding_does_not_count_as_clipping():
    rng = random.Random(0)
    now, before = ([rng.uniform(-0.1, 0.1) for _ in range(500)] for _ in range(2))
    losses = ValueLoss(value_clip=0.2)(valued(now), returned(before, [0.0] * 500))
    assert not losses.means["value_clip_fraction"].any()
