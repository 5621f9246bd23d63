"""A step does not depend on how its minibatch is split, ordered, packed and computed, whatever the preset."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from random_groups import MAX_STALENESS, VERSION, random_groups, with_trajectories_reordered
from safetensors.torch import load_file
from train_ranks import Ranks, Report
from train_sequences import assert_same_metrics, share_of
from train_variants import COMPILING, VARIANTS, Variant, assert_same_tensors, weights_of

from arl.algorithm.batch import Batch
from arl.api.settings.algorithm import AlgorithmConfig, preset
from arl.api.settings.engines import OptimizerConfig, TrainConfig
from arl.api.settings.presets import PRESETS
from arl.api.train_engine import Head, TokenLoss, TrainSequence
from arl.api.types import NOT_SAMPLED, Group
from arl.engine.fsdp.train_engine import FSDPTrainEngine
from arl.training.learner import Learner

Minibatches = list[list[TrainSequence]]
Step = tuple[dict[str, float], dict[str, torch.Tensor]]
"""Metrics, and the weights afterwards."""


def step(variant: Variant, model_dir: Path, minibatches: Minibatches, **options: Any) -> Step:
    engine = variant.engine(model_dir, **options)
    try:
        return engine.train_batch(minibatches, variant.loss), weights_of(engine)
    finally:
        engine.close()


def backwards(minibatches: Minibatches) -> Minibatches:
    return [sequences[::-1] for sequences in minibatches]


def with_an_untrained_one(minibatches: Minibatches) -> Minibatches:
    untrained = replace(minibatches[0][0], loss_mask=torch.zeros_like(minibatches[0][0].loss_mask), unit=-1)
    return [[untrained, *minibatches[0]], *minibatches[1:]]


SPLITS = {
    "as few tokens at a time as the longest sequence has": (list, {"max_tokens_per_microbatch": 1}),
    "backwards": (backwards, {"max_tokens_per_microbatch": 60}),
    "nothing shared": (with_an_untrained_one, {"share_prefixes": False, "max_tokens_per_microbatch": 100}),
    "activations computed twice": (list, {"activation_checkpointing": True}),
}
COMPILED = {
    "compiled": (list, {"compile": True}),
    "compiled, activations computed twice": (list, {"compile": True, "activation_checkpointing": True}),
}


@pytest.fixture(scope="module")
def whole(model_dir: Path) -> Callable[[str], Step]:
    """A variant's step with each minibatch in one microbatch."""
    return cache(lambda name: step(VARIANTS[name], model_dir, VARIANTS[name].minibatches))


@pytest.mark.parametrize(
    ("name", "split"),
    [
        *product(VARIANTS, SPLITS),
        *(pytest.param(*case, marks=COMPILING) for case in product(["token mean", "adapters"], COMPILED)),
    ],
)
def test_a_step_does_not_depend_on_how_it_is_computed(
    name: str, split: str, whole: Callable[[str], Step], model_dir: Path
) -> None:
    arranged, options = (SPLITS | COMPILED)[split]
    metrics, weights = step(VARIANTS[name], model_dir, arranged(VARIANTS[name].minibatches), **options)
    expected, theirs = whole(name)
    assert_same_metrics(metrics, expected, 1e-4)
    assert_same_tensors(weights, theirs)


Given = tuple[Sequence[Sequence[TrainSequence]], TokenLoss]
Batches = Sequence[Sequence[Group]]
TRAIN = TrainConfig(optimizer=OptimizerConfig(lr=3e-3, eps=1e-3, weight_decay=0.1))


class Recording(FSDPTrainEngine):
    """Remembers what it was given to train. It begins as if it had trained before: tokens have versions up to this."""

    def __init__(self, model: Path, config: TrainConfig, head: Head) -> None:
        super().__init__(model, config, head=head)
        self._version = VERSION
        self.given: list[Given] = []
        self.metrics: list[dict[str, float]] = []

    def train_batch(self, minibatches: Sequence[Sequence[TrainSequence]], loss: TokenLoss) -> dict[str, float]:
        self.given.append((minibatches, loss))
        self.metrics.append(super().train_batch(minibatches, loss))
        return self.metrics[-1]


@dataclass
class Learned:
    """What one engine of a Learner was given, and what it made of it."""

    given: list[Given]
    metrics: list[dict[str, float]]
    weights: dict[str, torch.Tensor]


def config_of(name: str) -> AlgorithmConfig:
    """The preset with two minibatches, so that ratios leave 1, and enough selected tokens for this batch."""
    selections = {"clip_cov": {"share": 0.1, "low": 0.01}, "kl_cov": {"share": 0.1}}
    changes: dict[str, Any] = {"selection": selections[name]} if name in selections else {}
    beside = {role: {"lr": 3e-3} for role in preset(name).trained_models[1:]}
    return preset(name, minibatches=2, **changes, **beside)


def head_of(role: str) -> Head:
    return "value" if role == "critic" else "policy"


def learned(name: str, batches: Batches, model: Path, train: TrainConfig = TRAIN) -> dict[str, Learned]:
    """What each model that the preset trains was given, and what it made of it."""
    engines = {role: Recording(model, train, head_of(role)) for role in preset(name).trained_models}
    learner = Learner(
        engines["policy"],
        config_of(name),
        critic=engines.get("critic"),
        reward_model=engines.get("reward_model"),
        max_staleness=MAX_STALENESS + len(batches),
    )
    try:
        for groups in batches:
            learner.train(learner.prepare(groups))
        return {role: Learned(e.given, e.metrics, weights_of(e)) for role, e in engines.items()}
    finally:
        learner.close()


def learn_on_a_rank(rank: int, model: Path, given: dict[str, list[Given]]) -> Report:
    report: Report = {}
    for role, steps in given.items():
        engine = FSDPTrainEngine(model, TRAIN, head=head_of(role))
        metrics = [engine.train_batch([share_of(part, rank, 2) for part in parts], loss) for parts, loss in steps]
        report[role] = Learned([], metrics, weights_of(engine))
        engine.close()
    return report


def near_to_the_model(groups: Sequence[Group], model: Path) -> list[Group]:
    """The groups as if they had been sampled by a model that is a little different."""
    engine = FSDPTrainEngine(model, TRAIN)
    logprobs = iter(engine.forward(Batch.of(groups).sequences()))
    engine.close()
    generator = torch.Generator().manual_seed(3)

    def sampled(group: Group) -> Group:
        trajectories = []
        for trajectory in group.trajectories:
            near = next(logprobs) + 0.2 * torch.randn(len(trajectory.token_ids), generator=generator)
            near = torch.where(torch.tensor(trajectory.versions) == NOT_SAMPLED, 0.0, near.clamp(max=0.0))
            trajectories.append(replace(trajectory, behavior_logprobs=tuple(near.tolist())))
        return replace(group, trajectories=tuple(trajectories))

    return [sampled(group) for group in groups]


@pytest.fixture(scope="module")
def batches(model_dir: Path) -> Batches:
    """Two: from the second on, the weights have left those of the reference policy."""
    return [near_to_the_model(random_groups(seed), model_dir) for seed in (1, 2)]


def assert_same(ours: dict[str, Learned], theirs: dict[str, Learned]) -> None:
    for role, one in ours.items():
        for mine, other in zip(one.metrics, theirs[role].metrics, strict=True):
            assert_same_metrics(mine, other, 1e-4)
        assert_same_tensors(one.weights, theirs[role].weights)


@pytest.mark.parametrize("name", PRESETS)
def test_microbatches_shared_prefixes_order_and_ranks_do_not_matter_and_something_is_learned(
    name: str, batches: Batches, pair: Ranks, model_dir: Path
) -> None:
    alone = learned(name, batches, model_dir)
    ranks = pair.start(learn_on_a_rank, model_dir, {role: one.given for role, one in alone.items()})
    train = TRAIN.model_copy(update={"max_tokens_per_microbatch": 100, "share_prefixes": False})
    shuffled = [with_trajectories_reordered(groups, seed=1) for groups in batches]
    split = learned(name, shuffled, model_dir, train)
    least = 1 if name == "online_dpo" else 2  # it has three pairs in all, and none is split
    assert split["policy"].metrics[0]["microbatches"] > least * alone["policy"].metrics[0]["microbatches"]
    for other in (split, *pair.reports(ranks)):
        assert_same(other, alone)
    before = load_file(model_dir / "model.safetensors")
    after = {name.removeprefix("model."): tensor for name, tensor in alone["policy"].weights.items()}
    assert max(float((after[name] - before[name]).abs().max()) for name in before) > 1e-3
