"""Conversation: a transcript that is exact to the token, over any tokenizer with a chat template.

What the model sampled stays as the tokens it sampled, with their logprobs and versions; what is added later is
tokenized as the chat template renders it after a finished turn. Nothing is ever tokenized twice, so what is trained
is what the model saw. A template that would rewrite earlier turns (Qwen3's drops their thinking when a user speaks
again) is noticed: an error, unless `keep_rewritten` says that the sampled tokens shall stay in view.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arl.api.errors import ModelError, PromptTooLongError, TrajectoryError
from arl.api.types import NOT_SAMPLED, ModelRequest, ModelResponse, SamplingParams, Trajectory, TurnSpan, new_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from arl.api.engine import InferenceEngine
    from arl.workflow.tools import Tool

Message = Mapping[str, Any]
"""A chat message as templates take it: `role`, `content`, and what else a role has."""

_MARKER = "arl-marks-the-sampled-turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One answer of the model: its text, without the token that ended it, and the response behind it."""

    text: str
    response: ModelResponse


class Conversation:
    """The transcript of one episode. Build it, `agenerate`, `add` what the environment says, `agenerate` again."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        template_options: Mapping[str, Any] | None = None,
        keep_rewritten: bool = False,
        session_id: str | None = None,
    ) -> None:
        """Start from `messages`; `tools` are shown as the template shows them; `template_options` are passed to it.

        Raises ModelError when the tokenizer has no chat template.
        """
        if not tokenizer.chat_template:
            raise ModelError(
                f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template; use a chat "
                "(instruct) model, or put the template into chat_template.jinja in the model's directory"
            )
        self._tokenizer = tokenizer
        self._tools = [tool.spec for tool in tools] or None
        self._template_options = dict(template_options or {})
        self._keep_rewritten = keep_rewritten
        self.session_id = session_id or new_id()
        self._messages: list[Message] = list(messages)
        self._pending: list[Message] = []
        self._token_ids: list[int] = []
        self._loss_mask: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._temperatures: set[float] = set()
        self._spans: list[tuple[int, int]] = []
        self.is_truncated = False
        self.num_turns = 0
        self._append(self._encode(self._render(self._messages)))

    @property
    def messages(self) -> tuple[Message, ...]:
        """Everything said so far, as messages."""
        return (*self._messages, *self._pending)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What the model has seen and sampled so far; messages added since the last turn are not in it yet."""
        return tuple(self._token_ids)

    @property
    def loss_mask(self) -> tuple[int, ...]:
        """1 where the model spoke, for each of `token_ids`."""
        return tuple(self._loss_mask)

    def add(self, *messages: Message) -> None:
        """Append what the environment says: tool results, user turns. They are rendered when the model speaks next."""
        if any(message["role"] == "assistant" for message in messages):
            raise ValueError("an assistant's message is not added; it is sampled (agenerate) or shown (demonstrate)")
        self._pending.extend(messages)

    async def agenerate(self, engine: InferenceEngine, sampling: SamplingParams) -> Turn:
        """Let the model speak. Raises what `engine.agenerate` raises, and ModelError for a rewriting template.

        is_truncated says from then on whether a length limit ended the turn, or left no room for it.
        """
        said = tuple(self._pending)
        between = self._between_turns(said)
        input_ids = (*self._token_ids, *between)
        request = ModelRequest(input_ids=input_ids, sampling=sampling, session_id=self.session_id)
        try:
            response = await engine.agenerate(request)
        except PromptTooLongError:
            self.is_truncated = True
            raise
        self._commit(said, between)  # only now: a call that failed may be made again
        self._append(response.output_ids, response.output_logprobs, response.output_versions)
        self._spans.append((len(self._token_ids) - len(response.output_ids), len(self._token_ids)))
        self._temperatures.add(response.temperature)
        self.is_truncated = response.stop_reason == "length"
        text = self._text_of(response)
        self._messages.append({"role": "assistant", "content": text})
        self.num_turns += 1
        return Turn(text=text, response=response)

    def demonstrate(self, text: str) -> None:
        """Append a turn that the model should imitate, ended as the template ends turns. It has no logprobs: it is
        for supervised training, by `token_ids` and `loss_mask`."""
        said = tuple(self._pending)
        self._commit(said, self._between_turns(said))
        end = self._encode(self._after_turn([]))[:1]
        ids = [*self._encode(text), *end]
        self._append(ids, [0.0] * len(ids), [NOT_SAMPLED] * len(ids))
        self._messages.append({"role": "assistant", "content": text})
        self.num_turns += 1

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
        """The record to return from arun_episode; every sampled token is trained.

        rewards: named parts of the reward. turn_rewards: what the environment gave for each sampled turn, beside
        `reward`. states: a key of the state that each was taken in; see TurnSpan. Raises TrajectoryError where these
        are not as many as turns were sampled.
        """
        if len(self._temperatures) > 1:
            raise ValueError(f"turns were sampled at temperatures {sorted(self._temperatures)}; they must be the same")
        return Trajectory(
            token_ids=self.token_ids,
            loss_mask=self.loss_mask,
            behavior_logprobs=tuple(self._logprobs),
            versions=tuple(self._versions),
            reward=reward,
            rewards=rewards or {},
            turns=self._turns(turn_rewards, states),
            is_truncated=self.is_truncated,
            metrics=metrics or {},
            role=role,
            temperature=next(iter(self._temperatures), 1.0),
        )

    def _turns(self, rewards: Sequence[float] | None, states: Sequence[str | None] | None) -> tuple[TurnSpan, ...]:
        n = len(self._spans)
        for name, given in (("turn_rewards", rewards), ("states", states)):
            if given is not None and len(given) != n:
                raise TrajectoryError(f"{name} has {len(given)} entries, but {n} turns were sampled; give one for each")
        rewards, states = rewards or (0.0,) * n, states or (None,) * n
        return tuple(
            TurnSpan(start=start, stop=stop, reward=reward, state=state)
            for (start, stop), reward, state in zip(self._spans, rewards, states, strict=True)
        )

    def _append(
        self, ids: Sequence[int], logprobs: Sequence[float] | None = None, versions: Sequence[int] | None = None
    ) -> None:
        self._token_ids.extend(ids)
        self._loss_mask.extend([int(logprobs is not None)] * len(ids))
        self._logprobs.extend(logprobs if logprobs is not None else [0.0] * len(ids))
        self._versions.extend(versions if versions is not None else [NOT_SAMPLED] * len(ids))

    def _between_turns(self, said: Sequence[Message]) -> list[int]:
        """What closes the turn before, if the model did not, and opens the next one, with what was said in between."""
        if not self.num_turns:
            if said:
                raise ValueError("messages were added before the first turn; give them to Conversation instead")
            return []
        self._check_history()
        ids = self._encode(self._after_turn(said, add_generation_prompt=True))
        already_ended = self._token_ids[-1] == ids[0]
        return ids[already_ended:]

    def _commit(self, said: Sequence[Message], ids: Sequence[int]) -> None:
        self._append(ids)
        self._messages.extend(said)
        del self._pending[: len(said)]

    def _after_turn(self, messages: Iterable[Message], add_generation_prompt: bool = False) -> str:
        """What the template writes after an assistant's words, from the end of the turn on, when `messages` follow."""
        users = (message for message in self._messages if message["role"] == "user")
        first = next(users, {"role": "user", "content": ""})
        text = self._render([first, {"role": "assistant", "content": _MARKER}, *messages], add_generation_prompt)
        before, marker, after = text.rpartition(_MARKER)
        if not marker or _MARKER in before:
            raise ModelError("the chat template does not show an assistant's message as it is; it cannot be used")
        return after

    def _check_history(self) -> None:
        """A template may show earlier turns otherwise than they were sampled once a user speaks again."""
        if self._keep_rewritten or not any(message["role"] == "user" for message in self._pending):
            return
        text, position = self._render(self.messages), 0
        for message in self._messages:
            if message["role"] == "assistant":
                said = message["content"].strip()
                position = text.find(said, position)
                if position < 0:
                    raise ModelError(
                        f"the chat template rewrites earlier turns: it no longer shows {said[:80]!r}. Pass "
                        "keep_rewritten=True to keep the sampled tokens in the model's view, or choose a template "
                        "that leaves earlier turns alone"
                    )
                position += len(said)

    def _render(self, messages: Iterable[Message], add_generation_prompt: bool = True) -> str:
        text = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=self._tools,  # pyright: ignore[reportArgumentType]
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self._template_options,
        )
        return str(text)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _text_of(self, response: ModelResponse) -> str:
        ids = response.output_ids
        if ids and ids[-1] in self._tokenizer.all_special_ids:
            ids = ids[:-1]
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
