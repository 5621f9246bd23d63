"""What the ready-made workflows have in common: where an episode's messages come from, and what an answer is worth."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from arl.api.errors import ConfigError, DatasetError
from arl.api.types import Example, SamplingParams, Trajectory
from arl.api.workflow import RolloutWorkflow, Shared
from arl.rewards.adapt import RewardLike, as_reward
from arl.rewards.score import Score
from arl.rewards.threads import THREADS, together
from arl.workflow.chat_template import Message
from arl.workflow.conversation import Conversation, Turn
from arl.workflow.dialogue import Rewriting

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from arl.api.engine import Sampler
    from arl.workflow.conversation import Conversation
    from arl.workflow.tools import Tool


PromptFunction = Callable[[Example], str | Sequence[Message]]
"""From an example to what the user asks, or to all messages that an episode begins with."""

_COLUMNS = ("messages", "prompt", "question")


@dataclass(kw_only=True, eq=False, repr=False)
class AgentWorkflow(Shared, RolloutWorkflow):
    """The base of the ready-made workflows. Its methods without an underscore are there to be overridden.

    tokenizer: with a chat template. reward: of the answer, `(answer, data)`; see as_reward for what it may be.
    sampling: of each turn. system: the system prompt, unless the example's messages have one. prompt: from an example
    to its messages; unset: the example's column `messages`, `prompt` or `question`. template_options: passed to the
    chat template (`{"enable_thinking": False}`, say). rewriting: what becomes of turns that the template shows
    otherwise later.
    """

    tokenizer: PreTrainedTokenizerBase = field(kw_only=False)
    reward: RewardLike = field(kw_only=False)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    system: str | None = None
    prompt: PromptFunction | None = None
    template_options: Mapping[str, Any] | None = None
    rewriting: Rewriting = "branch"

    def __post_init__(self) -> None:
        Shared.__init__(self)
        self._score = as_reward(self.reward)

    async def _open(self) -> None:
        await self._score.__aenter__()

    async def _close(self) -> None:
        await self._score.__aexit__()

    def messages(self, data: Example) -> Sequence[Message]:
        """What an episode begins with. Raises DatasetError for an example without messages."""
        given = self.prompt(data) if self.prompt is not None else _of_columns(data)
        return with_system(self.system, given)

    def conversation(self, data: Example, tools: Sequence[Tool] = ()) -> Conversation:
        return Conversation(
            self.tokenizer,
            self.messages(data),
            tools=tools,
            template_options=self.template_options,
            rewriting=self.rewriting,
        )

    def answer(self, turn: Turn) -> str:
        """What is rewarded of a turn: all of its text, thinking included."""
        return turn.text

    async def ascore(self, answer: str, data: Example) -> Score:
        """What an answer is worth."""
        return await self._score(answer, data)


def with_system(system: str | None, given: object) -> list[Message]:
    """A question, or messages as they are, after the system prompt; one of their own comes before ours.

    Raises DatasetError for anything else, and for messages that end with the assistant's.
    """
    messages: list[Message] = [{"role": "user", "content": given}] if isinstance(given, str) else _checked(given)
    if system is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def _of_columns(data: Example) -> object:
    column = next((name for name in _COLUMNS if data.get(name) is not None), None)
    if column is None:
        raise DatasetError(
            f"an example has the columns {', '.join(map(str, data)) or 'none'}, and no messages in any of "
            f"{', '.join(_COLUMNS)}; pass prompt=, a function from an example to a question or to messages"
        )
    return data[column]


def _checked(given: object) -> list[Message]:
    is_list = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    messages: list[Any] = list(cast("Sequence[Any]", given)) if is_list else []
    if not messages or not all(isinstance(message, Mapping) and "role" in message for message in messages):
        raise DatasetError(
            f"an episode would begin with {str(given)[:200]!r}; it must be a question, or messages with a role each"
        )
    if messages[-1]["role"] == "assistant":
        raise DatasetError(
            "an example's messages end with the assistant's, which would tell the model the answer; drop the last one"
        )
    return messages


# One question, one answer, one reward.


@dataclass(kw_only=True, eq=False, repr=False)
class SingleTurnWorkflow(AgentWorkflow):
    """Asks once and rewards the answer.

        workflow = SingleTurnWorkflow(tokenizer, math_reward(), sampling=SamplingParams(max_new_tokens=512))

    An example that does not fit into the model's context fails its episode (PromptTooLongError).
    """

    async def arun_episode(self, engine: Sampler, data: Example) -> Sequence[Trajectory]:
        chat = self.conversation(data)
        turn = await chat.agenerate(engine, self.sampling)
        score = await self.ascore(self.answer(turn), data)
        return chat.trajectories(score.value, score.metrics, rewards=score.parts)


# An answer, what is wrong with it, and another try.


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

    async def arun_episode(self, engine: Sampler, data: Example) -> Sequence[Trajectory]:
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

    async def _converse(self, engine: Sampler, chat: Conversation, data: Example) -> list[str]:
        answers: list[str] = []
        while True:
            turn = await chat.agenerate(engine, self.sampling)
            if chat.is_full:
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
