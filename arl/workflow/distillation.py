"""On-policy distillation: the student's own episodes, with a teacher's judgement of each token for a reward."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import Protocol, Self

from arl.api.engine import InferenceEngine
from arl.api.errors import ConfigError, first_error
from arl.api.types import Example, Trajectory
from arl.api.workflow import RolloutWorkflow


class Teacher(Protocol):
    """A TeacherClient, or what stands in for one in a test."""

    async def logprobs(self, token_ids: Sequence[int], start: int = 1) -> tuple[float, ...]: ...


class DistillationWorkflow(RolloutWorkflow):
    """Runs another workflow's episodes, and rewards each trained token with how much likelier the teacher finds it.

        token reward = teacher logprob - behavior logprob

    With advantages that are these rewards (`algorithm.preset=distillation`: no baseline, token_discount 0) and an
    importance-weighted policy loss, the gradient is that of the reverse KL(student || teacher) at the states that the
    student itself gets into, token by token (On-Policy Distillation, Thinking Machines 2025; GKD, Agarwal et al. 2023,
    2306.13649, with lambda = 1; MiniLLM, Gu et al. 2023, 2306.08543, with no look ahead).

    keep_reward: the workflow's own rewards stay, of trajectories, turns and tokens, and `coefficient` times the
    teacher's are added to them, for estimators that look at both. Else they are the teacher's alone, and the own one is
    the metric `task_reward`. The metric `teacher_kl` is the mean of behavior - teacher logprobs over trained tokens:
    an estimate of the KL divergence per token.

    The student has to sample at temperature 1, since a server tells a teacher's logprobs at no other: raises
    ConfigError for a trajectory of another. Sampling with top_p or top_k leaves tokens out of what is compared.
    """

    def __init__(
        self, workflow: RolloutWorkflow, teacher: Teacher, *, coefficient: float = 1.0, keep_reward: bool = False
    ) -> None:
        if not math.isfinite(coefficient) or coefficient <= 0:
            raise ConfigError(f"coefficient is {coefficient}; a teacher is followed with one above 0")
        if coefficient != 1.0 and not keep_reward:
            raise ConfigError(
                f"coefficient is {coefficient}, but without keep_reward there is nothing to weigh the teacher against; "
                "set algorithm.advantage.coefficient, which scales the advantages"
            )
        self._workflow = workflow
        self._teacher = teacher
        self._coefficient = coefficient
        self.keep_reward = keep_reward

    async def __aenter__(self) -> Self:
        await self._workflow.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._workflow.__aexit__(*exc)

    async def arun_episode(self, engine: InferenceEngine, data: Example) -> Trajectory | Sequence[Trajectory] | None:
        episode = await self._workflow.arun_episode(engine, data)
        if episode is None:
            return None
        if isinstance(episode, Trajectory):
            return await self._judged(episode)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._judged(trajectory)) for trajectory in episode]
        except ExceptionGroup as errors:
            raise first_error(errors) from None
        return [task.result() for task in tasks]

    async def _judged(self, trajectory: Trajectory) -> Trajectory:
        if not any(trajectory.loss_mask):
            return self._rewarded(trajectory, [0.0] * len(trajectory.token_ids))
        if trajectory.temperature != 1.0:
            raise ConfigError(
                f"the student sampled at temperature {trajectory.temperature:g}, and the teacher's logprobs are at 1; "
                "set SamplingParams(temperature=1.0) for distillation"
            )
        teacher = await self._teacher.logprobs(trajectory.token_ids, start=trajectory.loss_mask.index(1))
        pairs = zip(teacher, trajectory.behavior_logprobs, trajectory.loss_mask, strict=True)
        return self._rewarded(trajectory, [t - b if is_trained else 0.0 for t, b, is_trained in pairs])

    def _rewarded(self, trajectory: Trajectory, gains: Sequence[float]) -> Trajectory:
        """gains: how much likelier the teacher finds each token, 0 where it is not trained."""
        own = trajectory.token_rewards if self.keep_reward and trajectory.token_rewards else (0.0,) * len(gains)
        token_rewards = tuple(r + self._coefficient * gain for r, gain in zip(own, gains, strict=True))
        of_trained = list(compress(gains, trajectory.loss_mask))
        metrics = dict(trajectory.metrics)
        if of_trained:
            metrics["teacher_kl"] = -math.fsum(of_trained) / len(of_trained)
        if self.keep_reward:
            return replace(trajectory, token_rewards=token_rewards, metrics=metrics)
        return replace(
            trajectory,
            reward=0.0,
            rewards={},
            turns=tuple(replace(turn, reward=0.0) for turn in trajectory.turns),
            token_rewards=token_rewards,
            metrics={**metrics, "task_reward": trajectory.reward},
        )
