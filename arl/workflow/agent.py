"""Agents that answer: AgentWorkflow, the base of the ready-made workflows, and workflows of one turn and of several."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from arl.api.errors import ConfigError, DatasetError, ImageError
from arl.api.types import AGENT, Example, SamplingParams, Trajectory
from arl.api.workflow import RolloutWorkflow, Shared
from arl.rewards.adapt import RewardLike, as_reward, try_rewards
from arl.rewards.score import Score
from arl.rewards.threads import THREADS, together
from arl.workflow.call_formats import ToolCall
from arl.workflow.chat_template import template_of
from arl.workflow.compacting import Compaction, conversation_of
from arl.workflow.conversation import Conversation
from arl.workflow.dialogue import Rewriting, Turn
from arl.workflow.images import IMAGE_COLUMNS, MARKER, blind, check_places_as, has_marker, processor_of, with_images
from arl.workflow.messages import Message, holds_image, messages_in, without_padding
from arl.workflow.tools import Tool, ToolLimits, ToolResult, arun_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from arl.api.engine import Sampler
    from arl.workflow.call_formats import CallFormat

PromptFunction = Callable[[Example], str | Sequence[Message]]
"""From an example to the user's question, or to all messages that an episode begins with."""

_COLUMNS = ("messages", "prompt", "question")


@dataclass(kw_only=True, eq=False, repr=False)
class AgentWorkflow(Shared, RolloutWorkflow):
    """The base of the ready-made workflows. Override its methods without an underscore."""

    tokenizer: PreTrainedTokenizerBase = field(kw_only=False)
    """Must have a chat template."""
    reward: RewardLike = field(kw_only=False)
    """A function `(answer, data)`, or anything else that as_reward takes."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """How each turn is sampled."""
    system: str | None = None
    """The system prompt, unless the example's messages have one."""
    prompt: PromptFunction | None = None
    """Makes the messages from an example. If unset, they are the column `messages`, `prompt` or `question`."""
    image_columns: Sequence[str] = IMAGE_COLUMNS
    """The first of these columns that an example has holds its images, which go to the places of `<image>` in its
    messages, or before their text. Messages that have images of their own stay as they are."""
    template_options: Mapping[str, Any] | None = None
    """Passed to the chat template, `{"enable_thinking": False}` for instance."""
    rewriting: Rewriting = "branch"
    """What to do when the chat template rewrites an earlier turn (see Conversation)."""
    compaction: Compaction | None = None
    """Lets episodes outlive their context: the model summarises it, and goes on in a fresh one."""

    def __post_init__(self) -> None:
        Shared.__init__(self)
        template = template_of(self.tokenizer, self.template_options)
        if self.compaction is not None:
            self.compaction.check(template, self.sampling)
        self._score = as_reward(self.reward)
        self._rewards = [self._score]
        self._shared: list[Tool] = []

    async def _open(self, opened: AsyncExitStack) -> None:
        for reward in self._rewards:
            await opened.enter_async_context(reward)

    def messages(self, data: Example) -> Sequence[Message]:
        """The messages that an episode begins with.

        Raises DatasetError for an example without any, or with other images than places; ModelError for calls that
        cannot be read; ImageError for an image of a column that cannot be read.
        """
        if self.prompt is not None:
            given: object = self.prompt(data)
        elif (column := next((name for name in _COLUMNS if data.get(name) is not None), None)) is not None:
            given = data[column]
            if column == "messages" and isinstance(given, str):
                given = messages_in(given) or given
        else:
            raise DatasetError(
                f"an example has the columns {', '.join(map(str, data)) or 'none'}, and no messages in any of "
                f"{', '.join(_COLUMNS)}; pass prompt=, a function from an example to a question or to messages"
            )
        listed: Any = data.get("tools")
        of_row = listed if isinstance(listed, list) and all(isinstance(one, Mapping) for one in listed) else ()
        tools = [*(tool.spec for tool in self._shared), *of_row]
        messages, _ = without_padding(with_system(self.system, given), tools)
        return with_images(data, messages, self.image_columns)

    def check_example(self, data: Example) -> None:
        """Raise DatasetError for an example without messages, RewardError for one without a reference answer.

        Raises ImageError for images if the model sees none.
        """
        self.check_sees(self.messages(data))
        self._score.check_example(data)

    def check_sees(self, messages: Sequence[Message], models: Iterable[str] = ()) -> None:
        """Raise ImageError if messages have images, and the model is one of texts.

        models: those that are asked; also if one of them places images otherwise than the tokenizer's.
        """
        if (first := next(filter(holds_image, messages), None)) is None:
            return
        if template_of(self.tokenizer, self.template_options).image_token_id is None:
            raise blind(self.tokenizer, first)
        processor_of(self.tokenizer)
        for model in models:
            check_places_as(self.tokenizer, model)

    def check_first(self, data: Example, models: Sequence[str]) -> str | None:
        """The remark is about messages that name an image and have none, for a model that sees."""
        try:
            messages = self.messages(data)
        except ImageError:
            raise
        except Exception:  # noqa: BLE001 - the user's code, whose failures fail episodes
            return None
        self.check_sees(messages, models)
        if not self.image_columns or any(map(holds_image, messages)) or not has_marker(messages):
            return None
        if template_of(self.tokenizer, self.template_options).image_token_id is None:
            return None
        columns = " or ".join(map(repr, self.image_columns))
        return (
            f"has {MARKER} in its text and nothing in a column {columns}, so the model reads these letters and sees no "
            "image; name the column with image_columns=(...) of the workflow"
        )

    async def arehearse(self, examples: Sequence[Example]) -> None:
        """Raises RewardError for a reward that fails for all answers, unless a subclass changes what it gets."""
        methods = [getattr(type(self), name, None) for name in ("arun_episode", "answer", "ascore", "ascore_episode")]
        gets_text = all(method is None or method.__module__.startswith("arl.") for method in methods)
        await try_rewards(self._rewards, examples, gets_text=gets_text, is_open=self.is_open)

    def check_room(self, limit: int) -> None:
        check_fits(limit, self.sampling, self.compaction)

    def conversation(self, data: Example, tools: Sequence[Tool] = ()) -> Conversation:
        return conversation_of(
            self.tokenizer,
            self.messages(data),
            self.compaction,
            tools=tools,
            template_options=self.template_options,
            rewriting=self.rewriting,
        )

    def answer(self, turn: Turn) -> str:
        """The part of a turn that is rewarded: all of its text, thinking included."""
        return turn.text

    @property
    def declared_roles(self) -> frozenset[str] | None:
        """None for a subclass with an arun_episode or a conversation of its own, unless it declares them."""
        cls = type(self)
        is_arls = all(method.__module__.startswith("arl.") for method in (cls.arun_episode, cls.conversation))
        return self._roles() if is_arls else None

    def _roles(self) -> frozenset[str]:
        """Those of arl's own episodes."""
        return frozenset({AGENT})

    async def ascore(self, answer: str, data: Example) -> Score:
        """The reward of an answer."""
        return await self._score(answer, data)


def check_fits(limit: int, sampling: SamplingParams | None, compaction: Compaction | None, whose: str = "") -> None:
    """Raise ConfigError if answers leave no room for a prompt in `limit` tokens, or if compaction comes too late."""
    for name, wanted, most in (
        ("max_new_tokens", sampling and sampling.max_new_tokens, limit - 1),
        ("compaction.context_length", compaction and compaction.context_length, limit),
    ):
        if wanted is not None and wanted > most:
            raise ConfigError(f"{name}{whose} is {wanted}, and prompt and answer have room for {limit} tokens together")


def with_system(system: str | None, given: object) -> list[Message]:
    """A question or messages, after the system prompt unless they have one. Raises DatasetError for anything else."""
    is_list = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    messages: list[Any] = list(cast("Sequence[Any]", given)) if is_list else []
    if isinstance(given, str):
        messages = [{"role": "user", "content": given}]
    if not messages or not all(isinstance(message, Mapping) and "role" in message for message in messages):
        raise DatasetError(
            f"an episode would begin with {str(given)[:200]!r}; it must be a question, or messages with roles"
        )
    if messages[-1]["role"] == "assistant":
        raise DatasetError(
            "an example's messages end with the assistant's, which tells the model the answer; drop that one"
        )
    if system is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


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


Feedback = Callable[[str, Example, int], "str | Awaitable[str | None] | None"]
"""Takes an answer, its example and the number of earlier answers. Returns the user's reply; None ends the episode."""


@dataclass(kw_only=True, eq=False, repr=False)
class MultiTurnWorkflow(AgentWorkflow):
    """Asks, says what is wrong, and asks again. Rewards the last answer.

    If the context is full, the episode ends truncated, and its last answer is rewarded. Metrics: turns, context_full.
    """

    feedback: Feedback | None = None
    """Sync functions run in a thread."""
    max_turns: int = 3
    """Answers in an episode. The last one gets no feedback."""
    discount: float = 1.0
    """Multiplies the reward and its parts, once for each retry."""
    turn_reward: RewardLike | None = None
    """Also rewards each answer (TurnSpan.reward). If it returns a Score, only the value counts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.feedback is None and type(self).afeedback is MultiTurnWorkflow.afeedback:
            raise ConfigError(f"{type(self).__name__} has no feedback; pass feedback=, or override afeedback")
        if self.max_turns < 1 or not 0 <= self.discount <= 1:
            raise ConfigError(
                f"max_turns is {self.max_turns} and discount {self.discount}; they must be at least 1, and in [0, 1]"
            )
        self._turn_score = None if self.turn_reward is None else as_reward(self.turn_reward)
        if self._turn_score is not None:
            self._rewards.append(self._turn_score)

    async def afeedback(self, answer: str, data: Example, attempt: int) -> str | None:
        """The user's reply to an answer; None ends the episode. attempt: the number of earlier answers."""
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
        reward, turn_rewards = self._turn_score, None
        if reward is not None:
            turn_rewards = [one.value for one in await together(reward(answer, data) for answer in answers)]
        return chat.trajectories(
            share * score.value,
            {"turns": len(answers), **score.metrics},
            rewards={name: share * part for name, part in score.parts.items()},
            turn_rewards=turn_rewards,
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


@dataclass(slots=True, kw_only=True, eq=False)
class ToolEpisode:
    """The state of an episode, for its workflow's methods."""

    data: Example
    conversation: Conversation
    tools: Sequence[Tool]
    results: list[ToolResult] = field(default_factory=list[ToolResult])
    """The results of all calls so far, in order."""
    answer: Turn | None = None
    """The turn without a call that ended the episode; None if max_turns, is_done or a full context ended it."""

    @property
    def metrics(self) -> dict[str, float]:
        failures = [result.failure for result in self.results]
        malformed = failures.count("malformed")
        return {
            "tool_calls": len(self.results) - malformed,
            "tool_errors": failures.count("refused") + failures.count("failed"),
            "malformed_calls": malformed,
            "turns": self.conversation.num_turns,
            "answered": float(self.answer is not None),
        }

    async def aspeak(
        self,
        engine: Sampler,
        sampling: SamplingParams,
        *,
        call_format: CallFormat,
        limits: ToolLimits,
        max_turns: int,
        is_done: Callable[[ToolEpisode], bool] = lambda _: False,
    ) -> None:
        """Let the model call tools until it answers or must stop; sets `answer`. Raises as agenerate and tools do."""
        chat, self.answer = self.conversation, None
        for _ in range(max_turns):
            turn = await chat.agenerate(engine, sampling)
            if chat.is_full:
                return
            calls = call_format.parse(turn.words, [tool.spec for tool in self.tools]).calls
            if not calls:
                self.answer = turn
                return
            ids = iter([call["id"] for call in turn.message.get("tool_calls", ())])  # which the template may show
            calls = [replace(c, id=next(ids, c.id)) if isinstance(c, ToolCall) else c for c in calls]
            results = await arun_tools(calls, self.tools, limits)
            self.results += results
            chat.add(*(result.message for result in results))
            if is_done(self):
                return
