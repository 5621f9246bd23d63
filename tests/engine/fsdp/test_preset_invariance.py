"""Whatever the preset: a Learner on the train engine makes the same metrics and weights however the work is split."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from preset_learning import TRAIN, comparable, learned, learned_on_a_rank, near_to_the_model, weights
from random_groups import random_groups, with_trajectories_reordered
from train_ranks import Ranks

from arl.api.presets import PRESETS
from arl.api.types import Group

Batches = Sequence[Sequence[Group]]
Learned = tuple[dict[str, Any], Path]


@pytest.fixture(scope="module")
def batches(model_dir: Path) -> Batches:
    """Two: from the second on, the weights have left those of the reference policy."""
    return [near_to_the_model(random_groups(seed), model_dir) for seed in (1, 2)]


@pytest.fixture(scope="module")
def two_ranks(model_dir: Path, batches: Batches, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Learned]:
    """What each preset learns on two ranks, all presets in one pair of processes."""
    directory = tmp_path_factory.mktemp("ranks") / "shared"
    ranks = Ranks(learned_on_a_rank, 2, directory, tuple(PRESETS), batches, model_dir)
    reports: list[dict[str, Any]] = []

    def of(name: str) -> Learned:
        if not reports:
            reports.extend(ranks.reports())
            assert reports[0] == reports[1]
        return reports[0][name], directory / name

    return of


@pytest.fixture(scope="module")
def alone(model_dir: Path, batches: Batches, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Learned]:
    """What each preset learns on one rank, with all of a minibatch in one microbatch."""
    directory, reports = tmp_path_factory.mktemp("alone"), dict[str, dict[str, Any]]()

    def of(name: str) -> Learned:
        if name not in reports:
            reports[name] = learned(name, batches, model_dir, directory / name)
        return reports[name], directory / name

    return of


def assert_same(ours: Learned, theirs: Learned) -> None:
    for mine, other in zip(comparable(ours[0]), comparable(theirs[0]), strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-5)
    expected = weights(theirs[1])
    for name, weight in weights(ours[1]).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", PRESETS)
def test_microbatches_shared_prefixes_and_order_do_not_matter(
    name: str, alone: Callable[[str], Learned], batches: Batches, model_dir: Path, tmp_path: Path
) -> None:
    train = TRAIN.model_copy(update={"max_tokens_per_microbatch": 100, "share_prefixes": False})
    shuffled = [with_trajectories_reordered(groups, seed=1) for groups in batches]
    report = learned(name, shuffled, model_dir, tmp_path / name, train)
    assert report["metrics"][0]["microbatches"] > 2 * alone(name)[0]["metrics"][0]["microbatches"]
    assert_same((report, tmp_path / name), alone(name))


@pytest.mark.parametrize("name", PRESETS)
def test_two_ranks_learn_what_one_does(
    name: str, alone: Callable[[str], Learned], two_ranks: Callable[[str], Learned]
) -> None:
    assert_same(two_ranks(name), alone(name))


@pytest.mark.parametrize("name", PRESETS)
def test_something_is_learned(name: str, alone: Callable[[str], Learned], model_dir: Path) -> None:
    before, after = weights(model_dir), weights(alone(name)[1])
    assert max(float((after[name] - before[name]).abs().max()) for name in after) > 1e-3
