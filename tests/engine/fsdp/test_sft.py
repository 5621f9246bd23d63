"""Supervised fine-tuning learns its demonstrations, in an order that depends on the seed alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from train_models import MakeEngine
from transformers import AutoConfig

from arl.api.engine import ModelLimits
from arl.api.errors import DatasetError
from arl.api.scripted import ScriptedTrainEngine
from arl.engine.fsdp.model import model_limits
from arl.training.finetuning import Demonstration, finetune

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
        (([1, 2], [0, 0]), "demonstration 1 has nothing to learn: its loss_mask is 0 throughout; leave it out"),
        (([1, 2], [1, 1]), r"cannot learn its first token, which has no context; set loss_mask\[0\] to 0"),
        (([1, 2], [-100, 2]), "demonstration 1 has -100 in its loss_mask at position 0; 1 marks a token to learn"),
        (([1, 2, 300], [0, 1, 1]), "demonstration 1 has token 300 at position 2, and the model knows 0 to 299"),
        (([1, -1], [0, 1]), "token -1 at position 1"),
        (([1] * 9, [0] + [1] * 8), "demonstration 1 has 9 tokens, and the model's context 8; shorten it"),
        (([], []), "demonstration 1 has no token_ids; leave it out"),
        (
            ([1.0, 2.0], [0, 1]),
            "the token_ids of demonstration 1 must be a sequence of integers, and are torch.float32",
        ),
        (([[1, 2]], [0, 1]), r"must be a sequence of integers, and are torch.int64 of shape \[1, 2\]"),
        (("ab", [0, 1]), "the token_ids of demonstration 1 must be a sequence of integers: .*str"),
        (([1, 2], None), "the loss_mask of demonstration 1 must be a sequence of integers: .*NoneType"),
        (([1, 2], [0, 0.5]), "the loss_mask of demonstration 1 must be a sequence of integers"),
        ({"token_ids": [1, 2], "loss_mask": [0, 1]}, r"demonstration 1 is a dict; it must be a pair \(token_ids, loss"),
    ],
)
def test_a_demonstration_that_cannot_be_learned_is_named_before_anything_is_trained(example: Any, message: str):
    engine = ScriptedTrainEngine(limits=ModelLimits(vocab_size=300, context_length=8))
    with pytest.raises(DatasetError, match=message):
        finetune(engine, [DEMONSTRATIONS[0], example])
    assert engine.batches == []


def test_arrays_and_tensors_are_as_good_as_lists():
    engines = [ScriptedTrainEngine() for _ in range(3)]
    for engine, kind in zip(engines, (list, np.array, torch.tensor), strict=True):
        finetune(engine, [(kind([5, 6, 7]), kind([0, 1, 1]))])
    for engine in engines:
        (((sequence,),),) = engine.batches
        assert (sequence.token_ids.tolist(), sequence.loss_mask.tolist()) == ([5, 6, 7], [False, True, True])


def test_the_models_limits_are_its_configs(make_engine: MakeEngine, model_dir: Path):
    config = AutoConfig.from_pretrained(model_dir)
    expected = ModelLimits(vocab_size=config.vocab_size, context_length=config.max_position_embeddings)
    assert make_engine().limits == expected
    config.rope_parameters = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert model_limits(config).context_length == 4 * 32768


def test_nothing_to_learn_from_is_an_error():
    with pytest.raises(DatasetError, match="no demonstrations"):
        finetune(ScriptedTrainEngine(), [])


@pytest.mark.parametrize("settings", [{"epochs": 0}, {"batch_size": 0}])
def test_a_run_over_nothing_is_refused(settings: dict[str, int]):
    with pytest.raises(ValueError, match="both must be at least 1"):
        finetune(ScriptedTrainEngine(), DEMONSTRATIONS, **settings)
