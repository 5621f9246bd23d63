"""Conversations that outlive their context: the model writes a summary, and goes on with it in a fresh context.

    task, turns ..., "Summarise ..." -> summary    one context: a trajectory
    task + summary, turns ..., "Summarise ..." -> summary    the next
    task + summary, turns ... -> answer    the last

All contexts are trajectories of one episode, with its reward. Each sampled token is trained once, in the context in
which it was sampled: a summary's tokens where it was written, not where it is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

from arl.api.errors import ConfigError, PromptTooLongError
from arl.api.types import AGENT
from arl.workflow.conversation import Conversation
from arl.workflow.messages import Message, images_in, text_part

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from arl.api.engine import Sampler
    from arl.api.types import ModelRequest, ModelResponse, SamplingParams
    from arl.workflow.chat_template import ChatTemplate
    from arl.workflow.dialogue import Rewriting, Turn
    from arl.workflow.tools import Tool

T = TypeVar("T")

INSTRUCTION = (
    "There is no room for more of this conversation. Summarise it for yourself: you will go on with the task and this "
    "summary alone. Keep what you found out, what you did, and what is left to do. Write only the summary."
)
HANDOVER = "Your summary of what happened so far:\n{summary}"
_AROUND = 8
"""Tokens that a template may write where a turn ends, beside those of a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """When and how a conversation is compacted into a summary."""

    context_length: int
    """Tokens that a prompt and its answer may have together: the servers' context, or less."""
    summary_tokens: int = 1024
    """The longest summary. A summary that this limit cuts is used as it stands."""
    compact_at: int | None = None
    """Compact before a prompt of this many tokens. Unset: before a prompt after which an answer of max_new_tokens, the
    instruction and a summary would no longer fit. It can be no later."""
    max_compactions: int = 32
    """Summaries in an episode. After the last one, the conversation goes on until its context is full."""
    instruction: str = INSTRUCTION
    """What the user asks of the model, for it to write the summary."""
    handover: str = HANDOVER
    """How the fresh context shows the summary, in the place of `{summary}`, below the task."""
    train_summaries: bool = True
    """False trains everything but the summaries, to measure what their training is worth."""

    def __post_init__(self) -> None:
        if not 1 <= self.summary_tokens < self.context_length:
            raise ConfigError(
                f"summary_tokens is {self.summary_tokens}, and a prompt and its summary have room for "
                f"{self.context_length} tokens together (context_length); it must be at least 1, and less than that"
            )
        if self.max_compactions < 1 or (self.compact_at is not None and self.compact_at < 1):
            raise ConfigError(
                f"max_compactions is {self.max_compactions} and compact_at {self.compact_at}; they must be at least 1"
            )
        if "{summary}" not in self.handover:
            raise ConfigError(f"handover is {self.handover[:80]!r}; it must have {{summary}} where the summary stands")

    def check(self, template: ChatTemplate, sampling: SamplingParams) -> None:
        """Raise ConfigError if there is no room for any task, or if compact_at is too late for a summary."""
        latest = self.longest_prompt(template, sampling)
        if latest <= self.summary_tokens:
            raise ConfigError(
                f"a context of {self.context_length} tokens (context_length) has no room for a task beside "
                f"{self._needs(template, sampling)}; lower summary_tokens or max_new_tokens"
            )
        if self.compact_at is not None and self.compact_at > latest + 1:
            raise ConfigError(
                f"compact_at is {self.compact_at}, but a prompt of more than {latest} tokens leaves no room for an "
                f"answer and a summary in a context of {self.context_length}; lower it, or leave it unset"
            )

    def check_task(self, template: ChatTemplate, sampling: SamplingParams, num_tokens: int) -> None:
        """Raise PromptTooLongError if a task of so many tokens leaves no room for its summaries."""
        if num_tokens + self.summary_tokens > self.longest_prompt(template, sampling):
            raise PromptTooLongError(
                f"the task has {num_tokens} tokens, and a context of {self.context_length} (context_length) has no "
                f"room for it beside {self._needs(template, sampling)}; shorten the task, or lower one of these"
            )

    def longest_prompt(self, template: ChatTemplate, sampling: SamplingParams) -> int:
        """Tokens of the longest prompt after which an answer, the instruction and a summary still fit."""
        return self.context_length - sampling.max_new_tokens - self._asking(template) - self.summary_tokens

    def is_due(self, template: ChatTemplate, sampling: SamplingParams, num_tokens: int) -> bool:
        """Whether a prompt of so many tokens is to be compacted first."""
        latest = self.longest_prompt(template, sampling)
        return num_tokens > latest or (self.compact_at is not None and num_tokens >= self.compact_at)

    def begun(self, messages: Sequence[Message], summary: str) -> list[Message]:
        """The messages of a fresh context: the task with its images, and the summary below its last message."""
        shown, last = self.handover.replace("{summary}", summary), messages[-1]
        if last["role"] != "user":
            return [*messages, {"role": "user", "content": shown}]
        content: Any = last.get("content") or ""
        below = f"\n\n{shown}"
        part = text_part(below if images_in([last]) else shown)  # without images, templates get parts as lines
        joined = content + below if isinstance(content, str) else [*content, part]
        return [*messages[:-1], {**last, "content": joined}]

    def _asking(self, template: ChatTemplate) -> int:
        return len(template.encode(template.render([{"role": "user", "content": self.instruction}]))) + _AROUND

    def _needs(self, template: ChatTemplate, sampling: SamplingParams) -> str:
        return (
            f"an answer (max_new_tokens is {sampling.max_new_tokens}), the summary before and the one after it "
            f"(summary_tokens is {self.summary_tokens}) and the instruction ({self._asking(template)} tokens)"
        )


class CompactingConversation(Conversation):
    """A Conversation of any length: before its context is full, the model summarises it, and a fresh context begins.

    A fresh context has the system prompt, the tools, the task (the messages of the beginning, with their images) and
    the last summary. It shows later images no more, except those of messages that it shows once more. `messages`,
    `token_ids` and `loss_mask` are of the present context; `num_turns`, turn_rewards and states are of all turns but
    the summaries.

    If new messages leave no room to ask for a summary after them, the summary is of what came before, and the fresh
    context shows the last turn and these messages after it. If even they do not fit, the context is full (is_full).
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[Message],
        compaction: Compaction,
        *,
        tools: Sequence[Tool] = (),
        template_options: Mapping[str, Any] | None = None,
        rewriting: Rewriting = "branch",
        session_id: str | None = None,
        role: str = AGENT,
    ) -> None:
        """As for Conversation. Raises ConfigError as `Compaction.check` does, in the first `agenerate`."""
        super().__init__(
            tokenizer,
            messages,
            tools=tools,
            template_options=template_options,
            rewriting=rewriting,
            session_id=session_id,
            role=role,
        )
        self.compaction = compaction
        self._task = tuple(self._messages)

    @property
    def metrics(self) -> dict[str, float]:
        """compactions, and means over contexts and summaries."""
        lasts = [*self.summaries, *([self._last] if self._last else [])]
        made = {**super().metrics, "compactions": float(len(self.summaries))}
        if lasts:
            made["context_tokens"] = fmean(len(turn.token_ids) for turn in lasts)
        if self.summaries:
            made["summary_tokens"] = fmean(len(turn.output_ids) for turn in self.summaries)
            made["summaries_cut"] = fmean(turn.is_truncated for turn in self.summaries)
            made["summaries_empty"] = fmean(not text_of_summary(turn) for turn in self.summaries)
        return made

    async def agenerate(self, engine: Sampler, sampling: SamplingParams) -> Turn:
        """Let the model speak; before that, let it summarise if it is time. Raises as Conversation's does.

        If the task leaves no room for a summary, raises PromptTooLongError. Raises ConfigError if a server has less
        room than context_length.
        """
        within = _Within(engine, self.compaction.context_length)
        prompt = await self._aprompt()
        if not self._dialogue.turns:
            compaction, template = self.compaction, self._dialogue.template
            compaction.check(template, sampling)
            fresh = self._dialogue.prompt(compaction.begun(self._task, ""), self._tools)
            compaction.check_task(template, sampling, len(fresh.input_ids))
        elif (
            self._last is not None
            and len(self.summaries) < self.compaction.max_compactions
            and self.compaction.is_due(self._dialogue.template, sampling, len(prompt.input_ids))
            and await self._compact(within, sampling)
        ):
            prompt = await self._aprompt()
        return await self._answered(prompt, within, sampling)

    def _trained_turns(self) -> tuple[Turn, ...]:
        turns = self._dialogue.turns
        return turns if self.compaction.train_summaries else tuple(turn for turn in turns if turn not in self.summaries)

    async def _compact(self, engine: Sampler, sampling: SamplingParams) -> bool:
        """Summarise, and begin a fresh context. False: there is no room to do so."""
        asking: Message = {"role": "user", "content": self.compaction.instruction}
        room = self.compaction.context_length - self.compaction.summary_tokens
        unread: tuple[Message, ...] = ()
        prompt = await self._aprompt(asking)
        if len(prompt.input_ids) > room:
            assert self._last is not None
            num_read = self._last.prompt.num_messages + 1  # the messages up to the last turn
            unread = tuple(self._messages[num_read - 1 :])  # this turn with the messages after it, to show once more
            asked = (*self._messages[:num_read], asking)
            prompt = await self._dialogue.aprompt(asked, self._tools, after=self._last)
            if len(prompt.input_ids) > room:
                return False
        of_summary = replace(sampling, max_new_tokens=self.compaction.summary_tokens, grammar=None, stop=())
        turn = self._dialogue.record(prompt, await self._sampled(prompt, engine, of_summary))
        self.summaries.append(turn)
        self._messages = [*self.compaction.begun(self._task, text_of_summary(turn)), *unread]
        self._last = None
        return True


def conversation_of(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    compaction: Compaction | None,
    *,
    tools: Sequence[Tool],
    template_options: Mapping[str, Any] | None,
    rewriting: Rewriting,
    role: str = AGENT,
) -> Conversation:
    """A conversation that compacts itself, or one that ends with its context."""
    kind = Conversation if compaction is None else partial(CompactingConversation, compaction=compaction)
    return kind(tokenizer, messages, tools=tools, template_options=template_options, rewriting=rewriting, role=role)


@dataclass(frozen=True, slots=True)
class _Within:
    """A Sampler that takes no more tokens than a context has room for."""

    engine: Sampler
    context_length: int

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        num_tokens, most = len(request.input_ids), request.sampling.max_new_tokens
        if num_tokens + most > self.context_length:
            raise PromptTooLongError(
                f"the prompt has {num_tokens} tokens and the answer up to {most}, and the context {self.context_length}"
            )
        try:
            return await self.engine.agenerate(request)
        except PromptTooLongError as error:
            raise ConfigError(
                f"Compaction's context_length is {self.context_length}, but a server has no room for a prompt of "
                f"{num_tokens} tokens and an answer of {most} ({error}); set it to the servers' context"
            ) from error


def text_of_summary(turn: Turn) -> str:
    """The summary without the model's thinking."""
    return turn.text.rpartition("</think>")[2].strip()
