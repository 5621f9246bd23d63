"""One episode behind the endpoint: its agents, their calls, the dialogues that these form, and their trajectories."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

from arl.api.engine import Sampler
from arl.api.errors import ArlError, ConfigError, PromptTooLongError, RefusedRequestError, TrajectoryError
from arl.api.types import AGENT, ModelRequest, ModelResponse, Trajectory, new_id
from arl.endpoint.calls import (
    MAX_SEED,
    CallAnswer,
    CallPolicy,
    ChatCall,
    EpisodeOverError,
    GivenText,
    Spoken,
    grammar_of,
)
from arl.rewards.threads import together
from arl.runtime.http.bodies import RequestError
from arl.workflow.chat_template import encode_once
from arl.workflow.conversation import paths_of, trajectories
from arl.workflow.dialogue import Dialogue, Prompt, Shown, Turn
from arl.workflow.messages import Message, history_key


class TextDialogue(Dialogue):
    """A tree of turns that were given as text or tokens. Texts that show the whole of a turn keep its tokens."""

    def text_prompt(self, given: GivenText) -> Prompt:
        """The model's next input."""
        found = [(turn, rest) for turn in self.turns if (rest := self._rest(turn, given.prompt)) is not None]
        parent, rest = max(found, key=lambda pair: len(pair[0].token_ids), default=(None, given.prompt))
        tokenizer = self.template.tokenizer
        if isinstance(rest, str):
            is_first = given.adds_special_tokens and parent is None
            encoded = encode_once(tokenizer, rest) if is_first else tokenizer.encode(rest, add_special_tokens=False)
            ids = tuple(encoded) if rest else ()
        else:
            ids = rest
        text = given.prompt if isinstance(given.prompt, str) else str(tokenizer.decode(list(given.prompt)))
        message = {"role": "user", "content": text}
        return Prompt(
            parent=parent,
            after=parent,
            given_ids=ids,
            new_messages=(message,),
            num_messages=parent.prompt.num_messages + 2 if parent else 1,
            tools=(),
            shown=Shown(text),
            key=history_key(b"text", [message]),
        )

    def _rest(self, turn: Turn, given: str | tuple[int, ...]) -> str | tuple[int, ...] | None:
        """What follows a turn, its end included, in a text or tokens; None if they do not begin with it."""
        if isinstance(given, str):
            whole = turn.prompt.new_messages[0]["content"] + self.template.text_until(turn.output_ids, has_ended=False)
            return given[len(whole) :] if given.startswith(whole) else None
        ids = turn.token_ids
        return given[len(ids) :] if given[: len(ids)] == ids else None


class Speaker:
    """One agent of an episode: answers its calls (by one server, which caches prefixes), and records them.

    is_cut: the last call found no room in the context. cut_after: the turn that it continued, or else the last.
    """

    def __init__(self, engine: Sampler, policy: CallPolicy, role: str = AGENT) -> None:
        self.is_cut = False
        self.cut_after: Turn | None = None
        self._engine = engine
        self._policy = policy
        self._role = role
        self._session_id = new_id()
        self._texts = TextDialogue(policy.template)
        self._dialogues: dict[str, Dialogue] = {"texts": self._texts}
        """Those of messages by the options of their template, as JSON."""

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The recorded turns. Those of one set of template options stand together, in order."""
        return tuple(turn for dialogue in self._dialogues.values() for turn in dialogue.turns)

    def forget(self, answers: Sequence[CallAnswer]) -> None:
        """Forget answers that nobody has read, unless another call followed them."""
        for answer in answers:
            for dialogue in self._dialogues.values():
                dialogue.forget(answer.turn)

    async def aprompt(self, call: ChatCall) -> tuple[Dialogue, Prompt]:
        """The prompt of a call, which keeps nothing. Raises ModelError, and BodyError for what cannot be shown."""
        if call.text is not None:
            return self._texts, self._texts.text_prompt(call.text)
        options = json.dumps(call.template_options, sort_keys=True)
        if options not in self._dialogues:  # other options of the template begin another dialogue
            template = self._policy.template_with(call.template_options)
            self._dialogues[options] = Dialogue(template, rewriting=self._policy.rewriting)
        dialogue = self._dialogues[options]
        return dialogue, await dialogue.aprompt(call.messages, call.tools, prefill=call.prefill)

    async def anum_prompt_tokens(self, call: ChatCall) -> int:
        """The length of a call's prompt. Nothing is sampled or kept."""
        dialogue, prompt = await self.aprompt(call)
        return len(dialogue.input_array(prompt))

    async def acomplete(self, call: ChatCall) -> list[CallAnswer]:
        """Let the model answer, n times, and keep the answers. Raises what `agenerate` and `aprompt` do."""
        policy = self._policy
        dialogue, prompt = await self.aprompt(call)
        facts = dialogue.template.facts
        thinking = policy.thinking_of(facts, prompt, call)
        grammar = grammar_of(call.form, thinking, call.thinking_budget, facts)
        input_ids: Any = dialogue.input_array(prompt)
        try:
            sampling = policy.within_context(replace(call.sampling, grammar=grammar), len(input_ids))
            seeds = [None if sampling.seed is None else (sampling.seed + i) % (MAX_SEED + 1) for i in range(call.n)]
            requests = [
                ModelRequest(
                    input_ids=input_ids,
                    sampling=replace(sampling, seed=seed),
                    session_id=self._session_id,
                    routes_from=prompt.num_routed,
                    role=self._role,
                    images=prompt.all_images,
                )
                for seed in seeds
            ]
            responses = await together(self._engine.agenerate(request) for request in requests)
        except PromptTooLongError:
            self.is_cut, self.cut_after = True, prompt.after or next(reversed(self.turns), None)
            raise
        except (ConfigError, RefusedRequestError) as error:
            if grammar is None:
                raise
            raise call.without_grammar(str(error)) from error
        self.is_cut, self.cut_after = False, None
        read: list[tuple[ModelResponse, Spoken, Message]] = []
        for response in responses:
            text = policy.template.text_of(response.output_ids, response.stop_reason)
            spoken = policy.spoken(text, response, call, dialogue.template, prompt.begun.removesuffix(call.prefill))
            message = spoken.message
            if call.prefill:
                message["content"] = call.prefill + (message["content"] or "")
            read.append((response, spoken, message))
        return [  # keep nothing before all answers could be read
            CallAnswer(turn=dialogue.record(prompt, response, message), spoken=spoken, num_prompt_tokens=len(input_ids))
            for response, spoken, message in read
        ]


_ROLE = re.compile(r"[A-Za-z0-9_-]+")
log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class CallCounts:
    """The calls of an episode, by how they ended."""

    answered: int = 0
    """Calls with kept answers."""
    refused: int = 0
    """Calls that got an error by the program's fault."""
    failed: int = 0
    """Calls that got an error not by the program's fault."""
    cancelled: int = 0
    """Calls that the program gave up, or that the episode's end interrupted."""
    repeated: int = 0
    """Answers that an SDK did not read and asked for again; they are forgotten."""
    malformed: int = 0
    """Tool calls in kept answers that could not be read."""
    ignored: int = 0
    """Fields that the endpoint could not honour and ignored, as it was told to."""


class EpisodeSession:
    """A program's URL and key, and the record of its calls. `OpenAIProxy.episode` makes it.

    base_url: for OpenAI's clients. url: without /v1, for Anthropic's.
    api_key: valid until the episode's block ends. called_at: when a call ended last, by the loop's clock.
    errors: arl's failures that calls were answered with, in order.
    """

    def __init__(self, url: str, engine: Sampler, policy: CallPolicy) -> None:
        self.url = url
        self.api_key = f"arl-{secrets.token_urlsafe(32)}"
        self.policy = policy
        self.counts = CallCounts()
        self.errors: list[Exception] = []
        self._read: defaultdict[bytes, list[Sequence[CallAnswer]]] = defaultdict(list)
        """The answers to calls with this body that were sent, as far as anybody knows."""
        self._num_unanswered = Counter[bytes]()
        self.stored_responses: dict[str, Sequence[Message]] = {}
        """The messages up to each response of /v1/responses, by its id."""
        self._engine = engine
        self._speakers: dict[str, Speaker] = {}
        self.running: set[asyncio.Timeout] = set()
        """A scope for each call that runs."""
        self._idle = asyncio.Condition()
        self._is_over = False
        self.called_at = 0.0

    @property
    def name(self) -> str:
        """The episode's, in its URL."""
        return self.url.rpartition("/")[2]

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def base_url_of(self, role: str) -> str:
        """The base URL of one of several agents, whose turns become trajectories of this role."""
        if not is_role(role):
            raise ValueError(f"role is {role!r}; it must be a name of letters, digits, - and _, and no part of a path")
        return f"{self.url}/{role}/v1"

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles with turns, in order of their first turns."""
        return tuple(role for role in self._speakers if self.turns(role))

    def turns(self, role: str = AGENT) -> tuple[Turn, ...]:
        """The model's turns in a role, in order."""
        return self._speakers[role].turns if role in self._speakers else ()

    @property
    def is_truncated(self) -> bool:
        """Whether an agent's last call found no room in the context."""
        return any(speaker.is_cut for speaker in self._speakers.values())

    @property
    def metrics(self) -> dict[str, float]:
        """The counts of calls, and of branches beyond a single line of turns for each role."""
        branches = sum(len(list(paths_of(self.turns(role)))) - 1 for role in self.roles)
        counts = self.counts
        return {
            "calls": counts.answered,
            "calls_refused": counts.refused,
            "calls_failed": counts.failed,
            "calls_cancelled": counts.cancelled,
            "calls_repeated": counts.repeated,
            "malformed_calls": counts.malformed,
            "fields_ignored": counts.ignored,
            "branches": branches,
        }

    def trajectories(
        self,
        reward: float | Mapping[str, float],
        metrics: Mapping[str, float] | None = None,
        *,
        rewards: Mapping[str, float] | None = None,
    ) -> tuple[Trajectory, ...]:
        """The episode's result, to return from arun_episode: one trajectory for each path through each role's dialogue.

        reward: the episode's, or role -> reward. metrics: added to the session's. rewards: named parts of the reward.
        Raises TrajectoryError if no call was answered, and for a role without a reward.
        """
        if not self.roles:
            counts = self.counts
            reason = f"the program made no call that reached {self.base_url}; give it base_url and api_key"
            if counts.refused + counts.failed + counts.cancelled:
                reason = (
                    f"no call of the program was answered: {counts.refused} were refused, {counts.failed} failed, "
                    f"{counts.cancelled} were cancelled"
                )
            raise TrajectoryError(reason) from (self.errors[0] if self.errors else None)
        shown = {**self.metrics, **(metrics or {})}
        made: list[Trajectory] = []
        for role in self.roles:
            own = reward.get(role) if isinstance(reward, Mapping) else reward
            if own is None:
                known = ", ".join(reward) if isinstance(reward, Mapping) else ""
                raise TrajectoryError(f"the role {role!r} has no reward; there are rewards for {known or 'none'}")
            made += trajectories(
                self.turns(role),
                own,
                metrics={} if made else shown,
                role=role,
                rewards=rewards,
                cut_after=self._speakers[role].cut_after,
            )
        return tuple(made)

    def speaker(self, name: str, role: str | None = None) -> Speaker:
        """The agent of this name, which its path has. role: for which the model is asked, if that is another."""
        if name not in self._speakers:
            self._speakers[name] = Speaker(self._engine, self.policy, role or name)
        return self._speakers[name]

    def sent(self, key: bytes, answers: Sequence[CallAnswer]) -> None:
        """Note that a call was answered. key: the digest of its body."""
        self._read[key].append(answers)
        self.counts.answered += 1
        self.counts.malformed += sum(len(answer.spoken.malformed_calls) for answer in answers)

    def not_sent(self, key: bytes, role: str, answers: Sequence[CallAnswer]) -> None:
        """Forget the answers to a call that nobody took."""
        self.speaker(role).forget(answers)
        self._num_unanswered[key] += 1

    def repeat(self, key: bytes, role: str) -> None:
        """Forget the answer that an SDK did not read, and for which it calls again.

        It does not say which call it repeats: most likely one with the same body that got no answer; if all were
        answered, the last of them.
        """
        if self._num_unanswered[key]:
            self._num_unanswered[key] -= 1
        elif self._read[key]:
            self.speaker(role).forget(unread := self._read[key].pop())
            self.counts.malformed -= sum(len(answer.spoken.malformed_calls) for answer in unread)
            self.counts.answered -= 1
            self.counts.repeated += 1

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        """Handle a call within the block. The episode's end interrupts it with EpisodeOverError."""
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self.running.add(scope)
                try:
                    yield
                finally:
                    self.running.discard(scope)
                    self.called_at = asyncio.get_running_loop().time()
        except TimeoutError:
            if not scope.expired():
                raise
            raise EpisodeOverError from None
        finally:
            if self._is_over:
                async with self._idle:
                    self._idle.notify_all()

    def note(self, error: Exception, refusal: RequestError) -> None:
        """Count a call that ended with `error`, and keep the error if arl is at fault."""
        if isinstance(error, EpisodeOverError):
            self.counts.cancelled += 1
        elif refusal.status < HTTPStatus.INTERNAL_SERVER_ERROR:
            self.counts.refused += 1
        else:
            self.counts.failed += 1
            self.errors.append(error)
            if not isinstance(error, ArlError):
                log.error("a call of the episode failed", exc_info=error)

    async def aclose(self) -> None:
        """Expire the key, and interrupt calls that still run. Idempotent."""
        self._is_over = True
        now = asyncio.get_running_loop().time()
        for scope in tuple(self.running):
            if scope.when() is None:
                scope.reschedule(now)
        async with self._idle:
            await self._idle.wait_for(lambda: not self.running)


def is_role(name: str) -> bool:
    """Whether a path may name this role; `v1` follows it."""
    return _ROLE.fullmatch(name) is not None and name != "v1"
