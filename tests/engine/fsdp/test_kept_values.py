"""What training keeps of each token, for the event log: the numbers that the loss used, at the right tokens, also with
adapters, critics, teachers and shared beginnings."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_groups import MAX_STALENESS, VERSION, random_groups
from records import grouped
from train_models import MakeLearner, load_critic, load_twin, slow_values
from train_sequences import twin_logprobs

from arl.algorithm.batch import Batch
from arl.api.settings import run as run_settings
from arl.api.settings.run import EventsConfig
from arl.api.train_engine import TrainSequence
from arl.api.types import Group, Trajectory
from arl.training import token_log
from arl.training.learner import Learner
from arl.training.token_log import KeptBatch, choose

MOVING = {"optimizer": {"lr": 3e-2, "eps": 1e-3}}
"""Steps change each number."""
STANDING = {"optimizer": {"lr": 1e-30, "weight_decay": 0.0}}
"""Weights do not move, so every update of a batch computes the same."""


def decoupled(**changes: Any) -> dict[str, Any]:
    return {"preset": "decoupled_ppo", "rejections": [], **changes}


def trained(learner: Learner, groups: list[Group], replayed: list[Group] | None = None) -> KeptBatch:
    kept = learner.train(learner.prepare(groups, replayed or [])).kept
    assert kept is not None
    return kept


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


def sequence_of(trajectory: Trajectory) -> TrainSequence:
    return Batch.of([grouped(trajectory)]).sequences()[0]


@torch.no_grad()
def alone(model: Any, trajectory: Trajectory) -> tuple[np.ndarray, np.ndarray]:
    """Logprobs and entropies of a trajectory's trained tokens, from a forward pass of it alone."""
    logprobs, entropies = twin_logprobs(model, sequence_of(trajectory))
    return logprobs.numpy(), entropies.numpy()


def assert_close(ours: Any, theirs: Any, name: str = "") -> None:
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4, err_msg=name)


def at_level(log_weight: np.ndarray, level: str) -> np.ndarray:
    if not log_weight.size:
        return log_weight
    summed = {"token": log_weight, "sequence": log_weight.sum(), "geometric": log_weight.mean()}[level]
    return np.broadcast_to(summed, log_weight.shape)


@pytest.mark.parametrize(
    ("proximal", "level"),
    [("recomputed", "token"), ("recomputed", "sequence"), ("approximated", "geometric"), ("bypassed", "token")],
)
@pytest.mark.parametrize("seed", [5, 6])
def test_they_are_those_of_each_trajectory_alone(
    make_learner: MakeLearner, model_dir: Path, seed: int, proximal: str, level: str
):
    masked = {"weights": [{"level": level}], "rejections": [{"level": level, "upper": 3.0, "lower": 0.1}]}
    algorithm = decoupled(
        minibatches=2,
        epochs=seed - 4,
        proximal=proximal,
        **({"weights": []} if proximal == "bypassed" else masked),
        overlong={"mask_truncated": True},
        kl={"coefficient": 0.1},
    )
    groups = [
        replace(
            group,
            trajectories=tuple(
                replace(t, temperature=(1.0, 0.7)[i % 2], is_truncated=i % 4 == 3)
                for i, t in enumerate(group.trajectories)
            ),
        )
        for group in random_groups(seed)
    ]
    model = load_twin(model_dir)
    rollout = {"batch_size": 4, "group_size": 2, "max_staleness": MAX_STALENESS}
    learner = make_learner(train=STANDING, rollout=rollout, algorithm=algorithm)
    learner.engine._version = VERSION  # pyright: ignore[reportAttributeAccessIssue]
    prepared = learner.prepare(groups, random_groups(9)[2:])
    kept = learner.train(prepared).kept
    assert kept is not None
    advantages, starts = prepared.batch.advantages.numpy(), prepared.batch.starts
    for row, (trajectory, own) in enumerate(rows_of(kept, groups)):
        if trajectory.is_truncated:
            assert all(np.isnan(column).all() for column in own.values())
            assert kept.numbers[row] == (0.0, 0.0, 0.0, 0.0)
            continue
        mask = trajectory.loss_mask
        current, entropy = alone(model, trajectory)
        behavior, versions = trajectory.behavior_logprobs[mask], trajectory.versions[mask]
        staleness = VERSION - versions
        known = {
            "recomputed": current,
            "approximated": behavior + staleness / (staleness + 1) * (current - behavior),
            "bypassed": behavior,
        }[proximal]
        weight = np.exp(at_level(known - behavior, level))
        weight = weight * ((weight >= 0.1) & (weight <= 3.0))
        advantage = advantages[starts[row] : starts[row + 1]][mask]
        ratio = np.exp(current - known)
        clipped = ((ratio > 1.2) & (advantage > 0)) | ((ratio < 0.8) & (advantage < 0))
        expected = {
            "current_logprobs": current,
            "reference_logprobs": current,
            "entropy": entropy,
            "weights": weight,
            "clipped": clipped,
            "advantages": advantage,
            **({} if proximal == "bypassed" else {"proximal_logprobs": known}),
        }
        assert own.keys() == expected.keys()
        for name, column in expected.items():
            assert_close(own[name], column, name)
        means = [values.mean() if values.size else 0.0 for values in (advantage, clipped, entropy)]
        assert_close(kept.numbers[row], [means[0], weight.max(initial=0.0), means[1], means[2]])


@pytest.mark.parametrize("epochs", [1, 2])
def test_they_do_not_depend_on_how_the_batch_is_packed(make_learner: MakeLearner, epochs: int):
    groups, replayed, algorithm = random_groups(1), random_groups(9)[:2], decoupled(minibatches=2, epochs=epochs)
    small, large = (
        trained(make_learner(train={"max_tokens_per_microbatch": n}, algorithm=algorithm), groups, replayed)
        for n in (40, 4000)
    )
    assert small.rows == large.rows == list(range(sum(len(group.trajectories) for group in groups)))
    for name, column in large.columns.items():
        assert_close(small.columns[name], column, name)


def test_the_first_minibatch_sees_the_weights_before_the_update_and_the_second_those_after_it(
    make_learner: MakeLearner,
):
    learner = make_learner(algorithm=decoupled(minibatches=2))
    prepared = learner.prepare(groups := random_groups(0))
    kept, first = learner.train(prepared).kept, sum(Batch.of(groups).counts[row] for row in prepared.rows[0])
    assert kept is not None
    moved = kept.columns["current_logprobs"] - kept.columns["proximal_logprobs"]
    np.testing.assert_allclose(moved[:first], 0.0, atol=1e-5)
    assert np.abs(moved[first:]).max() > 1e-4


def test_of_a_large_batch_the_notable_trajectories_and_a_share_of_whole_groups_are_kept(
    make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_settings, "SAMPLED_SHARE", 0.0)
    monkeypatch.setattr(token_log, "NUM_NOTABLE", 1)
    groups = random_groups(3)
    every = trained(make_learner(algorithm=decoupled()), groups)
    some = trained(make_learner(algorithm=decoupled(), log={"events": {"tokens": "sampled"}}), groups)
    trajectories = [t for group in groups for t in group.trajectories]
    rewards = [t.total_reward for t in trajectories]
    lengths = [len(t.token_ids) for t in trajectories]
    weights = [number[1] for number in every.numbers]
    notable = {rewards.index(max(rewards)), rewards.index(min(rewards)), lengths.index(max(lengths))}
    assert notable | {weights.index(max(weights))} <= set(some.rows)
    assert len(some.rows) <= 5 < len(every.rows)
    ends = np.cumsum([0, *Batch.of(groups).counts])
    places = np.concatenate([np.arange(ends[row], ends[row + 1]) for row in some.rows])
    np.testing.assert_allclose(some.columns["weights"], every.columns["weights"][places], rtol=1e-5)
    nothing = make_learner(algorithm=decoupled(), log={"events": {"tokens": "none"}})
    assert trained(nothing, groups).rows == []


def test_a_share_takes_whole_groups_the_same_ones_each_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_settings, "SAMPLED_SHARE", 0.3)
    monkeypatch.setattr(token_log, "NUM_NOTABLE", 0)
    groups = [replace(group, group_id=number) for number, group in enumerate(random_groups(4) * 15)]
    config = EventsConfig(tokens="sampled")
    chosen = choose(groups, [0.0] * 1000, config)
    of = [group.group_id for group in groups for _ in group.trajectories]
    names = {of[row] for row in chosen}
    assert chosen == [row for row, name in enumerate(of) if name in names] == choose(groups, [0.0] * 1000, config)
    assert 5 < len(names) < 35


def test_keeping_them_changes_nothing_in_training_to_the_bit(make_learner: MakeLearner):
    groups, replayed, ends = random_groups(7), random_groups(9)[:1], list[tuple[dict[str, float], bytes]]()
    for events in ({}, None):
        learner = make_learner(algorithm=decoupled(minibatches=2, epochs=2), log={"events": events})
        result = learner.train(learner.prepare(groups, replayed))
        after = torch.cat(learner.engine.forward(Batch.of(groups).sequences(), "logprobs"))
        assert (result.kept is None) == (events is None)
        ends.append((result.metrics, after.numpy().tobytes()))
    assert ends[0] == ends[1]


# Variants


def test_with_adapters_they_are_those_of_the_merged_model_and_the_reference_those_of_the_one_beneath(
    make_learner: MakeLearner, model_dir: Path, tmp_path: Path
):
    algorithm = decoupled(kl={"coefficient": 0.1}, weights=[{"level": "token", "upper": 2.0}])
    learner = make_learner(train={"lora": {"rank": 4, "alpha": 8}, **MOVING}, algorithm=algorithm)
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
    algorithm = decoupled(
        critic={"model": str(critic_dir), "lr": 3e-2},
        advantage={"kind": "gae", "discount": discount, "lam": lam},
        minibatches=2,
        aggregation="token_mean",
    )
    learner = make_learner(train=MOVING, algorithm=algorithm)
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


@pytest.mark.parametrize("budget", [60, 400])
def test_those_of_trajectories_that_share_beginnings_are_their_own(
    make_learner: MakeLearner, model_dir: Path, budget: int
):
    algorithm = decoupled(minibatches=2, epochs=2, kl={"coefficient": 0.1})
    learner = make_learner(train={"max_tokens_per_microbatch": budget, **STANDING}, algorithm=algorithm)
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
    learner = make_learner(train=MOVING, algorithm=decoupled(preset="distillation", minibatches=2))
    groups, model = random_groups(4), load_twin(model_dir)
    for trajectory, own in rows_of(trained(learner, groups), groups):
        before, _ = alone(model, trajectory)
        mask = trajectory.loss_mask
        teacher = np.array(trajectory.token_rewards)[mask] + trajectory.behavior_logprobs[mask]
        assert_close(own["advantages"], teacher - before)


def test_a_reward_models_process_rewards_are_kept_of_each_trained_token(make_learner: MakeLearner):
    prime = {"lr": 3e-2, "beta": 0.5}
    learner = make_learner(train=MOVING, algorithm=decoupled(preset="prime", minibatches=2, reward_model=prime))
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
