"""Supervised fine-tuning learns its demonstrations, in an order that depends on the seed alone."""

import pytest
from train_models import MakeEngine

from arl.api.errors import DatasetError
from arl.sft import Demonstration, finetune

DEMONSTRATIONS: list[Demonstration] = [([i, 200 + i, 100 + i, 7], [0, 0, 1, 1]) for i in range(10)]


def test_finetuning_lowers_the_loss(make_engine: MakeEngine):
    losses: list[float] = []
    metrics = finetune(
        make_engine(),
        DEMONSTRATIONS,
        epochs=12,
        batch_size=5,
        on_step=lambda step, metrics: losses.append(metrics["loss"]),
    )
    assert len(losses) == 24
    assert metrics["loss"] == losses[-1] < 0.3 * losses[0]


def test_an_epoch_uses_each_demonstration_once_though_the_last_batch_is_smaller(make_engine: MakeEngine):
    trained: list[float] = []
    finetune(
        make_engine(),
        DEMONSTRATIONS,
        batch_size=4,
        on_step=lambda step, metrics: trained.append(metrics["trained_tokens"]),
    )
    assert trained == [8, 8, 4]


def test_a_seed_fixes_the_result_bit_for_bit(make_engine: MakeEngine):
    first, again, other = (finetune(make_engine(), DEMONSTRATIONS, batch_size=4, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (([1, 2, 3], [0, 1]), "demonstration 1 has 3 token_ids and 2 loss_mask entries"),
        (([1, 2], [0, 0]), "demonstration 1 must train at least one token"),
        (([1, 2], [1, 1]), "never its first"),
    ],
)
def test_a_malformed_demonstration_is_named(make_engine: MakeEngine, example: Demonstration, message: str):
    with pytest.raises(DatasetError, match=message):
        finetune(make_engine(), [DEMONSTRATIONS[0], example])


def test_nothing_to_learn_from_is_an_error(make_engine: MakeEngine):
    with pytest.raises(DatasetError, match="no demonstrations"):
        finetune(make_engine(), [])


@pytest.mark.parametrize("settings", [{"epochs": 0}, {"batch_size": 0}])
def test_a_run_over_nothing_is_refused(settings: dict[str, int], make_engine: MakeEngine):
    with pytest.raises(ValueError, match="both must be at least 1"):
        finetune(make_engine(), DEMONSTRATIONS, **settings)
