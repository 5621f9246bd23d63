"""Distillation from a teacher, and the clients of teachers and reward models."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol, Self
from weakref import WeakKeyDictionary

from arl.api.engine import Sampler
from arl.api.errors import (
    ArlError,
    ConfigError,
    ModelError,
    NoSuchPathError,
    RequestTimeoutError,
    RewardError,
    RewardTimeoutError,
    ServerError,
)
from arl.api.types import Example, Trajectory
from arl.api.workflow import RolloutWorkflow
from arl.rewards.score import is_finite
from arl.rewards.threads import together
from arl.runtime.http.client import JsonClient

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Teacher(Protocol):
    """A TeacherClient, or its fake in a test."""

    async def logprobs(self, token_ids: Sequence[int], start: int = 1) -> tuple[float, ...]: ...


class DistillationWorkflow(RolloutWorkflow):
    """Runs another workflow's episodes, and rewards each trained token by how much likelier the teacher finds it.

        token reward = teacher logprob - behavior logprob

    With the preset `distillation`, the gradient is that of the reverse KL(student || teacher), token by token, at the
    states that the student itself reaches (On-Policy Distillation, Thinking Machines 2025; GKD, Agarwal et al. 2023,
    2306.13649, with lambda = 1; MiniLLM, Gu et al. 2023, 2306.08543, with no look ahead).

    keep_reward: keep the workflow's own rewards (of trajectories, turns and tokens), and add `coefficient` times the
    teacher's. Otherwise these replace them, and the metric `task_reward` keeps the trajectory's. `teacher_kl` is the
    mean of behavior - teacher logprobs over an episode's trained tokens of a role. Raises ConfigError unless the
    student samples at temperature 1, as the teacher's logprobs are.
    """

    def __init__(
        self, workflow: RolloutWorkflow, teacher: Teacher, *, coefficient: float = 1.0, keep_reward: bool = False
    ) -> None:
        if not math.isfinite(coefficient) or coefficient <= 0:
            raise ConfigError(f"coefficient is {coefficient}; it must be above 0")
        if coefficient != 1.0 and not keep_reward:
            raise ConfigError(
                f"coefficient is {coefficient}, but without keep_reward there is nothing to weigh the teacher against; "
                "leave it out, or set keep_reward"
            )
        self._workflow = workflow
        self._teacher = teacher
        self._coefficient = coefficient
        self.keep_reward = keep_reward

    async def __aenter__(self) -> Self:
        await self._workflow.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._workflow.__aexit__(*exc)

    @property
    def declared_roles(self) -> frozenset[str] | None:
        return self._workflow.declared_roles

    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory | Sequence[Trajectory] | None:
        episode = await self._workflow.arun_episode(engine, data)
        if episode is None:
            return None
        trajectories = [episode] if isinstance(episode, Trajectory) else list(episode)
        gains = await together(self._gains(trajectory) for trajectory in trajectories)
        metrics = self._metrics(trajectories, gains)
        judged: list[Trajectory] = []
        for trajectory, gain, numbers in zip(trajectories, gains, metrics, strict=True):
            token_rewards = [self._coefficient * one for one in gain]
            if self.keep_reward and trajectory.token_rewards is not None:
                token_rewards = trajectory.token_rewards + token_rewards
            of_teacher = replace(trajectory, token_rewards=token_rewards, metrics=numbers)
            if not self.keep_reward:
                turns = tuple(replace(turn, reward=0.0) for turn in trajectory.turns)
                of_teacher = replace(of_teacher, reward=0.0, rewards={}, turns=turns)
            judged.append(of_teacher)
        return judged[0] if isinstance(episode, Trajectory) else judged

    async def _gains(self, trajectory: Trajectory) -> list[float]:
        if not trajectory.num_trained_tokens:
            return [0.0] * len(trajectory.token_ids)
        if trajectory.temperature != 1.0:
            raise ConfigError(
                f"the student sampled at temperature {trajectory.temperature:g}, and the teacher's logprobs are at 1; "
                "set SamplingParams(temperature=1.0) for distillation"
            )
        token_ids, first = tuple(trajectory.token_ids.tolist()), int(trajectory.loss_mask.argmax())
        teacher = await self._teacher.logprobs(token_ids, start=first)
        pairs = zip(teacher, trajectory.behavior_logprobs.tolist(), trajectory.loss_mask.tolist(), strict=True)
        return [t - b if is_trained else 0.0 for t, b, is_trained in pairs]

    def _metrics(self, trajectories: Sequence[Trajectory], gains: Sequence[Sequence[float]]) -> list[dict[str, float]]:
        """The metrics of each trajectory. The first trajectory of each role has the metrics of the episode's tokens and
        reward, so that an episode that branched counts once."""
        metrics = [dict(trajectory.metrics) for trajectory in trajectories]
        for role in dict.fromkeys(trajectory.role for trajectory in trajectories):
            places = [i for i, trajectory in enumerate(trajectories) if trajectory.role == role]
            of_trained = [gain for i in places for gain in compress(gains[i], trajectories[i].loss_mask.tolist())]
            if of_trained:
                metrics[places[0]]["teacher_kl"] = -math.fsum(of_trained) / len(of_trained)
            if not self.keep_reward:
                metrics[places[0]]["task_reward"] = fmean(trajectories[i].reward for i in places)
        return metrics


_PROBE = "Agent 12345 said:\n\t'déjà vu' def f(x): return x**2  # 你好 🙂"
"""Text that hardly two tokenizers encode alike."""
_GREETING_RETRIES = 4
"""At the start, a server that does not answer is more likely a wrong address than a restart."""


class ModelServer(JsonClient):
    """A client of one server. `async with` checks its model at once, and closes at the end; else the first call checks.

    tokenizer: makes the token ids, and is compared with the server's; needed unless the server reports the size of its
    vocabulary, as the embedded server does. The other settings are JsonClient's.
    """

    def __init__(
        self,
        url: str,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        api_key: str | None = None,
        max_concurrent: int = 64,
        timeout_s: float = 120.0,
        retries: int = 20,
    ) -> None:
        super().__init__(url, api_key=api_key, max_concurrent=max_concurrent, timeout_s=timeout_s, retries=retries)
        self._tokenizer = tokenizer
        self._greetings: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
        self._failure: ArlError | None = None
        """The last one of a greeting."""
        self._info: Mapping[str, Any] | None = None
        self._vocab_size = 0

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__setstate__(state)
        self._greetings = WeakKeyDictionary()

    async def __aenter__(self) -> Self:
        """Raises as `info` does."""
        try:
            await self.info()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def info(self) -> Mapping[str, Any]:
        """The server's description of its model, requested once. Raises ServerError; ModelError if the model is of the
        wrong kind, or its vocabulary is not the tokenizer's.

        Stock SGLang does not report the size of its vocabulary, and a token outside it ends its process.
        """
        if self._info is not None:
            return self._info
        before = self._failure
        async with self._greetings.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            if self._info is not None:
                return self._info
            if (failure := self._failure) and failure is not before:  # of a call for which this one waited
                raise type(failure)(str(failure)) from failure
            try:
                self._info = await self._greet()
            except ArlError as error:
                self._failure = error
                raise
            return self._info

    async def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Raise ModelError for a token that is not in the vocabulary of the server's model."""
        await self.info()
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            raise ModelError(
                f"token ids are {min(token_ids)} to {max(token_ids)}; {self.url} knows only {self._vocab_size} tokens"
            )

    async def _greet(self) -> Mapping[str, Any]:
        try:
            info = await self.ask("/model_info", max_retries=_GREETING_RETRIES)
        except NoSuchPathError:
            info = await self.ask("/get_model_info", max_retries=_GREETING_RETRIES)
        if not isinstance(info, dict):
            raise ServerError(f"{self.url} answers, but not as an SGLang server does: /model_info is {info!r}")
        self._check_kind(info)
        self._vocab_size = await self._check_vocabulary(info.get("vocab_size"))
        return info

    def _check_kind(self, info: Mapping[str, Any]) -> None:
        """Raise ModelError for a model of the wrong kind."""

    async def _check_vocabulary(self, told: int | None) -> int:
        tokenizer: Any = self._tokenizer
        if tokenizer is None:
            if told is None:
                raise ModelError(
                    f"{self.url} does not report the size of its vocabulary, and stock SGLang crashes on a token "
                    "outside it; pass the tokenizer that makes the tokens"
                )
            return told
        probe = " ".join([_PROBE, *tokenizer.get_added_vocab()])
        try:
            answer = await self.ask("/tokenize", {"prompt": probe, "add_special_tokens": False})
        except NoSuchPathError as error:
            raise ModelError(f"{self.url} has no /tokenize to compare its tokens with the given tokenizer's") from error
        if answer.get("tokens") != tokenizer.encode(probe, add_special_tokens=False):
            raise ModelError(f"{self.url} has another vocabulary than the given tokenizer; use one of the same family")
        return len(tokenizer) if told is None else told


class TeacherClient(ModelServer):
    """Asks a language model for the logprobs of given tokens, at temperature 1. tokenizer: of student and teacher."""

    async def logprobs(self, token_ids: Sequence[int], start: int = 1) -> tuple[float, ...]:
        """ln p(token_ids[t] | token_ids[:t]) for each t >= start, 0.0 before it. A later start costs less.

        Raises ModelError if the teacher has different tokens, ServerError, RequestTimeoutError.
        """
        if start < 1:
            raise ValueError(f"start is {start}; the first token has no context, so it must be at least 1")
        ids = list(token_ids)
        if start >= len(ids):
            return (0.0,) * len(ids)
        await self.check_tokens(ids)
        nothing_new = {"max_new_tokens": 0, "temperature": 1.0}
        asked = {"input_ids": ids, "sampling_params": nothing_new, "return_logprob": True}
        answer = await self.ask("/generate", {**asked, "logprob_start_len": start - 1})
        return (0.0,) * start + _given_logprobs(answer, ids[start - 1 :], self.url)

    def _check_kind(self, info: Mapping[str, Any]) -> None:
        if not info.get("is_generation", True):
            raise ModelError(f"{self.url} has a reward model; a teacher must be a language model")


class RewardModelClient(ModelServer):
    """Asks a reward model for the score of a whole sequence. tokenizer: makes the sequences' tokens."""

    async def score(self, token_ids: Sequence[int]) -> float:
        """The score of the whole, at its last token. Raises RewardError and RewardTimeoutError with URL and answer."""
        ids = list(token_ids)
        if not ids:
            raise RewardError(f"there is nothing to score: no tokens for {self.url}")
        try:
            await self.check_tokens(ids)
            answer = await self.ask("/classify", {"input_ids": ids})
        except RequestTimeoutError as timeout:
            raise RewardTimeoutError(str(timeout)) from timeout
        except (ServerError, ModelError) as error:
            raise RewardError(str(error)) from error
        scores = answer.get("embedding") if isinstance(answer, dict) else None
        if not isinstance(scores, list) or len(scores) != 1 or not is_finite(scores[0]):
            raise RewardError(f"{self.url} answered /classify with {str(answer)[:200]}; a reward is one finite number")
        return float(scores[0])

    def _check_kind(self, info: Mapping[str, Any]) -> None:
        if info.get("is_generation", False):
            raise ModelError(f"{self.url} has a language model; a reward model is served with --is-embedding")


def _given_logprobs(answer: Any, ids: Sequence[int], url: str) -> tuple[float, ...]:
    """The logprobs of ids[1:]. Raises ServerError unless the answer has exactly these tokens."""
    try:
        entries = answer["meta_info"]["input_token_logprobs"]
        told = [entry[1] for entry in entries]
        logprobs = tuple(entry[0] for entry in entries[1:])
    except (KeyError, TypeError, IndexError) as error:
        raise ServerError(f"{url} is no teacher: it answered /generate without input_token_logprobs") from error
    if len(told) != len(ids):
        raise ServerError(f"{url} gave logprobs of {len(told)} tokens for {len(ids)}; is its prompt cut off?")
    last = max(ids)  # SGLang reports the vocabulary's last token as 0, with the right logprob
    other = [(sent, got) for sent, got in zip(ids, told, strict=True) if got != sent and (sent, got) != (last, 0)]
    if other:
        raise ServerError(f"{url} was sent token {other[0][0]} and gave the logprob of token {other[0][1]}")
    if not all(is_finite(logprob) for logprob in logprobs):
        raise ServerError(f"{url} gave a logprob that is not a finite number")
    return logprobs
