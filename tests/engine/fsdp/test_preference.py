"""Pairs are learned on the train engine: preferences by a policy, scores by a model with a value head."""

from pathlib import Path
from typing import Any

import pytest
import torch
from train_models import MakeEngine, load_twin
from train_sequences import twin_logprobs
from train_variants import PAIRS, pairs
from transformers import AutoModelForSequenceClassification

from arl.algorithm.losses.supervised import PreferenceLoss
from arl.api.config import OptimizerConfig, TrainConfig
from arl.api.engine import ModelLimits, PackedTokens, TokenLosses, TokenOutputs
from arl.api.errors import ConfigError, DatasetError
from arl.api.scripted import ScriptedTrainEngine
from arl.api.types import TrainSequence
from arl.engine.fsdp.train_engine import FSDPTrainEngine
from arl.training.finetuning import Preference, train_preferences, train_reward_model

CHOSEN, REJECTED = (11, 12, 7), (21, 22, 23, 24, 7)
PROMPTS = [(3, 100 + i) for i in range(8)]
PREFERENCES = [
    Preference(chosen=((*p, *CHOSEN), (0, 0, 1, 1, 1)), rejected=((*p, *REJECTED), (0, 0, 1, 1, 1, 1, 1)))
    for p in PROMPTS
]
LIMITS = ModelLimits(vocab_size=300, context_length=8)
TEXTS = [((*p, *CHOSEN), (*p, *REJECTED)) for p in PROMPTS]


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
    train_preferences(
        engine, PREFERENCES, loss=loss, epochs=4, batch_size=4, on_step=lambda _, metrics: steps.append(dict(metrics))
    )
    after = logprob(engine, PROMPTS[0], CHOSEN) - logprob(engine, PROMPTS[0], REJECTED)
    assert len(steps) == 8
    assert steps[0]["margin"] == pytest.approx(0.0, abs=1e-5), "at first the model is its own reference"
    assert steps[-1]["accuracy"] == 1.0
    assert steps[-1]["margin"] > 0.1 * (after - before) / 2
    assert after > before + 1


def test_the_reference_is_the_model_that_training_began_with(make_engine: MakeEngine):
    engine = make_engine()
    finals = [train_preferences(engine, PREFERENCES, batch_size=8)["margin"] for _ in range(2)]
    assert finals == pytest.approx([0.0, 0.0], abs=1e-5), "a second call begins from the model as it is by then"


def test_a_reward_model_ranks_texts_and_its_files_give_the_same_scores(model_dir: Path, tmp_path: Path):
    engine = FSDPTrainEngine(model_dir, TrainConfig(optimizer=OptimizerConfig(lr=1e-2)), head="value")
    try:
        metrics = train_reward_model(engine, TEXTS, epochs=6, batch_size=4)
        engine.export(tmp_path / "reward")
        rows = [
            TrainSequence(token_ids=torch.tensor([*t, 0]), loss_mask=torch.eye(len(t) + 1)[-1] > 0) for t in TEXTS[0]
        ]
        ours = [float(values[-1]) for values in engine.forward(rows, "values")]
    finally:
        engine.close()
    assert metrics["accuracy"] == 1.0
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward").eval()
    with torch.no_grad():
        theirs = [float(model(torch.tensor([text])).logits[0, 0]) for text in TEXTS[0]]
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert theirs[0] > theirs[1] + 0.5


def test_a_policy_has_no_scores_to_train(make_engine: MakeEngine):
    with pytest.raises(ConfigError, match="a reward model has a value head alone"):
        train_reward_model(make_engine(head="policy_and_value"), TEXTS)
    with pytest.raises(ConfigError, match="head=policy"):
        train_reward_model(make_engine(), TEXTS)


def test_a_head_that_does_not_exist_is_refused(model_dir: Path):
    with pytest.raises(ConfigError, match="head is 'values'; a train engine has one of policy, value"):
        FSDPTrainEngine(model_dir, TrainConfig(), head="values")  # pyright: ignore[reportArgumentType]


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
    expected = sum(torch.nn.functional.softplus(torch.tensor(-0.2 * x, dtype=torch.float64)).item() for x in h) / 6
    metrics = make_engine(max_tokens_per_microbatch=60).train_batch([sequences], counting)
    assert metrics["microbatches"] > 1
    assert sorted(sizes) == [1, 2, 2, 2, 2, 2]
    assert metrics["loss"] == pytest.approx(expected, 1e-5)


SAME = Preference(chosen=((1, 2), (0, 1)), rejected=((1, 2), (0, 1)))
TOO_SHORT_A_MASK = Preference(chosen=((1, 2), (0, 1)), rejected=((1, 2, 3), (0, 1)))
UNKNOWN_TOKEN = Preference(chosen=((1, 300), (0, 1)), rejected=((1, 2), (0, 1)))


@pytest.mark.parametrize(
    ("preference", "message"),
    [
        (TOO_SHORT_A_MASK, "the rejected answer of pair 1 has 3 token_ids and 2 loss_mask entries"),
        (UNKNOWN_TOKEN, "the chosen answer of pair 1 has token 300 at position 1, and the model knows 0 to 299"),
        (SAME, "pair 1 has twice the same answer, so there is nothing to prefer; leave it out"),
        (((1, 2), (0, 1)), "pair 1 is a tuple; it must be a Preference"),
    ],
)
def test_a_preference_that_teaches_nothing_is_named_before_anything_is_trained(preference: Any, message: str):
    engine = ScriptedTrainEngine(limits=LIMITS)
    with pytest.raises(DatasetError, match=message):
        train_preferences(engine, [PREFERENCES[0], preference])
    assert engine.batches == []


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (((), (1,)), "the chosen text of pair 1 has no token_ids"),
        (((1,), (1,) * 9), "the rejected text of pair 1 has 9 tokens, and the model's context 8"),
        (((1,), (1,)), "pair 1 has twice the same answer"),
        (SAME, r"pair 1 is a Preference; it must be a pair \(chosen token_ids, rejected token_ids\)"),
    ],
)
def test_and_so_are_texts_of_which_none_is_better(texts: Any, message: str):
    engine = ScriptedTrainEngine(limits=LIMITS)
    with pytest.raises(DatasetError, match=message):
        train_reward_model(engine, [TEXTS[0], texts])
    assert engine.batches == []


def test_no_pairs_are_an_error():
    with pytest.raises(DatasetError, match="no pairs"):
        train_preferences(ScriptedTrainEngine(), [])
    with pytest.raises(DatasetError, match="no pairs"):
        train_reward_model(ScriptedTrainEngine(), [])
