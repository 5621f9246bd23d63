"""Named algorithms, each a set of values of AlgorithmConfig's fields, with its paper's own constants.

A preset names its differences from BASE. Where a paper trains on batches of its policy, p is that policy, and the
behavior weight covers the distance between p and the sampler; at staleness 0 both are the same. A preset is bypassed
if the paper's only ratio is to the sampler. It has the paper's optimizer steps per batch if its loss differs from the
policy gradient only from the second step on.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from arl.api.settings.sections import laid_over

BASE: Mapping[str, Any] = {
    "advantage": {"kind": "returns", "baseline": "group_mean", "scale": "group_std"},
    "loss": {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.2},
    "selection": None,
    "weights": ({"level": "token", "upper": 5.0},),
    "rejections": (),
    "kl": {"coefficient": 0.0},
    "overlong": {},
    "critic": None,
    "reward_model": None,
    "proximal": "recomputed",
    "aggregation": "token_mean",
    "sequence_tokens": 1024,
    "entropy": 0.0,
    "dynamic_sampling": False,
    "epochs": 1,
    "minibatches": 1,
}
"""Decoupled PPO with group-relative advantages, and no penalties. The preset decoupled_ppo adds rejections."""

_BYPASSED = {"proximal": "bypassed", "weights": ()}
_UNCLIPPED = {"clip_low": None, "clip_high": None}
_CENTRED = {"scale": "none"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A named algorithm."""

    paper: str
    """Its arXiv number, or authors and year."""
    about: str
    """Its purpose, in a sentence."""
    settings: Mapping[str, Any]
    """All fields, BASE's included."""


def _preset(paper: str, about: str, **changes: Any) -> Preset:
    return Preset(paper=paper, about=about, settings=laid_over(BASE, changes))


PRESETS: Mapping[str, Preset] = {
    "decoupled_ppo": _preset(
        "2505.24298",
        "AReaL's: PPO's clip around the proximal policy; stale tokens are weighed, and held near the sampler's policy.",
        # Not the paper's: without them old tokens may drive the policy away (docs/figures.md).
        rejections=({"level": "token", "lower": 0.5, "upper": 2.0, "outward": True},),
    ),
    "naive": _preset(
        "1707.06347", "PPO's clip around the sampler's policy: the baseline for decoupled_ppo.", **_BYPASSED
    ),
    "a3po": _preset(
        "2512.06547",
        "decoupled_ppo without the forward pass for p: p is interpolated between b and c by version.",
        proximal="approximated",
        minibatches=4,
    ),
    "ppo": _preset(
        "2203.02155",
        "PPO with a critic, for process rewards and long episodes; InstructGPT's constants.",
        advantage={"kind": "gae", "discount": 1.0, "lam": 0.95},
        critic={"value_clip": 0.2},
        kl={"coefficient": 0.02, "estimator": "k1", "place": "reward"},
        minibatches=8,
    ),
    "turn_ppo": _preset(
        "2512.17008",
        "PPO over turns: one advantage and one ratio for each turn, a critic of where turns begin. For many turns.",
        advantage={"kind": "gae", "level": "turn", "discount": 0.99, "lam": 0.9},
        loss={"kind": "gspo", "level": "turn", "clip_low": 0.2, "clip_high": 0.2},
        critic={"value_clip": 0.2},
        minibatches=4,  # not the paper's, which names discount and lam
    ),
    "grpo": _preset(
        "2402.03300",
        "Group-relative advantages: every trajectory weighs the same, and a KL holds the policy to the first model.",
        kl={"coefficient": 0.04, "estimator": "k3"},
        aggregation="sequence_mean",
    ),
    "dr_grpo": _preset(
        "2503.20783",
        "GRPO without its biases towards long wrong answers and towards questions of nearly equal rewards.",
        advantage=_CENTRED,
        aggregation="sequence_sum",
        sequence_tokens=3000,
    ),
    "dapo": _preset(
        "2503.14476",
        "For long reasoning: room to explore upwards, equal groups replaced, overlong answers penalised softly.",
        loss={"clip_high": 0.28},
        overlong={"max_tokens": 20480, "buffer_tokens": 4096, "penalty": 1.0},
        dynamic_sampling=True,
        minibatches=16,
    ),
    "gspo": _preset(
        "2507.18071",
        "One ratio and one clip for each trajectory: steadier for mixtures of experts.",
        loss={"kind": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
        aggregation="sequence_mean",
        minibatches=4,
    ),
    "gmpo": _preset(
        "2507.20673",
        "The geometric mean of a trajectory's ratios, in a wide clip: outliers hardly move it.",
        loss={"kind": "gmpo", "clip_low": 0.4, "clip_high": 0.4},
        aggregation="sequence_mean",
        minibatches=8,
    ),
    "cispo": _preset(
        "2506.13585",
        "MiniMax-M1's: clips ratios as weights, so rare, decisive tokens keep their gradient.",
        loss={"kind": "cispo", "clip_low": None, "clip_high": 4.0},
        dynamic_sampling=True,
        minibatches=16,
    ),
    "sapo": _preset(
        "2511.20347",
        "A smooth gate instead of a clip. It closes faster for tokens of bad trajectories.",
        loss={"kind": "sapo"},
        aggregation="sequence_mean",
        minibatches=4,
    ),
    "clip_cov": _preset(
        "2505.22617",
        "Keeps entropy up: leaves out some of the tokens that would lower it most.",
        loss={"clip_low": 1.0, "clip_high": 1.0},
        selection={"kind": "clip_cov", "share": 2e-4, "low": 1.0, "high": 5.0},
        minibatches=8,
    ),
    "kl_cov": _preset(
        "2505.22617",
        "Keeps entropy up: holds the tokens that would lower it most close to the proximal policy.",
        loss=_UNCLIPPED,
        selection={"kind": "kl_cov", "share": 2e-3, "coefficient": 1.0},
        minibatches=8,
    ),
    "reinforce": _preset(
        "2402.14740",
        "The plain policy gradient: rewards as they are, from groups of any size, also of one.",
        advantage={"baseline": "none", "scale": "none"},
        loss={"kind": "reinforce"},
        aggregation="sequence_sum",
    ),
    "rloo": _preset(
        "2402.14740",
        "REINFORCE with the mean of a group's other rewards as baseline, which keeps the gradient unbiased.",
        advantage={"baseline": "leave_one_out", "scale": "none"},
        loss={"kind": "reinforce"},
        kl={"coefficient": 0.03, "estimator": "k1", "place": "reward"},
        aggregation="sequence_sum",
    ),
    "reinforce++": _preset(
        "2501.03262",
        "Works with one episode for each example: whitens advantages over the batch, with a KL in the reward.",
        advantage={"baseline": "none", "scale": "batch_std"},
        kl={"coefficient": 0.01, "estimator": "k1", "place": "reward"},
    ),
    "reinforce++_baseline": _preset(
        "2501.03262",
        "Subtracts the group's mean, then whitens over the batch: small groups do not inflate small differences.",
        advantage={"scale": "batch_std"},
        kl={"coefficient": 1e-3, "estimator": "k2"},
    ),
    "remax": _preset(
        "2310.10505",
        "REINFORCE with the reward of one more, greedy episode as baseline: useful with very small groups.",
        advantage={"baseline": "greedy", "scale": "none"},
        loss={"kind": "reinforce"},
        aggregation="sequence_sum",
    ),
    "opo": _preset(
        "2505.23585",
        "REINFORCE with the baseline of least variance, the mean weighted by length. Made for fresh batches.",
        advantage={"baseline": "length_weighted", "scale": "none"},
        loss={"kind": "reinforce"},
    ),
    "topr": _preset(
        "2503.14286",
        "For old data: imitates good trajectories as they are, and bad ones only as far as they are still likely.",
        advantage=_CENTRED,
        loss={"kind": "topr"},
        aggregation="sequence_sum",
        **_BYPASSED,
    ),
    "mirror_descent": _preset(
        "2501.12599",
        "Kimi's: no ratio weighs anything; trajectories are pulled back to the policy that sampled them.",
        advantage=_CENTRED,
        loss={"kind": "mirror_descent", "tau": 0.1},
        aggregation="sequence_sum",
        **_BYPASSED,
    ),
    "gdpo": _preset(
        "2601.05242",
        "For several named rewards: normalises each in its group, so that none drowns the others.",
        advantage={"separate_rewards": True},
    ),
    "pass_at_k": _preset(
        "2508.10751",
        "Rewards a group for one success among k answers: explores where single answers mostly fail.",
        advantage={"kind": "pass_at_k", "k": 4},
    ),
    "maxrl": _preset(
        "2602.02710",
        "For hard questions: the rarer a success is in its group, the more it counts, as in maximum likelihood.",
        advantage={"kind": "max_likelihood"},
    ),
    "gigpo": _preset(
        "2505.10978",
        "For agents that meet the same states again: compares turns with turns from the same state.",
        advantage={"kind": "gigpo", "turn_discount": 0.95, "scale": "group_std"},
        kl={"coefficient": 0.01, "estimator": "k3"},
    ),
    "prime": _preset(
        "2502.01456",
        "A second model learns from outcomes how much each token helps; for long answers with rewards of 0 and 1.",
        advantage={"baseline": "leave_one_out", "scale": "none"},
        reward_model={"lr": 1e-6, "beta": 0.05, "update": "after"},
        dynamic_sampling=True,  # with 4 answers of reward 0 or 1, the same as the paper's accuracies from 0.2 to 0.8
        minibatches=4,
    ),
    "raft++": _preset(
        "2504.11343",
        "Rejection sampling: trains only on trajectories with a reward, within PPO's clip.",
        advantage={"kind": "rejection", "threshold": 0.0},
        aggregation="sequence_mean",
        minibatches=4,
    ),
    "distillation": _preset(
        "2306.13649",
        "The student's own tokens, each rewarded by how much likelier a teacher finds it (token_rewards).",
        advantage={"kind": "distillation"},
        loss=_UNCLIPPED,
    ),
    "importance_sampling": _preset(
        "Precup et al. 2000",
        "-A exp(c - b), without any clip: unbiased for each token, and noisy.",
        loss=_UNCLIPPED,
        **_BYPASSED,
    ),
    "tis": _preset(
        "Yao et al. 2025",
        "For servers that compute a little differently: caps each token's weight exp(p - b) at 2.",
        weights=({"level": "token", "upper": 2.0},),
    ),
    "mis": _preset(
        "Liu et al. 2025",
        "Leaves out trajectories that the trainer finds more than twice as likely as the sampler did.",
        weights=({"level": "sequence"},),
        rejections=({"level": "sequence", "upper": 2.0},),
    ),
    "icepop": _preset(
        "2510.18855",
        "Leaves out tokens on which trainer and sampler disagree, either way. For mixtures of experts.",
        weights=({"level": "token"},),
        rejections=({"level": "token", "lower": 0.5, "upper": 5.0},),
    ),
    "m2po": _preset(
        "2510.01161",
        "For data hundreds of versions old: leaves out the few tokens that moved most, and clips no others.",
        loss=_UNCLIPPED,
        selection={"kind": "second_moment", "limit": 0.04},
        **_BYPASSED,
    ),
    "dppo_tv": _preset(
        "2602.04879",
        "A trust region of probabilities, not of ratios: rare tokens may move far, frequent ones may not.",
        loss={"kind": "dppo_tv", "delta": 0.15},
        **_BYPASSED,
    ),
    "online_dpo": _preset(
        "2402.04792",
        "DPO on the best and the worst episode of each group: where only the order of rewards means something.",
        advantage={"kind": "pairs"},
        loss={"kind": "dpo", "beta": 0.1, "link": "sigmoid"},
        aggregation="sequence_mean",
        **_BYPASSED,
    ),
    "kto": _preset(
        "2402.01306",
        "Good and bad episodes, each by itself, with gains and losses that saturate: for rewards that are yes or no.",
        advantage={"kind": "labels", "balanced": True},
        loss={"kind": "kto", "beta": 0.1},
        aggregation="sequence_mean",
        **_BYPASSED,
    ),
}


def unknown_preset(name: object) -> str:
    """The message about a preset that does not exist."""
    close = difflib.get_close_matches(str(name).lower(), PRESETS, n=3, cutoff=0.5)
    advice = f"did you mean {' or '.join(close)}? " if close else ""
    return f"no preset is named {name!r}; {advice}there are {', '.join(PRESETS)}"
