"""One agent of an episode: answers its calls and records the turns."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b

from arl.api.engine import Sampler
from arl.api.errors import PromptTooLongError, first_error
from arl.api.types import ModelRequest, ModelResponse, SamplingParams, new_id
from arl.workflow.chat_template import ChatTemplate
from arl.workflow.dialogue import Prompt, Turn
from arl.workflow.proxy.calls import MAX_SEED, CallAnswer, ChatCall, Spoken, TokenCall
from arl.workflow.proxy.policy import CallPolicy, finish_reason_of, message_of


class TokenTurns:
    """The turns of a program that makes its prompts itself and sends tokens. Only tokens decide on their tree.

    A prompt continues the turn with the longest token sequence that it begins with. Without such a turn it is a root.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._turns: list[Turn] = []
        self._by_tokens: dict[bytes, Turn] = {}
        self._lengths: set[int] = set()

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns in order of recording."""
        return tuple(self._turns)

    def prompt(self, input_ids: Sequence[int]) -> Prompt:
        """The prompt of exactly these tokens."""
        parent, start = None, 0
        for length, digest in self._beginnings(input_ids):
            if (turn := self._by_tokens.get(digest)) is not None:
                parent, start = turn, length
        given_ids = tuple(input_ids[start:])
        return Prompt(parent=parent, after=parent, given_ids=given_ids, messages=(), tools=(), shown=None, key=b"")

    def record(self, prompt: Prompt, response: ModelResponse) -> Turn:
        text = self._template.text_of(response.output_ids, response.stop_reason)
        turn = Turn(
            prompt=prompt,
            output_ids=response.output_ids,
            has_ended=self._template.ends_turn(response.output_ids, response.stop_reason),
            response=response,
            text=text,
            message={"role": "assistant", "content": text},
            key=b"",
        )
        self._turns.append(turn)
        token_ids = turn.token_ids
        self._lengths.add(len(token_ids))
        self._by_tokens[_digest(token_ids)] = turn
        return turn

    def forget(self, turn: Turn) -> None:
        """Forget a turn that nobody has seen, unless another follows it."""
        if turn not in self._turns or any(other.parent is turn for other in self._turns):
            return
        self._turns.remove(turn)
        key = _digest(turn.token_ids)
        if self._by_tokens.get(key) is turn:
            del self._by_tokens[key]

    def _beginnings(self, input_ids: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """For each length that turns have, the shortest first: a key of the tokens up to there."""
        digest, start = blake2b(digest_size=16), 0
        for length in sorted(self._lengths):
            if length > len(input_ids):
                return
            digest.update(array("q", input_ids[start:length]))
            start = length
            yield length, digest.copy().digest()


def _digest(token_ids: Sequence[int]) -> bytes:
    return blake2b(array("q", token_ids), digest_size=16).digest()


_LONG_PROMPT = 20_000
"""Messages of at least this many characters are rendered and tokenized in a thread: that takes some 10 ms."""


class Speaker:
    """Answers the calls of one role and records them: calls with messages in a Dialogue, calls with tokens beside it.

    is_cut: the last call found no room in the context. cut_after: the turn that it continued, or else the last.
    All calls go to one server, which caches their prefixes.
    """

    def __init__(self, engine: Sampler, policy: CallPolicy) -> None:
        self.is_cut = False
        self.cut_after: Turn | None = None
        self._engine = engine
        self._policy = policy
        self._session_id = new_id()
        self._dialogue = policy.new_dialogue()
        self._tokens = TokenTurns(policy.template)

    @property
    def turns(self) -> tuple[Turn, ...]:
        return (*self._dialogue.turns, *self._tokens.turns)

    async def acomplete(self, call: ChatCall | TokenCall) -> list[CallAnswer]:
        """Let the model answer, n times, and keep the answers. Raises what `agenerate` does, and ModelError."""
        if isinstance(call, TokenCall):
            return await self._acontinue(call)
        policy = self._policy
        policy.check_tools(call)
        prompt = await self._prompt(call)
        responses = await self._asample(prompt, call)
        num_prompt_tokens = len(prompt.input_ids)
        is_thinking = policy.opens_thinking(prompt)
        texts = [policy.template.text_of(response.output_ids, response.stop_reason) for response in responses]
        read = [
            policy.spoken(text, response, call, is_thinking=is_thinking)
            for text, response in zip(texts, responses, strict=True)
        ]
        return [  # keep nothing before all answers could be read
            CallAnswer(
                turn=self._dialogue.record(prompt, response, message_of(spoken)),
                spoken=spoken,
                num_prompt_tokens=num_prompt_tokens,
            )
            for response, spoken in zip(responses, read, strict=True)
        ]

    async def _acontinue(self, call: TokenCall) -> list[CallAnswer]:
        prompt = self._tokens.prompt(call.input_ids)
        answers: list[CallAnswer] = []
        for response in await self._asample(prompt, call):
            turn = self._tokens.record(prompt, response)
            ending = finish_reason_of(response.stop_reason)
            spoken = Spoken(content=turn.text, reasoning=None, tool_calls=(), finish_reason=ending)
            answers.append(CallAnswer(turn=turn, spoken=spoken, num_prompt_tokens=len(call.input_ids)))
        return answers

    def forget(self, turn: Turn) -> None:
        """Forget an answer that nobody has read, unless another follows it."""
        self._dialogue.forget(turn)
        self._tokens.forget(turn)

    async def _prompt(self, call: ChatCall) -> Prompt:
        if sum(len(message.get("content") or "") for message in call.messages) < _LONG_PROMPT:
            return self._dialogue.prompt(call.messages, call.tools)
        return await asyncio.to_thread(self._dialogue.prompt, call.messages, call.tools)

    async def _asample(self, prompt: Prompt, call: ChatCall | TokenCall) -> list[ModelResponse]:
        input_ids = prompt.input_ids
        try:
            sampling = self._policy.within_context(call.sampling, len(input_ids))
            requests = [
                ModelRequest(input_ids=input_ids, sampling=one, session_id=self._session_id)
                for one in _apart(sampling, call.n)
            ]
            responses = await _all(self._engine, requests)
        except PromptTooLongError:
            self.is_cut, self.cut_after = True, prompt.after or next(reversed(self.turns), None)
            raise
        self.is_cut, self.cut_after = False, None
        return responses


def _apart(sampling: SamplingParams, n: int) -> list[SamplingParams]:
    """The parameters of n samples. With a seed, each sample gets a different one."""
    if sampling.seed is None:
        return [sampling] * n
    return [replace(sampling, seed=(sampling.seed + i) % (MAX_SEED + 1)) for i in range(n)]


async def _all(engine: Sampler, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
    """Await all of them at once; the first error ends the others."""
    if len(requests) == 1:
        return [await engine.agenerate(requests[0])]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(engine.agenerate(request)) for request in requests]
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    return [task.result() for task in tasks]
