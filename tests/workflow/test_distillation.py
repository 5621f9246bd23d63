"""A teacher's judgement as the reward of each token, and a student that comes nearer to its teacher by it."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from embedded_server import server_process

from arl.api.engine import Sampler
from arl.api.errors import ConfigError
from arl.api.fakes import ScriptedEngine
from arl.api.settings.engines import OptimizerConfig, TrainConfig
from arl.api.settings.run import Config, LogConfig, RolloutConfig
from arl.api.types import Example, SamplingParams, Trajectory, TurnSpan
from arl.api.workflow import RolloutWorkflow
from arl.engine.tiny import TinyShape, tiny_model, tiny_tokenizer
from arl.run.launch import launch
from arl.workflow.agent import SingleTurnWorkflow
from arl.workflow.teachers import DistillationWorkflow, TeacherClient

STUDENT = ScriptedEngine(lambda request: [0])


class FixedTeacher:
    """Finds token t as likely as exp(-t / 10). asked: what about."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], int]] = []

    async def logprobs(self, token_ids: Sequence[int], start: int = 1) -> tuple[float, ...]:
        self.asked.append((tuple(token_ids), start))
        return (0.0,) * start + tuple(-t / 10 for t in token_ids[start:])


class Fixed(RolloutWorkflow):
    def __init__(self, episode: Trajectory | list[Trajectory] | None) -> None:
        self.episode = episode

    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory | Sequence[Trajectory] | None:
        return self.episode


TWO_TURNS = Trajectory(
    token_ids=(3, 4, 5, 6, 7, 8),
    loss_mask=(0, 0, 1, 0, 1, 1),
    behavior_logprobs=(0.0, 0.0, -1.0, -3.0, -0.5, -0.25),
    versions=(-1, -1, 0, 0, 1, 1),
    reward=2.0,
    rewards={"style": 1.0},
    token_rewards=(0.0, 0.0, 1.0, 0.0, 0.0, 4.0),
    turns=(TurnSpan(start=2, stop=3, reward=0.5, state="s"), TurnSpan(start=4, stop=6)),
    metrics={"turns": 2.0},
)


UNTRAINED = replace(TWO_TURNS, loss_mask=(0,) * 6)
GAINS = (0.0, 0.0, 0.5, 0.0, -0.2, -0.55)


async def distilled(episode: Trajectory, teacher: FixedTeacher | None = None, **settings: Any) -> Trajectory:
    workflow = DistillationWorkflow(Fixed(episode), teacher or FixedTeacher(), **settings)
    result = await workflow.arun_episode(STUDENT, {})
    assert isinstance(result, Trajectory)
    return result


@pytest.mark.parametrize(
    ("episode", "settings", "token_rewards"),
    [
        (TWO_TURNS, {}, GAINS),
        (UNTRAINED, {}, (0.0,) * 6),
        (TWO_TURNS, {"keep_reward": True}, (0.0, 0.0, 1.5, 0.0, -0.2, 3.45)),
        (TWO_TURNS, {"keep_reward": True, "coefficient": 2.0}, (0.0, 0.0, 2.0, 0.0, -0.4, 2.9)),
        (replace(TWO_TURNS, token_rewards=None), {"keep_reward": True}, GAINS),
    ],
)
async def test_a_trained_token_is_rewarded_with_teacher_less_behavior_logprob(
    episode: Trajectory, settings: dict[str, Any], token_rewards: tuple[float, ...]
) -> None:
    """Alone, unless the workflow's own rewards are kept. The teacher is asked from the first trained token on."""
    teacher, has_trained, keeps = FixedTeacher(), episode is not UNTRAINED, "keep_reward" in settings
    result = await distilled(episode, teacher, **settings)
    assert result.token_rewards == pytest.approx(token_rewards)
    assert teacher.asked == [(tuple(TWO_TURNS.token_ids), 2)] * has_trained
    unchanged = ("token_ids", "loss_mask", "behavior_logprobs", "versions", "role", "temperature", "is_truncated")
    assert all(np.array_equal(getattr(result, name), getattr(episode, name)) for name in unchanged)
    told = {"teacher_kl": (-0.5 + 0.2 + 0.55) / 3} if has_trained else {}
    assert result.metrics == pytest.approx({"turns": 2.0, **told, **({} if keeps else {"task_reward": 2.0})})
    own = (2.0, {"style": 1.0}, TWO_TURNS.turns)
    alone = (0.0, {}, tuple(replace(turn, reward=0.0) for turn in TWO_TURNS.turns))
    assert (result.reward, result.rewards, result.turns) == (own if keeps else alone)


async def test_each_trajectory_of_an_episode_is_judged_and_a_rejected_episode_stays_rejected() -> None:
    teacher, other = FixedTeacher(), replace(TWO_TURNS, token_ids=(9, 9, 9, 9, 9, 9), role="critic")
    result = await DistillationWorkflow(Fixed([TWO_TURNS, other]), teacher).arun_episode(STUDENT, {})
    assert isinstance(result, list)
    assert [t.role for t in result] == ["agent", "critic"]
    assert result[1].token_rewards == pytest.approx((0.0, 0.0, 0.1, 0.0, -0.4, -0.65))
    assert await DistillationWorkflow(Fixed(None), teacher).arun_episode(STUDENT, {}) is None
    assert len(teacher.asked) == 2


async def test_each_token_of_an_episode_that_branched_is_judged_once_and_its_metrics_count_once() -> None:
    """The second branch has the first's beginning, which is trained there."""
    branch = replace(
        TWO_TURNS, token_ids=(3, 4, 5, 6, 9, 9), loss_mask=(0, 0, 0, 0, 1, 1), turns=(), metrics={}, reward=1.0
    )
    teacher = FixedTeacher()
    result = await DistillationWorkflow(Fixed([TWO_TURNS, branch]), teacher).arun_episode(STUDENT, {})
    assert isinstance(result, list)
    first, second = result
    assert teacher.asked == [(tuple(TWO_TURNS.token_ids), 2), (tuple(branch.token_ids), 4)]
    assert first.token_rewards == pytest.approx((0.0, 0.0, 0.5, 0.0, -0.2, -0.55))
    assert second.token_rewards == pytest.approx((0.0, 0.0, 0.0, 0.0, -0.4, -0.65))
    gap = (-0.5 + 0.2 + 0.55 + 0.4 + 0.65) / 5
    assert first.metrics == pytest.approx({"turns": 2.0, "task_reward": 1.5, "teacher_kl": gap})
    assert second.metrics == {}


async def test_a_temperature_or_a_coefficient_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sampled at temperature 0\.7"):
        await distilled(replace(TWO_TURNS, temperature=0.7))
    for coefficient in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match="coefficient"):
            DistillationWorkflow(Fixed(None), FixedTeacher(), coefficient=coefficient, keep_reward=True)
    with pytest.raises(ConfigError, match=r"coefficient is 2\.0, but without keep_reward .* leave it out"):
        await distilled(TWO_TURNS, coefficient=2.0)


SHAPE = TinyShape(hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16)


def write_model_of_habits(directory: Path, strength: float, seed: int) -> Path:
    """A model that says some tokens oftener than others whatever came before: what a student learns soonest.

    All embeddings have one direction in common, so that states have it too.
    """
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, replace(SHAPE, initializer_range=strength), seed)
    with torch.no_grad():
        model.get_input_embeddings().weight += 2 * SHAPE.hidden_size**-0.5
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


async def one(answer: str, data: Example) -> float:
    return 1.0


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_few_steps_bring_the_student_nearer_to_its_teacher(tmp_path: Path) -> None:
    teacher_model = write_model_of_habits(tmp_path / "teacher", strength=0.4, seed=1)
    student_model = write_model_of_habits(tmp_path / "student", strength=0.02, seed=2)
    config = Config(
        model=str(student_model),
        run_dir=tmp_path / "run",
        steps=12,
        rollout=RolloutConfig(batch_size=8, group_size=4, max_staleness=1),
        train=TrainConfig(num_threads=1, optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.0, eps=1e-8)),
        algorithm={"preset": "distillation"},
        log=LogConfig(console=False),
    )
    babbling = SingleTurnWorkflow(tiny_tokenizer(), one, sampling=SamplingParams(max_new_tokens=16, ignore_eos=True))
    questions = [{"question": str(number)} for number in range(64)]
    with server_process(str(teacher_model)) as server:
        async with TeacherClient(server.address, tokenizer=tiny_tokenizer()) as teacher:
            workflow = DistillationWorkflow(babbling, teacher)
            async with launch(config, workflow=workflow, dataset=questions) as trainer:
                steps = [step async for step in trainer]
    gaps = [step.metrics["episode/teacher_kl"] for step in steps]
    assert all(step.metrics["episode/task_reward"] == 1.0 for step in steps)
    assert sum(gaps[-3:]) / 3 < 0.7 * sum(gaps[:3]) / 3, gaps
