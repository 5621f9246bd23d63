"""The smallest workflow: one request, whose whole answer is trained."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from arl.api.engine import Sampler
from arl.api.types import Example, ModelRequest, SamplingParams, Trajectory
from arl.api.workflow import RolloutWorkflow


class OneTurn(RolloutWorkflow):
    """The reward is the example's number. changes: what else the trajectory has, by the answer's first token."""

    def __init__(self, changes: Callable[[int], Mapping[str, Any]] = lambda _: {}) -> None:
        self._changes = changes

    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory:
        prompt = (1, data["number"])
        response = await engine.agenerate(ModelRequest(input_ids=prompt, sampling=SamplingParams(max_new_tokens=3)))
        trajectory = Trajectory(
            token_ids=(*prompt, *response.output_ids),
            loss_mask=(0, 0, *[1] * len(response.output_ids)),
            behavior_logprobs=(0.0, 0.0, *response.output_logprobs),
            versions=(-1, -1, *response.output_versions),
            reward=float(data["number"]),
        )
        return replace(trajectory, **self._changes(response.output_ids[0]))
