"""What training keeps of each token with adapters, critics, teachers and shared beginnings: its trajectory's own."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_groups import random_groups
from records import grouped
from train_models import load_critic, load_twin, slow_values
from train_sequences import twin_logprobs

from arl.algorithm.batch import Batch
from arl.api.settings.run import Config
from arl.api.train_engine import TrainSequence
from arl.api.types import Group, Trajectory
from arl.run.learner import load_learner
from arl.training.learner import Learner
from arl.training.token_log import KeptBatch

MakeLearner = Callable[..., Learner]
MOVING, STANDING = {"lr": 3e-2, "eps": 1e-3}, {"lr": 1e-30, "weight_decay": 0.0}
"""Optimizers whose steps change each number, and none."""


@pytest.fixture
def make_learner(model_dir: Path) -> Iterator[MakeLearner]:
    """make(train settings, algorithm settings) -> a learner that keeps everything."""
    learners: list[Learner] = []

    def make(train: dict[str, Any], **algorithm: Any) -> Learner:
        settings = {
            "model": str(model_dir),
            "rollout": {"batch_size": 4, "group_size": 2},
            "train": {"max_tokens_per_microbatch": 60, **train},
            "algorithm": {"preset": "decoupled_ppo", "rejections": [], **algorithm},
        }
        learners.append(load_learner(Config.model_validate(settings)))
        return learners[-1]

    yield make
    for learner in learners:
        learner.close()


def plain(groups: list[Group]) -> list[Group]:
    """Groups whose trajectories have no rewards but their own."""
    return [
        replace(group, trajectories=tuple(replace(t, turns=(), token_rewards=None) for t in group.trajectories))
        for group in groups
    ]


def branching(groups: list[Group], seed: int) -> list[Group]:
    """Each episode gets a trajectory that begins as its first one, and one that the first one begins with.

    Tokens that trajectories share are trained in some of them, and at a temperature of their own.
    """
    chance = random.Random(seed)

    def branches(first: Trajectory) -> list[Trajectory]:
        length = len(first.token_ids)
        cut = chance.randrange(11, length)
        rest = chance.choices(range(256), k=chance.randint(1, 12))
        mask = [*first.loss_mask[:cut].tolist(), *[True] * len(rest)]
        mask = [m and chance.random() < 0.8 for m in mask]
        longer = replace(
            first,
            token_ids=(*first.token_ids[:cut].tolist(), *rest),
            loss_mask=mask,
            behavior_logprobs=[-3 * chance.random() * m for m in mask],
            versions=[0 if m else -1 for m in mask],
            temperature=1.1,
        )
        fields = ("token_ids", "loss_mask", "behavior_logprobs", "versions")
        return [first, longer, replace(first, **{name: getattr(first, name)[:cut] for name in fields})]

    return [
        replace(
            group,
            trajectories=tuple(branch for t in group.trajectories for branch in branches(t)),
            episode_indices=tuple(index for index in group.episode_indices for _ in range(3)),
        )
        for group in plain(groups)
    ]


def rows_of(kept: KeptBatch, groups: list[Group]) -> Iterator[tuple[Trajectory, dict[str, np.ndarray]]]:
    """Each trajectory, and the columns of its trained tokens."""
    trajectories = [t for group in groups for t in group.trajectories]
    assert kept.rows == list(range(len(trajectories)))
    ends = np.cumsum([0, *(t.num_trained_tokens for t in trajectories)])
    assert {len(column) for column in kept.columns.values()} == {ends[-1]}
    for row, t in enumerate(trajectories):
        yield t, {name: column[ends[row] : ends[row + 1]] for name, column in kept.columns.items()}


def trained(learner: Learner, groups: list[Group]) -> KeptBatch:
    kept = learner.train(learner.prepare(groups)).kept
    assert kept is not None
    return kept


def sequence_of(trajectory: Trajectory) -> TrainSequence:
    return Batch.of([grouped(trajectory)]).sequences()[0]


@torch.no_grad()
def alone(model: Any, trajectory: Trajectory) -> tuple[np.ndarray, np.ndarray]:
    """Logprobs and entropies of a trajectory's trained tokens, from a forward pass of it alone."""
    logprobs, entropies = twin_logprobs(model, sequence_of(trajectory))
    return logprobs.numpy(), entropies.numpy()


def assert_close(ours: Any, theirs: Any, name: str = "") -> None:
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4, err_msg=name)


def test_with_adapters_they_are_those_of_the_merged_model_and_the_reference_those_of_the_one_beneath(
    make_learner: MakeLearner, model_dir: Path, tmp_path: Path
):
    settings = {"lora": {"rank": 4, "alpha": 8}, "optimizer": MOVING}
    learner = make_learner(settings, kl={"coefficient": 0.1}, weights=[{"level": "token", "upper": 2.0}])
    trained(learner, random_groups(0))
    learner.engine.snapshot().write(tmp_path / "merged")
    groups = random_groups(1)
    merged, beneath = load_twin(tmp_path / "merged"), load_twin(model_dir)
    farthest = 0.0
    for trajectory, own in rows_of(trained(learner, groups), groups):
        (current, entropy), (reference, _) = alone(merged, trajectory), alone(beneath, trajectory)
        assert_close(own["current_logprobs"], current)
        assert_close(own["proximal_logprobs"], current)
        assert_close(own["reference_logprobs"], reference)
        assert_close(own["entropy"], entropy)
        behavior = trajectory.behavior_logprobs[trajectory.loss_mask]
        assert_close(own["weights"], np.minimum(np.exp(current - behavior), 2.0))
        farthest = max(farthest, np.abs(current - reference).max(initial=0.0))
    assert farthest > 0.05


def test_a_critics_values_and_returns_are_those_of_each_trajectory_alone(make_learner: MakeLearner, critic_dir: Path):
    discount, lam = 0.9, 0.8
    learner = make_learner(
        {"optimizer": MOVING},
        critic={"model": str(critic_dir), "lr": 3e-2},
        advantage={"kind": "gae", "discount": discount, "lam": lam},
        minibatches=2,
        aggregation="token_mean",
    )
    groups, critic = plain(random_groups(2)), load_critic(critic_dir)
    gains, kept = list[float](), list[np.ndarray]()
    for trajectory, own in rows_of(trained(learner, groups), groups):
        sequence = sequence_of(trajectory)
        values = slow_values(critic, sequence)[sequence.loss_mask].tolist()
        rewards = [0.0] * (len(values) - 1) + [trajectory.reward] if values else []
        later = [*values[1:], 0.0]
        deltas = [r + discount * after - value for r, after, value in zip(rewards, later, values, strict=False)]
        mine = [sum((discount * lam) ** k * d for k, d in enumerate(deltas[i:])) for i in range(len(deltas))]
        assert_close(own["values"], values)
        assert_close(own["returns"], np.add(mine, values))
        gains += mine
        kept.append(own["advantages"])
    assert_close(np.concatenate(kept), (np.array(gains) - np.mean(gains)) / np.std(gains, ddof=1))


def test_values_of_a_new_head_are_kept_as_the_zeros_that_they_are(make_learner: MakeLearner):
    learner = make_learner({"optimizer": STANDING}, critic={}, advantage={"kind": "gae"})
    groups = [
        replace(group, trajectories=tuple(replace(t, reward=0.0) for t in group.trajectories))
        for group in plain(random_groups(2))
    ]
    kept = trained(learner, groups)
    assert not kept.columns["values"].any()
    assert not kept.columns["returns"].any()


@pytest.mark.parametrize("budget", [60, 400])
def test_those_of_trajectories_that_share_beginnings_are_their_own(
    make_learner: MakeLearner, model_dir: Path, budget: int
):
    settings = {"optimizer": STANDING, "max_tokens_per_microbatch": budget}
    learner = make_learner(settings, minibatches=2, epochs=2, kl={"coefficient": 0.1})
    groups, model = branching(random_groups(3), seed=budget), load_twin(model_dir)
    result = learner.train(learner.prepare(groups))
    assert result.metrics["forwarded_share"] < 0.8
    assert result.kept is not None
    for trajectory, own in rows_of(result.kept, groups):
        current, entropy = alone(model, trajectory)
        for name in ("current_logprobs", "proximal_logprobs", "reference_logprobs"):
            assert_close(own[name], current, name)
        assert_close(own["entropy"], entropy)
        behavior = trajectory.behavior_logprobs[trajectory.loss_mask]
        assert_close(own["weights"], np.minimum(np.exp(current - behavior), 2.0))


def test_a_students_advantages_are_the_distance_from_its_teacher_before_any_update(
    make_learner: MakeLearner, model_dir: Path
):
    learner = make_learner({"optimizer": MOVING}, preset="distillation", minibatches=2)
    groups, model = random_groups(4), load_twin(model_dir)
    for trajectory, own in rows_of(trained(learner, groups), groups):
        before, _ = alone(model, trajectory)
        mask = trajectory.loss_mask
        teacher = np.array(trajectory.token_rewards)[mask] + trajectory.behavior_logprobs[mask]
        assert_close(own["advantages"], teacher - before)


def test_a_reward_models_process_rewards_are_kept_of_each_trained_token(make_learner: MakeLearner):
    prime = {"lr": 3e-2, "beta": 0.5}
    learner = make_learner({"optimizer": MOVING}, preset="prime", minibatches=2, reward_model=prime)
    groups = branching(random_groups(3), 2)
    learner.train(learner.prepare(groups))
    batch = learner.prepare(groups)
    kept = learner.train(batch).kept
    assert kept is not None
    assert batch.batch.implicit_rewards is not None
    rewards = batch.batch.split(batch.batch.implicit_rewards)
    for (trajectory, own), row in zip(rows_of(kept, groups), rewards, strict=True):
        assert_close(own["implicit_rewards"], row.numpy()[trajectory.loss_mask])
    assert np.abs(kept.columns["implicit_rewards"]).max() > 0.01
