"""Groups for the tests of advantages, by hand and at random, and the settings of every estimator."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

import torch
from records import grouped

from arl.algorithm.advantages import with_advantages
from arl.algorithm.batch import Batch
from arl.api.settings.algorithm import AlgorithmConfig, preset
from arl.api.types import Group, Trajectory, TurnSpan

Settings = dict[str, Any]
MASK = (0, 1, 0, 1)


def trajectory(reward: float = 0.0, mask: Sequence[int] = MASK, **changes: Any) -> Trajectory:
    """A trajectory of one token for each entry of `mask`, the trained ones sampled."""
    fields: Settings = {
        "token_ids": tuple(range(len(mask))),
        "loss_mask": tuple(mask),
        "behavior_logprobs": tuple(-0.5 * m for m in mask),
        "versions": tuple(3 if m else -1 for m in mask),
        "reward": reward,
    }
    return Trajectory(**fields | changes)


def group(*trajectories: Trajectory, group_id: int = 0, episodes: Sequence[int] | None = None, **changes: Any) -> Group:
    """episodes: the episode of each trajectory; by default each has its own."""
    indices = {} if episodes is None else {"episode_indices": tuple(episodes)}
    return grouped(*trajectories, number=group_id, **indices, **changes)


def of_rewards(*rewards: float) -> Group:
    return group(*map(trajectory, rewards))


def config_of(advantage: Settings, **others: Any) -> AlgorithmConfig:
    """Decoupled PPO with these advantages, and a critic where they need one."""
    critic = {"critic": {}} if advantage.get("kind") == "gae" else {}
    return preset("decoupled_ppo", advantage=advantage, **critic, **others)


def returns(baseline: str = "none", scale: str = "none", **others: Any) -> Settings:
    return {"kind": "returns", "baseline": baseline, "scale": scale, **others}


def rows_of(batch: Batch) -> list[list[float]]:
    """For each trajectory its tokens' advantages."""
    return [row.tolist() for row in batch.split(batch.advantages)]


def one_each(group: Group, advantage: Settings, **others: Any) -> list[float]:
    """The advantage of each trajectory's first trained token, with nothing forwarded beforehand."""
    config = config_of(advantage, **others)
    rows = rows_of(with_advantages(Batch.of([group], config.overlong), config))
    return [row[int(t.loss_mask.argmax())] for row, t in zip(rows, group.trajectories, strict=True)]


def taken(groups: Sequence[Group], config: AlgorithmConfig) -> Batch:
    """The batch before its advantages are estimated, with logprobs and values as forward passes fill them in: 0 where
    nothing is trained. They depend on a trajectory's tokens and turns, not on its reward and place."""
    batch = Batch.of(groups, config.overlong)
    noise = torch.cat([torch.zeros(3, 0), *map(_noise, batch.trajectories)], dim=1) * batch.loss_mask
    return replace(batch, proximal_logprobs=-noise[0], reference_logprobs=-2 * noise[1], values=noise[2])


def _noise(t: Trajectory) -> torch.Tensor:
    columns = [None if row is None else row.tolist() for row in (t.token_ids, t.loss_mask, t.token_rewards)]
    generator = torch.Generator().manual_seed(crc32(repr((columns, t.turns)).encode()))
    return torch.rand(3, len(t.token_ids), generator=generator)


def random_groups(seed: int, *, has_branches: bool = False) -> list[Group]:
    """1 to 4 groups of 1 to 6 trajectories in two roles, each of 1 to 12 tokens. Some are untrained, truncated, in
    turns, or have process rewards.

    has_branches: some trajectories share an episode, with the same reward or with one of their own.
    """
    rng = random.Random(seed)
    groups = []
    for group_id in range(rng.randint(1, 4)):
        members = [_random_trajectory(rng) for _ in range(rng.randint(1, 6))]
        greedy = {"agent": rng.choice((0.0, 0.5, 1.0)), "critic": rng.random()}
        episodes = [rng.randint(0, i) if has_branches else i for i in range(len(members))]
        if rng.random() < 0.5:
            members = [replace(t, reward=members[e].reward) for t, e in zip(members, episodes, strict=True)]
        groups.append(group(*members, group_id=group_id, greedy_rewards=greedy, episodes=episodes))
    return groups


def _random_trajectory(rng: random.Random) -> Trajectory:
    length = rng.randint(1, 12)
    share = rng.choice((0.0, 0.4, 1.0))
    mask = (0, *(int(rng.random() < share) for _ in range(length - 1)))
    cuts = sorted(rng.sample(range(1, length + 1), k=min(rng.choice((0, 0, 2, 4, 6)), length // 2 * 2)))
    spans = zip(cuts[::2], cuts[1::2], strict=True)
    return trajectory(
        rng.choice((0.0, 1.0, 1.0, rng.uniform(-3, 3))),
        mask,
        role=rng.choice(("agent", "agent", "critic")),
        rewards={"right": float(rng.random() < 0.5), "brief": rng.uniform(-1, 1)},
        is_truncated=rng.random() < 0.2,
        token_rewards=tuple(rng.gauss(0, 1) for _ in range(length)) if rng.random() < 0.6 else None,
        turns=tuple(
            TurnSpan(start=a, stop=b, state=rng.choice((None, "x", "y")), reward=rng.gauss(0, 1)) for a, b in spans
        ),
    )


BASELINES = ("none", "group_mean", "leave_one_out", "greedy", "length_weighted")
SCALES = ("none", "group_std", "batch_std")
KL = [{"coefficient": 0.3, "place": "reward", "estimator": estimator} for estimator in ("k1", "k2", "k3")]
OVERLONG = {"mask_truncated": True, "max_tokens": 5, "buffer_tokens": 3, "penalty": 0.7}
WHOLE = {"aggregation": "sequence_mean", "weights": ["none"], "rejections": []}
DPO = {"loss": {"kind": "dpo"}, **WHOLE}
KTO = {"loss": {"kind": "kto"}, **WHOLE}

ESTIMATORS: list[tuple[Settings, Settings]] = [
    *((returns(b, s), {}) for b in BASELINES for s in SCALES),
    *((returns(b, s, token_discount=0.9, turn_discount=0.5), {"kl": KL[2]}) for b in BASELINES for s in SCALES),
    (returns("none", token_discount=0.0), {"kl": KL[0]}),
    (returns("none"), {"kl": KL[2] | {"place": "loss"}}),
    (returns("none"), {"overlong": {"max_tokens": 5, "buffer_tokens": 0, "penalty": 0.7}}),
    (returns("leave_one_out", turn_discount=0.0), {"kl": KL[1], "overlong": OVERLONG | {"mask_truncated": False}}),
    ({"kind": "distillation"}, {}),
    *((returns(b, s, separate_rewards=True), {}) for b in ("group_mean", "leave_one_out") for s in SCALES),
    (returns("group_mean", "group_std", separate_rewards=True), {"overlong": OVERLONG}),
    (returns("group_mean", "group_std", separate_rewards=True, reward_weights={"right": 2.5}), {"overlong": OVERLONG}),
    (returns("none", separate_rewards=True, reward_weights={"right": -0.5}), {}),
    (returns("group_mean", "batch_std"), {"overlong": OVERLONG}),
    *(({"kind": "pass_at_k", "k": k}, {}) for k in (1, 2, 3)),
    ({"kind": "pass_at_k", "k": 2}, {"overlong": OVERLONG}),
    ({"kind": "max_likelihood"}, {}),
    ({"kind": "max_likelihood"}, {"overlong": OVERLONG}),
    ({"kind": "rejection", "threshold": 0.4}, {}),
    *(({"kind": "gigpo", "scale": scale}, {}) for scale in ("none", "group_std")),
    ({"kind": "gigpo", "turn_discount": 0.0}, {"overlong": OVERLONG}),
    *(({"kind": "gae", "discount": d, "lam": lam}, {}) for d in (1.0, 0.9, 0.0) for lam in (1.0, 0.95, 0.0)),
    ({"kind": "gae", "lam": 0.95}, {"kl": KL[2], "overlong": OVERLONG}),
    *(({"kind": "gae", "level": "turn", "discount": d, "lam": lam}, {}) for d, lam in ((1.0, 1.0), (0.9, 0.8), (1, 0))),
    ({"kind": "gae", "level": "turn", "lam": 0.6}, {"kl": KL[2], "overlong": OVERLONG}),
    ({"kind": "pairs"}, DPO),
    ({"kind": "pairs"}, {**DPO, "overlong": OVERLONG}),
    *(({"kind": "labels", "balanced": balanced}, KTO) for balanced in (False, True)),
    ({"kind": "labels", "threshold": 0.4}, KTO),
    ({"kind": "labels", "threshold": 0.4, "balanced": True}, {**KTO, "overlong": OVERLONG}),
]
"""Every estimator with its options: (advantage, the other sections)."""


def name_of(estimator: object) -> str:
    """A test's name for one of ESTIMATORS' parts."""
    if not isinstance(estimator, dict):
        return str(estimator)
    return "-".join(f"{key}={value}" for key, value in estimator.items() if key != "kind" or value != "returns")[:60]
