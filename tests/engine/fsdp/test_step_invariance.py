"""A step does not depend on how its minibatch is split, ordered, packed and computed."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from train_sequences import assert_same_metrics
from train_variants import VARIANTS, Variant, assert_same_tensors, weights_of

from arl.api.types import TrainSequence

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


# torch's own: the import of its compiler warns, and so does a look at .grad that it silences in a way of its own.
COMPILING = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
SPLITS = {
    "one sequence at a time": (list, {"max_tokens_per_microbatch": 1}),
    "backwards, chunk by chunk": (backwards, {"max_tokens_per_microbatch": 60, "logprob_chunk_size": 7}),
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
