"""A weighted sum of named rewards."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from contextlib import AsyncExitStack

from arl.api.errors import ConfigError, RewardError, RewardTimeoutError, first_error
from arl.api.shared import Shared
from arl.api.types import Example
from arl.rewards.adapt import RewardLike, WorkflowReward, as_reward
from arl.rewards.score import Score


class WeightedReward(Shared):
    """Runs several rewards at once and adds them up: the Score has each as a part, by its name and before weighting.

        reward = WeightedReward({"correct": (1.0, math_reward()), "format": (0.1, Tags("think", "answer"))})

    parts: name -> (weight, reward), a reward being whatever as_reward takes. A negative weight makes a penalty; a
    weight of 0 makes a number that is logged among the episode's metrics and rewarded by nothing. What a part says
    beside its value (parts and metrics of its own) is logged as the metric `NAME/...`.

    A part that fails fails the whole, with its name in front: RewardTimeoutError, or RewardError.
    """

    def __init__(self, parts: Mapping[str, tuple[float, RewardLike]]) -> None:
        super().__init__()
        if not parts:
            raise ConfigError("WeightedReward has no parts; give name: (weight, reward) for each")
        for name, part in parts.items():
            if not isinstance(part, tuple) or len(part) != 2 or not _is_weight(part[0]):
                raise ConfigError(f"the part {name!r} is {part!r}; it must be (weight, reward) with a finite weight")
        self._weights = {name: float(weight) for name, (weight, _) in parts.items()}
        self._rewards = {name: as_reward(reward) for name, (_, reward) in parts.items()}
        self._opened = AsyncExitStack()

    async def _open(self) -> None:
        async with AsyncExitStack() as stack:
            for reward in self._rewards.values():
                await stack.enter_async_context(reward)
            self._opened = stack.pop_all()

    async def _close(self) -> None:
        await self._opened.aclose()

    async def __call__(self, answer: str, data: Example) -> Score:
        try:
            async with asyncio.TaskGroup() as group:
                running = {
                    name: group.create_task(_part(name, reward, answer, data)) for name, reward in self._rewards.items()
                }
        except ExceptionGroup as errors:
            raise first_error(errors)  # noqa: B904 - it has its own cause
        scores = {name: task.result() for name, task in running.items()}
        values = {name: score.value for name, score in scores.items()}
        metrics = {name: value for name, value in values.items() if self._weights[name] == 0.0}
        for name, score in scores.items():
            metrics |= {f"{name}/{inner}": number for inner, number in {**score.parts, **score.metrics}.items()}
        return Score(
            value=math.fsum(self._weights[name] * value for name, value in values.items()),
            parts={name: value for name, value in values.items() if self._weights[name] != 0.0},
            metrics=metrics,
        )


async def _part(name: str, reward: WorkflowReward, answer: str, data: Example) -> Score:
    try:
        return await reward(answer, data)
    except RewardTimeoutError as error:
        raise RewardTimeoutError(f"the part {name!r} of the reward: {error}") from error
    except Exception as error:
        said = str(error) if isinstance(error, RewardError) else repr(error)
        raise RewardError(f"the part {name!r} of the reward: {said}") from error


def _is_weight(weight: object) -> bool:
    return isinstance(weight, int | float) and math.isfinite(weight)
