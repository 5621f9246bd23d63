"""What the ready-made workflows have in common: where an episode's messages come from, and what an answer is worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from arl.api.errors import DatasetError
from arl.api.shared import Shared
from arl.api.types import Example, SamplingParams
from arl.api.workflow import RolloutWorkflow
from arl.rewards.reward import RewardLike, Score, as_reward
from arl.workflow.conversation import Conversation, Turn
from arl.workflow.dialogue import Rewriting
from arl.workflow.messages import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
