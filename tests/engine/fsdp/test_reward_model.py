"""PRIME's reward model beside the policy: it says what two language models say, learns, is saved and taken up again."""

import os
import signal
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from random_groups import random_groups
from records import grouped, trajectory
from train_models import MakeLearner, learner_config, load_twin
from transformers import PreTrainedModel

from arl.algorithm.batch import Batch
from arl.algorithm.returns import outcomes_of
from arl.api.settings.engines import OptimizerConfig, TrainConfig
from arl.api.types import Group
from arl.engine.fsdp.train_engine import build_optimizer
from arl.run.learner import host_learner
from arl.training.learner_process import RemoteLearner
from arl.training.learner_recovery import RecoveringLearner

BETA, LR = 0.3, 3e-3


def prime(**reward_model: Any) -> dict[str, Any]:
    return {"preset": "prime", "minibatches": 2, "reward_model": {"lr": LR, "beta": BETA, **reward_model}}


def logprobs(model: PreTrainedModel, group_trajectories: Any) -> list[torch.Tensor]:
    """Of each trajectory, at temperature 1: 0 where nothing was sampled."""
    rows = []
    for t in group_trajectories:
        ids = torch.tensor(t.token_ids.tolist())
        row = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        rows.append(torch.cat([torch.zeros(1), row]) * torch.tensor(t.loss_mask))
    return rows


def in_branches() -> list[Group]:
    """Groups in which one episode has branched."""
    first, *others = random_groups(0)
    return [replace(first, episode_indices=(0, *first.episode_indices[1:-1], 0)), *others]


@pytest.mark.parametrize("update", ["before", "after"])
def test_process_rewards_and_what_is_learned_are_those_of_two_plain_models(
    make_learner: MakeLearner, model_dir: Path, update: str
):
    """Two batches of one minibatch each. In the plain loop, an episode's tokens are summed over its trajectories."""
    learner = make_learner(algorithm=prime(update=update))
    learner._config = learner._config.model_copy(update={"minibatches": 1})
    twin, reference = load_twin(model_dir), load_twin(model_dir)
    twin.train()
    optimizer = build_optimizer(twin, OptimizerConfig(lr=LR, eps=1e-3))

    def learn(groups: list[Group]) -> float:
        batch = Batch.of(groups)
        rows = zip(logprobs(twin, batch.trajectories), logprobs(reference, batch.trajectories), strict=True)
        sums: dict[int, torch.Tensor] = {}
        for (current, before), episode, count in zip(rows, batch.episode, batch.counts, strict=True):
            if count:
                sums[episode] = sums.get(episode, torch.zeros(())) + BETA * (current - before.detach()).sum()
        outcomes = dict(zip(batch.episode, outcomes_of(batch), strict=True))
        losses = [F.binary_cross_entropy(s.sigmoid(), torch.tensor(outcomes[e])) for e, s in sums.items()]
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    for groups in (random_groups(3), in_branches()):
        expected = learn(groups) if update == "before" else None
        prepared = learner.prepare(groups)
        with torch.no_grad():
            pairs = zip(*(logprobs(m, prepared.batch.trajectories) for m in (twin, reference)), strict=True)
            rewards = [BETA * (c - r) for c, r in pairs]
        assert prepared.batch.implicit_rewards is not None
        torch.testing.assert_close(prepared.batch.implicit_rewards.float(), torch.cat(rewards), rtol=1e-4, atol=1e-5)
        metrics = learner.train(prepared).metrics
        expected = learn(groups) if expected is None else expected
        assert metrics["reward_model/loss"] == pytest.approx(expected, abs=1e-5)
    assert prepared.batch.implicit_rewards.abs().max() > 0.01


@pytest.mark.parametrize("update", ["before", "after"])
def test_a_saved_reward_model_goes_on_with_its_reference(make_learner: MakeLearner, tmp_path: Path, update: str):
    """To the bit."""
    learner, again = (make_learner(algorithm=prime(update=update)) for _ in range(2))
    for _ in range(2):
        learner.train(learner.prepare(random_groups(0)))
    learner.save(tmp_path / "saved").wait()
    expected = learner.train(learner.prepare(random_groups(1))).metrics
    again.load(tmp_path / "saved")
    assert again.train(again.prepare(random_groups(1))).metrics == expected
    assert expected["reward_model/process_reward"] != 0
    assert again.fingerprint() == learner.fingerprint()
    assert {name.partition(".")[0] for name in again.fingerprint()} >= {"reward_model"}


@pytest.mark.parametrize("update", ["before", "after"])
def test_a_batch_that_was_prepared_teaches_once_also_if_the_step_is_begun_again_from_a_checkpoint(
    make_learner: MakeLearner, tmp_path: Path, update: str
):
    learner, again, plain = (make_learner(algorithm=prime(update=update)) for _ in range(3))
    groups = random_groups(1)
    learner.prepare(groups)
    learner.save(tmp_path / "saved").wait()
    again.load(tmp_path / "saved")
    for one in (learner, again, plain):
        one.train(one.prepare(groups))
    assert learner.fingerprint() == again.fingerprint() == plain.fingerprint()


def test_adapters_are_a_reward_model_too_and_begin_as_their_reference(make_learner: MakeLearner):
    learner = make_learner(train={"lora": {"rank": 2}}, algorithm=prime())
    first, second = (learner.prepare(random_groups(0)), learner.train(learner.prepare(random_groups(0))))
    assert first.batch.implicit_rewards is not None
    assert float(first.batch.implicit_rewards.abs().max()) < 1e-5
    assert second.metrics["reward_model/grad_norm"] > 0
    later = learner.prepare(random_groups(0)).batch.implicit_rewards
    assert later is not None
    assert float(later.abs().max()) > 1e-4


@pytest.mark.runs
@pytest.mark.parametrize("update", ["before", "after"])
def test_a_process_that_is_killed_with_a_prepared_batch_is_replaced_by_one_that_goes_on_to_the_bit(
    make_learner: MakeLearner, model_dir: Path, tmp_path: Path, update: str
):
    algorithm = prime(update=update)
    here, config = make_learner(algorithm=algorithm), learner_config(model_dir, algorithm=algorithm)
    start = partial(RemoteLearner, partial(host_learner, config), tmp_path / "trainer.log", 1)
    there = RecoveringLearner(start, tmp_path / "saved", TrainConfig(max_recoveries=1))
    try:
        for seed in range(3):
            prepared = there.prepare(random_groups(seed))
            if seed == 1:
                there.save(tmp_path / "saved" / "version-00000001" / "engine").wait()
            os.kill(there._learner._process.pid, signal.SIGKILL) if seed == 2 else None
            metrics = there.train(prepared).metrics
            expected = here.train(here.prepare(random_groups(seed))).metrics
            policys = {name for name in expected if not name.startswith("reward_model/")}
            assert {name: metrics[name] for name in policys} == {name: expected[name] for name in policys}
    finally:
        there.close()


def answers(seed: int) -> list[Group]:
    """Four groups of four answers of four tokens, each one of two. An answer wins if its third token is the odd one."""
    generator = torch.Generator().manual_seed(seed)

    def answer() -> Any:
        ids = torch.randint(30, 32, (4,), generator=generator).tolist()
        fields = {"token_ids": (7, *ids), "behavior_logprobs": (0.0, *[-4.0] * 4), "loss_mask": (0, 1, 1, 1, 1)}
        return trajectory((0,) * 4, float(ids[2] % 2), **fields)

    return [grouped(*(answer() for _ in range(4)), number=number) for number in range(4)]


def test_from_outcomes_alone_a_reward_model_learns_who_wins_and_not_before_it_is_decided(make_learner: MakeLearner):
    learner = make_learner(algorithm=prime(beta=1.0))
    accuracies = [learner.train(learner.prepare(answers(seed))).metrics["reward_model/accuracy"] for seed in range(25)]
    assert sum(accuracies[-5:]) / 5 > 0.9 > 0.8 > sum(accuracies[:3]) / 3
    batch = learner.prepare(answers(99)).batch
    assert batch.implicit_rewards is not None
    rows = torch.stack(batch.split(batch.implicit_rewards))[:, 1:]
    wins = torch.tensor([t.reward > 0.5 for t in batch.trajectories])
    apart = rows[wins].mean(0) - rows[~wins].mean(0)
    assert float(apart[:2].abs().max()) < 0.5 < 2 < float(apart[2:].sum())


@pytest.mark.slow
@pytest.mark.timeout(300)  # Ray takes its time to start on a machine that has other things to do
@pytest.mark.parametrize("update", ["before", "after"])
def test_two_ranks_of_each_model_train_as_one_process_does(
    make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch, update: str
):
    alone = make_learner(algorithm=prime(update=update))
    expected = [alone.train(alone.prepare(in_branches())).metrics for _ in range(2)]
    with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp") as directory:  # whose name is short, as Ray wants it
        monkeypatch.setattr(tempfile, "tempdir", directory)
        ranks = make_learner(algorithm=prime(update=update), train={"num_ranks": 2})
        for metrics in expected:
            ours = ranks.train(ranks.prepare(in_branches())).metrics
            for name in ("loss", "grad_norm", "accuracy", "success", "process_reward"):
                key = f"reward_model/{name}"
                assert ours[key] == pytest.approx(metrics[key], rel=1e-4, abs=1e-5)
            assert ours["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-3)
        ranks.close()
