"""One question, one answer, one reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arl.api.types import Example, Trajectory
from arl.workflow.agent import AgentWorkflow

if TYPE_CHECKING:
    from arl.api.engine import InferenceEngine


@dataclass(kw_only=True, eq=False, repr=False)
class SingleTurnWorkflow(AgentWorkflow):
    """Asks once and rewards the answer.

        workflow = SingleTurnWorkflow(tokenizer, math_reward(), sampling=SamplingParams(max_new_tokens=512))

    An example that does not fit into the model's context fails its episode (PromptTooLongError).
    """

    async def arun_episode(self, engine: InferenceEngine, data: Example) -> Sequence[Trajectory]:
        chat = self.conversation(data)
        turn = await chat.agenerate(engine, self.sampling)
        score = await self.ascore(self.answer(turn), data)
        return chat.trajectories(score.value, score.metrics, rewards=score.parts)
