"""The engines that launch builds for an algorithm train together, continue together, and close together."""

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from random_groups import random_groups
from train_models import MakeLearner, learner_config, load_critic, slow_values
from train_sequences import assert_same_metrics, random_sequences

from arl.api.errors import ConfigError, ModelError, ProcessLostError, TransportError
from arl.api.settings.engines import TrainConfig
from arl.api.settings.run import Config
from arl.api.types import Group
from arl.observe.events.batches import token_row, unpacked
from arl.run.learner import host_learner, load_learner
from arl.training.learner import Learner
from arl.training.learner_process import RemoteLearner
from arl.training.learner_recovery import RecoveringLearner
from arl.training.token_log import ReportedBatch, TrainedBatch, named


def ppo(model_dir: Path, critic: dict[str, Any] | None = None, train: dict[str, Any] | None = None) -> Config:
    """PPO with a critic."""
    critic = {"value_clip": None, "lr": 3e-3, **(critic or {})}
    algorithm = {"preset": "ppo", "minibatches": 1, "critic": critic, "kl": {"coefficient": 0.01}}
    return learner_config(model_dir, train=train, algorithm=algorithm, rollout={"batch_size": 3, "group_size": 2})


@pytest.fixture
def make_ppo(model_dir: Path) -> Iterator[MakeLearner]:
    """make_ppo(critic={...}, train={...}) -> a learner as `launch` makes it."""
    with ExitStack() as stack:

        def make(**changes: Any) -> Learner:
            learner = load_learner(ppo(model_dir, **changes))
            stack.callback(learner.close)
            return learner

        yield make


def test_the_critic_learns_beside_the_policy(make_ppo: MakeLearner):
    learner = make_ppo(train={"optimizer": {"lr": 5e-3, "eps": 1e-3}})
    metrics = [learner.train(learner.prepare(random_groups(0))).metrics for _ in range(10)]
    assert learner.version == 10
    assert metrics[-1]["critic/value_error"] < 0.8 * metrics[0]["critic/value_error"]
    assert metrics[0]["lr"] == pytest.approx(5e-3)
    assert metrics[0]["critic/lr"] == pytest.approx(3e-3)


def test_what_was_saved_goes_on_to_the_bit(make_ppo: MakeLearner, tmp_path: Path):
    learner, again = make_ppo(), make_ppo()
    for _ in range(2):
        learner.train(learner.prepare(random_groups(0)))
    learner.save(tmp_path / "saved").wait()
    expected = learner.train(learner.prepare(random_groups(1))).metrics
    again.load(tmp_path / "saved")
    assert again.train(again.prepare(random_groups(1))).metrics == expected


def test_a_critic_begins_as_the_reward_model_that_is_named(make_ppo: MakeLearner, critic_dir: Path):
    learner = make_ppo(critic={"model": str(critic_dir)})
    assert learner.critic is not None
    (sequence,) = random_sequences(1)
    (values,) = learner.critic.forward([sequence], "values")
    torch.testing.assert_close(values, slow_values(load_critic(critic_dir), sequence), rtol=1e-5, atol=1e-5)


def test_the_policy_is_closed_where_the_critic_cannot_be_built(make_ppo: MakeLearner, tmp_path: Path):
    assert not dist.is_initialized()
    with pytest.raises(ModelError, match="nowhere"):
        make_ppo(critic={"model": str(tmp_path / "nowhere")})
    assert not dist.is_initialized()


@pytest.mark.runs
def test_in_a_process_of_its_own_a_learner_trains_writes_and_continues_to_the_bit_and_again_in_the_next_process(
    make_ppo: MakeLearner, model_dir: Path, tmp_path: Path
):
    here = make_ppo()
    host, log, saved = partial(host_learner, ppo(model_dir)), tmp_path / "trainer.log", tmp_path / "saved"
    there = RecoveringLearner(partial(RemoteLearner, host, log, 1), saved, TrainConfig(max_recoveries=1))
    try:
        assert there.engine.limits == here.engine.limits
        for seed in range(2):
            groups, replayed = random_groups(seed), random_groups(seed + 10)[:seed]
            expected, prepared = here.prepare(groups, replayed), there.prepare(groups, replayed)
            assert prepared.advantages == expected.advantages
            theirs, ours = there.train(prepared), here.train(expected)
            assert theirs.metrics == ours.metrics
            assert_reported(theirs, ours, groups)
            assert there.version == here.version == seed + 1
        assert written(there, tmp_path / "there") == written(here, tmp_path / "here")
        there.save(saved / "version-00000002" / "engine").wait()
        next_metrics = there.train(there.prepare(random_groups(3))).metrics
        there.load(saved / "version-00000002" / "engine")
        assert there.version == 2
        assert there.train(there.prepare(random_groups(3))).metrics == next_metrics
        lost, snapshot = there._learner, there.engine.snapshot()
        os.kill(lost._process.pid, signal.SIGKILL)
        killed = "the trainer's process was ended by SIGKILL, as the kernel does where memory runs out; the end of"
        with pytest.raises(ProcessLostError, match=killed):
            snapshot.write(tmp_path / "lost")
        again = [there.train(there.prepare(random_groups(seed))).metrics for seed in (4, 5)]
        assert there.version == 5
        assert [here.train(here.prepare(random_groups(seed))).metrics for seed in (3, 4, 5)][1:] == again
        with pytest.raises(ProcessLostError, match=killed):
            lost.train(lost.prepare(random_groups(4)))
        assert lost.version == 3
    finally:
        there.close()


def assert_reported(theirs: ReportedBatch, ours: TrainedBatch, groups: list[Group]) -> None:
    """What the trainer's process packed is what training kept, under the names of the log."""
    assert ours.kept is not None
    assert theirs.numbers == ours.kept.numbers
    names = [(name, number, trajectory) for group in groups for name, number, trajectory in named(group)]
    chosen = [names[row] for row in ours.kept.rows]
    (packed,) = theirs.tokens
    assert packed.rows == [(name, number) for name, number, _ in chosen]
    assert packed.num_tokens == sum(len(trajectory.token_ids) for _, _, trajectory in chosen)
    read = [token_row(unpacked(packed.frame), place) for place in range(len(chosen))]
    for name, column in ours.kept.columns.items():
        trained = [columns[name][columns["loss_mask"]] for _, columns in read if columns["loss_mask"].any()]
        np.testing.assert_array_equal(np.concatenate(trained), column)
    for (row, columns), (_, _, trajectory) in zip(read, chosen, strict=True):
        assert row.reward == trajectory.reward
        assert columns["token_ids"].tolist() == trajectory.token_ids.tolist()
        assert columns["behavior_logprobs"].tolist() == trajectory.behavior_logprobs.tolist()


def assert_same_kept(ours: TrainedBatch, theirs: TrainedBatch, rtol: float = 0.0, atol: float = 0.0) -> None:
    assert ours.kept is not None
    assert theirs.kept is not None
    assert ours.kept.rows == theirs.kept.rows
    assert ours.kept.columns.keys() == theirs.kept.columns.keys() >= {"proximal_logprobs", "weights", "entropy"}
    for name, column in theirs.kept.columns.items():
        np.testing.assert_allclose(ours.kept.columns[name], column, rtol, atol, err_msg=name)
    np.testing.assert_allclose(ours.kept.numbers, theirs.kept.numbers, rtol, atol)


def written(learner: Learner | RecoveringLearner, directory: Path) -> dict[str, bytes]:
    """The files of a snapshot, which is released afterwards."""
    snapshot = learner.engine.snapshot()
    snapshot.write(directory)
    snapshot.release()
    with pytest.raises(TransportError, match="the snapshot of version 2 was released"):
        snapshot.write(directory)
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_gpus_for_the_policy_alone_are_not_enough(model_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(ConfigError, match=r"2 for the policy, and as many for the critic, .* has 3 GPU\(s\); set it"):
        load_learner(ppo(model_dir, train={"device": "cuda", "num_ranks": 2}))


@pytest.mark.slow
@pytest.mark.timeout(300)  # Ray takes its time to start on a machine that has other things to do
def test_a_policy_and_a_critic_of_two_ranks_each_train_as_one_process_does(
    make_ppo: MakeLearner, monkeypatch: pytest.MonkeyPatch
):
    alone = make_ppo()
    expected = [alone.train(alone.prepare(random_groups(seed))) for seed in range(2)]
    with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp") as directory:  # whose name is short, as Ray wants it
        monkeypatch.setattr(tempfile, "tempdir", directory)
        ranks = make_ppo(train={"num_ranks": 2})
        for seed in range(2):
            trained = ranks.train(ranks.prepare(random_groups(seed)))
            assert_same_metrics(trained.metrics, expected[seed].metrics, 1e-4)
            assert_same_kept(trained, expected[seed], rtol=1e-4, atol=1e-5)
        ranks.close()
