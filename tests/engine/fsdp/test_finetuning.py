"""Training on data: demonstrations and preferences are learned by a policy, scores by a model with a value head."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from train_models import MakeEngine, load_twin
from train_sequences import twin_logprobs
from train_variants import PAIRS, pairs
from transformers import AutoConfig

from arl.algorithm.losses.preferences import PreferenceLoss
from arl.api.errors import ConfigError, DatasetError
from arl.api.fakes import ScriptedTrainEngine
from arl.api.settings.engines import OptimizerConfig
from arl.api.train_engine import ModelLimits, PackedTokens, TokenLosses, TokenOutputs, TrainSequence
from arl.engine.fsdp.train_engine import FSDPTrainEngine
from arl.engine.model_files import model_limits
from arl.run.finetuning.examples import Demonstration, Kind, Preference, finetune

DEMONSTRATIONS: list[Demonstration] = [([i, 200 + i, 100 + i, 7], [0, 0, 1, 1]) for i in range(10)]
CHOSEN, REJECTED = (11, 12, 7), (21, 22, 23, 24, 7)
PROMPTS = [(3, 100 + i) for i in range(8)]
PREFERENCES = [
    Preference(chosen=((*p, *CHOSEN), (0, 0, 1, 1, 1)), rejected=((*p, *REJECTED), (0, 0, 1, 1, 1, 1, 1)))
    for p in PROMPTS
]
TEXTS = [((*p, *CHOSEN), (*p, *REJECTED)) for p in PROMPTS]


# Demonstrations


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


def test_an_epoch_has_each_demonstration_once_in_an_order_that_the_seed_fixes():
    def epoch(seed: int) -> list[list[list[int]]]:
        finetune(engine := ScriptedTrainEngine(), DEMONSTRATIONS, batch_size=4, seed=seed)
        return [[s.token_ids.tolist() for s in minibatch] for (minibatch,) in engine.batches]

    first = epoch(1)
    assert [len(minibatch) for minibatch in first] == [4, 4, 2]
    assert sorted(tokens for minibatch in first for tokens in minibatch) == [list(ids) for ids, _ in DEMONSTRATIONS]
    assert first == epoch(1) != epoch(2)


def test_arrays_and_tensors_are_as_good_as_lists():
    for kind in (list, np.array, torch.tensor):
        finetune(engine := ScriptedTrainEngine(), [(kind([5, 6, 7]), kind([0, 1, 1]))])
        (((sequence,),),) = engine.batches
        assert (sequence.token_ids.tolist(), sequence.loss_mask.tolist()) == ([5, 6, 7], [False, True, True])


def test_the_models_limits_are_its_configs(make_engine: MakeEngine, model_dir: Path):
    config = AutoConfig.from_pretrained(model_dir)
    expected = ModelLimits(vocab_size=config.vocab_size, context_length=config.max_position_embeddings)
    assert make_engine().limits == expected
    config.rope_parameters = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert model_limits(config).context_length == 4 * 32768


# Pairs


def logprob(engine: FSDPTrainEngine, prompt: tuple[int, ...], answer: tuple[int, ...]) -> float:
    ids = torch.tensor([*prompt, *answer])
    mask = torch.tensor([False] * len(prompt) + [True] * len(answer))
    (values,) = engine.forward([TrainSequence(token_ids=ids, loss_mask=mask)])
    return float(values.sum())


@pytest.mark.parametrize("loss", [PreferenceLoss(beta=0.1), PreferenceLoss(kind="ipo", beta=0.1)], ids=lambda x: x.kind)
def test_a_policy_comes_to_prefer_the_chosen_answers(loss: PreferenceLoss, make_engine: MakeEngine):
    engine = make_engine()
    before = logprob(engine, PROMPTS[0], CHOSEN) - logprob(engine, PROMPTS[0], REJECTED)
    steps: list[dict[str, float]] = []
    settings = {"loss": loss, "batch_size": 4, "on_step": lambda _, metrics: steps.append(dict(metrics))}
    finetune(engine, PREFERENCES, kind="dpo", epochs=4, **settings)
    after = logprob(engine, PROMPTS[0], CHOSEN) - logprob(engine, PROMPTS[0], REJECTED)
    assert len(steps) == 8
    assert steps[0]["margin"] == pytest.approx(0.0, abs=1e-5), "at first the model is its own reference"
    assert steps[-1]["accuracy"] == 1.0
    assert steps[-1]["margin"] > 0.1 * (after - before) / 2
    assert after > before + 1
    finetune(engine, PREFERENCES, kind="dpo", **settings)
    assert steps[8]["margin"] == pytest.approx(0.0, abs=1e-5), "a second call begins from the model as it is by then"


def test_a_reward_model_ranks_texts(make_engine: MakeEngine):
    engine = make_engine(optimizer=OptimizerConfig(lr=1e-2), head="value")
    assert finetune(engine, PREFERENCES, kind="rm", epochs=6, batch_size=4)["accuracy"] == 1.0
    rows = [TrainSequence(token_ids=torch.tensor([*t, 0]), loss_mask=torch.eye(len(t) + 1)[-1] > 0) for t in TEXTS[0]]
    chosen, rejected = (float(values[-1]) for values in engine.forward(rows, "values"))
    assert chosen > rejected + 0.5


def test_the_loss_is_the_mean_over_pairs_which_are_whole_in_every_microbatch(make_engine: MakeEngine, model_dir: Path):
    sizes: list[int] = []

    def counting(outputs: TokenOutputs, tokens: PackedTokens) -> TokenLosses:
        units = range(int(tokens.unit_ids.max()) + 1)
        sizes.extend(len(tokens.sequence_ids[tokens.unit_ids == unit].unique()) for unit in units)
        return PAIRS(outputs, tokens)

    sequences, twin = pairs(), load_twin(model_dir)
    with torch.no_grad():
        sums = [float(twin_logprobs(twin, s)[0].sum()) for s in sequences]
    h = [chosen - rejected for chosen, rejected in zip(sums[::2], sums[1::2], strict=True)]
    preferred = sum(torch.nn.functional.softplus(torch.tensor(-0.2 * x, dtype=torch.float64)).item() for x in h) / 6
    imitated = sum(-total / int(s.loss_mask.sum()) for total, s in zip(sums[::2], sequences[::2], strict=True)) / 6
    expected = preferred + 0.5 * imitated
    metrics = make_engine(max_tokens_per_microbatch=60).train_batch([sequences], counting)
    assert metrics["microbatches"] > 1
    assert sorted(sizes) == [1, 2, 2, 2, 2, 2]
    assert metrics["loss"] == pytest.approx(expected, 1e-5)


# What is refused


def test_an_engine_without_the_head_and_a_head_that_does_not_exist_are_refused(make_engine: MakeEngine):
    with pytest.raises(ConfigError, match="head=policy"):
        finetune(make_engine(), PREFERENCES, kind="rm")
    with pytest.raises(ConfigError, match="head is 'values'; a train engine has one of policy, value"):
        make_engine(head="values")


SAME = Preference(chosen=((1, 2), (0, 1)), rejected=((1, 2), (0, 1)))
TOO_SHORT_A_MASK = Preference(chosen=((1, 2), (0, 1)), rejected=((1, 2, 3), (0, 1)))
UNKNOWN_TOKEN = Preference(chosen=((1, 300), (0, 1)), rejected=((1, 2), (0, 1)))
REFUSED = {
    "sft": [
        (([1, 2, 3], [0, 1]), "demonstration 1 has 3 token_ids and 2 loss_mask entries"),
        (([1, 2], [0, 0]), "demonstration 1 has nothing to learn: its loss_mask is 0 throughout; leave it out"),
        (([1, 2], [1, 1]), r"cannot learn its first token, which has no context; set loss_mask\[0\] to 0"),
        (([1, 2], [-100, 2]), "demonstration 1 has -100 in its loss_mask at position 0; 1 marks a token to learn"),
        (([1, 2, 300], [0, 1, 1]), "demonstration 1 has token 300 at position 2, but the model's tokens are 0 to 299"),
        (([1, -1], [0, 1]), "token -1 at position 1"),
        (([1] * 9, [0] + [1] * 8), "demonstration 1 has 9 tokens, more than the model's context of 8; shorten it"),
        (([], []), "demonstration 1 has no token_ids; leave it out"),
        (([1.0, 2.0], [0, 1]), "token_ids of demonstration 1 must be a sequence of integers, not torch.float32"),
        (([[1, 2]], [0, 1]), r"must be a sequence of integers, not torch.int64 of shape \[1, 2\]"),
        (("ab", [0, 1]), "the token_ids of demonstration 1 must be a sequence of integers: .*str"),
        (([1, 2], None), "the loss_mask of demonstration 1 must be a sequence of integers: .*NoneType"),
        (([1, 2], [0, 0.5]), "the loss_mask of demonstration 1 must be a sequence of integers"),
        ({"token_ids": [1, 2], "loss_mask": [0, 1]}, r"demonstration 1 is a dict; it must be a pair \(token_ids, loss"),
    ],
    "dpo": [
        (TOO_SHORT_A_MASK, "the rejected answer of pair 1 has 3 token_ids and 2 loss_mask entries"),
        (UNKNOWN_TOKEN, "the chosen answer of pair 1 has token 300 at position 1, but the model's tokens are 0 to 299"),
        (SAME, "pair 1 has twice the same answer, so there is nothing to prefer; leave it out"),
        (((1, 2), (0, 1)), "pair 1 is a tuple; it must be a Preference"),
    ],
    "rm": [
        (Preference(chosen=((), ()), rejected=((1,), ())), "the chosen answer of pair 1 has no token_ids"),
        (
            Preference(chosen=((1,), ()), rejected=((1,) * 9, ())),
            "the rejected answer of pair 1 has 9 tokens, more than the model's context of 8",
        ),
        (Preference(chosen=((1,), ()), rejected=((1,), ())), "pair 1 has twice the same answer"),
        (((1,), (1,)), "pair 1 is a tuple; it must be a Preference"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "example", "message"), [(kind, *case) for kind, cases in REFUSED.items() for case in cases]
)
def test_an_example_that_cannot_be_learned_is_named_before_anything_is_trained(kind: Kind, example: Any, message: str):
    good = DEMONSTRATIONS[0] if kind == "sft" else PREFERENCES[0]
    engine = ScriptedTrainEngine(limits=ModelLimits(vocab_size=300, context_length=8))
    with pytest.raises(DatasetError, match=message):
        finetune(engine, [good, example], kind=kind)
    assert engine.batches == []


def test_a_run_over_nothing_is_refused():
    with pytest.raises(DatasetError, match="no demonstrations"):
        finetune(ScriptedTrainEngine(), [])
    for kind in ("dpo", "rm"):
        with pytest.raises(DatasetError, match="no pairs"):
            finetune(ScriptedTrainEngine(), [], kind=kind)
    for settings in ({"epochs": 0}, {"batch_size": 0}):
        with pytest.raises(ValueError, match="both must be at least 1"):
            finetune(ScriptedTrainEngine(), DEMONSTRATIONS, **settings)


def test_a_kind_that_does_not_exist_and_a_loss_of_another_kind_are_refused():
    with pytest.raises(ValueError, match="loss is a PreferenceLoss, but kind is rm, which has a RewardModelLoss"):
        finetune(ScriptedTrainEngine(), PREFERENCES, kind="rm", loss=PreferenceLoss())
    with pytest.raises(ValueError, match="kind is 'ppo'; it must be one of sft, dpo, rm"):
        finetune(ScriptedTrainEngine(), DEMONSTRATIONS, kind="ppo")  # type: ignore[arg-type]
