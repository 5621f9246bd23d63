"""Recorded steps give the run's weights again; and what other settings would have done, from the same weights."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_groups import random_groups
from train_models import learner_config

import arl.run.replay
from arl.api.errors import ConfigError, RecordingError
from arl.api.settings.run import Config
from arl.api.settings.sections import laid_over
from arl.api.types import Group
from arl.api.version import __version__
from arl.run.learner import host_learner
from arl.run.replay import ComparedLearners, ComparedStep, RecordedRun, nested, other_settings, replay
from arl.training.batch_codec import FlatBatch
from arl.training.learner_recovery import RecoveringLearner
from arl.training.recording import RecordedStep, Recorder, forget_steps, recorded_versions, step_file

STEPS = 4


class LearnerHere:
    """A RemoteLearner without its process."""

    num_ranks = 1

    def __init__(self, host: Callable[[], Any], log: Path, num_threads: int) -> None:
        self._host = host()

    version = property(lambda self: self._host.version())
    engine = property(lambda self: self._host._learner.engine)

    def prepare_flat(self, batch: FlatBatch) -> FlatBatch:
        self._host.prepare(batch)
        return batch

    def train(self, batch: FlatBatch) -> Any:
        return self._host.train()[0]

    def save(self, directory: Path) -> Any:
        return self._host._learner.save(directory)

    def load(self, directory: Path) -> None:
        self._host.load(directory)

    def close(self) -> None:
        self._host.close()


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arl.run.replay, "RemoteLearner", LearnerHere)

    def build_here(process: Any, what: str, build: Callable[[], Any], log: Path, environment: Any) -> None:
        process.object = build()

    learners = arl.run.replay._LearnersProcess
    monkeypatch.setattr(learners.__base__, "__init__", build_here)
    monkeypatch.setattr(learners, "call", lambda self, method, *args: getattr(self.object, method)(*args))
    monkeypatch.setattr(learners, "close", lambda self: self.object.close())


def config(model_dir: Path, run_dir: Path, **changes: Any) -> Config:
    algorithm = {"minibatches": 2, "kl": {"coefficient": 0.01}}
    train = {"optimizer": {"lr": 1e-3, "eps": 1e-3}, "max_tokens_per_microbatch": 200}
    sections = {"train": train, "algorithm": algorithm, "log": {"console": False}}
    rollout = {"batch_size": 4, "group_size": 6}
    return learner_config(model_dir, run_dir=run_dir, record=True, rollout=rollout, **laid_over(sections, changes))


PRIME = {"preset": "prime", "minibatches": 2, "kl": {"coefficient": 0.0}, "dynamic_sampling": False}


@pytest.mark.parametrize("update", ["before", "after"])
def test_a_reward_model_is_trained_again_too_from_the_model_and_from_a_checkpoint(
    model_dir: Path, tmp_path: Path, update: str
) -> None:
    algorithm = {**PRIME, "reward_model": {"lr": 1e-3, "update": update}}
    record(config(model_dir, tmp_path / "run", algorithm=algorithm))
    whole, later = replay(tmp_path / "run"), replay(tmp_path / "run", "2:4")
    assert all(step.is_identical for step in (*whole.steps, *later.steps))
    assert [step.version for step in later.steps] == [2, 3]
    (compared,) = replay(tmp_path / "run", "3:4", changes={"algorithm.advantage.token_discount": 0.5}).compared
    assert all(layer.gradient_cosine < 1 for layer in compared.layers)
    (same,) = replay(tmp_path / "run", "3:4", changes={"algorithm.loss.clip_low": 0.3}).compared
    assert same.metrics["reward_model/loss"] == same.other_metrics["reward_model/loss"]


def groups_of(step: int) -> list[Group]:
    return random_groups(step)


def record(settings: Config, *, first: int = 0, steps: int = STEPS, save_at: int | None = 2) -> None:
    """Train and record, as the trainer's process does; a checkpoint of `save_at`."""
    from arl.engine.model_files import model_digest

    settings.run_dir.mkdir(exist_ok=True)
    recorder = Recorder(settings, model_digest(settings.model))
    start = partial(LearnerHere, partial(host_learner, settings), settings.run_dir / "log", 1)
    learner: Any = RecoveringLearner(start, settings.run_dir / "checkpoints", settings.train, recorder=recorder)  # pyright: ignore[reportArgumentType]
    try:
        if first:
            learner.load(settings.run_dir / "checkpoints" / f"version-{first:08d}" / "engine")
        for step in range(first, first + steps):
            if step == save_at:
                learner._learner.save(settings.run_dir / "checkpoints" / f"version-{step:08d}" / "engine").wait()
            learner._prepared = learner.prepare(groups_of(step), groups_of(step + 9)[: step % 2])
            learner.train(learner._prepared)
    finally:
        learner.close()


@pytest.fixture(scope="module")
def recorded(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, with a checkpoint of version 2. Tests copy it before they change it."""
    run_dir = tmp_path_factory.mktemp("recorded") / "run"
    record(config(model_dir, run_dir))
    return run_dir


@pytest.fixture
def own_copy(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "run"))


def test_from_the_model_and_from_a_checkpoint_the_weights_of_each_step_are_the_runs_to_the_bit(recorded: Path) -> None:
    whole, later = replay(recorded), replay(recorded, "3:4")
    assert [step.version for step in whole.steps] == [0, 1, 2, 3]
    assert all(step.is_identical and step.loss == step.recorded_loss for step in whole.steps)
    assert whole.which.checkpoint is None
    assert later.which.base == 2
    assert [(step.version, step.digest) for step in later.steps] == [(3, whole.steps[3].digest)]
    assert len({step.digest for step in whole.steps}) == STEPS


def test_a_batch_with_one_other_reward_gives_other_weights_and_the_replay_says_so(own_copy: Path) -> None:
    path = step_file(own_copy / "recording", 0)
    step = RecordedStep.read(path)
    header = json.loads(step.batch.header)
    header["trajectories"]["reward"][0] += 0.5
    other = FlatBatch(header=json.dumps(header).encode(), arrays=step.batch.arrays, num_new=step.batch.num_new)
    RecordedStep(
        **{name: getattr(step, name) for name in step.__dataclass_fields__ if name != "batch"}, batch=other
    ).write(path)
    found = replay(own_copy, "0:1")
    assert not found.is_good
    assert found.steps[0].digest != found.steps[0].recorded_digest
    assert 0 < found.steps[0].difference < 0.1
    assert found.steps[0].tensor in step.after


def test_on_another_build_weights_are_compared_within_the_tolerance(own_copy: Path) -> None:
    path = step_file(own_copy / "recording", 0)
    with np.load(path) as file:
        arrays = dict(file)
    about = json.loads(arrays["about"].tobytes())
    about["build"]["packages"]["torch"] = "1.0"
    name = next(iter(about["after"]))
    bits, norm, projection = about["after"][name]
    about["after"][name] = [bits ^ 1, norm, projection + 1e-4 * norm]
    arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    np.savez(path, **arrays)
    (step,) = replay(own_copy, "0:1").steps
    assert step.build == (f"torch 1.0 there, {torch.__version__} here",)
    assert not step.is_identical
    assert step.difference == pytest.approx(1e-4, rel=1e-3)
    assert step.is_good(1e-3)
    assert not step.is_good(1e-5)


def test_a_run_that_continued_with_another_learning_rate_is_replayed_with_both(model_dir: Path, own_copy: Path) -> None:
    forget_steps(own_copy, 2)
    assert recorded_versions(own_copy) == [0, 1]
    record(config(model_dir, own_copy, train={"optimizer": {"lr": 5e-3}}), first=2, steps=2, save_at=None)
    shutil.rmtree(own_copy / "checkpoints")
    found = replay(own_copy)
    assert [step.is_identical for step in found.steps] == [True] * 4
    compared = replay(own_copy, changes={"algorithm.kl.coefficient": 0.2}).compared
    assert [one.metrics["loss"] for one in compared] == [step.recorded_loss for step in found.steps]
    assert [one.other_metrics["lr"] for one in compared] == [1e-3, 1e-3, 5e-3, 5e-3]


# Under other settings --------------------------------------------------------------------------------------------


@pytest.fixture
def compared(recorded: Path) -> Callable[[dict[str, Any]], ComparedStep]:
    """compared(changes) -> the first step under the run's settings and under others."""
    return lambda changes: replay(recorded, "0:1", changes=changes).compared[0]


def test_with_the_same_settings_nothing_changes(compared: Callable[..., ComparedStep]) -> None:
    found = compared({"algorithm.minibatches": 2})
    assert found.metrics == found.other_metrics
    for layer in found.layers:
        assert layer.gradient_cosine == pytest.approx(1)
        assert layer.update == layer.other_update


def test_another_learning_rate_changes_updates_and_no_gradient(compared: Callable[..., ComparedStep]) -> None:
    found = compared({"train.optimizer.lr": 2e-3, "algorithm.minibatches": 1, "algorithm.loss.clip_high": 0.2})
    same = compared({"algorithm.minibatches": 1})
    for layer, plain in zip(found.layers, same.layers, strict=True):
        assert layer.other_gradient == plain.other_gradient
        assert layer.other_update == pytest.approx(2 * plain.other_update, rel=1e-2)


def test_another_packing_changes_gradients_by_rounding_alone(compared: Callable[..., ComparedStep]) -> None:
    found = compared({"train.max_tokens_per_microbatch": 60, "train.share_prefixes": False})
    for layer in found.layers:
        assert layer.gradient_cosine == pytest.approx(1, abs=1e-6)
        assert layer.other_gradient == pytest.approx(layer.gradient, rel=1e-4)


def test_gradients_are_those_of_the_loss_before_clipping(compared: Callable[..., ComparedStep]) -> None:
    found = compared({"algorithm.minibatches": 1})
    norm = sum(layer.other_gradient**2 for layer in found.layers) ** 0.5
    assert norm == pytest.approx(found.other_metrics["grad_norm"], rel=1e-5)


def test_each_step_begins_with_the_runs_weights_and_the_runs_own_side_keeps_them(
    recorded: Path, model_dir: Path
) -> None:
    own = config(model_dir, recorded)
    learners = ComparedLearners(own, other_settings(own, nested({"train.optimizer.lr": 0.01})))
    try:
        run = RecordedRun(recorded)
        for version in range(2):
            batch = run.step(version).batch
            _, _, layers = learners.compare(batch)
            assert learners._own.fingerprint() == run.step(version).after
            assert layers[0].gradient_cosine > 0.9
    finally:
        learners.close()


# What is missing, or does not belong together ---------------------------------------------------------------------


def test_a_run_without_recorded_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="record=True"):
        replay(tmp_path)


def test_steps_that_no_recorded_steps_lead_to_are_refused_with_what_there_is(own_copy: Path) -> None:
    step_file(own_copy / "recording", 1).unlink()
    with pytest.raises(RecordingError, match=r"step 1: the recorded steps are 0, 2-3, the checkpoints 2"):
        replay(own_copy, "0:3")
    shutil.rmtree(own_copy / "checkpoints")
    with pytest.raises(RecordingError, match=r"step 2: .* the checkpoints none"):
        replay(own_copy, "2:3")


def test_a_checkpoint_of_other_weights_is_refused(own_copy: Path, model_dir: Path) -> None:
    other = own_copy.with_name("other")
    record(config(model_dir, other, train={"optimizer": {"lr": 0.01}}))
    shutil.rmtree(own_copy / "checkpoints")
    shutil.copytree(other / "checkpoints", own_copy / "checkpoints")
    with pytest.raises(RecordingError, match="version-00000002 holds other weights than step 2"):
        replay(own_copy, "2:3")


def test_another_model_is_refused(own_copy: Path, critic_dir: Path) -> None:
    with pytest.raises(RecordingError, match="is another model than the run began from"):
        replay(own_copy, model=critic_dir)
    with pytest.raises(RecordingError, match="cannot be read here"):
        replay(own_copy, model="nowhere")


@pytest.mark.parametrize("what", ["format", "cut", "batch"])
def test_a_step_of_another_format_a_damaged_one_and_a_changed_batch_are_refused(own_copy: Path, what: str) -> None:
    path = step_file(own_copy / "recording", 0)
    if what == "cut":
        path.write_bytes(path.read_bytes()[:-200])
    else:
        with np.load(path) as file:
            arrays = dict(file)
        if what == "format":
            about = json.loads(arrays["about"].tobytes()) | {"format": 99}
            arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
        else:
            arrays["token_ids"][3] += 1
        np.savez(path, **arrays)
    messages = {"format": "format 99", "cut": "cannot be read", "batch": "its checksum differs"}
    with pytest.raises(RecordingError, match=messages[what]):
        replay(own_copy, "0:1")


def test_settings_that_this_arl_does_not_know_name_the_arl_that_recorded_them(own_copy: Path) -> None:
    path = step_file(own_copy / "recording", 0)
    step = RecordedStep.read(path)
    replace(step, settings={**step.settings, "train": {"gone": 1}}).write(path)
    with pytest.raises(
        ConfigError, match=rf"arl {__version__} recorded the run, .* replay it with that one: train\.gone"
    ):
        replay(own_copy, "0:1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine.kind": "sglang"}, "engine has no effect in a replay"),
        ({"algorithm.preset": "ppo", "algorithm.minibatches": 2}, "algorithm.critic cannot be added"),
        ({"algorithm.reward_model": {}}, "algorithm.reward_model cannot be added or left out: a reward model learns"),
        ({"algorithm.los": 1}, "los is not a setting"),
        ({"train.lora": {}}, "train.lora cannot differ"),
        ({"train.num_ranks": 2}, "train.num_ranks has no effect here: both settings are compared on one rank"),
        ({"algorithm.weights.0.upper": 2}, r"algorithm.weights is .*; it must be a list with all parts, such as \[{"),
    ],
)
def test_settings_that_no_replay_can_change_are_refused(recorded: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replay(recorded, "0:1", changes=changes)


def test_a_step_that_cannot_be_written_is_missing_and_the_log_says_so(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(model_dir, tmp_path)
    (tmp_path / "recording").write_text("in the way")
    Recorder(settings, None).keep(0, FlatBatch.of(random_groups(0)), None, 1)
    assert "step 0 is not recorded, so it cannot be replayed" in caplog.text
