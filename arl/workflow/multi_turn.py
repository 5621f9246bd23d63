"""An answer, what is wrong with it, and another try."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arl.api.errors import ConfigError, PromptTooLongError
from arl.api.types import Example, Trajectory
from arl.rewards.reward import RewardLike, as_reward
from arl.workflow.agent import AgentWorkflow
from arl.workflow.together import together
from arl.workflow.tool_threads import THREADS

if TYPE_CHECKING:
    from arl.api.engine import InferenceEngine
    from arl.workflow.conversation import Conversation

Feedback = Callable[[str, Example, int], "str | Awaitable[str | None] | None"]
"""From an answer, its example and how many answers came before it to what the user says; None ends the episode."""


@dataclass(kw_only=True, eq=False, repr=False)
class MultiTurnWorkflow(AgentWorkflow):
    """Asks, tells what is wrong, asks again; rewards the last answer.

        async def feedback(answer, data, attempt):
            return None if answer.strip() == data["answer"] else "That is not right. Try again."

        workflow = MultiTurnWorkflow(tokenizer, exact_match, feedback=feedback, max_turns=3, discount=0.9)

    feedback: sync, then in a thread, or async; None ends the episode. max_turns: answers in an episode; the last one
    gets no feedback. discount: the reward and its parts are multiplied by it once for each retry. turn_reward: of each
    answer, beside the outcome (TurnSpan.reward); of a Score only the value counts. An episode whose context is full
    ends with the answer it has, as one that a length limit ended. Metrics: turns.
    """

    feedback: Feedback | None = None
    max_turns: int = 3
    discount: float = 1.0
    turn_reward: RewardLike | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.feedback is None and type(self).afeedback is MultiTurnWorkflow.afeedback:
            raise ConfigError(f"{type(self).__name__} has no feedback; pass feedback=, or override afeedback")
        if self.max_turns < 1 or not 0 <= self.discount <= 1:
            raise ConfigError(
                f"max_turns is {self.max_turns} and discount {self.discount}; they must be at least 1, and in [0, 1]"
            )
        self._turn_score = None if self.turn_reward is None else as_reward(self.turn_reward)

    async def _open(self) -> None:
        await super()._open()
        if self._turn_score is not None:
            try:
                await self._turn_score.__aenter__()
            except BaseException:
                await super()._close()
                raise

    async def _close(self) -> None:
        try:
            if self._turn_score is not None:
                await self._turn_score.__aexit__()
        finally:
            await super()._close()

    async def afeedback(self, answer: str, data: Example, attempt: int) -> str | None:
        """What the user says to an answer; None when it needs no other. attempt: how many answers came before it."""
        feedback = self.feedback
        assert feedback is not None
        if inspect.iscoroutinefunction(feedback):
            return await feedback(answer, data, attempt)
        said = await THREADS.acall(lambda: feedback(answer, data, attempt))
        return await said if inspect.isawaitable(said) else said

    async def arun_episode(self, engine: InferenceEngine, data: Example) -> Sequence[Trajectory]:
        chat = self.conversation(data)
        answers = await self._converse(engine, chat, data)
        score = await self.ascore(answers[-1], data)
        share = self.discount ** (len(answers) - 1)
        return chat.trajectories(
            share * score.value,
            {"turns": len(answers), **score.metrics},
            rewards={name: share * part for name, part in score.parts.items()},
            turn_rewards=await self._turn_rewards(answers, data),
        )

    async def _converse(self, engine: InferenceEngine, chat: Conversation, data: Example) -> list[str]:
        answers: list[str] = []
        while True:
            try:
                turn = await chat.agenerate(engine, self.sampling)
            except PromptTooLongError:
                if not answers:
                    raise
                return answers
            answers.append(self.answer(turn))
            if len(answers) == self.max_turns:
                return answers
            said = await self.afeedback(answers[-1], data, len(answers) - 1)
            if said is None:
                return answers
            chat.add({"role": "user", "content": said})

    async def _turn_rewards(self, answers: Sequence[str], data: Example) -> list[float] | None:
        reward = self._turn_score
        if reward is None:
            return None
        return [score.value for score in await together(reward(answer, data) for answer in answers)]
