"""What training keeps of each token, for the event log: the numbers that the loss used, at the right tokens."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_groups import MAX_STALENESS, VERSION, random_groups
from transformers import AutoModelForCausalLM

from arl.algorithm.batch import Batch
from arl.api.settings import run as run_settings
from arl.api.settings.run import Config, EventsConfig
from arl.api.types import Group, Trajectory
from arl.run.learner import load_learner
from arl.training import token_log
from arl.training.learner import Learner
from arl.training.token_log import KeptBatch, choose

Make = Callable[..., Learner]


@pytest.fixture
def make_learner(model_dir: Path) -> Iterator[Make]:
    learners: list[Learner] = []

    def make(budget: int = 60, minibatches: int = 1, epochs: int = 1, **events: Any) -> Learner:
        settings = {
            "model": str(model_dir),
            "rollout": {"batch_size": 4, "group_size": 2},
            "train": {"optimizer": {"lr": 1e-3, "eps": 1e-3}, "max_tokens_per_microbatch": budget},
            "algorithm": {"minibatches": minibatches, "epochs": epochs, "rejections": []},
            "log": {"events": events},
        }
        learners.append(load_learner(Config.model_validate(settings)))
        return learners[-1]

    yield make
    for learner in learners:
        learner.close()


def kept_of(learner: Learner, groups: list[Group], replayed: list[Group] | None = None) -> KeptBatch:
    kept = learner.train(learner.prepare(groups, replayed or [])).kept
    assert kept is not None
    return kept


def trained(values: torch.Tensor, batch: Batch) -> np.ndarray:
    return values[batch.loss_mask].numpy()


def test_each_tokens_numbers_are_those_of_the_loss(make_learner: Make):
    learner, groups = make_learner(minibatches=2), random_groups(0)
    batch = Batch.of(groups)
    before = torch.cat(learner.engine.forward(batch.sequences(), "logprobs"))
    prepared = learner.prepare(groups)
    kept = learner.train(prepared).kept
    assert kept is not None
    assert kept.rows == list(range(len(batch)))
    proximal, behavior = trained(before, batch), trained(batch.behavior_logprobs, batch)
    np.testing.assert_allclose(kept.columns["proximal_logprobs"], proximal, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(kept.columns["weights"], np.minimum(np.exp(proximal - behavior), 2.0), rtol=1e-4)
    np.testing.assert_allclose(kept.columns["advantages"], trained(prepared.batch.advantages.float(), batch))
    first = sum(batch.counts[row] for row in prepared.rows[0])
    current, ratio = kept.columns["current_logprobs"], np.exp(kept.columns["current_logprobs"] - proximal)
    np.testing.assert_allclose(current[:first], proximal[:first], rtol=1e-5, atol=1e-5)  # before the first update
    assert np.abs(current[first:] - proximal[first:]).max() > 1e-4  # after it
    assert set(np.unique(kept.columns["clipped"])) <= {0.0, 1.0}
    assert not kept.columns["clipped"][np.abs(ratio - 1) < 0.1].any()
    assert (kept.columns["entropy"] > 0).all()


@pytest.mark.parametrize("epochs", [1, 2])
def test_they_do_not_depend_on_how_the_batch_is_packed(make_learner: Make, epochs: int):
    groups, replayed = random_groups(1), random_groups(9)[:2]
    small, large = (
        kept_of(make_learner(budget=budget, minibatches=2, epochs=epochs), groups, replayed) for budget in (40, 4000)
    )
    assert small.rows == large.rows == list(range(sum(len(group.trajectories) for group in groups)))
    for name, column in large.columns.items():
        np.testing.assert_allclose(small.columns[name], column, rtol=1e-3, atol=1e-4, err_msg=name)


def test_a_trajectorys_numbers_sum_up_its_tokens(make_learner: Make):
    groups = random_groups(2)
    kept, batch = kept_of(make_learner(), groups), Batch.of(groups)
    ends = np.cumsum([0, *batch.counts])
    for row, (advantage, weight, clipped, entropy) in enumerate(kept.numbers):
        own = {name: column[ends[row] : ends[row + 1]] for name, column in kept.columns.items()}
        means = (
            [float(own[name].mean()) for name in ("advantages", "clipped", "entropy")] if own["weights"].size else []
        )
        assert [advantage, clipped, entropy] == pytest.approx(means or [0.0] * 3, abs=1e-6)
        assert weight == pytest.approx(own["weights"].max(initial=0.0))


def test_of_a_large_batch_the_notable_trajectories_and_a_share_of_whole_groups_are_kept(
    make_learner: Make, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_settings, "SAMPLED_SHARE", 0.0)
    monkeypatch.setattr(token_log, "NUM_NOTABLE", 1)
    groups = random_groups(3)
    every = kept_of(make_learner(), groups)
    some = kept_of(make_learner(tokens="sampled"), groups)
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
    assert kept_of(make_learner(tokens="none"), groups).rows == []


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


def alone(model: Any, trajectory: Trajectory) -> tuple[np.ndarray, np.ndarray]:
    """Logprobs and entropies of a trajectory's trained tokens, from a forward pass of it alone."""
    ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))
    with torch.no_grad():
        logprobs = (model(ids[None]).logits[0].double() / trajectory.temperature).log_softmax(-1)[:-1]
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    chosen, mask = logprobs.gather(1, ids[1:, None])[:, 0], trajectory.loss_mask[1:]
    return chosen.numpy()[mask], entropies.numpy()[mask]


def at_level(log_weight: np.ndarray, level: str) -> np.ndarray:
    if not log_weight.size:
        return log_weight
    summed = {"token": log_weight, "sequence": log_weight.sum(), "geometric": log_weight.mean()}[level]
    return np.broadcast_to(summed, log_weight.shape)


STANDING = {"optimizer": {"lr": 1e-30, "weight_decay": 0.0}, "max_tokens_per_microbatch": 60}
"""Weights do not move, so every update of a batch computes the same."""


@pytest.mark.parametrize(
    ("proximal", "level"),
    [("recomputed", "token"), ("recomputed", "sequence"), ("approximated", "geometric"), ("bypassed", "token")],
)
@pytest.mark.parametrize("seed", [5, 6])
def test_they_are_those_of_each_trajectory_alone(model_dir: Path, seed: int, proximal: str, level: str):
    masked = {"weights": [{"level": level}], "rejections": [{"level": level, "upper": 3.0, "lower": 0.1}]}
    algorithm: dict[str, Any] = {
        "preset": "decoupled_ppo",
        "minibatches": 2,
        "epochs": seed - 4,
        "proximal": proximal,
        **({"weights": [], "rejections": []} if proximal == "bypassed" else masked),
        "overlong": {"mask_truncated": True},
        "kl": {"coefficient": 0.1},
    }
    config = Config.model_validate(
        {
            "model": str(model_dir),
            "rollout": {"batch_size": 4, "group_size": 2, "max_staleness": MAX_STALENESS},
            "train": STANDING,
            "algorithm": algorithm,
        }
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
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    learner = load_learner(config)
    try:
        learner.engine._version = VERSION  # pyright: ignore[reportAttributeAccessIssue]
        prepared = learner.prepare(groups, random_groups(9)[2:])
        kept = learner.train(prepared).kept
    finally:
        learner.close()
    assert kept is not None
    advantages, starts = prepared.batch.advantages.numpy(), prepared.batch.starts
    start = 0
    for row, trajectory in enumerate(t for group in groups for t in group.trajectories):
        stop = start + trajectory.num_trained_tokens
        own = {name: column[start:stop] for name, column in kept.columns.items()}
        start = stop
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
            np.testing.assert_allclose(own[name], column, rtol=1e-3, atol=1e-4, err_msg=name)
        means = [values.mean() if values.size else 0.0 for values in (advantage, clipped, entropy)]
        largest = weight.max(initial=0.0)
        np.testing.assert_allclose(kept.numbers[row], [means[0], largest, means[1], means[2]], rtol=1e-3, atol=1e-4)
    assert start == len(kept.columns["weights"])


def test_keeping_them_changes_nothing_in_training_to_the_bit(model_dir: Path):
    groups, replayed, ends = random_groups(7), random_groups(9)[:1], list[tuple[dict[str, float], bytes]]()
    for events in ({}, None):
        config = Config.model_validate(
            {
                "model": str(model_dir),
                "rollout": {"batch_size": 4, "group_size": 2},
                "train": {"optimizer": {"lr": 1e-3}, "max_tokens_per_microbatch": 60},
                "algorithm": {"preset": "decoupled_ppo", "minibatches": 2, "epochs": 2},
                "log": {"events": events},
            }
        )
        learner = load_learner(config)
        try:
            result = learner.train(learner.prepare(groups, replayed))
            after = torch.cat(learner.engine.forward(Batch.of(groups).sequences(), "logprobs"))
        finally:
            learner.close()
        assert (result.kept is None) == (events is None)
        ends.append((result.metrics, after.numpy().tobytes()))
    assert ends[0] == ends[1]
