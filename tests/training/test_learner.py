"""What a Learner makes of a batch of groups, over the official fake of a train engine."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from records import grouped, trajectory

from arl.api.errors import CheckpointError
from arl.api.fakes import ScriptedTrainEngine
from arl.api.settings.algorithm import preset
from arl.api.settings.run import EventsConfig
from arl.api.train_engine import ModelLimits, Output, TokenLoss, TrainSequence
from arl.api.types import Group, TurnSpan
from arl.engine.model_files import model_limits
from arl.engine.tiny import tiny_vision_tokenizer, write_tiny_vision_model
from arl.training.learner import Learner
from arl.training.learner_process import probe_of


def pair(number: int) -> Group:
    """Two trajectories whose second token is the group's number."""
    of = {"token_ids": (1, number, 3), "loss_mask": (0, 0, 1), "behavior_logprobs": (0.0, 0.0, -1.0)}
    return grouped(*(trajectory((-1, 0), reward, **of) for reward in (0.0, 1.0)), number=number)


def trained(
    num_new: int, num_replayed: int = 0, **settings: Any
) -> tuple[list[list[int]], list[Sequence[TrainSequence]]]:
    """The group numbers of each minibatch, in order, and the minibatches."""
    engine = ScriptedTrainEngine()
    learner = Learner(engine, preset("decoupled_ppo", **settings))
    new, replayed = [pair(i) for i in range(num_new)], [pair(100 + i) for i in range(num_replayed)]
    learner.train(learner.prepare(new, replayed))
    (batch,) = engine.batches
    return [[int(s.token_ids[1]) for s in minibatch[::2]] for minibatch in batch], list(batch)


def test_minibatches_have_equally_many_new_groups_in_order_and_replayed_ones_dealt_out_and_weigh_the_same() -> None:
    numbers, minibatches = trained(4, 5, minibatches=2)
    assert numbers == [[0, 1, 100, 102, 104], [2, 3, 101, 103]]
    for minibatch in minibatches:
        assert sum(float(s.loss_weights.sum()) for s in minibatch) == pytest.approx(1.0)


def test_each_epoch_has_every_group_once_in_an_order_of_its_own() -> None:
    numbers, _ = trained(8, minibatches=2, epochs=3)
    epochs = [[*numbers[i], *numbers[i + 1]] for i in (0, 2, 4)]
    assert epochs[0] == list(range(8))
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_preparing_a_batch_trains_nothing_and_tells_the_advantages_of_trajectories_that_are_trained() -> None:
    learner = Learner(engine := ScriptedTrainEngine(), preset("grpo", overlong={"mask_truncated": True}))
    wrong, right = pair(1).trajectories
    masked = replace(pair(1), trajectories=(replace(wrong, is_truncated=True), right))
    lower, higher, cut, uncut, *replayed = learner.prepare([pair(0), masked], [pair(100)]).advantages
    assert (learner.version, engine.batches) == (0, [])
    assert (lower, higher) == pytest.approx((-1.0, 1.0), abs=0.5)
    assert lower == -(higher or 0)
    assert (cut is None, uncut is None) == (True, False)
    assert [advantage is None for advantage in replayed] == [False, False]


@pytest.mark.parametrize(("name", "trained"), [("online_dpo", 2), ("kto", 4)])
def test_what_is_not_compared_is_not_even_forwarded_and_what_is_lies_in_one_unit_of_equal_weight(
    name: str, trained: int
) -> None:
    forwarded = list[int]()

    class Counting(ScriptedTrainEngine):
        def forward(self, sequences: Sequence[TrainSequence], output: Output = "logprobs") -> list[Any]:
            forwarded.append(sum(bool(s.loss_mask.any()) for s in sequences))
            return super().forward(sequences, output)

    rewards = (0.5, 1.0, 0.25, 0.0)
    mixed = grouped(*(trajectory((-1, 0), r, loss_mask=(0, 0, 1)) for r in rewards))
    equal = replace(pair(1), trajectories=pair(1).trajectories[:1] * 2)
    learner = Learner(engine := Counting(), preset(name))
    metrics = learner.train(learner.prepare([mixed, equal])).metrics
    ((minibatch,),) = engine.batches
    weights = [float(s.loss_weights.sum()) for s in minibatch if s.loss_mask.any()]
    units = [s.unit for s in minibatch if s.loss_mask.any()]
    assert set(forwarded) == {trained}
    assert len(units) == trained
    assert len(set(units)) == {"online_dpo": 1, "kto": 4}[name]
    assert weights == pytest.approx([1 / trained] * trained)
    assert metrics["uncompared_groups"] == 0.5


def test_a_critic_of_turns_learns_where_turns_begin_and_weighs_turns_as_the_policy_weighs_tokens() -> None:
    policy, critic = ScriptedTrainEngine(), ScriptedTrainEngine()
    turns = (TurnSpan(start=1, stop=4), TurnSpan(start=5, stop=6))
    many = trajectory((0, 0, 0, -1, 0), 1.0, loss_mask=(0, 1, 1, 1, 0, 1), turns=turns)
    learner = Learner(policy, preset("turn_ppo", minibatches=1), critic=critic, events=EventsConfig())
    kept = learner.train(learner.prepare([grouped(many, trajectory((0,), 0.0))])).kept
    ((of_policy,),), ((of_critic,),) = policy.batches, critic.batches
    assert [s.loss_mask.tolist() for s in of_policy] == [[0, 1, 1, 1, 0, 1], [0, 1]]
    assert [s.loss_mask.tolist() for s in of_critic] == [[0, 1, 0, 0, 0, 1], [0, 1]]
    weights = torch.cat([s.loss_weights for s in of_critic]).tolist()
    assert weights == pytest.approx([0, 1 / 3, 0, 0, 0, 1 / 3, 0, 1 / 3])
    of_first = of_policy[0].advantages.tolist()
    assert of_first[1] == of_first[2] == of_first[3] != of_first[5]
    assert kept is not None
    assert np.isnan(kept.columns["values"]).tolist() == [False, True, True, False, False]


class Forwarding(ScriptedTrainEngine):
    calls = 0

    def forward(self, sequences: Sequence[TrainSequence], output: Output = "logprobs") -> list[Any]:
        self.calls += 1
        return super().forward(sequences, output)


@pytest.mark.parametrize(
    ("algorithm", "forwards"),
    [
        ({"proximal": "recomputed", "minibatches": 2}, 1),
        ({"proximal": "recomputed", "minibatches": 1}, 0),
        ({"proximal": "bypassed", "weights": [], "rejections": [], "minibatches": 2}, 0),
    ],
)
def test_proximal_logprobs_cost_a_forward_only_where_they_differ(algorithm: dict[str, Any], forwards: int) -> None:
    engine = Forwarding()
    Learner(engine, preset("decoupled_ppo", **algorithm)).prepare([pair(0), pair(1)])
    assert engine.calls == forwards


def test_while_the_critic_warms_up_the_policy_stands_still_and_reports_nothing() -> None:
    policy, critic = ScriptedTrainEngine(), ScriptedTrainEngine()
    config = preset("ppo", minibatches=1, critic={"warmup_batches": 1}, kl={"coefficient": 0.0})
    learner = Learner(policy, config, critic=critic)
    metrics = [learner.train(learner.prepare([pair(0)])).metrics for _ in range(2)]
    assert [len(batch) for batch in policy.batches] == [0, 1]
    assert [len(batch) for batch in critic.batches] == [1, 1]
    assert [sorted(m) for m in metrics] == [["critic/loss"], ["critic/loss", "loss"]]
    assert learner.version == 2


class Asked(ScriptedTrainEngine):
    """A reward model's engine that notes what it is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = list[str]()

    def forward(self, sequences: Sequence[TrainSequence], output: Output = "logprobs") -> list[Any]:
        self.asked.append(output)
        return super().forward(sequences, output)

    def train_batch(self, minibatches: Sequence[Sequence[TrainSequence]], loss: TokenLoss) -> dict[str, float]:
        self.asked.append("train")
        return super().train_batch(minibatches, loss)


@pytest.mark.parametrize("update", ["before", "after"])
def test_a_reward_model_learns_once_before_or_after_it_is_asked_however_often_a_batch_is_prepared(update: str) -> None:
    policy, model = ScriptedTrainEngine(), Asked()
    config = preset("prime", minibatches=2, reward_model={"update": update})
    learner = Learner(policy, config, reward_model=model)
    groups = [pair(0), pair(1)]
    learner.prepare(groups)
    first, model.asked = model.asked, []
    batch = learner.prepare(groups)
    trained = learner.train(batch)
    reads = ["reference_logprobs", "logprobs"]
    assert first == (["reference_logprobs", "train", "logprobs"] if update == "before" else reads)
    assert model.asked == (reads if update == "before" else [*reads, "train"])
    assert [len(batch) for batch in model.batches] == [2]
    assert "reward_model/loss" in trained.metrics or update == "before"
    assert policy.version == model.version == 1


@pytest.mark.parametrize(("preset_name", "has_engine"), [("prime", False), ("grpo", True)])
def test_a_reward_model_is_a_setting_and_an_engine_or_neither(preset_name: str, has_engine: bool) -> None:
    with pytest.raises(ValueError, match=r"algorithm\.reward_model is .*, but its engine is"):
        Learner(ScriptedTrainEngine(), preset(preset_name), reward_model=ScriptedTrainEngine() if has_engine else None)


def test_a_critic_leaves_the_device_and_comes_back_with_the_policy() -> None:
    moves = list[tuple[str, str]]()

    class Moving(ScriptedTrainEngine):
        def offload(self) -> None:
            moves.append(("offload", "critic" if self is critic else "policy"))

        def onload(self) -> None:
            moves.append(("onload", "critic" if self is critic else "policy"))

    policy, critic = Moving(), Moving()
    learner = Learner(policy, preset("ppo"), critic=critic)
    learner.offload()
    learner.onload()
    assert moves == [(move, who) for move in ("offload", "onload") for who in ("policy", "critic")]


@pytest.mark.parametrize(("wrote", "reads"), [("prime", "grpo"), ("ppo", "prime")])
def test_a_checkpoint_with_another_model_beside_the_policy_does_not_fit(wrote: str, reads: str, tmp_path: Path) -> None:
    def learner(name: str) -> Learner:
        of = {role: ScriptedTrainEngine() for role in preset(name).trained_models}
        return Learner(of["policy"], preset(name), critic=of.get("critic"), reward_model=of.get("reward_model"))

    learner(wrote).save(tmp_path / "engine").wait()
    with pytest.raises(CheckpointError, match=r"set algorithm\.(critic|reward_model) as it was"):
        learner(reads).load(tmp_path / "engine")


def test_a_probe_has_no_placeholder_of_an_image_that_nobody_gave() -> None:
    plain, seeing = (
        probe_of(ScriptedTrainEngine(limits=ModelLimits(vocab_size=8, image_ids=image_ids)), is_exact=True)
        for image_ids in (frozenset(), frozenset({0, 3, 5}))
    )
    assert {0, 3, 5} <= {*plain.token_ids}, "else nothing is seen here"
    assert seeing.token_ids == tuple(1 if number in (0, 3, 5) else number for number in plain.token_ids)


def test_a_models_config_says_which_ids_are_of_images(tmp_path: Any) -> None:
    from transformers import AutoConfig

    write_tiny_vision_model(tmp_path)
    vocabulary = tiny_vision_tokenizer().get_vocab()
    names = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    assert model_limits(AutoConfig.from_pretrained(tmp_path)).image_ids == {vocabulary[name] for name in names}
