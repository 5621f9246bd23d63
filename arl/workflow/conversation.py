"""Conversation: the transcript of one agent, exact to the token, over any tokenizer with a chat template.

The agent speaks, the environment answers, the agent speaks again: one line through a Dialogue, which keeps the tokens
as they were sampled and branches where the chat template rewrites what was said before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from arl.api.errors import PromptTooLongError, TrajectoryError
from arl.api.types import ModelRequest, SamplingParams, Trajectory, new_id
from arl.workflow.chat_template import ChatTemplate, Message
from arl.workflow.dialogue import Dialogue, Prompt, Rewriting, Turn
from arl.workflow.paths import trajectories

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from arl.api.engine import Sampler
    from arl.workflow.tools import Tool

__all__ = ["Conversation", "Message", "Turn"]


class Conversation:
    """The transcript of one episode. Build it, `agenerate`, `add` what the environment says, `agenerate` again."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        template_options: Mapping[str, Any] | None = None,
        rewriting: Rewriting = "branch",
        session_id: str | None = None,
    ) -> None:
        """Start from `messages`; `tools` are shown as the template shows them; `template_options` are passed to it.

        rewriting: what becomes of turns that the template shows otherwise later. Raises ModelError when the tokenizer
        has no chat template.
        """
        self._dialogue = Dialogue(ChatTemplate(tokenizer, template_options), rewriting=rewriting)
        self._tools = tuple(tool.spec for tool in tools)
        self.session_id = session_id or new_id()
        self._messages: list[Message] = list(messages)
        self._last: Turn | None = None
        self._is_cut = False

    @property
    def messages(self) -> tuple[Message, ...]:
        """Everything said so far, as messages."""
        return tuple(self._messages)

    @property
    def num_turns(self) -> int:
        """How often the model spoke."""
        return len(self._dialogue.turns)

    @property
    def is_truncated(self) -> bool:
        """Whether a length limit ended the last turn, or left no room for another."""
        response = self._last.response if self._last else None
        return self._is_cut or (response is not None and response.stop_reason == "length")

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What the model has seen and sampled in its present view; what was added since is not in it yet."""
        return self._last.token_ids if self._last else self._prompt().input_ids

    @property
    def loss_mask(self) -> tuple[int, ...]:
        """1 where the model spoke, for each of `token_ids`."""
        if self._last is None:
            return (0,) * len(self.token_ids)
        return tuple(
            bit for turn in self._last.path for bit in (0,) * len(turn.given_ids) + (1,) * len(turn.output_ids)
        )

    def add(self, *messages: Message) -> None:
        """Append what the environment says: tool results, user turns. They are rendered when the model speaks next."""
        if any(message["role"] == "assistant" for message in messages):
            raise ValueError("an assistant's message is not added; it is sampled (agenerate) or shown (demonstrate)")
        self._messages.extend(messages)

    async def agenerate(self, engine: Sampler, sampling: SamplingParams) -> Turn:
        """Let the model speak. Raises what `engine.agenerate` raises, and ModelError as `Dialogue.prompt` does.

        is_truncated says from then on whether a length limit ended the turn, or left no room for it.
        """
        prompt = self._prompt()
        request = ModelRequest(input_ids=prompt.input_ids, sampling=sampling, session_id=self.session_id)
        try:
            response = await engine.agenerate(request)
        except PromptTooLongError:
            self._is_cut = True
            raise
        self._is_cut = False
        return self._said(self._dialogue.record(prompt, response))

    def demonstrate(self, text: str) -> None:
        """Append a turn that the model should imitate, ended as the template ends turns. It has no logprobs: it is
        for supervised training, by `token_ids` and `loss_mask`."""
        self._said(self._dialogue.demonstrate(self._prompt(), text))

    def trajectories(
        self,
        reward: float,
        metrics: Mapping[str, float] | None = None,
        role: str = "agent",
        *,
        rewards: Mapping[str, float] | None = None,
        turn_rewards: Sequence[float] | None = None,
        states: Sequence[str | None] | None = None,
    ) -> tuple[Trajectory, ...]:
        """What to return from arun_episode: one trajectory, or one for each branch. Each sampled token is trained once.

        rewards: named parts of the reward. turn_rewards: what the environment gave for each sampled turn, beside
        `reward`. states: a key of the state that each was taken in; see TurnSpan. Raises TrajectoryError where these
        are not as many as turns were sampled.
        """
        return trajectories(
            self._dialogue.turns,
            reward,
            metrics=metrics,
            role=role,
            rewards=rewards,
            turn_rewards=turn_rewards,
            states=states,
            cut_after=self._last if self._is_cut else None,
        )

    def trajectory(
        self,
        reward: float,
        metrics: Mapping[str, float] | None = None,
        role: str = "agent",
        *,
        rewards: Mapping[str, float] | None = None,
        turn_rewards: Sequence[float] | None = None,
        states: Sequence[str | None] | None = None,
    ) -> Trajectory:
        """`trajectories`, where there is one. Raises TrajectoryError where the conversation branched."""
        made = self.trajectories(reward, metrics, role, rewards=rewards, turn_rewards=turn_rewards, states=states)
        first, *others = made
        if others:
            raise TrajectoryError(
                f"the conversation branched into {len(made)} trajectories, because its chat template rewrites earlier "
                "turns or turns were sampled at different temperatures; return conversation.trajectories(...)"
            )
        return first

    def _prompt(self) -> Prompt:
        return self._dialogue.prompt(self._messages, self._tools, after=self._last)

    def _said(self, turn: Turn) -> Turn:
        self._last = turn
        self._messages.append(turn.message)
        return turn
